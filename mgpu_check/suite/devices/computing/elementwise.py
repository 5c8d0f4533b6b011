"""Check elementwise operations: those that IEEE 754 defines bit for bit, and functions with documented error bounds.

The host makes the same data from the same counters, and computes the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mgpu_check.numerics.bounds import significand_bits
from mgpu_check.suite.common.counters import counted, fractions
from mgpu_check.suite.common.operators import BINARY, FUNCTIONS, UNARY, Function
from mgpu_check.suite.devices.computing.cases import ComputeCase
from mgpu_check.suite.devices.computing.evidence import evidence_of
from mgpu_check.suite.devices.computing.prepared import DTYPES, Judge, Prepared, seeded
from mgpu_check.suite.devices.computing.products import require

_HOST = torch.device("cpu")
_MOST = 1 << 20
"""Most elements per operation, because the host computes each of them too."""


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


def exact(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare the operators of the table that have the name of the operation."""
    require(case.dtype, device)
    rows = [
        (row, count) for rows, count in ((BINARY, 2), (UNARY, 1)) for row in rows if row.operation == case.operation
    ]
    calls = [(row.call, count) for row, count in rows]
    right = [(row.reference if row.reference and device.type == "cuda" else row.call, count) for row, count in rows]
    there, here = ([_patterns(case, number, where) for number in range(2)] for where in (device, _HOST))
    return Prepared(lambda: _called(calls, there), _same(_called(right, here)))


def _called(calls: Sequence[tuple[Function, int]], operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the results of calls in one tensor; each takes the first operands."""
    results: list[torch.Tensor] = []
    for call, count in calls:
        result = call(*operands[:count])
        results += [result] if isinstance(result, torch.Tensor) else result
    return torch.cat(results) if results[1:] else results[0]


def conversion(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare conversions to narrower dtypes and to integers, and back, of numbers within their range."""

    def converted(x: torch.Tensor) -> torch.Tensor:
        kinds = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
        return torch.cat([x.to(kind).double() for kind in kinds])

    there, here = (
        fractions(_shape(case), seed=seeded(case, 0), device=where, dtype=DTYPES[case.dtype], low=-6e4, high=6e4)
        for where in (device, _HOST)
    )
    return Prepared(lambda: converted(there), _same(converted(here)))


def within(function: str, dtype: str, x: torch.Tensor) -> Judge:
    """Judge by a float64 reference from the host: the error must not exceed the documented one.

    The documented error counts from the correctly rounded value, so half a unit is added. In float64 another unit is
    added for the reference, a bound that C libraries and SLEEF keep. For float16 and bfloat16 no bound is documented. A
    GPU computes in float32 and rounds; a simulated GPU may take two steps in the narrow dtype, as for the reciprocal of
    a root. The last rounding costs half a unit, and the error of the first step one.
    """
    row, narrow = FUNCTIONS[function], DTYPES[dtype]
    reference = row.call(x.double())
    units = row.double + 1.5 if dtype == "float64" else row.single + 0.5 + 2.0**-20
    if significand_bits(narrow) < significand_bits(torch.float32):
        units = 1.5

    def judge(got: torch.Tensor) -> dict[str, Any]:
        here = got.cpu()
        larger = torch.maximum(here.double().abs(), reference.abs())
        unit = torch.ldexp(torch.ones_like(larger), torch.frexp(larger).exponent - significand_bits(narrow))
        wrong = ~((here.double() - reference).abs() <= units * unit)  # true for NaN
        return evidence_of(here, reference.to(narrow), wrong) if bool(wrong.any()) else {}

    return judge


def bounded(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare the function of the table that has the name of the operation."""
    require(case.dtype, device)
    row = FUNCTIONS[case.operation]
    low, high = row.arguments
    there, here = (
        fractions(_shape(case), seed=seeded(case, 0), device=where, dtype=DTYPES[case.dtype], low=low, high=high)
        for where in (device, _HOST)
    )
    # The bounds are NVIDIA's, so GPUs of other makers are only compared with each other.
    judge = within(case.operation, case.dtype, here) if torch.version.hip is None else None
    return Prepared(lambda: row.call(there), judge)
