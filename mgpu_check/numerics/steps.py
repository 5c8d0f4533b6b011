"""The tolerance of a whole training step, measured on that step.

A parallel step adds up the same numbers in another order. How much that may change a gradient depends on the model, on
the data and on how well conditioned both are; no relative tolerance fits all. Two measurements tell:

- the step in float64, with its inputs and every intermediate result moved by a few unit roundoffs of float32, in both
  directions. What moves there is not determined by float32 arithmetic: rounding errors that grow or cancel, and ReLUs
  and maxima that decide otherwise (an activation within rounding errors of zero has a gradient on one device and none
  on another);
- how far steps on a single device in float32 (the whole batch at once; and shard by shard, as the kernels that are
  chosen for a small batch may sum in another order) are from the one in float64: whether rounding within the operators
  is larger than what those perturbations bring, and by how much.

Perturbing at random to see which digits are significant is Monte Carlo arithmetic: D. S. Parker, *Monte Carlo
Arithmetic*, UCLA CSD-970002, 1997. That rounding errors act like independent random ones, so that λ standard deviations
are exceeded with probability 2·exp(-λ²/2) at most: N. J. Higham and T. Mary, *A New Approach to Probabilistic Rounding
Error Analysis*, SIAM J. Sci. Comput. 41 (2019).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from mgpu_check.numerics.bounds import unit_roundoff
from mgpu_check.numerics.envelopes import estimate, farthest, root_mean_square
from mgpu_check.numerics.perturbation import Perturbed
from mgpu_check.torch_hooks import precision
from mgpu_check.torch_hooks.tensors import plain

__all__ = [
    "PAIRS",
    "Measurement",
    "Step",
    "assess",
    "deviations",
    "errors_seen",
    "full_precision",
    "granted_at_least",
    "granted_with",
    "measure_step",
    "measure_step_provisionally",
]

Key = TypeVar("Key", bound=Hashable)
"""By which results are known: names, or what has a name."""

Step = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""A step as a function: named inputs, parameters and what else it depends on -> named results. It must compute in the
dtype of what it is given, from nothing else, without randomness."""

PAIRS = 3
"""Of perturbations: a decision as close as rounding errors goes unnoticed in about one of a thousand."""

_SURE = 0.8
"""What one pair of perturbations in the dtype of the step surely shows of what all of them show in float64."""


@dataclass(frozen=True)
class Measurement(Generic[Key]):
    """The results that a step must give, and how far from them rounding may lead; by name of result."""

    reference: dict[Key, torch.Tensor]
    """The results in float64."""
    tolerance: dict[Key, torch.Tensor]
    """float64, one for each element."""
    amplification: dict[Key, float]
    """How many times larger the errors of the float32 step may be than what the perturbations bring; at least 1."""

    def without(self, names: Iterable[Key]) -> Measurement[Key]:
        """Return the same without some of the results."""
        left_out = set(names)
        kept = [name for name in self.reference if name not in left_out]
        return Measurement(
            {name: self.reference[name] for name in kept},
            {name: self.tolerance[name] for name in kept},
            {name: self.amplification[name] for name in kept},
        )

    def wider(self, other: Measurement[Key]) -> Measurement[Key]:
        """Return the same with what another measurement of the same step grants besides."""
        tolerance = {name: torch.maximum(value, other.tolerance[name]) for name, value in self.tolerance.items()}
        amplification = {name: max(value, other.amplification[name]) for name, value in self.amplification.items()}
        return Measurement(self.reference, tolerance, amplification)


def deviations(comparisons: int, false_alarm: float = 1e-9) -> float:
    """Return λ such that of so many comparisons any exceeds λ standard deviations with probability `false_alarm` at
    most.
    """
    return math.sqrt(2 * math.log(2 * max(comparisons, 1) / false_alarm))


