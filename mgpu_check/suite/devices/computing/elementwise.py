"""Check elementwise operations: those that IEEE 754 defines bit for bit, and functions with documented error bounds.

The host makes the same data from the same counters, and computes the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mgpu_check.numerics.bounds import significand_bits
from mgpu_check.suite.common.counters import counted, fractions
from mgpu_check.suite.devices.computing.cases import ComputeCase
from mgpu_check.suite.devices.computing.evidence import evidence_of
from mgpu_check.suite.devices.computing.prepared import DTYPES, Judge, Prepared, operation, seeded
from mgpu_check.suite.devices.computing.products import require

__all__ = ["FUNCTIONS", "within"]

_HOST = torch.device("cpu")
_MOST = 1 << 20
"""Most elements per operation, because the host computes each of them too."""

Function = Callable[..., torch.Tensor]


def _shape(case: ComputeCase) -> tuple[int, ...]:
    return (min(case.size**2, _MOST),)


def _patterns(case: ComputeCase, number: int, device: torch.device) -> torch.Tensor:
    """Return elements with pseudorandom bits; floats include subnormal, infinite and NaN ones."""
    dtype = DTYPES[case.dtype]
    words = counted(_shape(case), seeded(case, number), device)
    if not dtype.is_floating_point:
        return words.to(dtype)
    width = torch.finfo(dtype).bits
    return (words >> 64 - width).to(getattr(torch, f"int{width}")).view(dtype)


def _same(expected: torch.Tensor) -> Judge:
    """Judge by the host's result: the same bits, or NaN in both, because no standard fixes the bits of NaN."""

    def judge(got: torch.Tensor) -> dict[str, Any]:
        here = got.cpu()
        wrong = here != expected
        if here.dtype.is_floating_point:
            wrong &= ~(here.isnan() & expected.isnan())
            wrong |= (here == 0) & (expected == 0) & (here.signbit() != expected.signbit())
        return evidence_of(here, expected, wrong) if bool(wrong.any()) else {}

    return judge


def _exact(name: str, function: Function, operands: int = 2) -> None:
    @operation(name)
    def prepare(case: ComputeCase, device: torch.device) -> Prepared:
        require(case.dtype, device)
        there, here = ([_patterns(case, number, where) for number in range(operands)] for where in (device, _HOST))
        return Prepared(lambda: function(*there), _same(function(*here)))


def _remainder(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return quotients and remainders for divisors from 1 to 64, in one tensor."""
    divisor = (b & 63) + 1
    return torch.cat([torch.div(a, divisor, rounding_mode="floor"), torch.remainder(a, divisor)])


def _bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a & b, a | b, a ^ b, ~a, a << 3, a >> 2])


_exact("sum of two", lambda a, b: torch.add(a, b))
_exact("product of two", lambda a, b: torch.mul(a, b))
_exact("quotient", lambda a, b: torch.div(a, b))
_exact("square root", lambda a: torch.sqrt(a), 1)
_exact("remainder", _remainder)
_exact("bits", _bits)


@operation("conversion")
def _conversion(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare conversions to narrower dtypes and to integers, and back, of numbers within their range."""

    def converted(x: torch.Tensor) -> torch.Tensor:
        kinds = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
        return torch.cat([x.to(kind).double() for kind in kinds])

    there, here = (
        fractions(_shape(case), seed=seeded(case, 0), device=where, dtype=DTYPES[case.dtype], low=-6e4, high=6e4)
        for where in (device, _HOST)
    )
    return Prepared(lambda: converted(there), _same(converted(here)))


FUNCTIONS: dict[str, tuple[Function, float, float, tuple[float, float]]] = {
    "exp": (lambda x: torch.exp(x), 2, 1, (-9.0, 10.0)),
    "expm1": (lambda x: torch.expm1(x), 1, 1, (-9.0, 10.0)),
    "log": (lambda x: torch.log(x), 1, 1, (2.0, 6e4)),
    "log1p": (lambda x: torch.log1p(x), 1, 1, (0.1, 6e4)),
    "sin": (lambda x: torch.sin(x), 2, 2, (0.1, 3.0)),
    "cos": (lambda x: torch.cos(x), 2, 2, (-1.5, 1.5)),
    "atan": (lambda x: torch.atan(x), 2, 2, (0.01, 60.0)),
    "tanh": (lambda x: torch.tanh(x), 2, 2, (0.01, 9.0)),
    "erf": (lambda x: torch.erf(x), 2, 2, (0.01, 4.0)),
    "rsqrt": (lambda x: torch.rsqrt(x), 2, 2, (0.01, 6e4)),
}
"""Name -> function, largest errors in units in the last place in float32 and in float64, range of the arguments.

The errors come from the tables in NVIDIA's *CUDA C++ Programming Guide*, appendix "Mathematical Functions": the largest
value of any version since 11. The ranges keep results normal in float16.
"""


def within(function: str, dtype: str, x: torch.Tensor) -> Judge:
    """Judge by a float64 reference from the host: the error must not exceed the documented one.

    The documented error counts from the correctly rounded value, so half a unit is added. In float64 another unit is
    added for the reference, a bound that C libraries and SLEEF keep. For float16 and bfloat16 no bound is documented. A
    GPU computes in float32 and rounds; a simulated GPU may take two steps in the narrow dtype, as for the reciprocal of
    a root. The last rounding costs half a unit, and the error of the first step one.
    """
    reference = FUNCTIONS[function][0](x.double())
    narrow = DTYPES[dtype]
    _, single, double, _ = FUNCTIONS[function]
    units = double + 1.5 if dtype == "float64" else single + 0.5 + 2.0**-20
    if significand_bits(narrow) < significand_bits(torch.float32):
        units = 1.5

    def judge(got: torch.Tensor) -> dict[str, Any]:
        here = got.cpu()
        larger = torch.maximum(here.double().abs(), reference.abs())
        unit = torch.ldexp(torch.ones_like(larger), torch.frexp(larger).exponent - significand_bits(narrow))
        wrong = ~((here.double() - reference).abs() <= units * unit)  # true for NaN
        return evidence_of(here, reference.to(narrow), wrong) if bool(wrong.any()) else {}

    return judge


def _function(name: str) -> None:
    @operation(name)
    def prepare(case: ComputeCase, device: torch.device) -> Prepared:
        require(case.dtype, device)
        function, _, _, (low, high) = FUNCTIONS[name]
        there, here = (
            fractions(_shape(case), seed=seeded(case, 0), device=where, dtype=DTYPES[case.dtype], low=low, high=high)
            for where in (device, _HOST)
        )
        # The bounds are NVIDIA's, so GPUs of other makers are only compared with each other.
        judge = within(name, case.dtype, here) if torch.version.hip is None else None
        return Prepared(lambda: function(there), judge)


for _name in FUNCTIONS:
    _function(_name)
