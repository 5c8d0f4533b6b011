"""Which links the data of a collective cross, and which part of each rank's result has come over which.

NCCL sends along a ring of all ranks, in their order: a chunk of a sum, or the part of one rank, goes from rank to rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Hop", "hops_to", "share_of_link"]

_RING = frozenset({"all_reduce", "allreduce_coalesced", "all_gather", "_all_gather_base"})
_SCATTERED = frozenset({"reduce_scatter", "_reduce_scatter_base"})


@dataclass(frozen=True)
class Hop:
    """A part of the result of one rank that has crossed a link.

    Attributes:
        source, target: ranks.
        part: which of `parts` equal parts of the result.
    """

    source: int
    target: int
    part: int
    parts: int


def hops_to(name: str, rank: int, size: int, root: int) -> Iterator[Hop]:
    """Yield the hops by which the result of `rank` came, where a link that is wrong makes it wrong.

    Args:
        name: of the collective, as NCCL has it in torch.
        root: of a collective that has one; the other end of a message.
    """
    if name == "recv":
        yield Hop(root, rank, 0, 1)
    elif name in _RING:
        for start in range(size):  # the part of rank `start`, or the chunk whose sum is complete there
            yield from _along(start, (rank - start) % size, size, start, size)
    elif name in _SCATTERED:
        yield from _along((rank + 1) % size, size - 1, size, 0, 1)
    elif name == "broadcast":
        yield from _along(root, (rank - root) % size, size, 0, 1)
    elif name == "scatter" and rank != root:
        yield Hop(root, rank, 0, 1)
    elif name == "reduce" and rank == root:
        yield from _along((root + 1) % size, size - 1, size, 0, 1)
    elif name == "all_to_all" or (name == "gather" and rank == root):
        for other in range(size):
            if other != rank:
                yield Hop(other, rank, other, size)


def share_of_link(name: str, size: int) -> float:
    """Return the bytes that cross the busiest link, over those of the largest tensor of a rank, or of its list."""
    if name in ("all_reduce", "allreduce_coalesced"):
        return 2 * (size - 1) / size
    return 1.0 if name in ("broadcast", "reduce", "send", "recv") else (size - 1) / size


def _along(start: int, steps: int, size: int, part: int, parts: int) -> Iterator[Hop]:
    for step in range(steps):
        here = (start + step) % size
        yield Hop(here, (here + 1) % size, part, parts)
