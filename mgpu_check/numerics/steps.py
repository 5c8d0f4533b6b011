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
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from mgpu_check.numerics.bounds import unit_roundoff
from mgpu_check.numerics.envelopes import estimate, farthest, least_mean_square, root_mean_square
from mgpu_check.numerics.perturbation import Perturbed
from mgpu_check.torch_hooks import precision
from mgpu_check.torch_hooks.tensors import plain

Key = TypeVar("Key", bound=Hashable)
"""Identifies a result: a name, or an object with a name."""

Step = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""A step as a function from named tensors (inputs, parameters and everything else that it depends on) to named results.
It must compute in the dtype of its arguments, depend on nothing else, and use no randomness."""

_TEN_THOUSANDTH = -3.719
"""The quantile 1e-4 of the standard normal distribution."""

_ROUNDINGS = 8.0
"""Number of roundings to a narrow dtype that a result may pass through in sequence."""

PAIRS = 3
"""Pairs of perturbations.

Three pairs miss a ReLU or maximum within rounding errors of a tie about once in a thousand.
"""

_FALSE_ALARM = 1e-9
"""Probability that a right result exceeds its tolerance."""
_SURE = 0.8
"""Fraction of the movement in float64 that one pair of perturbations in the dtype of the step is sure to show."""


@dataclass(frozen=True)
class MeasuredStep(Generic[Key]):
    """The results that a step must give, and how far rounding may move them, by name of result."""

    reference: dict[Key, torch.Tensor]
    """The results in float64."""
    tolerance: dict[Key, torch.Tensor]
    """float64, in the shape of the result."""
    amplification: dict[Key, float]
    """How many times the errors of the float32 step may exceed the effect of the perturbations; at least 1."""

    def without(self, names: Iterable[Key]) -> MeasuredStep[Key]:
        """Return this measurement without some of the results."""
        left_out = set(names)
        kept = [name for name in self.reference if name not in left_out]
        return MeasuredStep(
            {name: self.reference[name] for name in kept},
            {name: self.tolerance[name] for name in kept},
            {name: self.amplification[name] for name in kept},
        )

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
    inputs: Mapping[str, torch.Tensor],
    *,
    singles: Sequence[Mapping[str, torch.Tensor]] = (),
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
    ran: list[Mapping[str, torch.Tensor]] = [*singles] or [step(dict(narrow))]
    for single in ran:
        _check_names(single, reference)
    # The largest random error among that many elements has `spread` standard deviations: move by as many roundoffs.
    spread = deviations(sum(value.numel() for value in reference.values()))
    moved = _moved(step, wide, pairs, seed, magnified * spread, roundoff)
    return assess(reference, ran, moved, roundoff, spread)


def measure_step_provisionally(
    step: Step, inputs: Mapping[str, torch.Tensor], single: Mapping[str, torch.Tensor]
) -> MeasuredStep[str]:
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
    held = {name: _at_least_float32(value).clone() for name, value in single.items()}
    spread = deviations(sum(value.numel() for value in held.values()))
    moved = _moved(step, narrow, 1, 0, spread, roundoff)
    for one in moved:
        _check_names(held, one)
    return MeasuredStep(held, granted_at_least(held, moved, roundoff, spread), dict.fromkeys(held, 1.0))


def _narrow(inputs: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], float]:
    """Return inputs on the CPU, and their unit roundoff."""
    narrow = {name: plain(value) for name, value in inputs.items()}
    floating = [value.dtype for value in narrow.values() if value.is_floating_point()]
    if not floating:
        raise ValueError("measure_step: inputs has no floating-point tensor; give parameters and data")
    return narrow, max(unit_roundoff(dtype) for dtype in floating)


def _at_least_float32(value: torch.Tensor) -> torch.Tensor:
    here = plain(value)
    if not here.is_floating_point():
        return here.double()
    return here.float() if here.element_size() < 4 else here


def _check_names(single: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]) -> None:
    if single.keys() != results.keys():
        raise ValueError(f"measure_step: singles have {sorted(single)}, but the step gives {sorted(results)}")


def _moved(
    step: Step, inputs: Mapping[str, torch.Tensor], pairs: int, seed: int, spread: float, roundoff: float
) -> list[Mapping[str, torch.Tensor]]:
    """Run `step` perturbed, in pairs of directions."""
    generator = torch.Generator().manual_seed(seed)
    moved: list[Mapping[str, torch.Tensor]] = []
    for _ in range(pairs):
        before = generator.get_state()
        for direction in (1, -1):
            generator.set_state(before)
            with Perturbed(direction * spread, generator, roundoff):
                moved.append(step({name: value.clone() for name, value in inputs.items()}))
    return moved


def assess(
    reference: Mapping[Key, torch.Tensor],
    singles: Sequence[Mapping[Key, torch.Tensor]],
    moved: Sequence[Mapping[Key, torch.Tensor]],
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
    envelope = {
        name: estimate(farthest(value, [one[name] for one in moved]), crosswise=True) for name, value in exact.items()
    }
    amplification = _amplification(envelope, errors, spread)
    rounding = {name: spread * roundoff * value.abs() for name, value in exact.items()}
    # The distance from the parallel step to a single-device step, plus the distance from there to the reference.
    tolerance = {
        name: torch.maximum(amplification[name] * value, rounding[name]) + _anywhere(errors[name], exact[name])
        for name, value in envelope.items()
    }
    return MeasuredStep(exact, tolerance, amplification)


def granted_at_least(
    single: Mapping[Key, torch.Tensor], moved: Sequence[Mapping[Key, torch.Tensor]], roundoff: float, spread: float
) -> dict[Key, torch.Tensor]:
    """Return a distance from `single` within which `assess`, with more measurements, would accept a result.

    `assess` grants the errors of `single` itself, plus the larger of two terms: `spread` roundoffs of each element, and
    the movement of several float64 pairs times an amplification of at least 1. One pair in the dtype of the step moves
    less, except for its own rounding, which is about `spread` times smaller. So a step within this distance of `single`
    is right, without the costly runs in float64. A step outside it may be right, too.

    Args:
        single: results of the step on one device in its own dtype, all finite.
        moved: results of the same step, perturbed by `spread` roundoffs in two opposite directions, and nudged if need
            be.
    """
    granted = {}
    for name, value in single.items():
        moving = estimate(farthest(value, [one[name] for one in moved]), crosswise=True)
        granted[name] = torch.maximum(moving, value.abs().mul_(spread * roundoff), out=moving).mul_(_SURE)
    return granted


def errors_seen(single: Mapping[Key, torch.Tensor], again: Mapping[Key, torch.Tensor]) -> dict[Key, float]:
    """Return the largest relative error of each result that two runs in one precision prove.

    `assess` measures the errors of both runs from float64, and grants the larger one everywhere. It is at least half of
    the difference between the two runs. Errors are relative to the size of the element (see `_size`).

    Args:
        single: results of the step on one device in its own dtype, all finite.
        again: the same on inputs that are moved by a roundoff, so that every sum rounds differently.
    """
    found = {}
    for name, value in single.items():
        size = _size(value)
        found[name] = 0.0 if size is None else float((farthest(value, [again[name]]) / size).max()) / 2
    return found


def granted_with(
    granted: Mapping[Key, torch.Tensor], single: Mapping[Key, torch.Tensor], errors: Mapping[Key, float]
) -> dict[Key, torch.Tensor]:
    """Add the errors of `errors_seen` to the distances of `granted_at_least`, as `assess` does."""
    wider = {}
    for name, value in granted.items():
        size = _size(single[name]) if errors.get(name) else None
        wider[name] = value if size is None else value + errors[name] * size
    return wider


def with_roundings(tolerance: torch.Tensor, exact: torch.Tensor, roundoff: float) -> torch.Tensor:
    """Return a tolerance with room for results that pass through a narrow dtype with this unit roundoff."""
    return tolerance + _ROUNDINGS * roundoff * (exact.abs() + root_mean_square(exact))


def _anywhere(errors: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Grant an error that was seen in one element to all elements, in proportion to their size.

    Errors of long sums grow with the sum, and the order of summation decides which elements get large errors.
    """
    size = _size(reference)
    return errors if size is None else (errors / size).max() * size


