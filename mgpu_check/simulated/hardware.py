"""Simulate the hardware of simulated devices, healthy or defective, below operators, copies and collectives.

A simulated node has no hardware until `planted` adds it. Then the hardware sets the memory size of the devices,
and blocks have addresses. Events measure virtual time (bytes and floating-point operations over rates), without
sleeping. Each `Defect` receives every operation after it ran correctly, and may spoil its result.

This module identifies a device by its number: the index in the machine plus `Hardware.first_device`. None is the host.

A collective takes the time of its links, and meets the defects of the links and devices of its ranks. NCCL sends
along a ring of all ranks in their order: a chunk of a sum, or the part of one rank, passes from rank to rank.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mgpu_check.simulated.cuda.streams import WorkClock, current_stream, go_by
from mgpu_check.simulated.distributed.collective_calls import TransferCall
from mgpu_check.simulated.distributed.process_groups import NcclGroup
from mgpu_check.simulated.node import Addresses, SimulatedNode, active_node, block_of
from mgpu_check.simulated.tensor import SimulatedTensor, raw
from mgpu_check.torch_hooks.collective_table import TRANSFERS, Transfer
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE

_FLOPS = {
    torch.float64: 3e13,
    torch.float32: 6e13,
    torch.float16: 6e14,
    torch.bfloat16: 6e14,
    torch.float8_e4m3fn: 1.2e15,
    torch.float8_e5m2: 1.2e15,
}
_TF32 = 3e14


@dataclass(frozen=True)
class Rates:
    """Rates of a fictitious device."""

    # dtype -> floating-point operations per second in matrix products
    flops: Mapping[torch.dtype, float] = field(default_factory=lambda: _FLOPS)
    memory: float = 2e12  # bytes per second that kernels read or write
    link: float = 2e11  # bytes per second from one device to another, in each direction
    # pinned, pageable: bytes per second between a device and pinned or pageable host memory
    pinned: float = 4e10
    pageable: float = 1.5e10
    # kernel, copy, collective: fixed seconds of each operation, in addition to its work
    kernel: float = 4e-6
    copy: float = 6e-6
    collective: float = 1e-5

    def of_operator(self, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
        """Return the duration of an operator, bound by memory or by arithmetic."""
        moved = sum(t.numel() * t.itemsize for t in (*inputs, *outputs))
        seconds = moved / self.memory
        count = _COUNTS.get(name)
        if count is not None and inputs:
            dtype = inputs[0].dtype
            rate = self.flops.get(dtype, _FLOPS[torch.float32])
            if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
                rate = _TF32
            seconds = max(seconds, count(inputs, outputs) / rate)
        return self.kernel + seconds

    def of_copy(self, nbytes: int, host: bool, pinned: bool) -> float:
        """Return the duration of a copy between devices or, with ``host``, between a device and the host."""
        rate = self.link if not host else self.pinned if pinned else self.pageable
        return self.copy + nbytes / rate


Count = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], float]


def _products(factor: int, terms: Callable[[torch.Size], int] = lambda shape: shape[-1]) -> Count:
    """Return the function that counts operations; ``terms``: of one element of the output, by the shape of a factor."""

    def count(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
        if len(inputs) <= factor or not outputs:
            return 0.0
        return 2.0 * outputs[0].numel() * terms(inputs[factor].shape)

    return count


_COUNTS: dict[str, Count] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "_scaled_mm", "_int_mm"), _products(0)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _products(1)),
    "convolution": _products(1, lambda shape: math.prod(shape[1:])),
}


_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Operation:
    """An operator that has run on one device."""

    device: int
    name: str  # name without namespace and overload: "mm", "convolution", "randn"
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]  # plain tensors that it wrote; a defect changes them in place
    seconds: float  # duration on healthy hardware
    heat: float  # seconds of work on the device before the operator, in this process


@dataclass(frozen=True)
class Copy:
    """A copy from one device to another, or between a device and the host."""

    # source, target: numbers of devices; None is the host
    source: int | None
    target: int | None
    # "engine" for a copy engine; "kernel" if a kernel of the source writes into the memory of its peer
    path: Literal["engine", "kernel"]
    # the copied bytes, uint8, in one dimension, in the order of memory; a defect changes them in place
    data: torch.Tensor
    before: torch.Tensor | None = None  # earlier bytes of the target's memory if their number is the same, else None
    pinned: bool = True  # whether the memory of the host is pinned
    load: int = 0  # number of other copies under way
    seconds: float = 0.0  # duration on healthy hardware


@dataclass(frozen=True)
class EndedCollective:
    """A collective that has ended on one rank."""

    name: str  # a name in `mgpu_check.torch_hooks.collective_table.TRANSFERS`, or "send" or "recv"
    device: int  # number of this rank's device
    group: tuple[int, ...]  # numbers of the devices of all ranks, in the order of ranks
    outputs: Sequence[torch.Tensor]  # plain tensors that it wrote on this rank; a defect changes them in place
    bytes: int  # size of this rank's inputs or outputs, the larger of the two
    dtype: torch.dtype


class Defect:
    """The base class of defects of simulated hardware. A subclass overrides the methods whose results it spoils.

    A fault of hardware makes it for a `Hardware`, which calls its methods from the time `since` on, at each event of
    this process. It keeps its state, such as counts and random numbers, from one event to the next.
    """

    since: float = 0.0  # time when the defect begins, in seconds as of `time.time`

    # device, first address and number of bytes of each piece of memory that `remembered` receives
    places: tuple[tuple[int, int, int], ...] = ()

    def reached(self, device: int) -> None:
        """Raise, or never return, before a call to the driver of a device."""

    def operated(self, operation: Operation) -> None:
        """Spoil the result of an operator."""

    def copied(self, copy: Copy) -> None:
        """Spoil a copy."""

    def reduced(self, collective: EndedCollective) -> None:
        """Spoil the result of a collective, in addition to its copies."""

    def remembered(self, *memory: torch.Tensor) -> None:
        """Spoil memory that was written or will be read: the bytes of each of `places`, uint8, each in one storage."""

    def factor(self, event: Operation | Copy | EndedCollective) -> float:
        """Return the duration as a multiple of the duration on healthy hardware."""
        return 1.0


class _Virtual(WorkClock):
    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._now = 0.0
        self._asked: WeakKeyDictionary[object, float] = WeakKeyDictionary()

    def now(self) -> float:
        return self._now

    def past(self, moment: float, whose: object) -> bool:
        if self._asked.get(whose) == moment:
            self.wait_until(moment)  # a caller that repeats its query is waiting
        self._asked[whose] = moment
        return moment <= self._now

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)

    def touch(self, device: torch.device | None) -> None:
        if device is not None:
            self._hardware.touch(device)


@dataclass(eq=False)
class Hardware:
    """The hardware of the simulated node of this process.

    A test or a fault makes it, and `planted` adds it to a node until a context exits. Operators, copies and collectives
    of the node call it after they ran correctly. It keeps its heat, addresses and defects if it is planted again.
    """

    planted: Sequence[Defect]  # defects, including those that have not begun
    memory: int  # bytes of each device
    rates: Rates = field(default_factory=Rates)
    first_device: int = 0  # number of the node's first device; numbers continue from host to host
    clock: WorkClock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = _Virtual(self)
        self._addresses: dict[int, Addresses] = {}
        self._heat: dict[int, float] = {}
        self._flights: list[tuple[float, tuple[int | None, int | None]]] = []
        self._lock = threading.Lock()
        self._holders: dict[tuple[int, int, int], StorageWeakRef] = {}
        self._dormant = sorted(self.planted, key=lambda defect: -defect.since)
        self._awake: list[Defect] = []

    @property
    def defects(self) -> list[Defect]:
        while self._dormant and self._dormant[-1].since <= time.time():
            self._awake.append(self._dormant.pop())
        return self._awake

    def equip(self, node: SimulatedNode) -> None:
        for memory in node.memory:
            memory.total = memory.limit = self.memory
            memory.addresses = self._addresses.setdefault(memory.index, Addresses(self.memory))

    def number(self, device: torch.device) -> int | None:
        """Return the number of a device of this process, or None for the host."""
        node = active_node()
        if device.type != "cuda" or node is None:
            return None
        return self.first_device + node.physical[device.index]

    def touch(self, device: torch.device) -> None:
        if self.defects and (number := self.number(device)) is not None:
            for defect in self.defects:
                defect.reached(number)

    def read(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        """Spoil the memory of these tensors; call this before they are read and after they were written."""
        concerned = [defect for defect in self.defects if defect.places]
        if not concerned:
            return
        number = self.number(device)
        storages = [
            tensor.untyped_storage()
            for tensor in tensors
            if isinstance(tensor, SimulatedTensor)
            and tensor.layout is torch.strided
            and tensor._dev.index == device.index
        ]
        for defect in concerned:
            touched = False
            for location in defect.places:
                for storage in storages:
                    if location[0] == number and _at(storage, *location[1:]) is not None:
                        self._holders[location] = StorageWeakRef(storage)
                        touched = True
            memory = [self._held(location) for location in defect.places] if touched else [None]
            if None not in memory:
                defect.remembered(*memory)

    def _held(self, location: tuple[int, int, int]) -> torch.Tensor | None:
        """Return the memory of a place, or None if no live storage is known to hold it."""
        holder = self._holders.get(location)
        storage = None if holder is None else torch.UntypedStorage._new_with_weak_ptr(holder.cdata)
        return None if storage is None else _at(storage, *location[1:])

    def operated(
        self, device: torch.device, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Add the time of an operator that has run to its stream, and spoil its outputs."""
        number = self.number(device)
        if number is None:
            return
        seconds = self.rates.of_operator(name, inputs, outputs)
        done = Operation(number, name, inputs, outputs, seconds, self._heat.get(number, 0.0))
        for defect in self.defects:
            defect.operated(done)
            seconds *= defect.factor(done)
        self._heat[number] = done.heat + seconds
        stream = current_stream(device)
        stream.busy_until(stream.reached + seconds)

    def copied(
        self,
        source: torch.Tensor | None,
        target: torch.device,
        arrived: torch.Tensor,
        into: torch.Tensor | None,
        pinned: bool,
    ) -> None:
        """Add the time of a finished copy to its streams, and spoil it.

        `source`: tensor that was copied; None if the values come from the host and not from a tensor. `arrived`: plain
        tensor with the copy. `into`: existing tensor that receives the copy, or None.
        """
        data = cells(arrived)
        if data is None:
            return
        start = _HOST if source is None else source.device
        ends = self.number(start), self.number(target)
        before = None if into is None or into.dtype != arrived.dtype else cells(raw(into))
        straight = source is None or None in ends or _same_layout(raw(source), arrived if into is None else into)
        streams = [current_stream(device) for device in (start, target) if device.type == "cuda"]
        begin = max(stream.reached for stream in streams)
        seconds = self.rates.of_copy(data.numel() * data.itemsize, None in ends, pinned)
        with self._lock:
            self._flights = [(end, link) for end, link in self._flights if end > self.clock.now()]
            load = sum(end > begin and link != ends for end, link in self._flights)
        old = None if before is None else before.view(torch.uint8)
        path: Literal["engine", "kernel"] = "engine" if straight else "kernel"
        done = Copy(*ends, path, data.view(torch.uint8), old, pinned, load, seconds)
        for defect in self.defects:
            defect.copied(done)
            seconds *= defect.factor(done)
        with self._lock:
            self._flights.append((begin + seconds, ends))
        for stream in streams:
            stream.busy_until(begin + seconds)

    def over_link(self, source: int, target: int, data: torch.Tensor, load: int) -> None:
        """Spoil `data`, sent by NCCL from `source` to `target`, as a defect of the link would."""
        for copy in self._hops(source, target, data, load):
            for defect in self.defects:
                defect.copied(copy)

    def pace(self, source: int, target: int) -> float:
        """Return NCCL's duration from one device to another, as a multiple of the duration on healthy hardware."""
        if not self.defects:
            return 1.0
        copies = self._hops(source, target, torch.empty(0, dtype=torch.uint8), 0)
        return max(math.prod(defect.factor(copy) for defect in self.defects) for copy in copies)

    def _hops(self, source: int, target: int, data: torch.Tensor, load: int) -> list[Copy]:
        """Return the copies that NCCL makes: one, or two through the host if NCCL_P2P_DISABLE is set."""
        if os.environ.get("NCCL_P2P_DISABLE", "0") in ("", "0"):
            return [Copy(source, target, "kernel", data, load=load)]
        return [Copy(source, None, "engine", data, load=load), Copy(None, target, "engine", data, load=load)]

    def reduced(self, collective: EndedCollective) -> None:
        for defect in self.defects:
            defect.reduced(collective)


