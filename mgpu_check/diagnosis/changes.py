"""Find the one factor between two changes of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mgpu_check.diagnosis.results import Result
from mgpu_check.numerics.factors import common_factor, evenly

CLOSE = 1e-5
"""Tolerance, as a fraction of the magnitude of a tensor, for values that are computed in the same order."""


def factor_of_change(
    was: Mapping[Result, torch.Tensor],
    stages: Sequence[Mapping[Result, torch.Tensor]],
    right: Mapping[Result, torch.Tensor],
) -> float | None:
    """Return the factor between the changes of all ranks since `was` and the right one; None if none fits."""
    found = [
        pair
        for stage in stages
        for name, start in was.items()
        for pair in pairs(stage[name].double() - start, right[name] - start)
    ]
    several = sum(expected != 0 for _, expected in found) > 1  # a factor always fits a single number
    return common_factor(found, least=0.0, of_largest=CLOSE) if several else None


def has_shapes_of(some: Mapping[Result, torch.Tensor], values: Mapping[Result, torch.Tensor]) -> bool:
    return all(name in values and values[name].shape == value.shape for name, value in some.items())


def largest(value: torch.Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def pairs(got: torch.Tensor, expected: torch.Tensor) -> list[tuple[float, float]]:
    some = evenly(got.numel())
    return list(zip(got.flatten()[some].tolist(), expected.flatten()[some].tolist(), strict=True))
