"""Measure how far runs that differ by rounding lead from the usual one, element by element."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from mgpu_check.torch_hooks.tensors import plain

__all__ = ["envelopes", "estimate", "farthest", "root_mean_square"]

Key = TypeVar("Key", bound=Hashable)


def envelopes(usual: Mapping[Key, torch.Tensor], runs: Iterable[Mapping[Key, Any]]) -> dict[Key, torch.Tensor]:
    """Return how far rounding may lead each element of `usual`, by name, as float64.

    Args:
        usual: floating-point tensors.
        runs: results of perturbed runs, taken one at a time. What a run has in another shape, or lacks, is passed over, and
            so is NaN.
    """
    moved = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in usual.items() if value.numel()}
    for run in runs:
        for name, reached in moved.items():
            value = run.get(name)
            if isinstance(value, torch.Tensor) and value.shape == reached.shape:
                moved[name] = torch.maximum(reached, _distance(usual[name].double(), value).nan_to_num(0.0))
    return {name: estimate(value) for name, value in moved.items()}


def farthest(value: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return how far, element by element, any of the others is from `value`, in its dtype."""
    reached: torch.Tensor | None = None
    for other in others:
        distance = _distance(value, other)
        reached = distance if reached is None else torch.maximum(reached, distance, out=reached)
    return torch.zeros_like(value) if reached is None else reached


def estimate(moved: torch.Tensor, *, crosswise: bool = False) -> torch.Tensor:
    """Turn what a few runs moved into an estimate for each element that its own few draws cannot understate.

    Args:
        moved: see `farthest`.
        crosswise: raise it to what the row and the column of the element suggest together, where rows (outputs) and
            columns (inputs) differ. In any case it is at least the root mean square over the tensor.
    """
    if not moved.numel():
        return moved.clone()
    # Large tensors are made as few as can be: the system takes longer to give their pages than it takes to fill them.
    squares = moved.square()
    mean = float(squares.mean().sqrt())
    raised = moved.clamp_min(mean)
    if crosswise and mean and moved.dim() > 1:
        matrix = squares.flatten(1)
        rows, columns = (matrix.mean(dim, keepdim=True).sqrt() for dim in (1, 0))
        together = torch.mul(rows, columns / mean, out=matrix).reshape(moved.shape)
        torch.maximum(raised, together, out=raised)
    return raised


def root_mean_square(value: torch.Tensor) -> float:
    """Return the root of the mean square of all elements, 0 where there is none."""
    return float(value.square().mean().sqrt()) if value.numel() else 0.0


def _distance(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (plain(other).to(value.dtype) - value).abs_()
