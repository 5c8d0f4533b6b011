"""Compare tensors of devices with a reference, and name the devices that are wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from mgpu_check.asserts.collectives import index_of
from mgpu_check.errors import DeviceMismatch
from mgpu_check.torch_hooks.tensors import as_bits, as_real, indices_of, name_of, plain

_LISTED = 6

Kind = Literal["bits", "values", "numbers"]
"""How a result is compared.

bits: every bit, including the payload of NaN; for operations that only move elements.
values: equal values; every NaN equals every other NaN, and the sign of zero counts.
numbers: as "values", but 0.0 equals -0.0.
"""


@dataclass(frozen=True)
class WrongCase:
    """A case in which a device is wrong, with a description of the error."""

    device: torch.device
    case: str
    what: str


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


def difference(got: torch.Tensor, expected: torch.Tensor, kind: Kind) -> str:
    """Describe how a tensor on any device differs from the expected one; "" if it does not."""
    if got.shape != expected.shape:
        return f"expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    if got.dtype != expected.dtype:
        return f"expected {name_of(expected.dtype)}, got {name_of(got.dtype)}"
    here, there = as_real(plain(got)), as_real(plain(expected))
    wrong = _wrong(here, there, kind)
    if wrong is None or not bool(wrong.any()):
        return ""
    count, flat = int(wrong.sum()), int(wrong.reshape(-1).to(torch.int8).argmax())
    values = [_shown(tensor.reshape(-1)[flat], kind) for tensor in (there, here)]
    return (
        f"{count} of {here.numel()} elements, the first {list(index_of(flat, here.shape))}: expected {values[0]}, got "
        f"{values[1]}"
    )


def _wrong(got: torch.Tensor, expected: torch.Tensor, kind: Kind) -> torch.Tensor | None:
    """Return a mask of the wrong elements, or None if all bits are equal."""
    here, there = as_bits(got), as_bits(expected)
    if torch.equal(here, there):
        return None
    if kind == "bits" or not got.dtype.is_floating_point:
        return here != there
    wrong = (got != expected) & ~(got.isnan() & expected.isnan())
    if kind == "values":
        wrong |= (got == 0) & (expected == 0) & (got.signbit() != expected.signbit())
    return wrong


def _shown(value: torch.Tensor, kind: Kind) -> str:
    number = value.item()
    if kind == "bits" or (isinstance(number, float) and math.isnan(number)):
        mask = (1 << 8 * value.element_size()) - 1
        return f"{number!r} (bits {int(as_bits(value).item()) & mask:#x})"
    return repr(number)
