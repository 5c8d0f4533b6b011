"""When two values are as good as the same, for a guess."""

from __future__ import annotations

import torch

__all__ = ["same_values"]

_NEAR = 1e-5


def same_values(one: torch.Tensor, other: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether both are equal to 1e-5 of the largest magnitude in `scale`, and not all zero."""
    return bool(((one - other).abs() <= _NEAR * float(scale.abs().max())).all()) and bool((other != 0).any())
