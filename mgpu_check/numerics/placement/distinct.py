"""Make the elements of a tensor distinct, so that its values show which slice of it somebody holds."""

from __future__ import annotations

import torch

_NOISE = 0.02
"""Of the magnitude of a tensor: enough to make its elements distinct, and too little to change how a model trains."""


def make_distinct(tensor: torch.Tensor, size: float, generator: torch.Generator) -> None:
    """Add noise to a tensor, in place.

    Args:
        size: the magnitude of its elements; 0 for zeros.
        generator: on the CPU; the same state gives the same noise.
    """
    noise = torch.randn(tensor.shape, generator=generator, device="cpu")
    with torch.no_grad():
        tensor.add_((_NOISE * (size or 1.0) * noise).to(tensor.device, tensor.dtype))