def _size(reference: torch.Tensor) -> torch.Tensor | None:
    """Return the size that each element's errors are proportional to; None if all elements are zero, or none exist."""
    size = reference.abs() + root_mean_square(reference)
    return size if size.numel() and bool((size > 0).all()) else None


def _amplification(
    envelope: Mapping[Key, torch.Tensor], errors: Mapping[Key, torch.Tensor], spread: float
) -> dict[Key, float]:
    """Estimate, for each result, the ratio of rounding within operators (mostly long sums) to the perturbations.

    A result with few elements may be right by chance, so its ratio is raised to the largest value that is plausible for
    the observed one, up to the largest observed ratio of all results.
    """
    seen = {}
    for name, value in envelope.items():
        size = root_mean_square(value)
        seen[name] = spread * root_mean_square(errors[name]) / size if size else 0.0
    largest = max([1.0, *seen.values()])
    return {
        name: max(1.0, min(largest, ratio / math.sqrt(least_mean_square(errors[name].numel(), _TEN_THOUSANDTH))))
        for name, ratio in seen.items()
    }


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 without TF32 in matrix products and convolutions inside the context; see `precision.exact`.

    TF32 rounds to 11 significant bits. Two steps that round differently may then differ by 5e-4, which would hide an
    equally large flipped bit.
    """
    before = precision.kept()
    precision.exact()
    try:
        yield
    finally:
        precision.put_back(before)
