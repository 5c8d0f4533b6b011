"""The hardware faults of a simulated node: memory cells, compute units, links and collectives that give wrong
results, and devices and links that are slow, hang, or are gone.

Timing and patterns are after arXiv 2605.04213: most wrong results of hardware have more than one wrong bit. Wrong
elements often repeat with a period, such as the lanes of a warp, and about one in a hundred is NaN or infinite.
"""

from __future__ import annotations

import abc
import random
import threading
import time
from collections.abc import Callable, Collection

import torch

from mgpu_check.simulated.defects import UNITS, Parameters
from mgpu_check.simulated.hardware import Copy, Defect, EndedCollective, Operation, cells
from mgpu_check.simulated.node import cuda_error
from mgpu_check.torch_hooks.collective_table import TRANSFERS
from mgpu_check.torch_hooks.tensors import name_of

_WARP = 32
_TILE = 16

Pattern = Callable[[torch.Tensor, random.Random], object]
"""Changes elements in place.

The tensor has one dimension, at least one element, and an integer dtype of the element size.
"""


class Chance:
    """Selects the events that a defect affects: one in ``every``, and each of these with ``probability``."""

    def __init__(self, parameters: Parameters) -> None:
        self._every = int(parameters.get("every", 1))
        self._probability = float(parameters.get("probability", 1.0))
        self.random = random.Random(int(parameters.get("seed", 0)))
        self._seen = 0

    def now(self) -> bool:
        self._seen += 1
        return self._seen % self._every == 0 and self.random.random() < self._probability


def dtype_matches(parameters: Parameters, dtype: torch.dtype) -> bool:
    """Return whether `dtype` matches the parameter "dtype", such as "float16"; always if that is "any" or missing."""
    return parameters.get("dtype", "any") in ("any", name_of(dtype))


def _invert(elements: torch.Tensor, bit: int) -> None:
    """Invert one bit of each element; bit -1 is the highest one below the sign."""
    elements ^= 1 << bit % (8 * elements.itemsize - 1)


def _one_of(elements: torch.Tensor, chosen: random.Random) -> torch.Tensor:
    return elements[chosen.randrange(elements.numel()) :][:1]


def _bit(elements: torch.Tensor, chosen: random.Random) -> None:
    _invert(_one_of(elements, chosen), chosen.randrange(64))


def _bits(elements: torch.Tensor, chosen: random.Random) -> None:
    element = _one_of(elements, chosen)
    for bit in chosen.sample(range(8 * elements.itemsize - 1), 3):
        _invert(element, bit)


def _lane(elements: torch.Tensor, chosen: random.Random) -> None:
    lane = chosen.randrange(min(_WARP, elements.numel()))
    _invert(elements[lane::_WARP], -chosen.randrange(2, 7))


def _tile(elements: torch.Tensor, chosen: random.Random) -> None:
    start = chosen.randrange(max(elements.numel() - _TILE, 1))
    _invert(elements[start : start + _TILE], -chosen.randrange(2, 7))


def _swap(elements: torch.Tensor, chosen: random.Random) -> None:
    """Swap the first and the last element; if they are equal or the same, invert one bit."""
    head, tail = elements[0].item(), elements[-1].item()
    if head == tail:
        _bit(elements, chosen)
    else:
        elements[0], elements[-1] = tail, head


SPOIL: dict[str, Pattern] = {
    "bit": _bit,
    "low-bit": lambda elements, chosen: _invert(_one_of(elements, chosen), 0),
    "bits": _bits,
    "lane": _lane,
    # all bits except the sign: NaN in each floating dtype
    "nan": lambda elements, chosen: _one_of(elements, chosen).fill_(torch.iinfo(elements.dtype).max),
    "tile": _tile,
    "swap": _swap,
}
"""The functions for the names of `PATTERNS`."""


