"""Run cases on each device, compare the results with a reference, and name the devices that are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mgpu_check.asserts.bits import index_of
from mgpu_check.asserts.findings import enough
from mgpu_check.errors import DeviceMismatch
from mgpu_check.suite.common.error_bounds import ulps_of
from mgpu_check.suite.common.operators import Function, Kind
from mgpu_check.torch_hooks.precision import repeatable
from mgpu_check.torch_hooks.tensors import as_bits, as_real, indices_of, name_of, plain

_LISTED = 6


@dataclass(frozen=True)
class Window:
    """An operand that is a view of a larger storage.

    Each device gets a copy of the storage and makes the view itself.
    """

    storage: torch.Tensor
    view: Callable[[torch.Tensor], torch.Tensor]


Operand = torch.Tensor | Window


class Places:
    """The operands on one device. An operand that many cases share is copied there once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: dict[int, tuple[Operand, torch.Tensor]] = {}

    def held(self, operand: Operand) -> torch.Tensor:
        """Return the shared copy of an operand, which cases must not write to."""
        kept = self._held.get(id(operand))
        if kept is None:
            kept = self._held[id(operand)] = operand, self.copied(operand)
        return kept[1]

    def copied(self, operand: Operand) -> torch.Tensor:
        """Return a new copy of an operand."""
        if isinstance(operand, Window):
            return operand.view(self.copied(operand.storage))
        return operand.to(self.device, copy=True)


@dataclass(frozen=True)
class Case:
    """An operator with its operands.

    Attributes:
        name: operator and dtype, such as "matmul of float16"; reports append the shapes of the operands.
        call: takes the operands, all on one device, and returns a tensor or a sequence of tensors, on that device.
        operands: the operands on the CPU.
        kind: how results are compared.
        expected: the right result, on the CPU; None: the result of `call` on the CPU.
        changes: whether `call` writes to its operands, and so needs copies of its own.
    """

    name: str
    call: Function
    operands: tuple[Operand, ...]
    kind: Kind = "values"
    expected: torch.Tensor | None = None
    changes: bool = False

    def on(self, places: Places) -> list[torch.Tensor]:
        """Return the results on a device."""
        operands = [places.copied(one) if self.changes else places.held(one) for one in self.operands]
        return _tensors(self.call(*operands))

    def right(self) -> list[torch.Tensor]:
        """Return the right results, on the CPU."""
        if self.expected is not None:
            return [self.expected]
        if self.kind == "close":
            # In float64, so that the rounding of the reference is negligible.
            places = Places(torch.device("cpu"))
            return _tensors(self.call(*[places.copied(_wider(operand)) for operand in self.operands]))
        return self.on(Places(torch.device("cpu")))

    def __str__(self) -> str:
        return f"{self.name}, {shapes_of(self.operands)}" if self.operands else self.name


@dataclass(frozen=True)
class WrongCase:
    """A case in which a device is wrong, with a description of the error."""

    device: torch.device
    case: str
    what: str


def assert_devices_agree(devices: Sequence[torch.device], cases: Iterable[Case]) -> int:
    """Assert that each case gives the right result on each of `devices`; return the number of cases.

    Raises:
        DeviceMismatch: naming the wrong devices, the case, and the first wrong element with the expected value. For
            each device it counts the wrong cases.
    """
    count, wrong = 0, list[WrongCase]()
    places = [Places(device) for device in devices]
    with repeatable():  # without TF32, which cuDNN uses by default
        for case in cases:
            count += 1
            right = case.right()
            for place in places:
                if what := _judged(case, place, right):
                    wrong.append(WrongCase(place.device, str(case), what))
            if enough(wrong):
                break
    if wrong:
        raise named_wrong(wrong, devices, count)
    return count


def _judged(case: Case, place: Places, right: Sequence[torch.Tensor]) -> str:
    device = place.device
    try:
        got = case.on(place)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        return f"it raised {type(error).__name__}: {error}"
    if len(got) != len(right):
        return f"it gave {len(got)} tensors, expected {len(right)}"
    for number, (one, other) in enumerate(zip(got, right, strict=True)):
        what = f"its result is on {one.device}" if one.device != device else difference(one, other, case.kind)
        if what:
            return f"result {number}: {what}" if len(right) > 1 else what
    return ""


