"""Make pseudorandom numbers from position and seed by integer arithmetic alone, the same on every device.

So data need not be copied to a device or stored for a comparison: position and seed suffice to make it again. The
mixing is a bijection of 64 bits, so a value shows its position. It uses the steps of splitmix64's finalizer: a product
with an odd number, and an exclusive or with a shift of itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MASK = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_STEP = 0x9E3779B97F4A7C15
_SHIFTS = (32, 29)


def signed(word: int) -> int:
    """Return the int64 that has the bits of `word`, an integer in [0, 2^64)."""
    return word - (1 << 64) if word >> 63 else word


def _offset(seed: int) -> int:
    return (seed + 1) * _STEP & MASK


def mix_(positions: torch.Tensor, seed: int, scratch: torch.Tensor) -> torch.Tensor:
    """Replace int64 positions by their mixed values, in place; `scratch` is of their shape, dtype and device."""
    positions.add_(signed(_offset(seed)))
    for factor, shift in zip((_FIRST, _SECOND), _SHIFTS, strict=True):
        positions.mul_(signed(factor))
        torch.bitwise_right_shift(positions, shift, out=scratch)
        scratch.bitwise_and_(MASK >> shift)  # the shift of int64 repeats the sign
        positions.bitwise_xor_(scratch)
    return positions


def mixed(position: int, seed: int) -> int:
    """Return the mixed value of one position as `mix_` computes it, as an integer in [0, 2^64)."""
    word = (position + _offset(seed)) & MASK
    for factor, shift in zip((_FIRST, _SECOND), _SHIFTS, strict=True):
        word = word * factor & MASK
        word ^= word >> shift
    return word


def position_of(word: int, seed: int) -> int:
    """Return the position whose mixed value is `word`, an integer in [0, 2^64)."""
    for factor, shift in zip((_SECOND, _FIRST), reversed(_SHIFTS), strict=True):
        bits, known = word, shift
        while known < 64:  # each round recovers `shift` more bits
            bits, known = word ^ (bits >> shift), known + shift
        word = bits * pow(factor, -1, 1 << 64) & MASK
    return (word - _offset(seed)) & MASK


def counted(shape: Sequence[int], seed: int, device: torch.device) -> torch.Tensor:
    """Return the mixed values of the positions 0, 1, ... as int64 of `shape` on `device`, in row-major order."""
    positions = torch.arange(torch.Size(shape).numel(), dtype=torch.int64, device=device)
    return mix_(positions, seed, torch.empty_like(positions)).view(tuple(shape))


def integers(
    shape: Sequence[int], low: int, high: int, *, seed: int, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Return pseudorandom whole numbers in [`low`, `high`], of `shape` and `dtype` on `device`.

    `dtype` must hold them exactly, and the range may have at most 2^31 numbers.
    """
    return several([shape], low, high, seed=seed, device=device, dtype=dtype)[0]


def several(
    shapes: Sequence[Sequence[int]], low: int, high: int, *, seed: int, device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return a tensor of numbers as from `integers` for each of `shapes`; the tensors are independent."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    words = counted((sum(sizes),), seed, device)
    words.bitwise_right_shift_(32).bitwise_and_((1 << 32) - 1)
    words.mul_(high - low + 1).bitwise_right_shift_(32).add_(low)
    return [part.view(tuple(shape)) for part, shape in zip(words.to(dtype).split(sizes), shapes, strict=True)]


def fractions(
    shape: Sequence[int], *, seed: int, device: torch.device, dtype: torch.dtype, low: float = -1.0, high: float = 1.0
) -> torch.Tensor:
    """Return pseudorandom numbers in [`low`, `high`], of `shape` and `dtype` on `device`, that use all digits.

    They are computed in float64 and rounded once, so they have the same bits on all devices that follow IEEE 754.
    """
    words = counted(shape, seed, device).bitwise_right_shift_(11)
    return words.to(torch.float64).mul_(2.0**-53).add_(0.5).mul_(high - low).add_(low).to(dtype)
