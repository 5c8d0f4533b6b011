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
    description: str


def named_wrong(
    wrong_cases: Sequence[WrongCase], devices: Sequence[torch.device], cases: int, reference: str = "the CPU"
) -> DeviceMismatch:
    """Return an error that names the wrong devices and their cases.

    `wrong_cases` has at least one error, in the order of the cases; each of `devices` ran as many cases as `cases`
    says. The other devices agree with `reference`, a name.
    """
    # The first case with the fewest wrong devices isolates the fault best.
    by_case: dict[str, list[WrongCase]] = {}
    for wrong_case in wrong_cases:
        by_case.setdefault(wrong_case.case, []).append(wrong_case)
    fewest = min(by_case.values(), key=len)
    odd = [wrong_case.device for wrong_case in fewest]
    faulty = {wrong_case.device for wrong_case in wrong_cases}
    others = [device for device in devices if device not in faulty]
    text = f"{_who(odd, devices, alone=len(faulty) == 1)} wrong in {fewest[0].case}: "
    if len(faulty) > len(odd):  # in other cases, so the devices of this one are not the only suspects
        who = _who([device for device in devices if device in faulty], devices)
        text = f"{who} wrong, {', '.join(map(str, odd))} in {fewest[0].case}: "
    if len({wrong_case.description for wrong_case in fewest}) == 1:
        text += fewest[0].description
    else:
        text += "; ".join(f"{wrong_case.device}: {wrong_case.description}" for wrong_case in fewest)
    if others:
        agree = f"the other {len(others)} agree" if len(others) > 1 else f"{others[0]} agrees"
        text += f"; {agree} with {reference}"
    for device in dict.fromkeys(wrong_case.device for wrong_case in wrong_cases):
        case_names = list(dict.fromkeys(wrong_case.case for wrong_case in wrong_cases if wrong_case.device == device))
        if len(case_names) > 1 or len(by_case) > 1:
            shown = [f"[{name}]" for name in case_names[:_LISTED]]
            listed = ", ".join([*shown, "…"] if len(case_names) > _LISTED else shown)
            text += f"\n{device}: {len(case_names)} of {cases} cases are wrong: {listed}"
    return DeviceMismatch(text, ranks=indices_of(*(wrong_case.device for wrong_case in wrong_cases)))


def _who(odd: Sequence[torch.device], devices: Sequence[torch.device], alone: bool = False) -> str:
    if len(odd) == 1:
        return f"{odd[0]} alone is" if alone and len(devices) > 1 else f"{odd[0]} is"
    if len(odd) == len(devices):
        return f"all {len(devices)} devices are"
    return f"{', '.join(map(str, odd))} are"


def difference(got: torch.Tensor, expected: torch.Tensor, comparison: Kind) -> str | None:
    """Describe how a tensor on any device differs from the expected one; None if it does not."""
    if got.shape != expected.shape:
        return f"expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    if got.dtype != expected.dtype:
        return f"expected {name_of(expected.dtype)}, got {name_of(got.dtype)}"
    actual, reference = as_real(plain(got)), as_real(plain(expected))
    mask = wrong_elements(actual, reference, comparison)
    if mask is None or not bool(mask.any()):
        return None
    count, flat = int(mask.sum()), int(mask.reshape(-1).to(torch.int8).argmax())
    should, shown = (_shown(tensor.reshape(-1)[flat], comparison) for tensor in (reference, actual))
    at = f"{count} of {actual.numel()} elements, the first {list(index_of(flat, actual.shape))}"
    return f"{at}: expected {should}, got {shown}"


def wrong_elements(got: torch.Tensor, expected: torch.Tensor, comparison: Kind) -> torch.Tensor | None:
    """Return a mask of the wrong elements, or None if all bits are equal."""
    actual, reference = as_bits(got), as_bits(expected)
    if torch.equal(actual, reference):
        return None
    if comparison == "bits" or not got.dtype.is_floating_point:
        return actual != reference
    mask = (got != expected) & ~(got.isnan() & expected.isnan())
    if comparison == "values":
        mask |= (got == 0) & (expected == 0) & (got.signbit() != expected.signbit())
    return mask


def _shown(value: torch.Tensor, comparison: Kind) -> str:
    number = value.item()
    if comparison == "bits" or (isinstance(number, float) and math.isnan(number)):
        mask = (1 << 8 * value.element_size()) - 1
        return f"{number!r} (bits {int(as_bits(value).item()) & mask:#x})"
    return repr(number)
