"""Measure how far a right device may be from the reference: the effect of rounding each step of a computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from mgpu_check.numerics.bounds import unit_roundoff
from mgpu_check.numerics.perturbation import Perturbed
from mgpu_check.torch_hooks.tensors import as_real, plain

_RUNS = 3
_ULPS = 64
"""Units in the last place that a result may be off in float32 and float64.

Sums in the cases have at most 64 terms, and each addition rounds once (N. J. Higham, *Accuracy and Stability of
Numerical Algorithms*, 2nd ed., section 4.2). Functions are accurate to 2 units (NVIDIA, *CUDA C++ Programming Guide*).
"""
_NARROW_ULPS = 4
"""The same for narrower dtypes: they are rounded only once or twice, from sums in float32."""

WIDE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}

Change = Callable[[torch.Tensor], torch.Tensor]
Run = Callable[[Change], Iterable[torch.Tensor]]
"""Run the computation on the CPU, with each operand replaced by the function, and return the results."""


def ulps_of(dtype: torch.dtype) -> int:
    """Return how many units in the last place a result may be off."""
    return _ULPS if dtype in (torch.float32, torch.float64) else _NARROW_ULPS


def error_bounds(
    run: Run, dtype: torch.dtype, right: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for each result the reference in float64 and the largest errors of a right device.

    A right implementation rounds its operands and each of its steps, in any order. Its error is bounded by some times
    the effect of such roundings. They are measured: the computation runs in float64 with random errors of a unit
    roundoff in each operand and step (D. S. Parker, *Monte Carlo Arithmetic*, 1997). So the bound of a result of
    cancellation follows from its largest step, not from the result. The error of the CPU in `dtype` counts too.
    An element may show no effect by chance, so none counts less than the median. Elements beside a jump, as of `floor`,
    do not widen the bounds of others.

    Args:
        right: the results of the CPU in `dtype`.
    """
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    if not real.is_floating_point:
        real = torch.float32  # torch computes fractions of integers in this dtype
    units = ulps_of(real)  # beyond the effect of rounding each step once; reductions in the samples have few terms
    roundoff = unit_roundoff(real)
    generator = torch.Generator("cpu").manual_seed(0)
    wide = list(run(_widened))

    def shaken(tensor: torch.Tensor) -> torch.Tensor:
        return _shaken(_widened(tensor), roundoff, generator)

    runs = []
    for _ in range(_RUNS):
        with Perturbed(1, generator, roundoff):
            runs.append(list(run(shaken)))
    bounds = []
    for number, (reference, result) in enumerate(zip(wide, right, strict=True)):
        effect = torch.stack([_gaps(values[number], reference) for values in runs]).amax(0)
        least = roundoff * _largest(reference)
        bounds.append((reference, units * (_filled(effect) + least) + 2 * _filled(_gaps(result, reference))))
    return bounds


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(WIDE.get(tensor.dtype, tensor.dtype)).requires_grad_(tensor.requires_grad)


def _shaken(tensor: torch.Tensor, roundoff: float, generator: torch.Generator) -> torch.Tensor:
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return (tensor.detach() * (1 + roundoff * signs.double())).to(tensor.dtype).requires_grad_(tensor.requires_grad)


def _gaps(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the differences of the elements, as real numbers; 0 where they are not finite."""
    gaps = (as_real(plain(one)).double() - as_real(plain(other)).double()).abs()
    return gaps.where(gaps.isfinite(), 0)


def _filled(gaps: torch.Tensor) -> torch.Tensor:
    return gaps.clamp(min=float(gaps.median())) if gaps.numel() else gaps


def _largest(tensor: torch.Tensor) -> float:
    return float(_gaps(tensor, torch.zeros_like(tensor)).amax()) if tensor.numel() else 0.0
