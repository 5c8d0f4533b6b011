"""The bits of tensors, without NumPy, which torch does not require."""

from __future__ import annotations

import ctypes
import hashlib

import torch

from mgpu_check.torch_hooks.tensors import plain

__all__ = ["bytes_of", "digest_of"]

_NOTHING = ctypes.c_char()


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
