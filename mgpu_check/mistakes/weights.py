"""How much each part counts in a sum of parts: by least squares over all elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["LOOSE", "fitted", "spanned"]

LOOSE = 1e-4
"""Of the magnitude of a tensor: a hypothesis is computed in another order than what it explains."""
_INDEPENDENT = 1e-4
"""Of the largest singular value: columns of parts are as good as dependent below."""


def fitted(columns: Sequence[Sequence[torch.Tensor]], values: Sequence[torch.Tensor]) -> list[float] | None:
    """Return the weights of the columns whose sum is the values; None where there are none, or more than one choice."""
    system = _system(columns, values)
    if system is None or int(torch.linalg.matrix_rank(system[0], rtol=_INDEPENDENT)) < len(columns):
        return None
    found = _solved(*system)
    return None if found is None else [float(weight) for weight in found]


def spanned(columns: Sequence[Sequence[torch.Tensor]], values: Sequence[torch.Tensor]) -> bool | None:
    """Return whether the values are some sum of the columns; None where too few elements, or some not finite, tell nothing."""
    system = _system(columns, values)
    return None if system is None else _solved(*system) is not None


def _system(
    columns: Sequence[Sequence[torch.Tensor]], values: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not values or not all(columns):
        return None
    matrix = torch.stack([torch.cat(list(column)) for column in columns], dim=1)
    right = torch.cat([value.double().flatten() for value in values])
    if len(matrix) != len(right) or len(right) <= 2 * len(columns):
        return None
    return (matrix, right) if bool(matrix.isfinite().all() & right.isfinite().all()) else None


def _solved(matrix: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """Return weights of the columns, by least squares; None where their sum is not `right`."""
    found = torch.linalg.lstsq(matrix, right[:, None], driver="gelsd").solution[:, 0]
    return None if bool(((matrix @ found - right).abs() > LOOSE * right.abs().max()).any()) else found
