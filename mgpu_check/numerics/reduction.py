"""The result of a reduction over ranks, computed on one device, its a priori bounds, and data that need none.

The bounds are those of N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., SIAM 2002: Lemma 3.1
for `gamma`, section 4.2 for sums (the bound holds for every order of summation), section 3.1 for products.

Let all terms of a sum be multiples of a power of two q, and let their magnitudes sum to less than q·2^p, where p is the
number of significand bits. Every partial sum is then q times an integer of at most p bits, so no order of summation
rounds. The idea comes from NCCL's own tests (`verifiable.cu`). Here each element has its own q, and no two ranks hold
the same value in an element, so that a swapped element or rank shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mgpu_check.torch_hooks.tensors import plain


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
    index = torch.arange(torch.Size(shape).numel())
    band = most // count
    contributions = []
    for rank in range(count):
        position = (index + rank) % count
        magnitude = 1 + position % most
        if band:
            magnitude = position * band + 1 + torch.randint(0, band, index.shape, generator=generator)
        contribution = (_signs(index, dtype, generator) * magnitude).to(dtype)
        if dtype.is_floating_point:
            contribution = torch.ldexp(contribution.double(), (index // count) % _SCALES - _SCALES // 2).to(dtype)
        contributions.append(contribution.reshape(tuple(shape)))
    return contributions


def _signs(like: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor | int:
    """Return random signs in the shape of `like`; 1 for unsigned integers, without a draw."""
    if not dtype.is_floating_point and not dtype.is_signed:
        return 1
    return 1 - 2 * torch.randint(0, 2, like.shape, generator=generator)


def exact_factors(shape: Sequence[int], dtype: torch.dtype, *, count: int, seed: int) -> list[torch.Tensor]:
    """Make `count` tensors of `shape` that multiply to the same bits in every order.

    In each element one rank holds a number with many significand bits. The others hold ±1/2, ±1 or ±2; integers have no
    1/2, and unsigned integers no sign.
    """
    if count < 1:
        raise ValueError(f"exact_factors: count={count} must be at least 1")
    generator = torch.Generator().manual_seed(seed)
    index, bits = torch.arange(torch.Size(shape).numel()), significand_bits(dtype)
    # Only this many ranks scale: more could overflow an integer, or leave the normal range of float16.
    scaling = 6 if dtype.is_floating_point else max(0, min(bits - 3, 8))
    most = 2 ** (bits if dtype.is_floating_point else bits - scaling) - 1
    contributions = []
    for rank in range(count):
        many = torch.randint(1, min(most, 2**52) + 1, index.shape, generator=generator).double()
        if dtype.is_floating_point:
            many = torch.ldexp(many, torch.tensor(1 - bits))
        low = -1 if dtype.is_floating_point else 0
        power = torch.randint(low, 2, index.shape, generator=generator) if rank < scaling else torch.zeros(len(index))
        few = torch.ldexp(torch.ones(len(index), dtype=torch.float64), power)
        value = _signs(index, dtype, generator) * torch.where(index % count == rank, many, few)
        contributions.append(value.to(dtype).reshape(tuple(shape)))
    return contributions


def random_parts(shape: Sequence[int], dtype: torch.dtype, *, count: int, seed: int) -> list[torch.Tensor]:
    """Make `count` tensors of `shape` with all bits in use, so that their sums round; exact data cannot show rounding.

    Floating-point values are normal deviates, each scaled by a power of two between 1/8 and 8. Integers are uniform
    over the range of their dtype, so that sums wrap around (modulo 2^bits, hence equal in every order).
    """
    generator, size = torch.Generator().manual_seed(seed), tuple(shape)
    contributions = []
    for _ in range(count):
        if dtype.is_floating_point:
            normal = torch.randn(size, generator=generator, dtype=torch.float64)
            drawn = torch.ldexp(normal, torch.randint(-3, 4, size, generator=generator))
        else:
            info = torch.iinfo(dtype)
            drawn = torch.randint(info.min, info.max, size, generator=generator, dtype=torch.int64)
        contributions.append(drawn.to(dtype))
    return contributions


def lowest_bits(value: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two that divides each number; 0 for 0, NaN and infinities. All float64."""
    mantissa, exponent = torch.frexp(value)
    integer = torch.ldexp(mantissa, torch.tensor(53)).nan_to_num(0, 0, 0).long()
    return torch.ldexp((integer & -integer).double(), exponent - 53)


