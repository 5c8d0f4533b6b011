"""Map each part of a collective's result to the links that it crossed.

NCCL sends along a ring of all ranks in their order: a chunk of a sum, or the part of one rank, passes from rank to
rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mgpu_check.torch_hooks.table import TRANSFERS, Transfer


@dataclass(frozen=True)
class Hop:
    """A link that a part of one rank's result has crossed.

    Attributes:
        source, target: ranks at the ends of the link.
        parts: number of equal parts of the result.
    """

    source: int
    target: int
    part: int
    parts: int


def hops_to(name: str, rank: int, size: int, root: int) -> Iterator[Hop]:
    """Yield the hops of the result of `rank`: a defect of one of their links spoils it.

    Args:
        name: name of the transfer, as in `hardware.EndedCollective`.
        root: root of a collective that has one; the other end of a message.
    """
    if name == "recv":
        yield Hop(root, rank, 0, 1)
    elif name in TRANSFERS and TRANSFERS[name].takes(rank, root):
        yield from (_straight if TRANSFERS[name].direct else _along_ring)(TRANSFERS[name], rank, size, root)


def _straight(transfer: Transfer, rank: int, size: int, root: int) -> Iterator[Hop]:
    for source in transfer.sources(rank, size, root):
        if source != rank:
            yield Hop(source, rank, source, size) if transfer.joins else Hop(source, rank, 0, 1)


def _along_ring(transfer: Transfer, rank: int, size: int, root: int) -> Iterator[Hop]:
    if transfer.givers == "root":
        yield from _along(root, (rank - root) % size, size, 0, 1)
    elif transfer.takers == "root" or transfer.divides:  # the sum is complete when it has passed all other ranks
        yield from _along((rank + 1) % size, size - 1, size, 0, 1)
    else:
        for start in range(size):  # the part of rank `start`, or the chunk whose sum is complete there
            yield from _along(start, (rank - start) % size, size, start, size)


def share_of_link(name: str, size: int) -> float:
    """Return the bytes that cross the busiest link, divided by the bytes of a rank's largest tensor or list."""
    return TRANSFERS[name].share_of_link(size) if name in TRANSFERS else 1.0  # a message crosses one link


def _along(start: int, steps: int, size: int, part: int, parts: int) -> Iterator[Hop]:
    for step in range(steps):
        here = (start + step) % size
        yield Hop(here, (here + 1) % size, part, parts)
