"""Check a product of matrices of whole numbers without computing it again, by Freivalds' algorithm."""

from __future__ import annotations

from typing import Any

import torch

from mgpu_check.suite.common.counters import integers
from mgpu_check.suite.devices.computing.evidence import evidence_of

_CHOICES, _FEWEST = 1024, 128
_VECTORS = 2
_ROWS = 1024
_LOOKED_AT = 32
_EXACT = 2**53


def wrong_rows(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a mask of the rows of `c` that differ from the product of `a` and `b`: bool, (m,), in O(n²).

    The check compares c·x with a·(b·x) for two vectors x of numbers drawn from [1, r]. Here r is 1024, or less if sums
    would not be exact in float64. It never calls a right row wrong, and always finds a row with one wrong element. It
    misses a row with several with probability at most r^-2, about 10^-6 for 1024: if all numbers of x but one are
    fixed, at most one value of the last number hides the difference.
    Source: R. Freivalds, *Probabilistic machines can use less running time*, IFIP 1977.

    Args:
        a, b, c: whole numbers, of shapes (m, k), (k, n) and (m, n), of any dtype, on one device; `c` may hold NaN.

    Raises:
        ValueError: sums could be inexact in float64: k·n·max|a|·max|b|·128 must be less than 2^53.
    """
    most = float(a.double().abs().max()) * float(b.double().abs().max())
    exact = int((_EXACT - 1) // max(1.0, most * a.shape[1] * b.shape[1]))
    if exact < _FEWEST:
        raise ValueError(
            f"wrong_rows: k={a.shape[1]}, n={b.shape[1]} and products up to {most:g} are not exact in float64"
        )
    x = integers((b.shape[1], _VECTORS), 1, min(_CHOICES, exact), seed=seed, device=a.device, dtype=torch.float64)
    there = _times(a, _times(b, x))
    return (_times(c, x) != there).any(dim=1)


def _times(matrix: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Multiply a matrix by a few columns in float64 by sums, because the units for products are under test."""
    blocks = [
        torch.stack([(rows.double() * vector).sum(dim=1) for vector in vectors.unbind(dim=1)], dim=1)
        for rows in matrix.split(_ROWS)
    ]
    return torch.cat(blocks)


def freivalds(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, seed: int) -> dict[str, Any]:
    """Return evidence of the errors in a product, empty if `wrong_rows` finds none.

    The check finds wrong rows and wrong columns. The host computes some of the elements where they cross again.
    """
    rows = wrong_rows(a, b, c, seed)
    if not bool(rows.any()):
        return {}
    columns = wrong_rows(b.t(), a.t(), c.t(), seed + 1)
    found: dict[str, Any] = {"wrong rows": int(rows.sum()), "wrong columns": int(columns.sum())}
    at = rows.nonzero()[:_LOOKED_AT, 0], columns.nonzero()[:_LOOKED_AT, 0]
    right = a[at[0]].cpu().double() @ b[:, at[1]].cpu().double()
    got = c[at[0]][:, at[1]].cpu()
    expected = right.to(got.dtype)
    found |= evidence_of(got, expected, got != expected)
    here = [index.tolist() for index in at]
    found["indices"] = [[here[0][row], here[1][column]] for row, column in found.get("indices", [])]
    found["box"] = [[min(axis), max(axis)] for axis in here if axis]
    found["errors"] = max(found["errors"], found["wrong rows"], found["wrong columns"])
    return found
