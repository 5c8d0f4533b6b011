"""Map each part of a collective's result to the links that it crossed.

NCCL sends along a ring of all ranks in their order: a chunk of a sum, or the part of one rank, passes from rank to
rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Hop", "hops_to", "share_of_link"]

_RING = frozenset({"all_reduce", "allreduce_coalesced", "all_gather", "_all_gather_base"})
_SCATTERED = frozenset({"reduce_scatter", "_reduce_scatter_base"})


@dataclass(frozen=True)
class Hop:
    """A link that a part of one rank's result has crossed.

    Attributes:
        source, target: ranks at the ends of the link.
        part: index of the part.
        parts: number of equal parts of the result.
    """

    source: int
    target: int
    part: int
    parts: int


def hops_to(name: str, rank: int, size: int, root: int) -> Iterator[Hop]:
    """Yield the hops of the result of `rank`: a defect of one of their links spoils it.

    Args:
        name: name of the collective, as in `hardware.Collective`.
        rank: rank whose result is traced.
        size: number of ranks.
        root: root of a collective that has one; the other end of a message.
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
    """Return the bytes that cross the busiest link, divided by the bytes of a rank's largest tensor or list."""
    if name in ("all_reduce", "allreduce_coalesced"):
        return 2 * (size - 1) / size
    return 1.0 if name in ("broadcast", "reduce", "send", "recv") else (size - 1) / size


def _along(start: int, steps: int, size: int, part: int, parts: int) -> Iterator[Hop]:
    for step in range(steps):
        here = (start + step) % size
        yield Hop(here, (here + 1) % size, part, parts)
