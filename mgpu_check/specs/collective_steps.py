"""Specs of programs of collectives: steps on a few tensors that every rank holds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BUFFERS", "GROUPS", "LENGTH", "OF_GROUPS", "STEPS", "CollectiveStep"]

BUFFERS = 4
LENGTH = 5
"""Each rank holds so many tensors, of LENGTH elements per rank."""
GROUPS = 2
"""A program has so many groups at once, beside the world: they have the numbers from 1 on."""

STEPS = (
    "add",
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "shift",
    "reduce",
    "scatter",
    "gather",
)
OF_GROUPS = ("new_group", "destroy_group")


@dataclass(frozen=True)
class CollectiveStep:
    """One step of every rank.

    Attributes:
        kind: of `STEPS` or `OF_GROUPS`; "add": to a tensor another one, times a number of the rank; "shift": each rank sends to one further on.
        target, source: numbers of tensors.
        root: a member of the group, modulo its size; of "shift" the distance.
        op: "SUM", "MIN" or "MAX", where it reduces.
        asynchronous: whether the call returns before it is done. It is waited for when one of its tensors is next used, or its group
            destroyed.
        group: number of the group that takes the step, or is made or destroyed; 0: all ranks.
        members: ranks of a new group, modulo the world size.
    """

    kind: str
    target: int = 0
    source: int = 1
    root: int = 0
    op: str = "SUM"
    asynchronous: bool = False
    group: int = 0
    members: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind in OF_GROUPS:
            return f"{self.kind}({self.group}{''.join(f', {member}' for member in self.members)})"
        late = ", async" if self.asynchronous else ""
        where = f", group {self.group}" if self.group else ""
        return f"{self.kind}(t{self.target} from t{self.source}, {self.root}, {self.op}{late}{where})"
