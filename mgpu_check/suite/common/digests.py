"""Compute digests of 64 bits over all bits of a tensor, on its device.

Each word of 32 bits is joined with its position and mixed by a bijection of 64 bits, and the results are summed. A
single changed word always changes the digest; several leave it unchanged with probability 2^-64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_check.suite.common.counters import MASK, mix_
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE

_NARROW = (1 << 32) - 1
_BLOCK = 1 << 24
"""Elements to mix at once; a limit, because mixing needs many times their memory."""


def digest(tensor: torch.Tensor) -> int:
    """Return the digest of a tensor of any size, in [0, 2^64)."""
    flat = tensor.detach().reshape(-1)
    total = 0
    for start in range(0, flat.numel(), _BLOCK):
        words = _words(flat[start : start + _BLOCK])
        total += int(_mixed(words, start * _halves(flat)).sum())
    return total & MASK


def digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the digest of each of `tensors` as int64 on their device, without waiting for it.

    The digest depends on the size of the tensors before, so it differs from that of `digest`.
    """
    mixed = _mixed(torch.cat([_words(tensor.detach()) for tensor in tensors]), 0)
    return torch.stack([part.sum() for part in mixed.split([t.numel() * _halves(t) for t in tensors])])


def _mixed(words: torch.Tensor, first: int) -> torch.Tensor:
    """Return the mixed values of words at the positions from `first` on; `words` is overwritten."""
    positions = torch.arange(first, first + len(words), device=words.device).bitwise_left_shift_(32)
    return mix_(positions.bitwise_or_(words), 0, words)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of the elements as int64 in [0, 2^32); an element of 64 bits gives two of them."""
    flat = tensor.contiguous().reshape(-1)
    size = min(flat.element_size(), 4)
    return flat.view(INTEGER_OF_SIZE[size]).long().bitwise_and_(_NARROW >> (32 - 8 * size))


def _halves(tensor: torch.Tensor) -> int:
    return max(1, tensor.element_size() // 4)
