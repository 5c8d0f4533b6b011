"""A priori bounds on rounding errors of reductions.

Source: N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., SIAM 2002: Lemma 3.1 for `gamma`,
section 4.2 for sums (the bound holds for every order of summation), section 3.1 for products.
"""

from __future__ import annotations

import torch


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding to nearest.

    It is 2^-53 for float64, 2^-24 for float32, 2^-11 for half, 2^-8 for bfloat16.

    Raises:
        ValueError: `dtype` is not a real floating-point type; integers do not round.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"unit_roundoff: dtype={dtype} does not round; give a real floating-point dtype")
    return torch.finfo(dtype).eps / 2


def significand_bits(dtype: torch.dtype) -> int:
    """Return the number of bits up to which `dtype` holds every integer exactly.

    53, 24, 11 and 8 for float64, float32, float16 and bfloat16; 7 for int8, 8 for uint8, 31 for int32, 63 for int64.
    """
    if dtype.is_floating_point:
        return 1 - round(torch.tensor(torch.finfo(dtype).eps, dtype=torch.float64).log2().item())
    return torch.iinfo(dtype).max.bit_length()


def gamma(operations: int, roundoff: float) -> float:
    """Return gamma(k) = k·u / (1 - k·u): the relative error that k roundings can add up to.

    Raises:
        ValueError: k·u reaches 1: no relative error is guaranteed from there on.
    """
    product = operations * roundoff
    if product >= 1:
        raise ValueError(
            f"gamma: {operations} roundings of {roundoff:g} each leave no correct digit; sum in more precision"
        )
    return product / (1 - product)


def sum_bound(magnitude: torch.Tensor, terms: int, dtype: torch.dtype) -> torch.Tensor:
    """Bound, element by element, how far a sum of `terms` numbers, added in any order, may be from the exact sum.

    Args:
        magnitude: Σ|x|, float64.
        terms: how many numbers are added.
        dtype: the dtype of the partial sums and of the result.

    Returns:
        gamma(terms-1)·Σ|x|. Sums need no term for underflow: a sum that is subnormal is exact.
    """
    return gamma(max(terms - 1, 0), unit_roundoff(dtype)) * magnitude


def product_bound(
    magnitude: torch.Tensor, factors: int, dtype: torch.dtype, growth: torch.Tensor | None = None
) -> torch.Tensor:
    """Bound how far a product of `factors` numbers, multiplied in any order, may be from the exact one.

    Args:
        magnitude: of the exact product, float64.
        factors: how many numbers are multiplied.
        dtype: the dtype of the factors, and of partial products.
        growth: the product of max(1, |x|) over all factors x, float64. It bounds every partial product, and every
            product of the remaining factors. 1 by default.

    Returns:
        gamma(factors-1)·|product|, plus the effect of underflow: each rounding may lose half of the smallest subnormal,
        and later factors multiply that loss by at most `growth`. Infinite where a partial product may overflow by
        `growth`.
    """
    limits = torch.finfo(dtype)
    smallest = limits.smallest_normal * limits.eps
    roundings = max(factors - 1, 0)
    relative = gamma(roundings, unit_roundoff(dtype))
    largest = torch.ones_like(magnitude) if growth is None else growth * (1 + relative)
    bound = relative * magnitude + roundings * smallest / 2 * largest
    return torch.where(largest < limits.max, bound, torch.inf)