def _spoil_result(result: torch.Tensor, pattern: Pattern, chance: Chance) -> None:
    elements = cells(result)
    if elements is None or not elements.numel():
        return
    if result.dtype is torch.bool:
        elements[:1] ^= 1
    else:
        pattern(elements, chance.random)


class _Cells(Defect):
    """Some bytes of one device, from the parameter ``address`` on."""

    def __init__(self, parameters: Parameters, length: int = 1) -> None:
        self.places = ((int(parameters["device"]), int(parameters["address"]), length),)
        self._mask = 1 << int(parameters.get("bit", 0))


class StuckBit(_Cells):
    """One bit always has the value ``value``."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self._is_one = bool(parameters["value"])

    def remembered(self, *memory: torch.Tensor) -> None:
        if self._is_one:
            memory[0].bitwise_or_(self._mask)
        else:
            memory[0].bitwise_and_(0xFF - self._mask)


class DeadRow(_Cells):
    """A row reads as zeros."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, int(parameters["length"]))

    def remembered(self, *memory: torch.Tensor) -> None:
        memory[0].zero_()


class WeakBit(_Cells):
    """One bit sometimes flips."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self._chance = Chance(parameters)

    def remembered(self, *memory: torch.Tensor) -> None:
        if self._chance.now():
            memory[0].bitwise_xor_(self._mask)


class LeakyBit(_Cells):
    """One bit turns to 0 ``seconds`` after its byte was last changed."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self._seconds = float(parameters["seconds"])
        self._was, self._changed = -1, 0.0

    def remembered(self, *memory: torch.Tensor) -> None:
        value, now = int(memory[0][0]), time.monotonic()
        if value != self._was:
            self._was, self._changed = value, now
        if now - self._changed >= self._seconds:
            memory[0].bitwise_and_(0xFF - self._mask)
            self._was = value & ~self._mask


class Aliased(Defect):
    """The ``length`` bytes at ``address`` are the same cells as the bytes ``distance`` behind them."""

    def __init__(self, parameters: Parameters) -> None:
        device, address, length = (int(parameters[name]) for name in ("device", "address", "length"))
        self.places = ((device, address, length), (device, address + int(parameters["distance"]), length))
        self._known: torch.Tensor | None = None

    def remembered(self, *memory: torch.Tensor) -> None:
        low, high = memory
        if self._known is None or not torch.equal(high, self._known):
            low.copy_(high)  # if both were written, the higher address counts as the last write
        else:
            high.copy_(low)
        self._known = low.clone()


