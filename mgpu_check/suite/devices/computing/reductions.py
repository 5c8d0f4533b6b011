"""Prepare reductions of whole numbers, whose results are known by algebra and exact in every order."""

from __future__ import annotations

import itertools
import math

import torch

from mgpu_check.suite.common.counters import fractions, integers
from mgpu_check.suite.devices.computing.cases import ComputeCase
from mgpu_check.suite.devices.computing.prepared import DTYPES, Prepared, exactly, seeded
from mgpu_check.suite.devices.computing.products import require

_LARGEST = 7
_TERMS = 8


def rows_with_known_sums(case: ComputeCase, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix of whole numbers from -7 to 7, float64, and the sums of its rows.

    A row is [x, y, -x], so its sum is that of y, which has 8 or 9 numbers.
    """
    half = (case.size - _TERMS) // 2
    x, y = (
        integers((case.size, width), -_LARGEST, _LARGEST, seed=seeded(case, i), device=device, dtype=torch.float64)
        for i, width in enumerate((half, case.size - 2 * half))
    )
    sums = y[:, 0].clone()
    for column in y.unbind(dim=1)[1:]:
        sums += column
    return torch.cat([x, y, -x], dim=1), sums


def sums(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare sums of rows, and of the columns of the transposed matrix; sums of uint8 are modulo 256."""
    require(case.dtype, device)
    matrix, sums = rows_with_known_sums(case, device)
    dtype = DTYPES[case.dtype]
    rows = matrix.to(torch.int64).to(dtype) if dtype == torch.uint8 else matrix.to(dtype)
    columns = rows.t().contiguous()
    expected = (sums.to(torch.int64).to(dtype) if dtype == torch.uint8 else sums.to(dtype)).repeat(2)
    return Prepared(
        lambda: torch.cat([rows.sum(dim=1, dtype=dtype), columns.sum(dim=0, dtype=dtype)]), exactly(expected)
    )


def means(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare means of rows whose length is a power of two."""
    require(case.dtype, device)
    matrix, _ = rows_with_known_sums(case, device)
    columns = 1 << (case.size.bit_length() - 1)
    wanted = matrix[:, :columns]
    sums = wanted.to(torch.int64).sum(dim=1)
    # Narrow dtypes round the mean once: its sum is below 2^24, and so exact in float32.
    expected = (sums.to(torch.float64) / columns).to(torch.float64 if case.dtype == "float64" else torch.float32)
    rows = wanted.to(DTYPES[case.dtype]).contiguous()
    return Prepared(lambda: rows.mean(dim=1), exactly(expected.to(rows.dtype)))


def extremes(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare minima and maxima of rows with their indices; both were put at drawn places."""
    require(case.dtype, device)
    dtype = DTYPES[case.dtype]
    low = 10 if dtype == torch.uint8 else -100
    matrix = integers((case.size, case.size), low, 100, seed=seeded(case, 0), device=device, dtype=torch.int64)
    places = integers((2, case.size), 0, case.size // 2 - 1, seed=seeded(case, 1), device=device)
    places[1] += case.size // 2
    least, greatest = low - 7, 111
    rows = torch.arange(case.size, device=device)
    matrix[rows, places[0]], matrix[rows, places[1]] = least, greatest
    values = matrix.to(dtype)
    expected = torch.stack([torch.full_like(rows, least), torch.full_like(rows, greatest), *places])

    def call() -> torch.Tensor:
        low, high = values.min(dim=1), values.max(dim=1)
        return torch.stack([low.values.to(torch.int64), high.values.to(torch.int64), low.indices, high.indices])

    return Prepared(call, exactly(expected))


def cumulative_sums(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare the cumulative sum of the differences of numbers, which gives the numbers back."""
    require(case.dtype, device)
    dtype = DTYPES[case.dtype]
    low, high = (0, 200) if dtype == torch.uint8 else (-60, 60)
    numbers = integers((case.size, case.size), low, high, seed=seeded(case, 0), device=device)
    steps = torch.diff(numbers, dim=1, prepend=torch.zeros_like(numbers[:, :1])).to(dtype)
    return Prepared(lambda: steps.cumsum(dim=1, dtype=dtype), exactly(numbers.to(dtype)))


def counts(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare counts of nonzero elements; their number was drawn for each row."""
    dtype = DTYPES[case.dtype]
    counts = integers((case.size,), 0, case.size, seed=seeded(case, 0), device=device)
    places = torch.arange(case.size, device=device)
    # Spread over the row: step and size have no common factor, so each place gets a different number.
    step = next(step for step in itertools.count(7) if math.gcd(step, case.size) == 1)
    order = places * step % case.size
    matrix = ((order[None, :] < counts[:, None]).to(torch.int64) * (order % 100 + 1)).to(dtype)
    return Prepared(lambda: torch.count_nonzero(matrix, dim=1), exactly(counts))


def logsumexp(case: ComputeCase, device: torch.device) -> Prepared:
    require(case.dtype, device)
    shape = case.size, case.size
    x = fractions(shape, seed=seeded(case, 0), device=device, dtype=DTYPES[case.dtype], high=9.0)
    return Prepared(lambda: torch.logsumexp(x, dim=1))
