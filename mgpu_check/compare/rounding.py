"""Measure on the script itself how far apart two runs may be by rounding alone.

The script runs on one device once more with every module's result and every gradient moved by a few unit roundoffs: how
far that leads, step after step, is how far sums in another order may lead. What may differ is λ times that; λ is such
that among all comparisons of a run rounding errors exceed it with probability 1e-9
(`mgpu_check.numerics.steps.deviations`). There is no other tolerance.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from mgpu_check.compare.alignment import Aligned, Kind, deviation, of_kind
from mgpu_check.compare.trace import Parameter, Trace
from mgpu_check.processes.rank_lists import few

__all__ = ["Repeat", "Rounding", "repeatability"]

_WINDOW = 8  # steps over which few numbers of a small tensor cannot all happen to be right
_USELESS = 0.5  # where not even a factor of two would show


@functools.cache
def roundoff(dtype: str) -> float:
    """Return the unit roundoff of a dtype by its name, of a complex one that of its parts; of float32 for what does not
    round.
    """
    import torch  # late: while the first processes import it, too

    from mgpu_check.numerics.bounds import unit_roundoff

    known: torch.dtype = getattr(torch, dtype)
    real = known.to_real() if known.is_complex else known
    return unit_roundoff(real if real.is_floating_point else torch.float32)


class Rounding:
    """The tolerance of each tensor of each step, in proportion to the tensor.

    Args:
        one: the run on one device.
        others: runs of the same that differ from it by rounding: moved, and repeated.
    """

    def __init__(self, one: Trace, others: list[Trace]) -> None:
        from mgpu_check.numerics.steps import deviations

        self._one, self._others = one, others
        # After the first step at which one device has no finite numbers, deviations from it are none of rounding.
        steps = min(one.finite_steps + 1, len(one.steps), *(len(trace.steps) for trace in others))
        comparisons = sum(2 * len(step.parameters) + len(step.states) for step in one.steps) * 13
        self.margin = deviations(comparisons)
        self._grown: dict[tuple[Kind, str], list[float]] = {}
        measured: dict[Kind, Mapping[str, Parameter]] = {**dict.fromkeys(_KINDS, one.parameters), "state": one.states}
        for kind, entries in measured.items():
            for name, entry in entries.items():
                apart = [self._apart(s, kind, name, entry.shape) for s in range(steps)]
                self._grown[kind, name] = _grown(apart)
        self._medians = {
            kind: [statistics.median(self._grown[kind, n][s] for n in entries) for s in range(steps)]
            for kind, entries in measured.items()
            if entries
        }
        losses = [_relative([t.steps[s].loss for t in others], one.steps[s].loss) for s in range(steps)]
        self._losses = _grown(losses)

    def _apart(self, step: int, kind: Kind, name: str, shape: tuple[int, ...]) -> float:
        expected = of_kind(self._one.steps[step], kind).get(name)
        if expected is not None and not expected.finite:
            return math.inf
        return max(deviation(of_kind(t.steps[step], kind).get(name), expected, shape).size for t in self._others)

    def tolerance(self, step: int, kind: Kind, name: str) -> float:
        """Return the tolerance for the deviation of a tensor: infinite where the moved run has parted ways by more than
        its size.
        """
        least = max(map(roundoff, self._dtypes(name)))
        if kind == "before":
            return self.margin * least
        grown = self._grown[kind, name]
        if step >= len(grown):
            return math.inf
        return self.margin * max(grown[step], self._medians[kind][step], least)

    def _dtypes(self, name: str) -> list[str]:
        """Return the dtypes that round a tensor: of a state also that of its parameter, whose gradients it is made of."""
        state = self._one.states.get(name)
        found = [state, self._one.parameters.get(state.of if state else name)]
        return [entry.dtype for entry in found if entry is not None]

    def of_loss(self, step: int) -> float:
        """Return the tolerance for the loss, in proportion to it."""
        return self.margin * max(self._losses[step], 2.0**-24) if step < len(self._losses) else math.inf

    def drowned(self, steps: int, kind: Kind, name: str) -> int | None:
        """Return the first of so many steps at which rounding alone hides a factor of two in a tensor; None where none
        does.
        """
        return next((step for step in range(steps) if self.tolerance(step, kind, name) > _USELESS), None)

    def leaves_numbers(self, step: int, kind: Kind, name: str) -> bool:
        """Return whether rounding alone makes a finite tensor of one that is not finite on one device."""
        found = [of_kind(trace.steps[step], kind).get(name) for trace in self._others if step < len(trace.steps)]
        return any(summary is not None and summary.finite for summary in found)

    def useful_until(self, steps: int) -> int:
        """Return the number of steps up to which rounding alone leaves a factor of two to be seen in most gradients."""
        for step in range(steps):
            medians = self._medians.get("gradient", [])
            if step >= len(medians) or self.margin * medians[step] > _USELESS:
                return step
        return steps


_KINDS: tuple[Kind, ...] = ("gradient", "parameter")


def _grown(apart: list[float]) -> list[float]:
    """Return what was reached up to each step, and in any of the first few.

    It is over steps and of whole tensors, so it is not what `numerics.envelopes` finds for elements.
    """
    grown: list[float] = []
    reached = max((x for x in apart[:_WINDOW] if math.isfinite(x)), default=0.0)
    for value in apart:
        reached = max(reached, value)
        grown.append(reached)
    return grown


def _relative(got: list[float | None], expected: float | None) -> float:
    known = [value for value in got if value is not None]
    if expected is None or not known:
        return 0.0
    return max(abs(value - expected) for value in known) / (abs(expected) or 1.0)


@dataclass(frozen=True)
class Repeat:
    """The first step at which the script, run twice on one device, differed, and in what."""

    step: int
    what: str


def repeatability(one: Trace, again: Trace) -> Repeat | None:
    """Find where two runs on one device part ways by more than rounding; None where they do not.

    Samples and first parameters must be the same bits. Later tensors may differ where kernels add up in no fixed order;
    what differs in the upper half of its digits, where it first differs, does so for another reason.
    """
    if len(one.steps) != len(again.steps):
        return Repeat(min(len(one.steps), len(again.steps)), f"it made {len(one.steps)} and {len(again.steps)} steps")
    aligned = Aligned(one, [again])
    if aligned.missing or aligned.extra:
        return Repeat(0, f"it trains other parameters: {few(aligned.missing + aligned.extra, 3)}")
    apart = 0.0
    for number, (here, there) in enumerate(zip(one.steps, again.steps, strict=True)):
        for name, summary in here.before.items():
            found = there.before.get(name)
            # What is no number is not even itself.
            if (
                found is None
                or found.bits != summary.bits
                or deviation(found, summary, one.parameters[name].shape).size
            ):
                return Repeat(number, f"{name} had other values before the step")
        if here.samples != there.samples:
            return Repeat(number, "the model was given other samples, or in another order")
        before = apart
        for kind in _KINDS:
            for name in aligned.names:
                pair = of_kind(there, kind).get(name), of_kind(here, kind).get(name)
                size = deviation(*pair, one.parameters[name].shape).size
                if not before and size > math.sqrt(roundoff(one.parameters[name].dtype)):
                    tensor = f"the gradient of {name}" if kind == "gradient" else name
                    return Repeat(number, f"{tensor} was another, from the same samples")
                apart = max(apart, size)
    return None
