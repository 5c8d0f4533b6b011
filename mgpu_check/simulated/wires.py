"""Apply simulated hardware to a collective: its time, and the defects of the links and devices of its ranks.

NCCL sends along a ring of all ranks in their order: a chunk of a sum, or the part of one rank, passes from rank to
rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mgpu_check.simulated.calls import TransferCall
from mgpu_check.simulated.groups import NcclGroup
from mgpu_check.simulated.hardware import EndedCollective, Hardware, cells
from mgpu_check.simulated.streams import current_stream
from mgpu_check.simulated.tensor import SimulatedTensor, raw
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


def sent(below: Hardware, group: NcclGroup | None, asked: list[TransferCall]) -> Callable[[], None] | None:
    """Prepare calls of a group, and return the function to call after them; None if they involve no device."""
    tensors = [t for call in asked for t in call.tensors() if isinstance(t, SimulatedTensor)]
    if group is None or not tensors:
        return None
    device = tensors[0].device
    below.touch(device)
    below.read(device, tensors)
    number = below.number(device)
    assert number is not None  # a simulated device has one
    group.tell(number)
    start = current_stream(device).reached

    def delivered() -> None:
        moment = start
        with torch.no_grad():
            for call in asked:
                moment += _arrive(below, group, call, number)
        below.read(device, tensors)
        current_stream(device).busy_until(moment)

    return delivered


def _arrive(below: Hardware, group: NcclGroup, call: TransferCall, number: int) -> float:
    """Spoil the results of one call on this rank; return how long it took."""
    rank, size = group.pg.rank(), group.pg.size()
    if call.peer and call.root == rank:
        return 0.0
    written = () if call.name == "broadcast" and rank == call.root else (*call.both, *call.outs)
    outputs = [raw(t) for t in written]
    ranks = sorted({rank, call.root}) if call.peer else range(size)
    devices = {rank: group.number_of(rank) for rank in ranks if rank >= 0}  # recv(src=None) does not name the sender
    if below.defects:
        load = 0 if call.peer else size - 1
        for hop in hops_to(call.name, rank, size, call.root):
            if hop.source in devices:
                for data in _parts(call, outputs, hop):
                    below.over_link(devices[hop.source], devices[hop.target], data, load)
    largest = max(_bytes(call.both), _bytes(call.ins), _bytes(outputs))
    done = EndedCollective(call.name, number, tuple(devices.values()), outputs, largest, call.tensors()[0].dtype)
    below.reduced(done)
    links = {(rank, call.root)} if call.peer else _links(call.name, size, call.root)
    if call.name == "recv":
        links = {(call.root, rank)}
    paces = (below.pace(devices[a], devices[b]) for a, b in links if below.defects and {a, b} <= set(devices))
    pace = max(paces, default=1.0)
    slow = math.prod(defect.factor(done) for defect in below.defects)
    return (below.rates.collective + largest * share_of_link(call.name, size) / below.rates.link * pace) * slow


@functools.cache
def _links(name: str, size: int, root: int) -> frozenset[tuple[int, int]]:
    """Return the links that a collective crosses, as pairs of ranks."""
    return frozenset((hop.source, hop.target) for rank in range(size) for hop in hops_to(name, rank, size, root))


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.itemsize for t in tensors)


def _parts(call: TransferCall, outputs: Sequence[torch.Tensor], hop: Hop) -> list[torch.Tensor]:
    """Return the bytes of the results that crossed a hop."""
    if len(outputs) == hop.parts:  # a list by rank
        outputs, parts = [outputs[hop.part]], 1
    else:
        parts = hop.parts
    found = []
    for data in map(cells, outputs):
        if data is None:
            continue
        row = data.numel() // max(outputs[0].size(0), 1) if outputs[0].dim() else 1
        sizes = [row * rows for rows in call.splits[0]]
        pieces = data.split(sizes) if parts > 1 and sizes else data.tensor_split(parts)
        found.append(pieces[hop.part if parts > 1 else 0].view(torch.uint8))
    return found