def sums_exactly(contributions: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return, element by element, whether every order of summation of `contributions` gives the same bits.

    The result is bool, in the shape of the parts. The test is sufficient, not necessary. Integers always qualify, since
    their sums wrap around; NaN and infinities never do.
    """
    dtype = contributions[0].dtype
    if not dtype.is_floating_point:
        return torch.ones(contributions[0].shape, dtype=torch.bool)
    magnitude = torch.zeros(contributions[0].shape, dtype=torch.float64)
    grain = torch.full(contributions[0].shape, torch.inf, dtype=torch.float64)
    for contribution in contributions:
        value = contribution.double()
        low = lowest_bits(value)
        grain = torch.where(low != 0, torch.minimum(grain, low), grain)
        magnitude += value.abs()
    # Strictly less: a float64 sum of magnitudes that reaches 2^p may have been rounded.
    return magnitude / grain < 2.0 ** significand_bits(dtype)


OPERATIONS = ("sum", "avg", "product", "min", "max")


@dataclass(frozen=True)
class Reduced:
    """The exact result of a reduction, to float64, and a tolerance for rounding in the dtype of the parts."""

    value: torch.Tensor  # float64 for floating-point parts; otherwise in the dtype of the parts
    tolerance: torch.Tensor  # float64, element by element; 0 where every order gives the same bits
    contributions: tuple[torch.Tensor, ...]
    operation: str


def compensated_sum(contributions: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum `contributions` in float64, by Neumaier's algorithm: as if summed in twice the precision and rounded once.

    Source: A. Neumaier, *Rundungsfehleranalyse einiger Verfahren zur Summation endlicher Summen*, ZAMM 54 (1974);
    relative error 2u + O(n²u²)·cond with u = 2^-53.
    """
    total = torch.zeros(contributions[0].shape, dtype=torch.float64)
    lost = torch.zeros_like(total)
    for contribution in contributions:
        term = contribution.double()
        new = total + term
        lost += torch.where(total.abs() >= term.abs(), (total - new) + term, (term - new) + total)
        total = new
    # With infinities or NaN among the parts, the correction is not finite and the plain sum is the result.
    return torch.where(lost.isfinite(), total + lost, total)


def reduced(contributions: Sequence[torch.Tensor], operation: str = "sum") -> Reduced:
    """Return the result of `operation` over `contributions`, one tensor per rank, all of one shape and dtype.

    Raises:
        ValueError: there are no parts, their shapes or dtypes differ, the operation is unknown, or it is "avg" of
            integers.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"reduced: operation={operation!r} is unknown; choose one of {', '.join(OPERATIONS)}")
    if not contributions:
        raise ValueError("reduced: parts is empty; give one tensor per rank")
    kinds = {(tuple(contribution.shape), contribution.dtype) for contribution in contributions}
    if len(kinds) > 1:
        raise ValueError(
            f"reduced: the parts differ in shape or dtype, {sorted(map(str, kinds))}; a reduction needs equal ones"
        )
    values = tuple(plain(contribution) for contribution in contributions)
    count, dtype = len(values), values[0].dtype
    exact = torch.zeros(values[0].shape, dtype=torch.float64)
    if operation in ("min", "max"):
        stacked = torch.stack(values)
        extreme = stacked.amin(0) if operation == "min" else stacked.amax(0)
        return Reduced(extreme.double() if dtype.is_floating_point else extreme, exact, values, operation)
    if not dtype.is_floating_point:
        if operation == "avg":
            raise ValueError("reduced: operation='avg' of integers is not defined by torch.distributed; use 'sum'")
        total = values[0].clone()
        for value in values[1:]:
            total = total + value if operation == "sum" else total * value
        return Reduced(total, exact, values, operation)
    if operation == "product":
        return _product(values)
    total = compensated_sum(values)
    magnitude = torch.stack([value.double().abs() for value in values]).sum(0)
    # The second term is the error of the reference itself.
    tolerance = sum_bound(magnitude, count, dtype) + 2 * unit_roundoff(torch.float64) * magnitude
    tolerance = torch.where(sums_exactly(values), 0.0, tolerance)
    if operation == "avg":
        # Libraries divide either each part or the sum, which adds at most one rounding and half a subnormal per part.
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        roundings = gamma(count, unit_roundoff(dtype)) * magnitude + 2 * unit_roundoff(torch.float64) * magnitude
        return Reduced(total / count, roundings / count + count * smallest / 2, values, operation)
    return Reduced(total, tolerance, values, operation)


def _product(values: tuple[torch.Tensor, ...]) -> Reduced:
    product = torch.ones(values[0].shape, dtype=torch.float64)
    growth, grain = torch.ones_like(product), torch.ones_like(product)
    powers = torch.zeros(values[0].shape, dtype=torch.int64)
    for value in values:
        wide = value.double()
        product = product * wide
        growth = growth * wide.abs().clamp_min(1)
        low = lowest_bits(wide)
        grain = grain * torch.where(low != 0, low.clamp_max(1), 1.0)
        # A factor that is a power of two moves the exponent only.
        powers += (torch.frexp(wide)[0].abs() == 0.5).long()
    dtype, count = values[0].dtype, len(values)
    bound = (
        product_bound(product.abs(), count, dtype, growth) + gamma(count, unit_roundoff(torch.float64)) * product.abs()
    )
    # Every partial product is a multiple of the grain: small ones do not underflow if the grain is representable.
    limits = torch.finfo(dtype)
    exact = (powers >= count - 1) & (grain >= limits.smallest_normal * limits.eps) & (growth < limits.max)
    return Reduced(product, torch.where(exact, 0.0, bound), values, "product")
