"""Simulate the hardware of simulated devices, healthy or defective, below operators, copies and collectives.

A simulated node has no hardware until `planted` adds it. Then the hardware sets the memory size of the devices, and
blocks have addresses. Events measure virtual time (bytes and floating-point operations over rates), without sleeping.
Each `Defect` receives every operation after it ran correctly, and may spoil its result.

This module identifies a device by its number: the index in the machine plus `Hardware.first`. None is the host.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mgpu_check.simulated.addresses import Addresses
from mgpu_check.simulated.delivery import WorkClock
from mgpu_check.simulated.memory import block_of
from mgpu_check.simulated.rates import Rates
from mgpu_check.simulated.state import SimulatedNode, active_node
from mgpu_check.simulated.streams import Stream, current_stream, go_by
from mgpu_check.simulated.tensor import SimulatedTensor, raw
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Operation:
    """An operator that has run on one device.

    Attributes:
        name: name without namespace and overload: "mm", "convolution", "randn".
        outputs: plain tensors that it wrote; a defect changes them in place.
        seconds: duration on healthy hardware.
        heat: seconds of work on the device before the operator, in this process.
    """

    device: int
    name: str
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    seconds: float
    heat: float


@dataclass(frozen=True)
class Copy:
    """A copy from one device to another, or between a device and the host.

    Attributes:
        source, target: numbers of devices; None is the host.
        path: "engine" for a copy engine; "kernel" if a kernel of the source writes into the memory of its peer.
        data: the copied bytes, uint8, in one dimension, in the order of memory; a defect changes them in place.
        before: earlier bytes of the target's memory if their number is the same, else None.
        pinned: whether the memory of the host is pinned.
        load: number of other copies under way.
        seconds: duration on healthy hardware.
    """

    source: int | None
    target: int | None
    path: Literal["engine", "kernel"]
    data: torch.Tensor
    before: torch.Tensor | None = None
    pinned: bool = True
    load: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class EndedCollective:
    """A collective that has ended on one rank.

    Attributes:
        name: a name in `mgpu_check.torch_hooks.table.TRANSFERS`, or "send" or "recv".
        device: number of this rank's device.
        group: numbers of the devices of all ranks, in the order of ranks.
        outputs: plain tensors that it wrote on this rank; a defect changes them in place.
        bytes: size of this rank's inputs or outputs, the larger of the two.
    """

    name: str
    device: int
    group: tuple[int, ...]
    outputs: Sequence[torch.Tensor]
    bytes: int
    dtype: torch.dtype


class Defect:
    """The base class of defects of simulated hardware. A subclass overrides the methods whose results it spoils.

    Attributes:
        since: time when the defect begins, in seconds as of `time.time`.
        places: device, first address and number of bytes of each piece of memory that `remembered` receives.
    """

    since: float = 0.0

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

    Attributes:
        planted: defects, including those that have not begun.
        memory: bytes of each device.
        first: number of the node's first device; numbers continue from host to host.
    """

    planted: Sequence[Defect]
    memory: int
    rates: Rates = field(default_factory=Rates)
    first: int = 0
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
        return self.first + node.physical[device.index]

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
            for place in defect.places:
                for storage in storages:
                    if place[0] == number and _at(storage, *place[1:]) is not None:
                        self._holders[place] = StorageWeakRef(storage)
                        touched = True
            memory = [self._held(place) for place in defect.places] if touched else [None]
            if None not in memory:
                defect.remembered(*memory)

    def _held(self, place: tuple[int, int, int]) -> torch.Tensor | None:
        """Return the memory of a place, or None if no live storage is known to hold it."""
        holder = self._holders.get(place)
        storage = None if holder is None else torch.UntypedStorage._new_with_weak_ptr(holder.cdata)
        return None if storage is None else _at(storage, *place[1:])

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

        Args:
            source: tensor that was copied; None if the values come from the host and not from a tensor.
            arrived: plain tensor with the copy.
            into: existing tensor that receives the copy, or None.
        """
        data = cells(arrived)
        if data is None:
            return
        start = _HOST if source is None else source.device
        ends = self.number(start), self.number(target)
        before = None if into is None or into.dtype != arrived.dtype else cells(raw(into))
        straight = source is None or None in ends or _same_layout(raw(source), arrived if into is None else into)
        self._copy(
            ends,
            [current_stream(device) for device in (start, target) if device.type == "cuda"],
            "engine" if straight else "kernel",
            data.view(torch.uint8),
            None if before is None else before.view(torch.uint8),
            pinned,
        )

    def _copy(
        self,
        ends: tuple[int | None, int | None],
        streams: Sequence[Stream],
        path: Literal["engine", "kernel"],
        data: torch.Tensor,
        before: torch.Tensor | None,
        pinned: bool,
    ) -> None:
        start = max(stream.reached for stream in streams)
        seconds = self.rates.of_copy(data.numel(), None in ends, pinned)
        with self._lock:
            self._flights = [(end, link) for end, link in self._flights if end > self.clock.now()]
            load = sum(end > start and link != ends for end, link in self._flights)
        done = Copy(*ends, path, data, before, pinned, load, seconds)
        for defect in self.defects:
            defect.copied(done)
            seconds *= defect.factor(done)
        with self._lock:
            self._flights.append((start + seconds, ends))
        for stream in streams:
            stream.busy_until(start + seconds)

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
        """Spoil the result of a collective on one rank."""
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


def _same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the bytes of one tensor can be copied to the other without conversion."""
    return (
        one.dtype == other.dtype
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
        and torch.ops.aten.is_non_overlapping_and_dense(one)
        and all(a == b for a, b, n in zip(one.stride(), other.stride(), one.shape, strict=True) if n > 1)
    )


present: Hardware | None = None
"""The hardware of the simulated node of this process, inside `planted`; else None."""


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