def measure_step(
    step: Step,
    inputs: Mapping[str, torch.Tensor],
    *,
    singles: Sequence[Mapping[str, torch.Tensor]] = (),
    pairs: int = PAIRS,
    seed: int = 0,
    magnified: float = 1.0,
) -> Measurement[str]:
    """Measure what `step` gives for `inputs`, and how far rounding in their dtype may lead from it.

    Args:
        step: see `Step`. Called 1 + 2·pairs times in float64, on the CPU.
        inputs: what the step depends on, as it is given to the parallel step: floating-point tensors (float32, say) are
            widened and perturbed, others are handed over as they are.
        singles: results of single-device steps in the dtype of the inputs, on the device where the parallel step runs:
            of the whole batch, of the batch shard by shard; one is computed here, on the CPU, where none is given.
        pairs: how often to perturb, in both directions.
        seed: of the perturbations.
        magnified: perturb by so many times more, to come to decisions that rounding within operators, which is larger
            than what is perturbed, may bring about.

    Raises:
        ValueError: `inputs` has no floating-point tensor, or `singles` have other results than `step`.
    """
    narrow, roundoff = _narrow(inputs)
    wide = {name: value.double() if value.is_floating_point() else value for name, value in narrow.items()}
    reference = {name: plain(value).double() for name, value in step(dict(wide)).items()}
    ran: list[Mapping[str, torch.Tensor]] = [*singles] or [step(dict(narrow))]
    for single in ran:
        _check_names(single, reference)
    # Moved by as many roundoffs as the largest of so many random errors has standard deviations.
    spread = deviations(sum(value.numel() for value in reference.values()))
    moved = _moved(step, wide, pairs, seed, magnified * spread, roundoff)
    return assess(reference, ran, moved, roundoff, spread)


def measure_step_provisionally(
    step: Step,
    inputs: Mapping[str, torch.Tensor],
    single: Mapping[str, torch.Tensor],
    *,
    seed: int = 0,
) -> Measurement[str]:
    """Measure how far results may be from those of a single device of which `measure_step` would say that they are right.

    What is further off may be right, too, and is to be measured by `measure_step`. `step` is called twice only, in the
    dtype of the inputs, on the CPU.

    Args:
        step, inputs, seed: see `measure_step`.
        single: one of its `singles`.

    Raises:
        ValueError: `inputs` has no floating-point tensor, or `single` has other results than `step`.
    """
    narrow, roundoff = _narrow(inputs)
    held = {name: _at_least_float32(value).clone() for name, value in single.items()}
    spread = deviations(sum(value.numel() for value in held.values()))
    moved = _moved(step, narrow, 1, seed, spread, roundoff)
    for one in moved:
        _check_names(held, one)
    return Measurement(held, granted_at_least(held, moved, roundoff, spread), dict.fromkeys(held, 1.0))


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
) -> Measurement[Key]:
    """Return what a step must give, and how far rounding may lead from it, by what was measured.

    Args:
        reference: the results in the best precision there is, as float64.
        singles: results of steps on one device in the precision of the parallel step.
        moved: results of steps whose every operator was perturbed by `spread` unit roundoffs, in pairs of directions.
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
    # From the parallel step to a single-device one, and from there to the reference.
    tolerance = {
        name: torch.maximum(amplification[name] * value, rounding[name]) + _anywhere(errors[name], exact[name])
        for name, value in envelope.items()
    }
    return Measurement(exact, tolerance, amplification)


def granted_at_least(
    single: Mapping[Key, torch.Tensor], moved: Sequence[Mapping[Key, torch.Tensor]], roundoff: float, spread: float
) -> dict[Key, torch.Tensor]:
    """Return how far from `single` results may be of which `assess` would say, measuring more, that they are right.

    `assess` grants the errors of `single` itself, beside what perturbations in float64 bring: the larger of what several
    pairs do, times an amplification of at least 1, and `spread` roundoffs of each element. One pair in the dtype of the
    step brings less, but for its own rounding, which is some `spread` times smaller. So a step that is within this of
    `single` is right, without any of the costly runs in float64; one that is not may be right, too.

    Args:
        single: results of the step on one device in its own dtype, all finite.
        moved: results of the same, perturbed by `spread` roundoffs in two opposite directions, and nudged if need be.
    """
    granted = {}
    for name, value in single.items():
        moving = estimate(farthest(value, [one[name] for one in moved]), crosswise=True)
        granted[name] = torch.maximum(moving, value.abs().mul_(spread * roundoff), out=moving).mul_(_SURE)
    return granted


def errors_seen(single: Mapping[Key, torch.Tensor], again: Mapping[Key, torch.Tensor]) -> dict[Key, float]:
    """Return the largest error of each result, as a fraction of its element's size, that two runs in one precision prove.

    `assess` has the errors of both from float64, and grants the larger everywhere: it is half of their difference at least.

    Args:
        single: results of the step on one device in its own dtype, all finite.
        again: the same on inputs that are moved by a roundoff, so that every sum is rounded otherwise.
    """
    found = {}
    for name, value in single.items():
        size = _size(value)
        found[name] = 0.0 if size is None else float((farthest(value, [again[name]]) / size).max()) / 2
    return found


def granted_with(
    granted: Mapping[Key, torch.Tensor], single: Mapping[Key, torch.Tensor], errors: Mapping[Key, float]
) -> dict[Key, torch.Tensor]:
    """Return what `granted_at_least` grants, and the errors of `errors_seen` besides, as `assess` does."""
    wider = {}
    for name, value in granted.items():
        size = _size(single[name]) if errors.get(name) else None
        wider[name] = value if size is None else value + errors[name] * size
    return wider


def _anywhere(errors: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Grant an error that was seen in one element to all elements, in proportion to their size.

    Errors of long sums grow with the sum; in which elements they are large depends on the order of summation.
    """
    size = _size(reference)
    return errors if size is None else (errors / size).max() * size


