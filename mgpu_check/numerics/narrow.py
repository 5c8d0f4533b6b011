"""Measure how far rounding to bfloat16 or float16 may move the results of a step.

In such dtypes an error of one roundoff is large: perturbations of several roundoffs, as `numerics.steps` makes them for
float32, leave the linear range, and add up to tolerances of 10 to 30 times the true error. So the errors themselves are
sampled. The step runs a few times in its own dtypes, each time with some results of operators moved by one unit in the
last place, so that all later results round differently. The distances of these runs from the float64 run are samples of
the error.

The error of an element has two parts. The last rounding is at most half a unit in the last place. The error before it
is a sum of many roundings, and nearly normal; its variance is what remains of the samples' mean square. The variance of
a uniform error of one unit is 1/12 (B. Widrow and I. Kollár, *Quantization Noise*, Cambridge 2008, section 5.1). A
variance from few samples is uncertain, so the quantile is Student's and not the normal one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgpu_check.numerics.envelopes import least_mean_square
from mgpu_check.numerics.perturbation import Perturbed
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE

SAMPLES = 6
"""Runs with moved results. Six leave Student's quantile for a bias of three elements 1.6 times the normal one."""

_CHANCE = 1 / 24
"""Chance that an element is moved. The moves then add half of the variance of the rounding itself."""
_FALSE_ALARM = 1e-6
"""Probability that a right result exceeds its tolerance."""
_LAST_ROUNDING = 1 / 12
_OF_PARTS = 7 / 12
"""Variance of a sum over 4 ranks, which rounds 4 parts and 3 sums, in squared units; parts may be as large as it."""
_NEIGHBOURS = 16
"""Elements whose mean square shows the size of the parts of each of them."""
_TWENTIETH = -1.645
"""The quantile 0.05 of the standard normal distribution."""
_LEAST = 0.4**3
"""Least quantile of a mean square: below 3 numbers the approximation means nothing."""
_DEVIATION_OF_SQUARE = math.sqrt(1 / 80 - 1 / 144)
"""Standard deviation of the square of a uniform error of one unit, in squared units."""
_DEVIATIONS = 2.0
"""Standard errors of the variance of the last roundings that may hide errors before them."""
_OUTLIER = 8.0
"""Standard deviations above which an error is a jump: a ReLU or maximum that decides differently."""
_JUMPS = 1.5
"""Factor for the largest jump of an element: ranks may be on the other side of more ties than any one run."""
_OF_MEDIAN = 2.2
"""Mean square of normal errors over their median square."""


