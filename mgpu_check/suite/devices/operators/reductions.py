"""Yield cases of reductions, sorting and searching whose results are exact in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mgpu_check.suite.common.agreement import Case, Window
from mgpu_check.suite.common.operators import Function, Kind
from mgpu_check.suite.common.values import FLOATS, INTEGERS, NUMBERS, REAL, anything, significands, whole
from mgpu_check.torch_hooks.tensors import name_of

_ROWS, _COLUMNS = 17, 32
_POWERS = 14


def _long(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix of one row of 544 elements: kernels for rows above 256 differ from those for shorter ones."""
    return matrix.reshape(1, -1)


def _tall(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix of two columns of 1632 elements: kernels for columns above 1024 add up in blocks."""
    return matrix.reshape(-1, 1).repeat(3, 2)


_SUMS: tuple[tuple[str, Function, Sequence[torch.dtype]], ...] = (
    ("sum", lambda a: torch.sum(a), REAL),
    ("sum of rows", lambda a: a.sum(dim=1), REAL),
    ("sum of columns", lambda a: a.sum(0, keepdim=True), REAL),
    ("sum in its dtype", lambda a: a.sum(dim=1, dtype=a.dtype), NUMBERS),
    ("nansum", lambda a: torch.nansum(a, dim=1), FLOATS),
    ("cumsum", lambda a: torch.cumsum(a, dim=1), REAL),
    ("cumsum of transposed", lambda a: torch.cumsum(a.t(), dim=1), REAL),
    ("cumsum of columns", lambda a: a.cumsum(0), NUMBERS),
    ("mean of rows", lambda a: a.mean(dim=1), FLOATS),
    ("count_nonzero", lambda a: torch.count_nonzero(a, dim=0), REAL),
    ("trace", lambda a: torch.trace(a), FLOATS[:2]),
    ("diff", lambda a: torch.diff(a, dim=1), NUMBERS),
    ("norm 1", lambda a: torch.linalg.vector_norm(a, 1, dim=1), FLOATS),
    ("norm inf", lambda a: torch.linalg.vector_norm(a, float("inf")), FLOATS),
)

_ORDERED: tuple[tuple[str, Function, Sequence[torch.dtype], Kind], ...] = (
    ("max", lambda a: torch.max(a), REAL, "numbers"),
    ("min", lambda a: torch.min(a), REAL, "numbers"),
    ("amax of rows", lambda a: torch.amax(a, dim=1), REAL, "numbers"),
    ("amin of columns", lambda a: torch.amin(a, dim=0), REAL, "numbers"),
    ("max of rows", lambda a: torch.max(a, dim=1).values, NUMBERS, "numbers"),
    ("any", lambda a: torch.any(a, dim=1), REAL, "values"),
    ("all", lambda a: torch.all(a, dim=0), REAL, "values"),
    ("sort", lambda a: torch.sort(a, dim=1).values, NUMBERS, "numbers"),
    ("sort descending", lambda a: a.sort(dim=0, descending=True).values, NUMBERS, "numbers"),
    ("topk", lambda a: torch.topk(a, 5, dim=1).values, NUMBERS, "numbers"),
    ("topk of long rows", lambda a: torch.topk(_long(a), 9, dim=1).values, NUMBERS, "numbers"),
    ("least of long rows", lambda a: torch.topk(_long(a), 9, dim=1, largest=False).values, NUMBERS, "numbers"),
    ("topk of transposed", lambda a: torch.topk(a.t(), 5, dim=1).values, NUMBERS, "numbers"),
    ("sort of long rows", lambda a: torch.sort(_long(a), dim=1).values, NUMBERS, "numbers"),
    ("sort of transposed", lambda a: torch.sort(a.t(), dim=1).values, NUMBERS, "numbers"),
    ("kthvalue", lambda a: torch.kthvalue(a, 3, dim=1).values, NUMBERS, "numbers"),
    ("median", lambda a: torch.median(a, dim=1).values, NUMBERS, "numbers"),
    ("cummax", lambda a: torch.cummax(a, dim=1).values, NUMBERS, "numbers"),
    ("unique", lambda a: torch.unique(a), NUMBERS, "numbers"),
)

_PLACES: tuple[tuple[str, Function], ...] = (
    ("argmax", lambda a: torch.argmax(a, dim=1)),
    ("argmin", lambda a: torch.argmin(a)),
    ("argsort", lambda a: torch.argsort(a, dim=1)),
    ("max indices", lambda a: torch.max(a, dim=0).indices),
    ("searchsorted", lambda a: torch.searchsorted(a.sort(dim=1).values, a[:, :5].contiguous())),
)

_TIES: tuple[tuple[str, Function], ...] = (
    ("argmax", lambda a: torch.argmax(a, dim=1)),
    ("argmin", lambda a: torch.argmin(a)),
    ("max", lambda a: torch.max(a, dim=0).indices),
    ("min", lambda a: torch.min(a, dim=1).indices),
    ("stable argsort", lambda a: torch.argsort(a, dim=1, stable=True)),
    ("stable sort of columns", lambda a: torch.sort(a, dim=0, descending=True, stable=True).indices),
    ("unique", lambda a: torch.unique(a, return_inverse=True, return_counts=True)),
    (
        "searchsorted from the right",
        lambda a: torch.searchsorted(a.sort(dim=1).values, a[:, :5].contiguous(), right=True),
    ),
)
"""Functions with a documented result for equal elements: the first place, all in their order, or their number.

Source: documentation of `torch.argmax`, `torch.max`, `torch.sort` and `torch.searchsorted`.
"""


_WITH_NAN: tuple[tuple[str, Function], ...] = (
    ("max", lambda a: torch.max(a)),
    ("max of rows", lambda a: torch.max(a, dim=1).values),
    ("min of columns", lambda a: torch.min(a, dim=0).values),
    ("amax of rows", lambda a: torch.amax(a, dim=1)),
    ("amin of columns", lambda a: torch.amin(a, dim=0)),
    ("sum of rows", lambda a: a.sum(dim=1)),
    ("nansum of rows", lambda a: torch.nansum(a, dim=1)),
    ("nanmedian of rows", lambda a: torch.nanmedian(a, dim=1).values),
    ("median of rows", lambda a: torch.median(a, dim=1).values),
    ("cummax of rows", lambda a: torch.cummax(a, dim=1).values),
    ("cumsum of rows", lambda a: torch.cumsum(a, dim=1)),
    ("prod of columns", lambda a: torch.prod(a.clamp(-1, 1), dim=0)),
    ("sort of rows", lambda a: torch.sort(a, dim=1).values),
    ("descending sort of columns", lambda a: torch.sort(a, dim=0, descending=True).values),
    ("topk of rows", lambda a: torch.topk(a, 5, dim=1).values),
    ("kthvalue of rows", lambda a: torch.kthvalue(a, 5, dim=1).values),
    ("norm inf of rows", lambda a: torch.linalg.vector_norm(a, float("inf"), dim=1)),
    ("any of rows", lambda a: torch.any(a, dim=1)),
)
"""Functions with a defined result for NaN: it propagates, is skipped, or is the greatest.

Source: documentation of these functions.
"""


def reduction_cases(seed: int = 0) -> Iterator[Case]:
    """Yield each reduction in each dtype: whole numbers, a full significand among zeros, extremes, equal elements."""
    shape = _ROWS, _COLUMNS
    for name, call, dtypes in _SUMS:
        for dtype in dtypes:
            # Sums of integers wrap around as on the CPU, so any number will do.
            data = whole(shape, dtype, seed) if dtype.is_floating_point else significands(shape, dtype, seed)
            yield Case(f"{name} of {name_of(dtype)}", call, (data,), "numbers")
            if dtype.is_floating_point and name != "mean of rows":
                rows = 1 if name in ("sum", "trace") else _ROWS  # one number per sum
                yield Case(
                    f"{name} of one sharp number in {name_of(dtype)}", call, (_alone(dtype, seed, rows),), "numbers"
                )
    for dtype in FLOATS:
        powers = torch.ldexp(torch.ones(shape), whole(shape, torch.float32, seed, 1)).to(dtype)[:, :_POWERS]
        yield Case(f"prod of {name_of(dtype)}", lambda a: torch.prod(a, dim=1), (powers,), "numbers")
        yield Case(f"cumprod of {name_of(dtype)}", lambda a: torch.cumprod(a, dim=1), (powers,), "numbers")
    for dtype in INTEGERS:
        yield Case(f"prod of {name_of(dtype)}", lambda a: torch.prod(a, dim=1), (significands(shape, dtype, seed),))
    for dtype in (*FLOATS[:2], *INTEGERS):  # narrower dtypes do not hold so long sums
        data = whole(shape, dtype, seed)
        yield Case(f"cumsum of long rows of {name_of(dtype)}", lambda a: _long(a).cumsum(1), (data,), "numbers")
        yield Case(f"cumsum of long columns of {name_of(dtype)}", lambda a: _tall(a).cumsum(0), (data,), "numbers")
    yield from _comparisons(shape, seed)
    yield Case("bincount", lambda a: torch.bincount(a, minlength=9), (whole((99,), torch.int64, seed, 8).abs(),))
    gaps = Window(significands((_ROWS, 2 * _COLUMNS), torch.int64, seed), lambda storage: storage[:, ::2])
    yield Case("sum of int64 with gaps", lambda a: a.sum(dim=0), (gaps,))
    yield Case("max of int64 with gaps", lambda a: a.amax(dim=1), (gaps,))


def _comparisons(shape: tuple[int, int], seed: int) -> Iterator[Case]:
    """Yield functions that compare elements: of any order, with NaN, and with equal elements."""
    for name, call, dtypes, kind in _ORDERED:
        for dtype in dtypes:
            yield Case(f"{name} of {name_of(dtype)}", call, (_ordered(shape, dtype, seed),), kind)
    for dtype in FLOATS:
        with_nan = whole(shape, dtype, seed).clone()
        with_nan.view(-1)[3 :: 2 * _COLUMNS + 5] = float("nan")  # in every second row and column, or nearly so
        for name, call in _WITH_NAN:
            yield Case(f"{name} of {name_of(dtype)} with NaN", call, (with_nan,), "numbers")
    for name, call in _PLACES:
        for dtype in (*FLOATS[:2], *INTEGERS[:2]):
            yield Case(f"{name} of {name_of(dtype)}", call, (significands(shape, dtype, seed),))
    for name, call in _TIES:
        for dtype in (*FLOATS[:2], *INTEGERS[:2]):
            yield Case(f"{name} of equal elements of {name_of(dtype)}", call, (whole(shape, dtype, seed),))


def _alone(dtype: torch.dtype, seed: int, rows: int) -> torch.Tensor:
    """Return a matrix of zeros, with one full significand in each of the first `rows` rows, no two in one column."""
    matrix = torch.zeros(_ROWS, _COLUMNS, dtype=dtype, device="cpu")
    places = torch.arange(rows, device="cpu")
    matrix[places, places] = significands((rows,), dtype, seed)
    return matrix


def _ordered(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return arbitrary bits, with 1 in place of NaN, which has no place in the order."""
    data = anything(shape[0] * shape[1], dtype, seed)
    return data.where(data == data, 1).view(shape)
