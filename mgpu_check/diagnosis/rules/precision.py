"""Detect overflow and rounding in narrow dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_check.diagnosis.registry import Precedence, mistake, on_tensors
from mgpu_check.diagnosis.report import Finding

if TYPE_CHECKING:
    from mgpu_check.diagnosis.tensors import Tensors

_NARROW = ("float16", "bfloat16")
_ROUNDED = 2.0**-4
"""Relative error that rounding in a few sums may cause: bfloat16 has a precision of 8 bits."""

mistake(
    "low-precision-overflow",
    "a sum over ranks overflows the narrow dtype that it is communicated in",
    "divide before the sum, or reduce in float32",
)
mistake(
    "low-precision-arithmetic",
    "values are rounded to a narrower dtype than on one device",
    "reduce and accumulate in float32",
)


@on_tensors(Precedence.APART + 50)
def overflows(tensors: Tensors) -> Finding | None:
    """Detect an overflow of a sum: a non-finite result, or an integer that is off by a multiple of 2^bits."""
    broken = tensors.broken
    for _, event in tensors.events("collective") if broken else ():
        narrow = [tensor["dtype"] for tensor in event.tensors if tensor["dtype"] in _NARROW]
        if narrow and event.details.get("op", "sum") == "sum":
            return Finding(
                "low-precision-overflow",
                f"{event.where} adds up {narrow[0]} tensors, and {broken[0]} is not finite on {tensors.size} ranks, "
                "where it is on one device",
                site=event.site,
            )
    for name in tensors.wrong("returned"):
        right, got = tensors.expected.single.values.get(name), tensors.seen[0].values.get(name)
        if right is None or got is None or right.shape != got.shape or right.dtype.is_floating_point:
            continue
        off = got.long() - right.long()
        for bits in (8, 16, 32):
            if bool((off != 0).any()) and bool((off % 2**bits == 0).all()):
                told = f"{name} is off by a multiple of 2^{bits}, as an int{bits} that overflows"
                return Finding("low-precision-overflow", told)
    return None


@on_tensors(Precedence.POSSIBLE + 70)
def narrow_operand(tensors: Tensors) -> Finding | None:
    """Detect a collective that communicates a narrow dtype, if rounding can explain the wrong results."""
    for _, event in tensors.events("collective"):
        narrow = [tensor["dtype"] for tensor in event.details.get("tensors", []) if tensor["dtype"] in _NARROW]
        if narrow and _may_be_rounding(tensors):
            told = f"{event.where} communicates {narrow[0]} tensors"
            return Finding("low-precision-arithmetic", told, site=event.site)
    return None


def _may_be_rounding(tensors: Tensors) -> bool:
    """Return whether rounding in a narrow dtype can explain all differences from one device."""
    for name in tensors.names:
        exact = tensors.expected.exact[name]
        for value in (one.values.get(name) for one in tensors.seen):
            if value is None or value.shape != exact.shape:
                continue
            off = float((value.double() - exact).norm())
            if not off <= _ROUNDED * float(exact.norm()):
                return False
    return True
