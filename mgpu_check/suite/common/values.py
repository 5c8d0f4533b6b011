"""Make operands that show errors which small whole numbers hide: full significands, special values, extremes, any
bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from mgpu_check.suite.common import operators
from mgpu_check.suite.common.counters import counted, fractions, integers
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE


def _dtypes(names: Sequence[str]) -> tuple[torch.dtype, ...]:
    return tuple(getattr(torch, name) for name in names)


ALL = _dtypes((*operators.NUMBERS, "bool", "complex64", "complex128"))

_CPU = torch.device("cpu")
_PART = {torch.complex64: torch.float32, torch.complex128: torch.float64}


@lru_cache(maxsize=256)
def significands(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return finite numbers that use every digit of a dtype.

    Floats are between 1/8 and 16 in magnitude, with either sign; integers are arbitrary. A product or a copy in a
    narrower format loses digits of nearly every number.
    """
    if dtype.is_complex:
        parts = significands((*shape, 2), _PART[dtype], seed)
        return torch.view_as_complex(parts)
    if dtype.is_floating_point:
        parts = fractions(shape, seed=seed, device=_CPU, dtype=torch.float64, low=1.0, high=2.0)
        signs = integers(shape, 0, 1, seed=seed + 1, device=_CPU, dtype=torch.float64) * 2 - 1
        powers = integers(shape, -3, 3, seed=seed + 2, device=_CPU)
        return torch.ldexp(parts * signs, powers).to(dtype)
    words = counted(shape, seed, _CPU)
    return words & 1 != 0 if dtype == torch.bool else words.to(dtype)


@lru_cache(maxsize=64)
def small(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return numbers in (-2, 2) that use all digits of the dtype."""
    return fractions(shape, seed=seed, device=_CPU, dtype=dtype, low=-2.0, high=2.0)


@lru_cache(maxsize=64)
def anything(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return elements with arbitrary bits: first the special values, then pseudorandom bits, including NaN with
    payloads."""
    if dtype.is_complex:
        return torch.view_as_complex(anything(2 * count, _PART[dtype], seed).view(-1, 2))
    if dtype == torch.bool:
        return significands((count,), dtype, seed)
    integer = INTEGER_OF_SIZE[dtype.itemsize]
    words = counted((count,), seed, _CPU).bitwise_right_shift_(64 - 8 * dtype.itemsize).to(integer)
    special = _special(dtype).view(integer)
    kept = special[: min(count, len(special))]
    words[: len(kept)] = kept
    return words.view(dtype)


@lru_cache(maxsize=16)
def _special(dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        facts = torch.finfo(dtype)
        least = facts.smallest_normal * facts.eps  # subnormal
        values = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, least, -least, facts.smallest_normal / 2)
        more = (facts.smallest_normal, facts.max, facts.min, 1 + facts.eps, math.nan)
        special = torch.tensor([*values, *more], dtype=torch.float64).to(dtype)
        special.view(INTEGER_OF_SIZE[dtype.itemsize])[-1] |= 5  # NaN with a payload
        return special
    if dtype == torch.bool:
        return torch.tensor([False, True])
    limits = torch.iinfo(dtype)
    extremes = {0, 1, 2, limits.min, limits.min + 1, limits.max, limits.max - 1, limits.max // 2 + 1}
    return torch.tensor(sorted(extremes | ({-1} if limits.min else set())), dtype=dtype)
