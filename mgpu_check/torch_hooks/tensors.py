"""Facts of tensors that every comparison of their values needs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

__all__ = ["INTEGER_OF_SIZE", "as_real", "plain"]

INTEGER_OF_SIZE: Mapping[int, torch.dtype] = MappingProxyType(
    {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
)
"""The signed integer dtype whose elements have so many bytes, to look at the bits of others."""


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of `tensor` as a contiguous tensor on the CPU, without autograd history."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real ones in a last dimension of 2, and any other tensor itself."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
