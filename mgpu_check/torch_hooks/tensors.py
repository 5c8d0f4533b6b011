"""Facts of tensors that every comparison of their values needs: copies on the CPU, bits, checksums. Without NumPy, which
torch does not require.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from types import MappingProxyType

import torch

__all__ = ["INTEGER_OF_SIZE", "as_real", "bytes_of", "copied", "digest_of", "plain"]

INTEGER_OF_SIZE: Mapping[int, torch.dtype] = MappingProxyType(
    {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
)
"""The signed integer dtype whose elements have so many bytes, to look at the bits of others."""

_NOTHING = ctypes.c_char()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of `tensor` as a contiguous tensor on the CPU, without autograd history.

    Where `tensor` is that already, the result shares its memory.
    """
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of `tensor`, which may be sparse, as `plain` does, in memory of their own."""
    value = tensor.detach()
    return plain((value if value.layout == torch.strided else value.to_dense()).to("cpu", copy=True))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real ones in a last dimension of 2, and any other tensor itself."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bits of a dense tensor's elements, in order."""
    here = plain(tensor)
    return bytes(_memory(here))


def digest_of(tensor: torch.Tensor) -> str:
    """Return a checksum of dtype, shape and bits of a dense tensor."""
    here = plain(tensor)
    checksum = hashlib.blake2b(_memory(here), digest_size=12)
    checksum.update(f"{here.dtype}{tuple(here.shape)}".encode())
    return checksum.hexdigest()


def _memory(here: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    size = here.numel() * here.element_size()
    return (ctypes.c_char * size).from_address(here.data_ptr() or ctypes.addressof(_NOTHING))
