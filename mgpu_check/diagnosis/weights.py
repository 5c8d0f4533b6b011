"""Combine parts in known ways, and fit the weight of each part in a sum, by least squares over all elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

COMBINED: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "own": lambda parts, rank: parts[rank],
    "first": lambda parts, rank: parts[0],
    "last": lambda parts, rank: parts[-1],
    "mean": lambda parts, rank: parts.mean(0),
    "sum": lambda parts, rank: parts.sum(0),
    "norm": lambda parts, rank: parts.square().sum(0).sqrt(),
    "max": lambda parts, rank: parts.amax(0),
    "min": lambda parts, rank: parts.amin(0),
}
"""Ways to combine all parts, which are stacked in rank order, to the result of one rank."""
LOOSE = 1e-4
"""Tolerance, as a fraction of the magnitude of a tensor: a hypothesis is summed in another order than the result."""
_INDEPENDENT = 1e-4
"""Fraction of the largest singular value below which columns of parts count as linearly dependent."""


def fitted(columns: Sequence[Sequence[torch.Tensor]], values: Sequence[torch.Tensor]) -> list[float] | None:
    """Return the weights of the columns that sum to the values; None if no weights do, or if they are not unique."""
    system = _system(columns, values)
    if system is None or int(torch.linalg.matrix_rank(system[0], rtol=_INDEPENDENT)) < len(columns):
        return None
    found = _solved(*system)
    return None if found is None else [float(weight) for weight in found]


def spanned(columns: Sequence[Sequence[torch.Tensor]], values: Sequence[torch.Tensor]) -> bool | None:
    """Return whether the values are a weighted sum of the columns; None if too few, or not finite."""
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
    """Return the least-squares weights of the columns; None if their sum does not match `right`."""
    found = torch.linalg.lstsq(matrix, right[:, None], driver="gelsd").solution[:, 0]
    return None if bool(((matrix @ found - right).abs() > LOOSE * right.abs().max()).any()) else found
