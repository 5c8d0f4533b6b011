"""The hardware of simulated devices, right or defect, below everything that computes, copies or reduces on them.

A simulated node has none until `planted` gives it some. Then its devices have as much memory as the hardware says, blocks
have addresses, events measure virtual time (bytes and floating-point operations over rates, without sleeping), and
each `Defect` is told what was done, after the right thing was, to spoil it.

Devices are numbers here: of a device of the machine, plus `Hardware.first`. None is the host.
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
from mgpu_check.simulated.delivery import Clock
from mgpu_check.simulated.memory import block_of
from mgpu_check.simulated.rates import Rates
from mgpu_check.simulated.state import Node, active_node
from mgpu_check.simulated.streams import Stream, current_stream, go_by
from mgpu_check.simulated.tensor import SimulatedTensor, raw
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE

__all__ = ["Collective", "Copy", "Defect", "Hardware", "Operation", "cells", "planted", "present"]

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Operation:
    """An operator that has run on one device.

    Attributes:
        device: its number.
        name: without its namespace and overload: "mm", "convolution", "randn".
        inputs: its tensors, simulated ones as they are.
        outputs: what it has written, plain; a defect changes them in place.
        seconds: that it takes on right hardware.
        heat: seconds that the device has been busy, in this process, before it.
    """

    device: int
    name: str
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    seconds: float
    heat: float


@dataclass(frozen=True)
class Copy:
    """Bytes that have gone from one device to another, or from or to the host.

    Attributes:
        source, target: numbers of devices; None is the host.
        path: "engine", or "kernel" for what a kernel of the source writes into the memory of its peer.
        data: the bytes that have arrived, uint8, in one dimension, in the order of memory; a defect changes them in place.
        before: bytes that the memory had before, where they are as many; else None.
        pinned: memory of the host is.
        load: other copies that were under way.
        seconds: that it takes on right hardware.
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
class Collective:
    """A collective that has ended on one rank.

    Attributes:
        name: as NCCL has it in torch: "all_reduce", "_all_gather_base", "reduce_scatter", "recv", ...
        device: of this rank.
        group: the devices of all ranks, in their order.
        outputs: what it has written on this rank, plain; a defect changes them in place.
        bytes: of the tensors of this rank, the larger of what it gave and what it got.
        dtype: of them.
    """

    name: str
    device: int
    group: tuple[int, ...]
    outputs: Sequence[torch.Tensor]
    bytes: int
    dtype: torch.dtype


class Defect:
    """Something that is wrong with simulated hardware. What it overrides is called after the right thing was done.

    Attributes:
        since: the time, as `time.time` tells it, before which all is well.
        places: device, first address and number of bytes of each piece of memory that `remembered` is about.
    """

    since: float = 0.0

    places: tuple[tuple[int, int, int], ...] = ()

    def reached(self, device: int) -> None:
        """Come before anything that needs the driver of a device: raise, or never return."""

    def operated(self, operation: Operation) -> None:
        """Spoil the result of an operator."""

    def copied(self, copy: Copy) -> None:
        """Spoil a copy."""

    def reduced(self, collective: Collective) -> None:
        """Spoil the result of a collective, beyond what its copies do."""

    def remembered(self, *memory: torch.Tensor) -> None:
        """Spoil memory that was written or will be read: the bytes of each of `places`, uint8, each in one storage."""

    def factor(self, event: Operation | Copy) -> float:
        """Return how many times as long as on right hardware this takes."""
        return 1.0


