"""Measure, element by element, how far perturbed runs move a result."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from mgpu_check.torch_hooks.tensors import plain

Key = TypeVar("Key", bound=Hashable)


def envelopes(usual: Mapping[Key, torch.Tensor], runs: Iterable[Mapping[Key, Any]]) -> dict[Key, torch.Tensor]:
    """Return how far rounding may move each element of `usual`, by name, as float64.

    Args:
        usual: floating-point tensors.
        runs: results of perturbed runs, consumed one at a time. Tensors that a run lacks or has in another shape are
            ignored, and so is NaN.
    """
    moved = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in usual.items() if value.numel()}
    for run in runs:
        for name, reached in moved.items():
            value = run.get(name)
            if isinstance(value, torch.Tensor) and value.shape == reached.shape:
                moved[name] = torch.maximum(reached, _distance(usual[name].double(), value).nan_to_num(0.0))
    return {name: estimate(value) for name, value in moved.items()}


def farthest(value: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the largest distance of `others` from `value`, element by element, in the dtype of `value`."""
    reached: torch.Tensor | None = None
    for other in others:
        distance = _distance(value, other)
        reached = distance if reached is None else torch.maximum(reached, distance, out=reached)
    return torch.zeros_like(value) if reached is None else reached


def estimate(moved: torch.Tensor, *, crosswise: bool = False) -> torch.Tensor:
    """Estimate how far each element may move, from the movement seen in a few runs.

    A few draws may understate one element, so every estimate is at least the root mean square over the tensor.

    Args:
        moved: see `farthest`.
        crosswise: also raise an element to the value that its row (output) and column (input) suggest together. Use it
            where rows and columns differ in size.
    """
    if not moved.numel():
        return moved.clone()
    # Reuse memory: for large tensors the system takes longer to provide the pages than torch takes to fill them.
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
    """Return the root mean square of all elements, or 0 for an empty tensor."""
    return float(value.square().mean().sqrt()) if value.numel() else 0.0


def least_mean_square(count: int, below: float) -> float:
    """Return a quantile of the mean square of `count` standard normal numbers.

    This is the quantile of chi-squared divided by `count`, in the approximation of E. B. Wilson and M. M. Hilferty
    (1931).

    Args:
        below: the same quantile of the standard normal distribution.
    """
    root = 1 - 2 / (9 * max(count, 1)) + below * math.sqrt(2 / (9 * max(count, 1)))
    return max(root, 1e-3) ** 3


def _distance(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (plain(other).to(value.dtype) - value).abs_()
