"""Yield cases of elementwise operators that IEEE 754 or integer arithmetic define, and of all conversions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mgpu_check.suite.common.agreement import Case
from mgpu_check.suite.common.operators import BINARY, COMPLEX, UNARY, ElementwiseOperator
from mgpu_check.suite.common.values import ALL, FLOATS, anything, pairs, significands, whole
from mgpu_check.torch_hooks.tensors import name_of

_COMPLEX: tuple[ElementwiseOperator, ...] = (
    ElementwiseOperator("add", lambda a, b: torch.add(a, b), COMPLEX, "numbers"),
    ElementwiseOperator("sub", lambda a, b: torch.sub(a, b), COMPLEX, "numbers"),
    ElementwiseOperator("mul", lambda a, b: torch.mul(a, b), COMPLEX, "numbers"),
    ElementwiseOperator("conj", lambda a, b: a.conj(), COMPLEX, "numbers"),
    ElementwiseOperator("conj mul", lambda a, b: a.conj() * b, COMPLEX, "numbers"),
    ElementwiseOperator("real and imag", lambda a, b: (a.real, b.imag), COMPLEX, "numbers"),
    ElementwiseOperator("view_as_real", lambda a, b: torch.view_as_real(a + b), COMPLEX, "numbers"),
)
"""Operators on whole complex numbers."""


def elementwise_cases(seed: int = 0) -> Iterator[Case]:
    """Yield each function in each dtype, on all pairs of special values and on arbitrary bits, then all conversions."""
    for row in BINARY:
        yield from _cases(row, lambda dtype: pairs(dtype, seed))
    for row in UNARY:
        yield from _cases(row, lambda dtype: (anything(259, dtype, seed),))
    for row in _COMPLEX:
        yield from _cases(row, lambda dtype: (whole((61,), dtype, seed, 99), whole((61,), dtype, seed + 9, 99)))
    for dtype in FLOATS:
        operands = significands((67,), dtype, seed), significands((67,), dtype, seed + 3)
        yield Case(f"add alpha= of {name_of(dtype)}", lambda a, b: torch.add(a, b, alpha=2), operands)
        yield Case(f"masked add of {name_of(dtype)}", _masked_add, operands, changes=True)
    yield from _conversions(seed)


def _cases(row: ElementwiseOperator, operands: Callable[[torch.dtype], tuple[torch.Tensor, ...]]) -> Iterator[Case]:
    for name in row.dtypes:
        made = operands(getattr(torch, name))
        right = None if row.reference is None else row.reference(*made)
        yield Case(f"{row.name} of {name}", row.call, made, row.compared, right, changes=row.changes)


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
