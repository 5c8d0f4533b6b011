"""Compare the bits of two tensors, and find where they first differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_check.torch_hooks.tensors import plain


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of `tensor` in order, as a uint8 matrix on the CPU, (number of elements, bytes of one)."""
    # Always copy: torch calls a single element contiguous for any stride, and `view` then refuses it.
    flat = plain(tensor).clone(memory_format=torch.contiguous_format).reshape(-1)
    if flat.numel() == 0:
        return torch.empty(0, flat.element_size(), dtype=torch.uint8, device="cpu")
    return flat.view(torch.uint8).reshape(-1, flat.element_size())


def same_bits(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Return whether shape, dtype and every bit agree.

    NaN equals a NaN with the same bits, and 0.0 differs from -0.0. The devices may differ.
    """
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    return torch.equal(as_bytes(expected), as_bytes(got))


def first_difference(expected: torch.Tensor, got: torch.Tensor) -> tuple[int, ...]:
    """Return the index of the first element, in row-major order, whose bits differ; shapes and dtypes must be equal.

    Raises:
        ValueError: the tensors hold the same bits.
    """
    differs = (as_bytes(expected) != as_bytes(got)).any(dim=1).nonzero()
    if len(differs) == 0:
        raise ValueError("first_difference: the tensors hold the same bits")
    return index_of(int(differs[0]), expected.shape)


def index_of(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the element at position `flat`, in row-major order, of a tensor of this shape."""
    index = []
    for size in reversed(shape):
        flat, position = divmod(flat, size)
        index.append(position)
    return tuple(reversed(index))
