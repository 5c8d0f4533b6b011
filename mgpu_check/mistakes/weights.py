"""How much each part counts in a sum of parts: by least squares over all elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["LOOSE", "fitted"]

LOOSE = 1e-4
"""Of the magnitude of a tensor: a hypothesis is computed in another order than what it explains."""
_INDEPENDENT = 1e-4
"""Of the largest singular value: columns of parts are as good as dependent below."""


def fitted(columns: Sequence[Sequence[torch.Tensor]], values: Sequence[torch.Tensor]) -> list[float] | None:
    """Return the weights of the columns whose sum is the values; None where there are none, or more than one choice."""
    if not values or not all(columns):
        return None
    matrix = torch.stack([torch.cat(list(column)) for column in columns], dim=1)
    right = torch.cat([value.double().flatten() for value in values])
    if len(matrix) != len(right) or len(right) <= 2 * len(columns):
        return None
    if not bool(matrix.isfinite().all() & right.isfinite().all()):
        return None
    if int(torch.linalg.matrix_rank(matrix, rtol=_INDEPENDENT)) < len(columns):
        return None
    found = torch.linalg.lstsq(matrix, right[:, None], driver="gelsd").solution[:, 0]
    if bool(((matrix @ found - right).abs() > LOOSE * right.abs().max()).any()):
        return None
    return [float(weight) for weight in found]
