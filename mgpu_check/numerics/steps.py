"""Measure the tolerance of a whole training step on that step.

A parallel step adds the same numbers in another order. How much that may change a gradient depends on the model, on the
data and on their conditioning; no relative tolerance fits all. Two measurements give the tolerance:

- The step runs in float64, and its inputs and every intermediate result are moved by a few float32 unit roundoffs, in
  both directions. Float32 arithmetic does not determine a result that moves. The reasons are rounding errors that grow
  or cancel, and ReLUs and maxima that decide differently (an activation within rounding errors of zero has a gradient
  on one device and no gradient on another).
- Steps on a single device in float32 are compared with the float64 step. They show how much rounding within the
  operators exceeds those perturbations. One step takes the whole batch; others take it shard by shard, because kernels
  for a small batch may sum in another order.

Random perturbation that shows which digits are significant is Monte Carlo arithmetic: D. S. Parker, *Monte Carlo
Arithmetic*, UCLA CSD-970002, 1997. Rounding errors act like independent random errors, and exceed λ standard deviations
with probability 2·exp(-λ²/2) at most: N. J. Higham and T. Mary, *A New Approach to Probabilistic Rounding Error
Analysis*, SIAM J. Sci. Comput. 41 (2019).

Rounding to bfloat16 or float16:

In such dtypes an error of one roundoff is large: perturbations of several roundoffs, as they are made for
float32, leave the linear range, and add up to tolerances of 10 to 30 times the true error. So the errors themselves are
sampled. The step runs a few times in its own dtypes, each time with some results of operators moved by one unit in the
last place, so that all later results round differently. The distances of these runs from the float64 run are samples of
the error.

The error of an element has two parts. The last rounding is at most half a unit in the last place. The error before it
is a sum of many roundings, and nearly normal; its variance is what remains of the samples' mean square. The variance of
a uniform error of one unit is 1/12 (B. Widrow and I. Kollár, *Quantization Noise*, Cambridge 2008, section 5.1). A
variance from few samples is uncertain, so the quantile is Student's and not the normal one.

A cast to float8 is sampled alike. Its scale may be that of a rank's own part, so that each element rounds otherwise.
Many ReLUs decide otherwise then, and a few samples show only some of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgpu_check.numerics.perturbation import Perturbed
from mgpu_check.numerics.reduction import unit_roundoff
from mgpu_check.torch_hooks import switches
from mgpu_check.torch_hooks.tensors import FLOAT8, INTEGER_OF_SIZE, plain

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)
"""Identifies a result: a name, or an object with a name."""
Results = Mapping[Key, torch.Tensor]


def envelopes(usual: Results[Key], runs: Iterable[Mapping[Key, Any]]) -> dict[Key, torch.Tensor]:
    """Return how far rounding may move each element of `usual`, by name, as float64.

    `usual`: floating-point tensors. `runs`: results of perturbed runs, consumed one at a time. Tensors that a run lacks
    or has in another shape are ignored, and so is NaN.
    """
    moved = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in usual.items() if value.numel()}
    for run in runs:
        for name, reached in moved.items():
            value = run.get(name)
            if isinstance(value, torch.Tensor) and value.shape == reached.shape:
                moved[name] = torch.maximum(reached, _distance(usual[name].double(), value).nan_to_num(0.0))
    return {name: estimate(value) for name, value in moved.items()}


def farthest(value: torch.Tensor, moved_values: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the largest distance of `moved_values` from `value`, element by element, in the dtype of `value`."""
    reached: torch.Tensor | None = None
    for moved in moved_values:
        distance = _distance(value, moved)
        reached = distance if reached is None else torch.maximum(reached, distance, out=reached)
    return torch.zeros_like(value) if reached is None else reached


def estimate(moved: torch.Tensor, *, crosswise: bool = False) -> torch.Tensor:
    """Estimate how far each element may move, from the movement seen in a few runs.

    A few draws may understate one element, so every estimate is at least the root mean square over the tensor.

    `moved`: see `farthest`. `crosswise`: also raise an element to the value that its row (output) and column (input)
    suggest together. Use it where rows and columns differ in size.
    """
    if not moved.numel():
        return moved.clone()
    # Reuse memory: for large tensors the system takes longer to provide the pages than torch takes to fill them.
    squares = moved.square()
    mean = float(squares.mean().sqrt())
    raised = moved.clamp_min(mean)
    if crosswise and mean and moved.dim() > 1:
        matrix = squares.flatten(1)
        rows, columns = (matrix.mean(dim, keepdim=True).sqrt() for dim in (1, 0))
        together = torch.mul(rows, columns / mean, out=matrix).reshape(moved.shape)
        torch.maximum(raised, together, out=raised)
    return raised