def named_wrong(
    wrong: Sequence[WrongCase], devices: Sequence[torch.device], cases: int, reference: str = "the CPU"
) -> DeviceMismatch:
    """Return an error that names the wrong devices and their cases.

    Args:
        wrong: at least one error, in the order of the cases.
        devices: all devices that ran the cases.
        cases: the number of cases that each device ran.
        reference: the name of the reference with which the other devices agree.
    """
    # The first case with the fewest wrong devices isolates the fault best.
    by_case: dict[str, list[WrongCase]] = {}
    for one in wrong:
        by_case.setdefault(one.case, []).append(one)
    first = min(by_case.values(), key=len)
    odd = [one.device for one in first]
    faulty = {one.device for one in wrong}
    others = [device for device in devices if device not in faulty]
    text = f"{_who(odd, devices, alone=len(faulty) == 1)} wrong in {first[0].case}: "
    if len(faulty) > len(odd):  # in other cases, so the devices of this one are not the only suspects
        named = ", ".join(map(str, odd))
        text = f"{_who([one for one in devices if one in faulty], devices)} wrong, {named} in {first[0].case}: "
    if len({one.what for one in first}) == 1:
        text += first[0].what
    else:
        text += "; ".join(f"{one.device}: {one.what}" for one in first)
    if others:
        text += (
            f"; the other {len(others)} agree with {reference}"
            if len(others) > 1
            else f"; {others[0]} agrees with {reference}"
        )
    for device in dict.fromkeys(one.device for one in wrong):
        names = list(dict.fromkeys(one.case for one in wrong if one.device == device))
        if len(names) > 1 or len(by_case) > 1:
            listed = ", ".join(f"[{name}]" for name in names[:_LISTED]) + (", …" if len(names) > _LISTED else "")
            text += f"\n{device}: {len(names)} of {cases} cases are wrong: {listed}"
    return DeviceMismatch(text, ranks=indices_of(*(one.device for one in wrong)))


def _who(odd: Sequence[torch.device], devices: Sequence[torch.device], alone: bool = False) -> str:
    if len(odd) == 1:
        return f"{odd[0]} alone is" if alone and len(devices) > 1 else f"{odd[0]} is"
    if len(odd) == len(devices):
        return f"all {len(devices)} devices are"
    return f"{', '.join(map(str, odd))} are"


def difference(got: torch.Tensor, expected: torch.Tensor, kind: Kind, error: torch.Tensor | None = None) -> str:
    """Describe how a tensor on any device differs from the expected one; "" if it does not.

    Args:
        error: the largest errors for the kind "close", with complex numbers as pairs; by default some units in the last
            place of the largest element.
    """
    if got.shape != expected.shape:
        return f"expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    if got.dtype != expected.dtype and kind != "close":
        return f"expected {name_of(expected.dtype)}, got {name_of(got.dtype)}"
    here, there = as_real(plain(got)), as_real(plain(expected))
    wrong = _wrong(here, there, kind, error)
    if wrong is None or not bool(wrong.any()):
        return ""
    count, flat = int(wrong.sum()), int(wrong.reshape(-1).to(torch.int8).argmax())
    values = [_shown(tensor.reshape(-1)[flat], kind) for tensor in (there, here)]
    return (
        f"{count} of {here.numel()} elements, the first {list(index_of(flat, here.shape))}: expected {values[0]}, got "
        f"{values[1]}"
    )


def _wrong(got: torch.Tensor, expected: torch.Tensor, kind: Kind, error: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask of the wrong elements, or None if all bits are equal."""
    if kind == "close":
        return _far(got, expected, error)
    here, there = as_bits(got), as_bits(expected)
    if torch.equal(here, there):
        return None
    if kind == "bits" or not got.dtype.is_floating_point:
        return here != there
    wrong = (got != expected) & ~(got.isnan() & expected.isnan())
    if kind == "values":
        wrong |= (got == 0) & (expected == 0) & (got.signbit() != expected.signbit())
    return wrong


def _far(got: torch.Tensor, expected: torch.Tensor, error: torch.Tensor | None) -> torch.Tensor:
    if not got.dtype.is_floating_point:
        return got != expected
    if error is not None:
        rounded = expected.to(got.dtype)  # beyond the range of the dtype it is infinite
        same = (got == rounded) | (got.isnan() & rounded.isnan())
        return ~same & ~((got.double() - expected.double()).abs() <= error)
    scale = float(expected.double().abs().max()) if expected.numel() else 0.0
    roundoff = torch.finfo(got.dtype).eps
    return ~((got.double() - expected.double()).abs() <= ulps_of(got.dtype) * roundoff * max(scale, roundoff))


def _shown(value: torch.Tensor, kind: Kind) -> str:
    number = value.item()
    if kind == "bits" or (isinstance(number, float) and math.isnan(number)):
        mask = (1 << 8 * value.element_size()) - 1
        return f"{number!r} (bits {int(as_bits(value).item()) & mask:#x})"
    return repr(number)


def _wider(operand: Operand) -> Operand:
    if isinstance(operand, Window):
        wider = _wider(operand.storage)
        assert isinstance(wider, torch.Tensor)
        return Window(wider, operand.view)
    return operand.double() if operand.dtype.is_floating_point else operand


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [one for one in result if isinstance(one, torch.Tensor)]


def shapes_of(operands: Sequence[Operand]) -> str:
    """Return the shapes of operands, such as "64x32 and 32x8"."""
    shapes = [
        operand.view(operand.storage).shape if isinstance(operand, Window) else operand.shape for operand in operands
    ]
    return " and ".join("x".join(map(str, shape)) or "0-dim" for shape in shapes)