def _size(reference: torch.Tensor) -> torch.Tensor | None:
    """Return the size of each element to which its errors are in proportion; None where all are zero, or there is none."""
    size = reference.abs() + root_mean_square(reference)
    return size if size.numel() and bool((size > 0).all()) else None


def _amplification(
    envelope: Mapping[Key, torch.Tensor], errors: Mapping[Key, torch.Tensor], spread: float
) -> dict[Key, float]:
    """Estimate by how much rounding within operators (long sums, mostly) exceeds what was perturbed, for each result.

    A few elements may happen to be right. Their ratio is therefore raised to what it can be, given what it is seen to
    be, up to the largest ratio of all results.
    """
    seen = {}
    for name, value in envelope.items():
        size = root_mean_square(value)
        seen[name] = spread * root_mean_square(errors[name]) / size if size else 0.0
    largest = max([1.0, *seen.values()])
    return {
        name: max(1.0, min(largest, ratio / math.sqrt(_least_mean_square(errors[name].numel()))))
        for name, ratio in seen.items()
    }


def _least_mean_square(count: int) -> float:
    """Return the value below which the mean of the squares of `count` standard normal numbers falls with probability
    1e-4.

    The quantile of chi-squared, divided by `count`, by the approximation of Wilson and Hilferty (1931).
    """
    below = -3.719  # the quantile 1e-4 of the standard normal distribution
    root = 1 - 2 / (9 * max(count, 1)) + below * math.sqrt(2 / (9 * max(count, 1)))
    return max(root, 1e-3) ** 3


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 as float32: no TF32 in matrix products and convolutions for the time of the context; see
    `precision.exact`.

    TF32 rounds to 11 significant bits; two steps that round differently may then differ by 5e-4, and a flipped bit of
    that size could not be told from it.
    """
    before = precision.kept()
    precision.exact()
    try:
        yield
    finally:
        precision.put_back(before)