def root_mean_square(value: torch.Tensor) -> float:
    """Return the root mean square of all elements, or 0 for an empty tensor."""
    return float(value.square().mean().sqrt()) if value.numel() else 0.0


def least_mean_square(count: int, below: float) -> float:
    """Return a quantile of the mean square of `count` standard normal numbers.

    This is the quantile of chi-squared divided by `count`, in the approximation of E. B. Wilson and M. M. Hilferty
    (1931).

    `below`: the same quantile of the standard normal distribution.
    """
    root = 1 - 2 / (9 * max(count, 1)) + below * math.sqrt(2 / (9 * max(count, 1)))
    return max(root, 1e-3) ** 3


def _distance(value: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    return (plain(moved).to(value.dtype) - value).abs_()


SAMPLES = 6
"""Runs with moved results. Six leave Student's quantile for a bias of three elements 1.6 times the normal one."""

_CHANCE = 1 / 24  # chance that an element is moved. The moves then add half of the variance of the rounding itself.
_TWO_ROUNDINGS = 1 / 6  # chance whose moves have the variance of the difference of two roundings, in squared units
_FALSE_ALARM_OF_NARROW = 1e-6  # probability that a right result exceeds its tolerance
_LAST_ROUNDING = 1 / 12
_OF_PARTS = 7 / 12
"""Variance of a sum over 4 ranks, which rounds 4 parts and 3 sums, in squared units; parts may be as large as it."""
_NEIGHBOURS = 16  # elements whose mean square shows the size of the parts of each of them
_TWENTIETH = -1.645  # the quantile 0.05 of the standard normal distribution
_LEAST = 0.4**3  # least quantile of a mean square: below 3 numbers the approximation means nothing
_DEVIATION_OF_SQUARE = math.sqrt(1 / 80 - 1 / 144)
"""Standard deviation of the square of a uniform error of one unit, in squared units."""
_DEVIATIONS = 2.0  # standard errors of the variance of the last roundings that may hide errors before them
_OUTLIER = 8.0  # standard deviations above which an error is a jump: a ReLU or maximum that decides differently
_JUMPS = 1.5  # factor for the largest jump of an element: ranks may be on the other side of more ties than any one run
_OF_MEDIAN = 2.2  # mean square of normal errors over their median square


def is_narrow(dtype: torch.dtype) -> bool:
    """Return whether a floating-point dtype rounds more coarsely than float32."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


class Dithered(Perturbed):
    """Moves results of operators in narrow dtypes by one unit in the last place, up or down, at random places.

    Results that are written in place are left alone: mostly an optimizer's update, whose rounding is the last one. What
    a collective adds up is moved more: on several ranks each part is rounded, and each sum of parts.
    """

    _decomposes = _in_place = False

    def __init__(self, generator: torch.Generator, *, precise: bool = True) -> None:
        """`precise`: whether there is a float64 run, from which all distances are measured.

        Without it they are measured from the mean of the runs, which rounds to float8 as they do. A rank that scales
        its own part rounds each element otherwise, so each is moved often enough for the variance of two roundings.
        """
        super().__init__(0.0, generator, 0.0, copies=False)
        self._chance_of_float8 = _CHANCE if precise else _TWO_ROUNDINGS

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
        of_float8 = tensor.itemsize == 1
        if spared or not is_narrow(tensor.dtype) or (of_float8 and tensor.dtype not in FLOAT8) or tensor.is_meta:
            return
        chance = self._chance_of_float8 if of_float8 else _CHANCE
        drawn = torch.rand(tensor.shape, generator=self.generator, dtype=torch.float32)
        move = (drawn < chance / 2).to(torch.int16) - (drawn > 1 - chance / 2).to(torch.int16)
        # No operator of torch 2.13 compares numbers of float8. A scale brings one of them to the largest number, next
        # to which is NaN or infinity.
        size = tensor.float().abs()
        move = move.to(tensor.device) * ((size > 0) & (size < torch.finfo(tensor.dtype).max))
        # The bits of a number, taken as an integer, count units in the last place.
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
    coarse: bool = False,
) -> torch.Tensor:
    """Return how far rounding may move each element of a result, as float64.

    Args:
        exact: the result in float64; or the mean of `samples`, if there is none.
        samples: the result of the plain run first, and of runs under `Dithered`; float64, in the shape of `exact`.
        pairs: results of runs under `Perturbed`, with opposite signs. They show ReLUs and maxima within rounding errors
            of a tie, which decide differently in one direction only.
        dtype: the dtype of the result in the step.
        comparisons: number of elements that are compared together.
        coarse: whether the step rounds to float8 or more coarsely. Then many ReLUs may decide differently, and the
            samples show it for some of them only: each element may jump as far as any two.
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
    if coarse:
        jumps = 2 * jumps.amax().expand_as(jumps)  # those of two samples may meet in an element
    squares = usual.square()
    before = squares - rounded
    # Small elements have a small last rounding, so they show the error before it better than the mean does.
    small = active & (last <= last[active].median())
    variance = max(float(before[:, active].mean()), float(before[:, small].mean()), 0.0)
    spread = torch.full_like(last, math.sqrt(variance))
    if last.dim() > 1 and (mean := float(squares.mean())):
        # More where row and column have larger errors than others.
        matrix = squares.mean(0).flatten(1)
        together = matrix.mean(1, keepdim=True) * matrix.mean(0, keepdim=True) / mean**2
        spread *= together.clamp_min(1.0).sqrt().reshape(last.shape)
    count = int(active.sum())
    unknown = _DEVIATIONS * _DEVIATION_OF_SQUARE * math.sqrt(float(last[active].pow(4).mean()) / count)
    wide = _quantile(comparisons, count * len(samples)) * spread + _quantile(comparisons) * math.sqrt(unknown)
    return wide + last / 2 + _JUMPS * jumps


def unit_in_last_place(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the distance of neighbouring numbers of a dtype at each value, as float64; 0 for 0."""
    _, exponent = torch.frexp(value.double())
    return torch.where(value == 0, 0.0, torch.finfo(dtype).eps * torch.exp2((exponent - 1).double()))


def _quantile(comparisons: int, samples: int | None = None) -> float:
    """Return the normal quantile, or Student's for a variance of so many samples (approximately)."""
    squared = 2 * math.log(2 * max(comparisons, 1) / _FALSE_ALARM_OF_NARROW)
    return math.sqrt(squared if samples is None else samples * math.expm1(min(squared / samples, 50.0)))


Step = Callable[[dict[str, torch.Tensor]], Results[str]]
"""A step as a function from named tensors (inputs, parameters and everything else that it depends on) to named results.
It must compute in the dtype of its arguments, depend on nothing else, and use no randomness."""

_TEN_THOUSANDTH = -3.719  # the quantile 1e-4 of the standard normal distribution

_ROUNDINGS = 8.0  # number of roundings to a narrow dtype that a result may pass through in sequence

PAIRS = 3
"""Pairs of perturbations: three miss a ReLU or maximum within rounding errors of a tie about once in a thousand."""

_FALSE_ALARM = 1e-9  # probability that a right result exceeds its tolerance
_SURE = 0.8
"""Fraction of the movement in float64 that one pair of perturbations in the dtype of the step is sure to show."""


@dataclass(frozen=True)
class MeasuredStep(Generic[Key]):
    """The results that a step must give, and how far rounding may move them, by name of result."""

    reference: dict[Key, torch.Tensor]  # the results in float64
    tolerance: dict[Key, torch.Tensor]  # float64, in the shape of the result
    # how many times the errors of the float32 step may exceed the effect of the perturbations; at least 1
    amplification: dict[Key, float]

    def without(self, keys: Iterable[Key]) -> MeasuredStep[Key]:
        left_out = set(keys)

        def kept(results: Mapping[Key, T]) -> dict[Key, T]:
            return {name: value for name, value in results.items() if name not in left_out}

        return MeasuredStep(kept(self.reference), kept(self.tolerance), kept(self.amplification))

    def wider(self, other: MeasuredStep[Key]) -> MeasuredStep[Key]:
        """Return this measurement with the larger tolerances of it and another measurement of the same step."""
        tolerance = {name: torch.maximum(value, other.tolerance[name]) for name, value in self.tolerance.items()}
        amplification = {name: max(value, other.amplification[name]) for name, value in self.amplification.items()}
        return MeasuredStep(self.reference, tolerance, amplification)


def deviations(comparisons: int) -> float:
    """Return λ such that any of `comparisons` exceeds λ standard deviations with probability at most `_FALSE_ALARM`."""
    return math.sqrt(2 * math.log(2 * max(comparisons, 1) / _FALSE_ALARM))


def measure_step(
    step: Step,
    inputs: Results[str],
    *,
    singles: Sequence[Results[str]] = (),
    pairs: int = PAIRS,
    seed: int = 0,
    magnified: float = 1.0,
) -> MeasuredStep[str]:
    """Measure the results of `step` for `inputs`, and how far rounding in their dtype may move them.

    Args:
        step: see `Step`. Called 1 + 2·pairs times in float64, on the CPU.
        inputs: the arguments of the parallel step. Floating-point tensors (float32, say) are widened and perturbed;
            others are passed unchanged.
        singles: results of single-device steps in the dtype of the inputs, on the device where the parallel step runs:
            of the whole batch, and of the batch shard by shard. If empty, one is computed here, on the CPU.
        pairs: number of perturbations, each in both directions.
        magnified: multiply the perturbations by this factor. Rounding within operators may exceed the perturbations and
            flip decisions (ReLUs, maxima) that the plain perturbations do not reach.

    Raises:
        ValueError: `inputs` has no floating-point tensor, or `singles` name other results than `step`.
    """
    narrow, roundoff = _narrow(inputs)
    wide = {name: value.double() if value.is_floating_point() else value for name, value in narrow.items()}
    reference = {name: plain(value).double() for name, value in step(dict(wide)).items()}
    ran: list[Results[str]] = [*singles] or [step(dict(narrow))]
    for single in ran:
        _check_names(single, reference)
    # The largest random error among that many elements has `spread` standard deviations: move by as many roundoffs.
    spread = deviations(sum(value.numel() for value in reference.values()))
    moved = _moved(step, wide, pairs, seed, magnified * spread, roundoff)
    return assess(reference, ran, moved, roundoff, spread)


def measure_step_provisionally(step: Step, inputs: Results[str], single: Results[str]) -> MeasuredStep[str]:
    """Measure a distance from single-device results within which `measure_step` would accept a result.

    Results further off may be right, too: measure them with `measure_step`. `step` is called only twice, in the dtype
    of the inputs, on the CPU.

    Args:
        step, inputs: see `measure_step`.
        single: one of the `singles` of `measure_step`.

    Raises:
        ValueError: `inputs` has no floating-point tensor, or `single` names other results than `step`.
    """
    narrow, roundoff = _narrow(inputs)
    wide = {name: plain(value).clone() for name, value in single.items()}
    for name, value in wide.items():  # at least float32
        if not value.is_floating_point():
            wide[name] = value.double()
        elif value.element_size() < 4:
            wide[name] = value.float()
    spread = deviations(sum(value.numel() for value in wide.values()))
    moved = _moved(step, narrow, 1, 0, spread, roundoff)
    for result in moved:
        _check_names(wide, result)
    return MeasuredStep(wide, granted_at_least(wide, moved, roundoff, spread), dict.fromkeys(wide, 1.0))


def _narrow(inputs: Results[str]) -> tuple[dict[str, torch.Tensor], float]:
    narrow = {name: plain(value) for name, value in inputs.items()}
    floating = [value.dtype for value in narrow.values() if value.is_floating_point()]
    if not floating:
        raise ValueError("measure_step: inputs has no floating-point tensor; give parameters and data")
    return narrow, max(unit_roundoff(dtype) for dtype in floating)


def _check_names(single: Results[str], results: Results[str]) -> None:
    if single.keys() != results.keys():
        raise ValueError(f"measure_step: singles have {sorted(single)}, but the step gives {sorted(results)}")


def _moved(
    step: Step, inputs: Results[str], pairs: int, seed: int, spread: float, roundoff: float
) -> list[Results[str]]:
    generator = torch.Generator().manual_seed(seed)
    moved: list[Results[str]] = []
    for _ in range(pairs):
        before = generator.get_state()
        for direction in (1, -1):
            generator.set_state(before)
            with Perturbed(direction * spread, generator, roundoff):
                moved.append(step({name: value.clone() for name, value in inputs.items()}))
    return moved


def assess(
    reference: Results[Key],
    singles: Sequence[Results[Key]],
    moved: Sequence[Results[Key]],
    roundoff: float,
    spread: float,
) -> MeasuredStep[Key]:
    """Return the results that a step must give, and how far rounding may move them, from measured runs.

    Args:
        reference: the results in the best available precision, as float64.
        singles: results of steps on one device in the precision of the parallel step.
        moved: results of steps that perturb every operator by `spread` unit roundoffs, in pairs of directions.
        roundoff: the unit roundoff of the parallel step.
        spread: see `deviations`.
    """
    exact = {name: plain(value).double() for name, value in reference.items()}
    errors = {name: farthest(value, [single[name] for single in singles]) for name, value in exact.items()}
    movement = {name: farthest(value, [result[name] for result in moved]) for name, value in exact.items()}
    envelope = {name: estimate(value, crosswise=True) for name, value in movement.items()}
    amplification = _amplification(envelope, errors, spread)
    tolerance = {}
    for name, value in exact.items():
        # The distance from the parallel step to a single-device step, plus the distance from there to the reference.
        rounding = torch.maximum(amplification[name] * envelope[name], spread * roundoff * value.abs())
        # An error that was seen in one element is granted to all, in proportion to their size: errors of long sums grow
        # with the sum, and the order of summation decides which elements get large errors.
        size, error = _size(value), errors[name]
        tolerance[name] = rounding + (error if size is None else (error / size).max() * size)
    return MeasuredStep(exact, tolerance, amplification)


def granted_at_least(
    single: Results[Key], moved: Sequence[Results[Key]], roundoff: float, spread: float
) -> dict[Key, torch.Tensor]:
    """Return a distance from `single` within which `assess`, with more measurements, would accept a result.

    `assess` grants the errors of `single` itself, plus the larger of two terms: `spread` roundoffs of each element, and
    the movement of several float64 pairs times an amplification of at least 1. One pair in the dtype of the step moves
    less, except for its own rounding, which is about `spread` times smaller. So a step within this distance of `single`
    is right, without the costly runs in float64. A step outside it may be right, too.

    `single`: results of the step on one device in its own dtype, all finite. `moved`: results of the same step,
    perturbed by `spread` roundoffs in two opposite directions, and nudged if need be.
    """
    granted = {}
    for name, value in single.items():
        moving = estimate(farthest(value, [result[name] for result in moved]), crosswise=True)
        granted[name] = torch.maximum(moving, value.abs().mul_(spread * roundoff), out=moving).mul_(_SURE)
    return granted


def errors_seen(single: Results[Key], moved: Results[Key]) -> dict[Key, float]:
    """Return the largest relative error of each result that two runs in one precision prove.

    `assess` measures the errors of both runs from float64, and grants the larger one everywhere. It is at least half of
    the difference between the two runs. Errors are relative to the size of the element (see `_size`).

    `single`: results of the step on one device in its own dtype, all finite. `moved`: the same on inputs that are moved
    by a roundoff, so that every sum rounds differently.
    """
    errors = dict.fromkeys(single, 0.0)
    for name, value in single.items():
        if (size := _size(value)) is not None:
            errors[name] = float((farthest(value, [moved[name]]) / size).max()) / 2
    return errors


def granted_with(granted: Results[Key], single: Results[Key], errors: Mapping[Key, float]) -> dict[Key, torch.Tensor]:
    """Add the errors of `errors_seen` to the distances of `granted_at_least`, as `assess` does."""
    sizes = {name: _size(single[name]) if errors.get(name) else None for name in granted}
    return {
        name: value if (size := sizes[name]) is None else value + errors[name] * size for name, value in granted.items()
    }


def with_roundings(tolerance: torch.Tensor, exact: torch.Tensor, roundoff: float) -> torch.Tensor:
    """Return a tolerance with room for results that pass through a narrow dtype with this unit roundoff."""
    return tolerance + _ROUNDINGS * roundoff * (exact.abs() + root_mean_square(exact))


def _size(reference: torch.Tensor) -> torch.Tensor | None:
    """Return the size that each element's errors are proportional to; None if all elements are zero, or none exist."""
    size = reference.abs() + root_mean_square(reference)
    return size if size.numel() and bool((size > 0).all()) else None


def _amplification(envelope: Results[Key], errors: Results[Key], spread: float) -> dict[Key, float]:
    """Estimate, for each result, the ratio of rounding within operators (mostly long sums) to the perturbations.

    A result with few elements may be right by chance, so its ratio is raised to the largest value that is plausible for
    the observed one, up to the largest observed ratio of all results.
    """
    ratios = {}
    for name, value in envelope.items():
        size = root_mean_square(value)
        ratios[name] = spread * root_mean_square(errors[name]) / size if size else 0.0
    largest = max([1.0, *ratios.values()])
    return {
        name: max(1.0, min(largest, ratio / math.sqrt(least_mean_square(errors[name].numel(), _TEN_THOUSANDTH))))
        for name, ratio in ratios.items()
    }


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 without TF32 in matrix products and convolutions inside the context.

    See `switches.exact_precision`.

    TF32 rounds to 11 significant bits. Two steps that round differently may then differ by 5e-4, which would hide an
    equally large flipped bit.
    """
    before = switches.saved_precision()
    switches.exact_precision()
    try:
        yield
    finally:
        switches.restore_precision(before)
