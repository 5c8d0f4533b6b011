"""Specs of programs of collectives: steps on a few tensors that every rank holds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BUFFERS", "LENGTH", "STEPS", "CollectiveStep"]

BUFFERS = 3
LENGTH = 5
"""Each rank holds so many tensors, of LENGTH elements per rank."""

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


@dataclass(frozen=True)
class CollectiveStep:
    """One step of every rank.

    Attributes:
        kind: of `STEPS`; "add": to a tensor another one, times a number of the rank; "shift": each rank sends to one further on.
        target, source: numbers of tensors.
        root: a rank, modulo the world size; of "shift" the distance.
        op: "SUM", "MIN" or "MAX", where it reduces.
        asynchronous: whether the call returns before it is done, and is waited for.
    """

    kind: str
    target: int = 0
    source: int = 1
    root: int = 0
    op: str = "SUM"
    asynchronous: bool = False

    def __str__(self) -> str:
        late = ", async" if self.asynchronous else ""
        return f"{self.kind}(t{self.target} from t{self.source}, {self.root}, {self.op}{late})"