def cells(t: torch.Tensor) -> torch.Tensor | None:
    """Return the elements of a dense plain tensor in memory order, as integers of the same size; None for others."""
    if t.layout is not torch.strided or t.is_quantized or not torch.ops.aten.is_non_overlapping_and_dense(t):
        return None
    flat = t.detach().as_strided((t.numel(),), (1,), t.storage_offset())
    if t.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(INTEGER_OF_SIZE[flat.element_size()])


def _at(storage: torch.UntypedStorage, address: int, length: int) -> torch.Tensor | None:
    """Return ``length`` bytes of a storage at an address; None if the storage does not hold all of them."""
    block = block_of(storage)
    if block is None or block.address is None:
        return None
    offset = address - block.address
    if offset < 0 or offset + length > block.requested:
        return None
    with torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=torch.uint8, device=_HOST).set_(storage, offset, (length,), (1,))


def _same_layout(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether the bytes of one tensor can be copied to the other without conversion."""
    return (
        source.dtype == target.dtype
        and source.is_conj() == target.is_conj()
        and source.is_neg() == target.is_neg()
        and torch.ops.aten.is_non_overlapping_and_dense(source)
        and all(a == b for a, b, n in zip(source.stride(), target.stride(), source.shape, strict=True) if n > 1)
    )


present: Hardware | None = None  # the hardware of the simulated node of this process, inside `planted`; else None


@contextlib.contextmanager
def planted(hardware: Hardware) -> Iterator[None]:
    """Add hardware to the simulated node of this process until the context exits. `hardware` keeps its state."""
    global present
    node = active_node()
    if node is None or node.backing.type != "cpu":
        raise ValueError("hardware can be planted in a simulated node on the CPU only: give --simulate")
    before = [(memory, memory.total, memory.limit) for memory in node.memory]
    hardware.equip(node)
    go_by(hardware.clock)
    present = hardware
    try:
        yield
    finally:
        present = None
        go_by(None)
        for memory, total, limit in before:
            memory.total, memory.limit, memory.addresses = total, limit, None


@dataclass(frozen=True)
class Hop:
    """A link that a part of one rank's result has crossed."""

    # source, target: ranks at the ends of the link
    source: int
    target: int
    piece: int
    pieces: int  # number of equal parts of the result


def hops_to(name: str, rank: int, size: int, root: int) -> Iterator[Hop]:
    """Yield the hops of the result of `rank`: a defect of one of their links spoils it.

    `name`: name of the transfer, as in `hardware.EndedCollective`. `root`: root of a collective that has one; the other
    end of a message.
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


def _along(start: int, steps: int, size: int, piece: int, pieces: int) -> Iterator[Hop]:
    for step in range(steps):
        rank = (start + step) % size
        yield Hop(rank, (rank + 1) % size, piece, pieces)


def sent(below: Hardware, group: NcclGroup | None, calls: list[TransferCall]) -> Callable[[], None] | None:
    """Prepare calls of a group, and return the function to call after them; None if they involve no device."""
    tensors = [t for call in calls for t in call.tensors() if isinstance(t, SimulatedTensor)]
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
            for call in calls:
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
    share = TRANSFERS[call.name].share_of_link(size) if call.name in TRANSFERS else 1.0  # a message crosses one link
    return (below.rates.collective + largest * share / below.rates.link * pace) * slow


@functools.cache
def _links(name: str, size: int, root: int) -> frozenset[tuple[int, int]]:
    return frozenset((hop.source, hop.target) for rank in range(size) for hop in hops_to(name, rank, size, root))


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.itemsize for t in tensors)


def _parts(call: TransferCall, outputs: Sequence[torch.Tensor], hop: Hop) -> list[torch.Tensor]:
    if len(outputs) == hop.pieces:  # a list by rank
        outputs, count = [outputs[hop.piece]], 1
    else:
        count = hop.pieces
    views = []
    for data in map(cells, outputs):
        if data is None:
            continue
        row = data.numel() // max(outputs[0].size(0), 1) if outputs[0].dim() else 1
        sizes = [row * rows for rows in call.splits[0]]
        pieces = data.split(sizes) if count > 1 and sizes else data.tensor_split(count)
        views.append(pieces[hop.piece if count > 1 else 0].view(torch.uint8))
    return views