class _Virtual(Clock):
    """Time that passes where somebody waits for a device, and nowhere else."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._now = 0.0
        self._asked: WeakKeyDictionary[object, float] = WeakKeyDictionary()

    def now(self) -> float:
        return self._now

    def past(self, moment: float, whose: object) -> bool:
        if self._asked.get(whose) == moment:
            self.wait_until(moment)  # who asks again is waiting; who asks about another event is not
        self._asked[whose] = moment
        return moment <= self._now

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)

    def touch(self, device: torch.device | None) -> None:
        if device is not None:
            self._hardware.touch(device)


@dataclass(eq=False)
class Hardware:
    """What a simulated node is made of, in this process.

    Attributes:
        planted: its defects.
        memory: bytes of each device.
        first: the number of its first device: on several hosts devices are counted host by host.
    """

    planted: Sequence[Defect]
    memory: int
    rates: Rates = field(default_factory=Rates)
    first: int = 0
    clock: Clock = field(init=False)

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
        """The defects that have begun."""
        while self._dormant and self._dormant[-1].since <= time.time():
            self._awake.append(self._dormant.pop())
        return self._awake

    def equip(self, node: Node) -> None:
        """Give the devices of `node` their memory."""
        for memory in node.memory:
            memory.total = memory.limit = self.memory
            memory.addresses = self._addresses.setdefault(memory.index, Addresses(self.memory))

    def number(self, device: torch.device) -> int | None:
        """Return the number of a device of this process; None of the host."""
        node = active_node()
        if device.type != "cuda" or node is None:
            return None
        return self.first + node.physical[device.index]

    def touch(self, device: torch.device) -> None:
        """Come before anything that needs the driver of a device."""
        if self.defects and (number := self.number(device)) is not None:
            for defect in self.defects:
                defect.reached(number)

    def read(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        """Have memory be what defects make of it, before somebody reads these tensors, or after somebody wrote them."""
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
        """Return the memory of a place, if it is in a storage that somebody has used."""
        holder = self._holders.get(place)
        storage = None if holder is None else torch.UntypedStorage._new_with_weak_ptr(holder.cdata)
        return None if storage is None else _at(storage, *place[1:])

    def operated(
        self, device: torch.device, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Take the time of an operator that has run, and spoil what it has written."""
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
        """Take the time of a copy that has been made, and spoil it.

        Args:
            source: None where values come from the host that no tensor has.
            arrived: the copy, plain.
            into: the tensor that it is for, if there is one already.
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
        """Spoil what a kernel of NCCL has sent from one device to another, as bytes."""
        for copy in self._hops(source, target, data, load):
            for defect in self.defects:
                defect.copied(copy)

    def pace(self, source: int, target: int) -> float:
        """Return how many times as long as on right hardware NCCL takes from one device to another."""
        if not self.defects:
            return 1.0
        copies = self._hops(source, target, torch.empty(0, dtype=torch.uint8), 0)
        return max(math.prod(defect.factor(copy) for defect in self.defects) for copy in copies)

    def _hops(self, source: int, target: int, data: torch.Tensor, load: int) -> list[Copy]:
        """Return how NCCL sends: without access to the memory of peers, through memory of the host."""
        if os.environ.get("NCCL_P2P_DISABLE", "0") in ("", "0"):
            return [Copy(source, target, "kernel", data, load=load)]
        return [Copy(source, None, "engine", data, load=load), Copy(None, target, "engine", data, load=load)]

    def reduced(self, collective: Collective) -> None:
        """Spoil what a collective has left on one rank."""
        for defect in self.defects:
            defect.reduced(collective)


def cells(t: torch.Tensor) -> torch.Tensor | None:
    """Return the elements of a plain tensor in the order of memory, as integers of their size; None where it has gaps."""
    if t.layout is not torch.strided or t.is_quantized or not torch.ops.aten.is_non_overlapping_and_dense(t):
        return None
    flat = t.detach().as_strided((t.numel(),), (1,), t.storage_offset())
    if t.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(INTEGER_OF_SIZE[flat.element_size()])


def _at(storage: torch.UntypedStorage, address: int, length: int) -> torch.Tensor | None:
    """Return the bytes of a storage at an address; None where not all are in it."""
    block = block_of(storage)
    if block is None or block.address is None:
        return None
    offset = address - block.address
    if offset < 0 or offset + length > block.requested:
        return None
    with torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=torch.uint8, device=_HOST).set_(storage, offset, (length,), (1,))


def _same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether bytes go from one to the other as they are."""
    return (
        one.dtype == other.dtype
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
        and torch.ops.aten.is_non_overlapping_and_dense(one)
        and all(a == b for a, b, n in zip(one.stride(), other.stride(), one.shape, strict=True) if n > 1)
    )


present: Hardware | None = None
"""The hardware of the simulated node of this process, while it has some."""


@contextlib.contextmanager
def planted(hardware: Hardware) -> Iterator[None]:
    """Give the simulated node of this process hardware, for the time of the context. Its state stays for the next time.

    Raises:
        ValueError: there is no simulated node, or it is on a real device.
    """
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
