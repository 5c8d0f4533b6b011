"""Helpers for comparisons of tensors: copies on the CPU, bits, checksums.

They do not use NumPy, which torch does not need.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from types import MappingProxyType

import torch

INTEGER_OF_SIZE: Mapping[int, torch.dtype] = MappingProxyType(
    {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
)
"""Bytes of an element -> the signed integer dtype of that size, to compare the bits of other dtypes."""

_NOTHING = ctypes.c_char()


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module: "float16"."""
    return str(dtype).removeprefix("torch.")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of `tensor` as a contiguous tensor on the CPU, without autograd history.

    The result shares memory with `tensor` if no conversion is needed.
    """
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor`, which may be sparse, as a dense tensor in the form of `plain`."""
    value = tensor.detach()
    return plain((value if value.layout == torch.strided else value.to_dense()).to("cpu", copy=True))


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU, with complex numbers as pairs of real ones.

    A DTensor is gathered first, which is a collective.
    """
    value = tensor.detach()
    return as_real(copied(value.full_tensor() if hasattr(value, "full_tensor") else value))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as real pairs in a new last dimension of 2, and any other tensor unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as integers of the size of its elements; a complex one by its real pairs."""
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    real = as_real(tensor)
    return real.view(INTEGER_OF_SIZE[real.element_size()])


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a dense tensor's elements in order."""
    here = plain(tensor)
    return bytes(memory_of(here))


def digest_of(tensor: torch.Tensor) -> str:
    """Return a checksum of a dense tensor's dtype, shape and bits."""
    here = plain(tensor)
    checksum = hashlib.sha1(memory_of(here), usedforsecurity=False)  # processors have instructions for it
    checksum.update(f"{here.dtype}{tuple(here.shape)}".encode())
    return checksum.hexdigest()[:24]


def all_finite(tensor: torch.Tensor) -> bool:
    """Return whether no element is infinite or NaN, which holds for every integer tensor."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return True
    # The sum takes one pass, and `isfinite` four. A finite sum proves finite elements; an infinite one may be an
    # overflow.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def memory_of(here: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """Return the memory of a contiguous CPU tensor, as an array that keeps the tensor alive."""
    size = here.numel() * here.element_size()
    memory = (ctypes.c_char * size).from_address(here.data_ptr() or ctypes.addressof(_NOTHING))
    memory.of = here  # type: ignore[attr-defined]  # a new attribute, which keeps the tensor alive
    return memory


def indices_of(*devices: torch.device) -> list[int]:
    """Return the distinct indices of the devices that have one, in order: the ranks of an error about all of them."""
    return sorted({device.index for device in devices if device.index is not None})