class Coupled(_Cells):
    """A bit that changes from 0 to 1 flips the same bit of the next byte."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, 2)
        self._was = 0xFF

    def remembered(self, *memory: torch.Tensor) -> None:
        value = int(memory[0][0])
        if value & self._mask & ~self._was:
            memory[0][1] ^= self._mask
        self._was = value


_SIDES = (("inner", "inputs", -1), ("rows", "outputs", -2), ("columns", "outputs", -1))
"""Parameter, the tensors of an operation, and the dimension of the first of them."""


class Unit(Defect):
    """Some operators give wrong elements. Its parameters select the operators and elements; `tf32` those that round."""

    def __init__(self, parameters: Parameters, operations: tuple[str, ...], tf32: bool = False) -> None:
        self._parameters = parameters
        self._operations = frozenset(operations)
        self._tf32 = tf32
        self._chance = Chance(parameters)
        self._pattern = SPOIL[str(parameters.get("pattern", "bits"))]

    def operated(self, operation: Operation) -> None:
        parameters = self._parameters
        if operation.device != parameters["device"] or operation.name not in self._operations or not operation.outputs:
            return
        result = operation.outputs[0]
        dtype = operation.inputs[0].dtype if operation.inputs else result.dtype
        if (
            not dtype_matches(parameters, dtype)
            or result.numel() * result.itemsize <= int(parameters.get("above", 0))
            or not _has_sides(parameters, operation)
            or operation.heat < float(parameters.get("heat", 0))
            or (self._tf32 and (dtype is not torch.float32 or torch.get_float32_matmul_precision() == "highest"))
            or not self._chance.now()
        ):
            return
        _spoil_result(result, self._pattern, self._chance)


def _has_sides(parameters: Parameters, operation: Operation) -> bool:
    """Return whether the dimensions of an operation are those that a defect needs; without any, all are."""
    for name, tensors, dimension in _SIDES:
        wanted, operands = int(parameters.get(name, 0)), getattr(operation, tensors)
        if wanted and (not operands or operands[0].dim() < -dimension or operands[0].shape[dimension] != wanted):
            return False
    if not parameters.get("transposed"):
        return True
    factors = [matrix for matrix in operation.inputs if matrix.dim() >= 2]
    return len(factors) >= 2 and factors[-1].stride(-1) != 1 and factors[-1].stride(-2) == 1


class _OfDevice(Defect):
    def __init__(self, parameters: Parameters) -> None:
        self._device = parameters["device"]


class RepeatingRandom(_OfDevice):
    """Random numbers repeat: the second half of a tensor equals the first."""

    def operated(self, operation: Operation) -> None:
        if operation.device == self._device and operation.name in UNITS["random numbers"]:
            for drawn in operation.outputs:
                elements = cells(drawn)
                if elements is not None:
                    half = elements.numel() // 2
                    elements[half : 2 * half] = elements[:half].clone()


_ANY = tuple(name for name, transfer in TRANSFERS.items() if transfer.takers == "all" and name != "scatter")
"""Transfers that are wrong by default: those that give each rank a result. A wrong scatter could be an error of its
root too."""


class WrongCollective(Defect):
    """The result on ``device`` is wrong.

    Parameters: operation (a transfer, or "any"), dtype, bytes (exactly; 0 for any), above (bytes), ranks (at least),
    most (ranks), pattern, every, probability, seed.
    """

    def __init__(self, parameters: Parameters, pattern: str = "bits") -> None:
        self._parameters = parameters
        operation = str(parameters.get("operation", "any"))
        self._names = _ANY if operation == "any" else (operation,)
        self._chance = Chance(parameters)
        self._pattern = SPOIL[pattern]

    def reduced(self, collective: EndedCollective) -> None:
        parameters = self._parameters
        if (
            collective.device == parameters["device"]
            and collective.name in self._names
            and dtype_matches(parameters, collective.dtype)
            and int(parameters.get("bytes", 0)) in (0, collective.bytes)
            and collective.bytes > int(parameters.get("above", 0))
            and int(parameters.get("ranks", 2)) <= len(collective.group) <= int(parameters.get("most", 1 << 20))
            and self._chance.now()
        ):
            for output in collective.outputs:
                _spoil_result(output, self._pattern, self._chance)


_TAIL = 1000


def _words(pattern: str) -> Callable[[torch.Tensor, Chance], object]:
    def spoil(data: torch.Tensor, chance: Chance) -> None:
        is_aligned = data.numel() >= 4 and data.storage_offset() % 4 == 0
        words = data[: data.numel() // 4 * 4].view(torch.int32) if is_aligned else data
        SPOIL[pattern](words if words is not data else data.view(torch.int8), chance.random)

    return spoil


_SPOIL: dict[str, Callable[[torch.Tensor, Chance], object]] = {
    "zeros": lambda data, chance: data.zero_(),
    "offset": lambda data, chance: data.copy_(data.roll(64 if data.numel() > 64 else 1)),
    "tail": lambda data, chance: data[-min(_TAIL, data.numel() // 2 + 1) :].bitwise_xor_(0x5A),
    "half": lambda data, chance: data[data.numel() // 2 :].zero_(),
    "bit": _words("bit"),
    "lane": _words("lane"),
}


class _Spoiled(Defect, abc.ABC):
    """Some copies deliver wrong data, as the entry `damage` of `_SPOIL` does it. Its parameters select the copies."""

    def __init__(self, parameters: Parameters, damage: str = "zeros") -> None:
        self.parameters = parameters
        self.chance = Chance(parameters)
        self._spoil = _SPOIL[damage]

    @abc.abstractmethod
    def concerns(self, copy: Copy) -> bool:
        """Return whether a copy uses the defective link."""

    def copied(self, copy: Copy) -> None:
        parameters = self.parameters
        if (
            self.concerns(copy)
            and copy.data.numel() > int(parameters.get("above", 0))
            and parameters.get("path", "any") in ("any", copy.path)
            and copy.load >= int(parameters.get("load", 0))
            and ("word" not in parameters or _holds_only(copy.data, int(parameters["word"])))
            and self.chance.now()
        ):
            self.spoil(copy)

    def spoil(self, copy: Copy) -> None:
        """Change the delivered data."""
        self._spoil(copy.data, self.chance)


def _holds_only(data: torch.Tensor, word: int) -> bool:
    """Return whether bytes repeat one word of 64 bits, given as an integer in [0, 2^64)."""
    words = data[: data.numel() // 8 * 8].clone().view(torch.int64)
    return words.numel() > 0 and bool((words == (word ^ 1 << 63) - (1 << 63)).all())


class Link(_Spoiled):
    """The link from ``device`` to ``peer``."""

    def concerns(self, copy: Copy) -> bool:
        return (copy.source, copy.target) == (self.parameters["device"], self.parameters["peer"])


def _deliver(other_data: torch.Tensor | None, data: torch.Tensor) -> None:
    """Replace the delivered data by other data, as far as they reach, or by zeros."""
    if other_data is None:
        data.zero_()
    else:
        size = min(other_data.numel(), data.numel())
        data[:size] = other_data[:size]


class Stale(Link):
    """Leave the old content of the memory. If it was new, deliver the previous data of the link, or zeros."""

    _last: torch.Tensor | None = None

    def spoil(self, copy: Copy) -> None:
        arrived = copy.data.clone()
        _deliver(copy.before if copy.before is not None else self._last, copy.data)
        self._last = arrived


class Wrapping(Link):
    """Copies that land ``reach`` bytes or more into an allocation arrive ``reach`` bytes in front of their place."""

    def spoil(self, copy: Copy) -> None:
        reach = int(self.parameters["reach"])
        if copy.before is None or copy.before.storage_offset() < reach:
            return
        size, offset = copy.data.numel(), copy.before.storage_offset() - reach
        copy.before.as_strided((size,), (1,), offset).copy_(copy.data)
        copy.data.copy_(copy.before)


class AnotherPeer(Link):
    """Deliver the last data that another peer sent to the same device, or zeros."""

    _previous: torch.Tensor | None = None

    def copied(self, copy: Copy) -> None:
        parameters = self.parameters
        if copy.target == parameters["peer"] and copy.source not in (None, parameters["device"]):
            self._previous = copy.data.clone()
        super().copied(copy)

    def spoil(self, copy: Copy) -> None:
        _deliver(self._previous, copy.data)


class Between(Stale):
    """Copies between any two devices leave the old content, as where the IOMMU drops what one writes to another."""

    def concerns(self, copy: Copy) -> bool:
        return None not in (copy.source, copy.target)


class Egress(_Spoiled):
    """All links from ``device`` to other devices, but not to the host: its own port is at fault."""

    def concerns(self, copy: Copy) -> bool:
        return copy.source == self.parameters["device"] and copy.target is not None


def _crosses_host_link(parameters: Parameters, copy: Copy, ways: Collection[str]) -> bool:
    """Return whether a copy takes the link between the host and "device", in one of some ways, with its memory."""
    way, memory = "upload" if copy.source is None else "download", "pinned" if copy.pinned else "pageable"
    ends = {copy.source, copy.target} == {None, parameters["device"]}
    return ends and way in ways and parameters.get("memory", "any") in ("any", memory)


class HostLink(_Spoiled):
    """The link between the host and ``device``. Parameters: memory ("pinned", "pageable", "any")."""

    def __init__(self, parameters: Parameters, damage: str, upload: bool = False, download: bool = False) -> None:
        super().__init__(parameters, damage)
        self._ways = ["upload"] * upload + ["download"] * download

    def concerns(self, copy: Copy) -> bool:
        return _crosses_host_link(self.parameters, copy, self._ways)


Event = Operation | Copy | EndedCollective


class _Slow(Defect, abc.ABC):
    """Some events take ``factor`` times as long; with ``below``, only those of at most that many bytes; with
    ``every``, one in this number."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self._chance = Chance(parameters)

    @abc.abstractmethod
    def concerns(self, event: Event) -> bool:
        """Return whether the slow part handles an event."""

    def factor(self, event: Event) -> float:
        most = int(self.parameters.get("below", 0))
        slow = self.concerns(event) and (not most or 0 < _bytes_of(event) <= most) and self._chance.now()
        return float(self.parameters["factor"]) if slow else 1.0