def is_narrow(dtype: torch.dtype) -> bool:
    """Return whether a floating-point dtype rounds more coarsely than float32."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


class Dithered(Perturbed):
    """Moves results of operators in narrow dtypes by one unit in the last place, up or down, at random places.

    Results that are written in place are left alone: mostly an optimizer's update, whose rounding is the last one. What
    a collective adds up is moved more: on several ranks each part is rounded, and each sum of parts.
    """

    _decomposes = _in_place = False

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(0.0, generator, 0.0, copies=False)

    def _after_collective(self, func: Any, written: Any) -> None:
        if "reduce" in func._opname:
            for value in tree_leaves(written):
                tensor = self._raw(value) if isinstance(value, torch.Tensor) else None
                if tensor is not None and is_narrow(tensor.dtype) and tensor.numel() and not tensor.is_meta:
                    wide = tensor.double()
                    size = torch.maximum(wide.abs(), _size_of_parts(wide))
                    noise = torch.randn(tensor.shape, generator=self.generator, dtype=torch.float64).to(tensor.device)
                    deviation = math.sqrt(_OF_PARTS) * unit_in_last_place(size, tensor.dtype)
                    tensor.copy_(wide + deviation * noise)

    def _perturb(self, tensor: torch.Tensor, spared: bool) -> None:
        if spared or not is_narrow(tensor.dtype) or tensor.is_meta:
            return
        drawn = torch.rand(tensor.shape, generator=self.generator, dtype=torch.float32)
        move = (drawn < _CHANCE / 2).to(torch.int16) - (drawn > 1 - _CHANCE / 2).to(torch.int16)
        # The bits of a number, taken as an integer, count units in the last place.
        move = move.to(tensor.device) * ((tensor != 0) & tensor.isfinite())
        bits = tensor.view(INTEGER_OF_SIZE[tensor.element_size()])
        bits.add_(move.to(bits.dtype))


def _size_of_parts(total: torch.Tensor) -> torch.Tensor:
    """Return how large the parts of a sum may be, from the elements beside each element of the sum.

    A single element may be small because its parts cancel. A bucket holds gradients of very different sizes, so only
    neighbours count. The mean square of few numbers may be small by chance: it is divided by a quantile of it.
    """
    squares = total.square().flatten()
    blocks = functional.pad(squares, (0, -len(squares) % _NEIGHBOURS)).view(-1, _NEIGHBOURS)
    weights = blocks.new_full((len(blocks),), _weight(_NEIGHBOURS))
    weights[-1] = _weight(len(squares) - _NEIGHBOURS * (len(blocks) - 1))
    sizes = (blocks.sum(1) * weights).sqrt()
    return sizes.repeat_interleave(_NEIGHBOURS)[: len(squares)].view_as(total)


def _weight(count: int) -> float:
    return 1 / (count * max(least_mean_square(count, _TWENTIETH), _LEAST))


class Unnarrowed(TorchDispatchMode):
    """Lets float64 code stay in float64 where it asks for a narrower floating-point dtype.

    So code that casts its inputs, `x.bfloat16()`, has a float64 counterpart.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is not torch.ops.aten.view.dtype:  # it reads the same bits in another dtype
            args = tuple(map(_widened, args))
            kwargs = {name: _widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _widened(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument.is_floating_point else argument


def narrow_tolerance(
    exact: torch.Tensor,
    samples: Sequence[torch.Tensor],
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype,
    comparisons: int,
) -> torch.Tensor:
    """Return how far rounding may move each element of a result, as float64.

    Args:
        exact: the result in float64; or the mean of `samples`, if there is none.
        samples: the result of the plain run first, and of runs under `Dithered`; float64, in the shape of `exact`.
        pairs: results of runs under `Perturbed`, with opposite signs. They show ReLUs and maxima within rounding errors
            of a tie, which decide differently in one direction only.
        dtype: the dtype of the result in the step.
        comparisons: number of elements that are compared together.
    """
    last = unit_in_last_place(torch.maximum(exact.abs(), samples[0].abs()), dtype)
    errors = torch.stack([(sample - exact).abs() for sample in samples])
    active = (last > 0) | (errors.amax(0) > 0)
    if not bool(active.any()):
        return last
    rounded = _LAST_ROUNDING * last.square()
    typical = math.sqrt(_OF_MEDIAN * max(float((errors.square() - rounded)[:, active].median()), 0.0))
    usual = torch.minimum(errors, _OUTLIER * typical + last)
    jumps = torch.where(errors > usual, errors, 0.0).amax(0)
    for up, down in pairs:
        bent = (up + down - 2 * samples[0]).abs().nan_to_num(0.0)
        jumps = torch.maximum(jumps, torch.where(bent > _OUTLIER * typical + 2 * last, bent, 0.0))
    squares = usual.square()
    before = squares - rounded
    # Small elements have a small last rounding, so they show the error before it better than the mean does.
    small = active & (last <= last[active].median())
    variance = max(float(before[:, active].mean()), float(before[:, small].mean()), 0.0)
    spread = _rows_by_columns(squares.mean(0), variance).sqrt()
    count = int(active.sum())
    unknown = _DEVIATIONS * _DEVIATION_OF_SQUARE * math.sqrt(float(last[active].pow(4).mean()) / count)
    wide = _quantile(comparisons, count * len(samples)) * spread + _quantile(comparisons) * math.sqrt(unknown)
    return wide + last / 2 + _JUMPS * jumps


def unit_in_last_place(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the distance of neighbouring numbers of a dtype at each value, as float64; 0 for 0."""
    _, exponent = torch.frexp(value.double())
    return torch.where(value == 0, 0.0, torch.finfo(dtype).eps * torch.exp2((exponent - 1).double()))


def _rows_by_columns(squares: torch.Tensor, variance: float) -> torch.Tensor:
    """Return `variance` for each element, or more where its row and its column have larger errors than others."""
    mean = float(squares.mean())
    if squares.dim() < 2 or not mean:
        return torch.full_like(squares, variance)
    matrix = squares.flatten(1)
    together = matrix.mean(1, keepdim=True) * matrix.mean(0, keepdim=True) / mean**2
    return (variance * together.clamp_min(1.0)).reshape(squares.shape)


def _quantile(comparisons: int, samples: int | None = None) -> float:
    """Return the normal quantile, or Student's for a variance of so many samples (approximately)."""
    squared = 2 * math.log(2 * max(comparisons, 1) / _FALSE_ALARM)
    return math.sqrt(squared if samples is None else samples * math.expm1(min(squared / samples, 50.0)))
