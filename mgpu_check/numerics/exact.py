"""Make data that every order of a reduction sums to the same bits, and recognize such data.

Let all terms of a sum be multiples of a power of two q, and let their magnitudes sum to less than q·2^p, where p is the
number of significand bits. Every partial sum is then q times an integer of at most p bits, so no order of summation
rounds. The idea comes from NCCL's own tests (`verifiable.cu`). Here each element has its own q, and no two ranks hold
the same value in an element, so that a swapped element or rank shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_check.numerics.bounds import significand_bits

_SCALES = 8  # powers of two that elements are scaled by: 2^-4 … 2^3, so that sums stay finite and normal in float16


def exact_parts(shape: Sequence[int], dtype: torch.dtype, *, count: int, seed: int) -> list[torch.Tensor]:
    """Make `count` tensors of `shape`, one per rank, that sum to the same bits in every order.

    All values are nonzero. The values of an element differ between all ranks, and the values of a rank differ between
    neighbouring elements, as far as `dtype` has enough numbers. They use as many significand bits as the sum allows.

    Raises:
        ValueError: `count` numbers are more than `dtype` can add exactly (bfloat16: 255, int8: 126).
    """
    if count < 1:
        raise ValueError(f"exact_parts: count={count} must be at least 1")
    most = (2 ** min(significand_bits(dtype), 62) - 1) // count
    if most < 1:
        raise ValueError(f"exact_parts: count={count} numbers of {dtype} have no exact sum in every order; use fewer")
    generator = torch.Generator().manual_seed(seed)
    elements = torch.Size(shape).numel()
    index = torch.arange(elements)
    band = most // count
    parts = []
    for rank in range(count):
        position = (index + rank) % count
        if band:
            within = torch.randint(0, band, (elements,), generator=generator)
            magnitude = position * band + 1 + within
        else:
            magnitude = 1 + position % most
        signed = dtype.is_floating_point or dtype.is_signed
        sign = 1 - 2 * torch.randint(0, 2, (elements,), generator=generator) if signed else 1
        part = (sign * magnitude).to(dtype)
        if dtype.is_floating_point:
            part = torch.ldexp(part.double(), (index // count) % _SCALES - _SCALES // 2).to(dtype)
        parts.append(part.reshape(tuple(shape)))
    return parts


def exact_factors(shape: Sequence[int], dtype: torch.dtype, *, count: int, seed: int) -> list[torch.Tensor]:
    """Make `count` tensors of `shape` that multiply to the same bits in every order.

    In each element one rank holds a number with many significand bits. The others hold ±1/2, ±1 or ±2; integers have no
    1/2, and unsigned integers no sign.
    """
    if count < 1:
        raise ValueError(f"exact_factors: count={count} must be at least 1")
    generator = torch.Generator().manual_seed(seed)
    elements = torch.Size(shape).numel()
    index = torch.arange(elements)
    bits = significand_bits(dtype)
    # Only this many ranks scale: more could overflow an integer, or leave the normal range of float16.
    scaling = 6 if dtype.is_floating_point else max(0, min(bits - 3, 8))
    most = 2 ** (bits if dtype.is_floating_point else bits - scaling) - 1
    holder = index % count
    parts = []
    for rank in range(count):
        many = torch.randint(1, min(most, 2**52) + 1, (elements,), generator=generator).double()
        if dtype.is_floating_point:
            many = torch.ldexp(many, torch.tensor(1 - bits))
            low = -1
        else:
            low = 0
        power = torch.randint(low, 2, (elements,), generator=generator) if rank < scaling else torch.zeros(elements)
        few = torch.ldexp(torch.ones(elements, dtype=torch.float64), power)
        signed = dtype.is_floating_point or dtype.is_signed
        sign = 1 - 2 * torch.randint(0, 2, (elements,), generator=generator) if signed else 1
        parts.append((sign * torch.where(holder == rank, many, few)).to(dtype).reshape(tuple(shape)))
    return parts


def random_parts(shape: Sequence[int], dtype: torch.dtype, *, count: int, seed: int) -> list[torch.Tensor]:
    """Make `count` tensors of `shape` with all bits in use, so that their sums round; exact data cannot show rounding.

    Floating-point values are normal deviates, each scaled by a power of two between 1/8 and 8. Integers are uniform
    over the range of their dtype, so that sums wrap around (modulo 2^bits, hence equal in every order).
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(count):
        if dtype.is_floating_point:
            normal = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
            scale = torch.randint(-3, 4, tuple(shape), generator=generator)
            parts.append(torch.ldexp(normal, scale).to(dtype))
        else:
            info = torch.iinfo(dtype)
            drawn = torch.randint(info.min, info.max, tuple(shape), generator=generator, dtype=torch.int64)
            parts.append(drawn.to(dtype))
    return parts


def lowest_bits(value: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two that divides each number; 0 for 0, NaN and infinities. All float64."""
    mantissa, exponent = torch.frexp(value)
    integer = torch.ldexp(mantissa, torch.tensor(53)).nan_to_num(0, 0, 0).long()
    return torch.ldexp((integer & -integer).double(), exponent - 53)


def sums_exactly(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return, element by element, whether every order of summation of `parts` gives the same bits.

    The result is bool, in the shape of the parts. The test is sufficient, not necessary. Integers always qualify, since
    their sums wrap around; NaN and infinities never do.
    """
    dtype = parts[0].dtype
    if not dtype.is_floating_point:
        return torch.ones(parts[0].shape, dtype=torch.bool)
    magnitude = torch.zeros(parts[0].shape, dtype=torch.float64)
    grain = torch.full(parts[0].shape, torch.inf, dtype=torch.float64)
    for part in parts:
        value = part.double()
        low = lowest_bits(value)
        grain = torch.where(low != 0, torch.minimum(grain, low), grain)
        magnitude += value.abs()
    # Strictly less: a float64 sum of magnitudes that reaches 2^p may have been rounded.
    return magnitude / grain < 2.0 ** significand_bits(dtype)
