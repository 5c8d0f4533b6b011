"""Yield cases of elementwise operators that IEEE 754 or integer arithmetic define, and conversions between all
dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F

from mgpu_check.suite.common.agreement import Case, Function, Kind
from mgpu_check.suite.common.values import (
    ALL,
    BOOL,
    COMPLEX,
    FLOATS,
    INTEGERS,
    NUMBERS,
    REAL,
    anything,
    pairs,
    significands,
    whole,
)
from mgpu_check.torch_hooks.tensors import name_of

__all__ = ["elementwise_cases"]

_SIGNED = (*FLOATS, *INTEGERS[:-1])

_CHANGING = ("add_", "+=", "mul_", "zero_", "fill_")

FaultRow = tuple[str, Function, Sequence[torch.dtype], Kind]


def _accumulated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a += b
    return a


_BINARY: tuple[FaultRow, ...] = (
    ("add", lambda a, b: torch.add(a, b), REAL, "values"),
    ("+", lambda a, b: a + b, REAL, "values"),
    ("add_", lambda a, b: a.add_(b), REAL, "values"),
    ("+=", _accumulated, NUMBERS, "values"),
    ("add out=", lambda a, b: torch.add(a, b, out=torch.empty_like(a)), NUMBERS, "values"),
    ("foreach add", lambda a, b: torch._foreach_add([a, b], [b, a]), NUMBERS, "values"),
    ("sub", lambda a, b: torch.sub(a, b), NUMBERS, "values"),
    ("mul", lambda a, b: torch.mul(a, b), REAL, "values"),
    ("*", lambda a, b: a * b, NUMBERS, "values"),
    ("mul_", lambda a, b: a.mul_(b), NUMBERS, "values"),
    ("div", lambda a, b: torch.div(a, b), REAL[:-1], "values"),
    ("maximum", lambda a, b: torch.maximum(a, b), REAL, "numbers"),
    ("minimum", lambda a, b: torch.minimum(a, b), REAL, "numbers"),
    ("fmax", lambda a, b: torch.fmax(a, b), FLOATS, "numbers"),
    ("clamp", lambda a, b: torch.clamp(a, min=b), NUMBERS, "numbers"),
    ("eq", lambda a, b: torch.eq(a, b), REAL, "values"),
    ("ne", lambda a, b: torch.ne(a, b), REAL, "values"),
    ("lt", lambda a, b: torch.lt(a, b), REAL, "values"),
    ("ge", lambda a, b: torch.ge(a, b), REAL, "values"),
    ("where", lambda a, b: torch.where(a < b, a, b), REAL, "bits"),
    ("logical_and", lambda a, b: torch.logical_and(a, b), REAL, "values"),
    ("logical_xor", lambda a, b: torch.logical_xor(a, b), REAL, "values"),
    ("copysign", lambda a, b: torch.copysign(a, b), FLOATS, "values"),
    ("bitwise_and", lambda a, b: torch.bitwise_and(a, b), (*INTEGERS, *BOOL), "values"),
    ("bitwise_or", lambda a, b: torch.bitwise_or(a, b), (*INTEGERS, *BOOL), "values"),
    ("bitwise_xor", lambda a, b: torch.bitwise_xor(a, b), (*INTEGERS, *BOOL), "values"),
    ("add 0-dim", lambda a, b: a + b[3], NUMBERS, "values"),
)

_UNARY: tuple[FaultRow, ...] = (
    ("neg", lambda a: torch.neg(a), _SIGNED, "values"),
    ("abs", lambda a: torch.abs(a), NUMBERS, "values"),
    ("sign", lambda a: torch.sign(a), NUMBERS, "numbers"),
    ("add a number", lambda a: a + 3, NUMBERS, "values"),
    ("mul by a number", lambda a: a * 2, NUMBERS, "values"),
    ("shift", lambda a: torch.cat([a << 3, a >> 2]), INTEGERS, "values"),
    ("bitwise_not", lambda a: torch.bitwise_not(a), (*INTEGERS, *BOOL), "values"),
    ("logical_not", lambda a: torch.logical_not(a), REAL, "values"),
    ("sqrt", lambda a: torch.sqrt(a), FLOATS, "values"),
    ("floor", lambda a: torch.floor(a), FLOATS, "numbers"),
    ("ceil", lambda a: torch.ceil(a), FLOATS, "numbers"),
    ("round", lambda a: torch.round(a), FLOATS, "numbers"),
    ("trunc", lambda a: torch.trunc(a), FLOATS, "numbers"),
    ("isnan", lambda a: torch.isnan(a), FLOATS, "values"),
    ("isfinite", lambda a: torch.isfinite(a), FLOATS, "values"),
    ("signbit", lambda a: torch.signbit(a), FLOATS, "values"),
    ("nan_to_num", lambda a: torch.nan_to_num(a), FLOATS, "values"),
    ("relu", lambda a: F.relu(a), FLOATS, "numbers"),
    ("hardtanh", lambda a: F.hardtanh(a), FLOATS, "numbers"),
    ("masked_fill", lambda a: a.masked_fill(a > 0, 1), REAL[:-1], "bits"),
    ("zero_", lambda a: a.zero_(), REAL, "bits"),
    ("fill_", lambda a: a.fill_(1), REAL, "bits"),
)

_COMPLEX: tuple[FaultRow, ...] = (
    ("add", lambda a, b: torch.add(a, b), COMPLEX, "numbers"),
    ("sub", lambda a, b: torch.sub(a, b), COMPLEX, "numbers"),
    ("mul", lambda a, b: torch.mul(a, b), COMPLEX, "numbers"),
    ("conj", lambda a, b: a.conj(), COMPLEX, "numbers"),
    ("conj mul", lambda a, b: a.conj() * b, COMPLEX, "numbers"),
    ("real and imag", lambda a, b: (a.real, b.imag), COMPLEX, "numbers"),
    ("view_as_real", lambda a, b: torch.view_as_real(a + b), COMPLEX, "numbers"),
)


def _divided(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    divisor = b.bitwise_and(63) + 1
    return [torch.div(a, divisor, rounding_mode=mode) for mode in ("floor", "trunc")] + [torch.remainder(a, divisor)]


def elementwise_cases(seed: int = 0) -> Iterator[Case]:
    """Yield each function in each dtype, on all pairs of special values and on arbitrary bits, then all conversions."""
    for name, function, dtypes, kind in _BINARY:
        for dtype in dtypes:
            yield Case(f"{name} of {name_of(dtype)}", function, pairs(dtype, seed), kind, changes=name in _CHANGING)
    for name, function, dtypes, kind in _UNARY:
        for dtype in dtypes:
            yield Case(
                f"{name} of {name_of(dtype)}", function, (anything(259, dtype, seed),), kind, changes=name in _CHANGING
            )
    for name, function, dtypes, kind in _COMPLEX:
        for dtype in dtypes:
            operands = whole((61,), dtype, seed, 99), whole((61,), dtype, seed + 9, 99)
            yield Case(f"{name} of {name_of(dtype)}", function, operands, kind)
    for dtype in INTEGERS:
        yield Case(f"integer division of {name_of(dtype)}", _divided, pairs(dtype, seed))
    for dtype in FLOATS:
        operands = significands((67,), dtype, seed), significands((67,), dtype, seed + 3)
        yield Case(f"add alpha= of {name_of(dtype)}", lambda a, b: torch.add(a, b, alpha=2), operands)
        yield Case(f"masked add of {name_of(dtype)}", _masked_add, operands, changes=True)
    yield from _conversions(seed)


def _masked_add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    mask = a > 0
    a[mask] += b[mask]
    return a


def _conversions(seed: int) -> Iterator[Case]:
    for dtype in ALL:
        for other in ALL:
            if dtype == other or (dtype.is_complex and not other.is_complex):
                continue  # torch warns that the imaginary part is lost
            if dtype.is_floating_point and not other.is_floating_point and other != torch.bool:
                # C++ leaves conversions out of range undefined; every dtype holds 0 to 100.
                operand = whole((61,), torch.int64, seed, 100).abs().to(dtype)
            elif dtype.is_complex:
                operand = significands((61,), dtype, seed)
            else:
                operand = anything(61, dtype, seed)
            name = f"conversion of {name_of(dtype)} to {name_of(other)}"
            yield Case(name, lambda a, other=other: a.to(other), (operand,), "values")
