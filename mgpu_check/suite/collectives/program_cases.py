"""Specs of collective programs: sequences of steps on a few tensors of every rank."""

from __future__ import annotations

from dataclasses import dataclass

from mgpu_check.torch_hooks.table import TRANSFERS

BUFFERS = 4
LENGTH = 5
"""Each rank holds BUFFERS tensors, of LENGTH elements per rank."""
GROUPS = 2
"""Largest number of groups at a time, besides the world. Groups are numbered from 1."""

STEPS = ("add", *TRANSFERS, "shift")
OF_GROUPS = ("new_group", "destroy_group")


@dataclass(frozen=True)
class CollectiveStep:
    """One step of every rank.

    Attributes:
        kind: a name in `STEPS` or `OF_GROUPS`. "add" adds the source, times a number of the rank, to the target.
            "shift" sends from each rank to the rank `root` places further on.
        target, source: numbers of tensors.
        root: a member of the group, modulo its size; for "shift", the distance.
        op: "SUM", "MIN" or "MAX", for a reduction.
        asynchronous: whether the call returns before it is done. It is waited for when one of its tensors is next used,
            or its group is destroyed.
        group: number of the group that takes the step, or is created or destroyed; 0 for all ranks.
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
