"""Compute the result of a reduction over ranks on one device, and the tolerance for its rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mgpu_check.numerics.bounds import gamma, product_bound, sum_bound, unit_roundoff
from mgpu_check.numerics.exact import lowest_bits, sums_exactly
from mgpu_check.torch_hooks.tensors import plain

OPERATIONS = ("sum", "avg", "product", "min", "max")


@dataclass(frozen=True)
class Reduced:
    """The exact result of a reduction, to float64, and a tolerance for rounding in the dtype of the parts."""

    value: torch.Tensor
    """float64 for floating-point parts; otherwise in the dtype of the parts."""
    tolerance: torch.Tensor
    """float64, element by element; 0 where every order gives the same bits."""
    parts: tuple[torch.Tensor, ...]
    operation: str


def compensated_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum `parts` in float64, by Neumaier's algorithm: as if summed in twice the precision and rounded once.

    Source: A. Neumaier, *Rundungsfehleranalyse einiger Verfahren zur Summation endlicher Summen*, ZAMM 54 (1974);
    relative error 2u + O(n²u²)·cond with u = 2^-53.
    """
    total = torch.zeros(parts[0].shape, dtype=torch.float64)
    lost = torch.zeros_like(total)
    for part in parts:
        term = part.double()
        new = total + term
        lost += torch.where(total.abs() >= term.abs(), (total - new) + term, (term - new) + total)
        total = new
    # With infinities or NaN among the parts, the correction is not finite and the plain sum is the result.
    return torch.where(lost.isfinite(), total + lost, total)


def reduced(parts: Sequence[torch.Tensor], operation: str = "sum") -> Reduced:
    """Return the result of `operation` over `parts`, one tensor per rank, all of one shape and dtype.

    Raises:
        ValueError: there are no parts, their shapes or dtypes differ, the operation is unknown, or it is "avg" of
            integers.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"reduced: operation={operation!r} is unknown; choose one of {', '.join(OPERATIONS)}")
    if not parts:
        raise ValueError("reduced: parts is empty; give one tensor per rank")
    kinds = {(tuple(part.shape), part.dtype) for part in parts}
    if len(kinds) > 1:
        raise ValueError(
            f"reduced: the parts differ in shape or dtype, {sorted(map(str, kinds))}; a reduction needs equal ones"
        )
    values = tuple(plain(part) for part in parts)
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