def _bytes_of(event: Event) -> int:
    if isinstance(event, Operation):
        return sum(output.nbytes for output in event.outputs)
    return event.data.numel() if isinstance(event, Copy) else event.bytes


class SlowDevice(_Slow):
    """Operators of ``device`` are slow.

    Parameters: unit (a key of `UNITS`, or "any"), dtype (of the first input), heat (seconds that the device has been
    busy before).
    """

    def concerns(self, event: Event) -> bool:
        parameters = self.parameters
        unit = str(parameters.get("unit", "any"))
        return (
            isinstance(event, Operation)
            and event.device == parameters["device"]
            and event.heat >= float(parameters.get("heat", 0))
            and (unit == "any" or event.name in UNITS[unit])
            and (not event.inputs or dtype_matches(parameters, event.inputs[0].dtype))
        )


class SlowLink(_Slow):
    """Copies from ``device`` to ``peer`` are slow. Parameters: path ("engine", "kernel", "any")."""

    def concerns(self, event: Event) -> bool:
        return (
            isinstance(event, Copy)
            and (event.source, event.target) == (self.parameters["device"], self.parameters["peer"])
            and self.parameters.get("path", "any") in ("any", event.path)
        )


class SlowPort(_Slow):
    """Copies between ``device`` and each other device are slow, but not those to the host."""

    def concerns(self, event: Event) -> bool:
        ends = (event.source, event.target) if isinstance(event, Copy) else (None,)
        return None not in ends and self.parameters["device"] in ends


class SlowHostLink(_Slow):
    """Copies between the host and ``device`` are slow.

    Parameters: way ("upload", "download", "any"), memory ("pinned", "pageable", "any").
    """

    def concerns(self, event: Event) -> bool:
        way = str(self.parameters.get("way", "any"))
        ways = ("upload", "download") if way == "any" else (way,)
        return isinstance(event, Copy) and _crosses_host_link(self.parameters, event, ways)


class SlowCollective(_Slow):
    """Collectives with ``device`` are slow on all ranks. Parameters: operation (a transfer, or "any")."""

    def concerns(self, event: Event) -> bool:
        return (
            isinstance(event, EndedCollective)
            and self.parameters["device"] in event.group
            and self.parameters.get("operation", "any") in ("any", event.name)
        )


class Lost(_OfDevice):
    """``device`` is gone from the bus: the driver refuses all operations on it."""

    def reached(self, device: int) -> None:
        if device == self._device:
            raise cuda_error(999, "unknown error")  # cudaErrorUnknown


class Hanging(_OfDevice):
    """A call of the driver about ``device`` never returns."""

    def reached(self, device: int) -> None:
        if device == self._device:
            threading.Event().wait()
