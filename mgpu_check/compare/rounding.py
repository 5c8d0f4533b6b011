"""Measure on the script itself how much two runs may differ by rounding alone.

The script runs on one device once more, with every module's result and every gradient perturbed by a few unit
roundoffs. The deviation of this run at each step shows how much sums in another order may change. The tolerance is λ
times this deviation. λ is chosen so that rounding errors exceed the tolerance in any comparison of a run with
probability 1e-9 (`mgpu_check.numerics.steps.deviations`). There is no other tolerance.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from mgpu_check.compare.alignment import Aligned, Quantity, deviation, of_quantity, output_deviation
from mgpu_check.compare.trace import Parameter, Trace
from mgpu_check.processes.rank_lists import few

_WINDOW = 8  # steps: the few numbers of a small tensor may agree by chance at one step, but not at all of these
COMPARED: tuple[Quantity, ...] = ("gradient", "parameter")  # the quantities that every script has at each step
_USELESS = 0.5  # a wider tolerance would accept even a factor of two


@functools.cache
def roundoff(dtype: str) -> float:
    """Return the unit roundoff of a dtype, given by name: of a complex one's parts, of float32 for an exact one."""
    import torch  # imported late, in parallel with the first processes of the script

    from mgpu_check.numerics.reduction import unit_roundoff

    torch_dtype: torch.dtype = getattr(torch, dtype)
    real = torch_dtype.to_real() if torch_dtype.is_complex else torch_dtype
    return unit_roundoff(real if real.is_floating_point else torch.float32)


class Rounding:
    """The tolerance of each tensor of each step, relative to the tensor.

    `verdict.measured` makes it from the runs on one device, and makes another one if further runs must decide. The
    search for a difference and the reports ask it for tolerances.

    `reference`: the trace of the run on one device. `others`: traces of runs on one device that differ only by
    rounding: the perturbed one and the repeated one.
    """

    def __init__(self, reference: Trace, others: list[Trace]) -> None:
        from mgpu_check.numerics.steps import deviations

        self._one, self._others = reference, others
        # After the first non-finite step on one device, deviations do not measure rounding.
        steps = min(reference.finite_steps + 1, len(reference.steps), *(len(trace.steps) for trace in others))
        comparisons = sum(2 * len(step.parameters) + len(step.states) for step in reference.steps) * 13
        self.margin = deviations(comparisons)
        self._grown: dict[tuple[Quantity, str], list[float]] = {}
        measured: dict[Quantity, Mapping[str, Parameter]] = {
            **dict.fromkeys(COMPARED, reference.parameters),
            "state": reference.states,
        }
        for quantity, entries in measured.items():
            for name, entry in entries.items():
                spread = [self._apart(s, quantity, name, entry.shape) for s in range(steps)]
                self._grown[quantity, name] = _grown(spread)
        self._medians = {
            quantity: [statistics.median(self._grown[quantity, n][s] for n in entries) for s in range(steps)]
            for quantity, entries in measured.items()
            if entries
        }
        self._outputs: dict[str, list[float]] = {}
        for name in reference.modules:
            spread = []
            for step, *moved in zip(reference.steps[:steps], *(trace.steps for trace in others), strict=False):
                outputs, expected = [own.outputs.get(name) for own in moved], step.outputs.get(name)
                sizes = [math.inf if own is None else output_deviation(own, expected).size for own in outputs]
                spread.append(0.0 if expected is None else max(sizes))
            self._outputs[name] = _grown(spread)
        losses = []
        for step, *moved in zip(reference.steps[:steps], *(trace.steps for trace in others), strict=False):
            off = [abs(own.loss - step.loss) for own in moved if own.loss is not None and step.loss is not None]
            losses.append(max(off, default=0.0) / (abs(step.loss or 1.0)))
        self._losses = _grown(losses)

    def _apart(self, step: int, quantity: Quantity, name: str, shape: tuple[int, ...]) -> float:
        expected = of_quantity(self._one.steps[step], quantity).get(name)
        if expected is not None and not expected.finite:
            return math.inf
        return max(
            deviation(of_quantity(t.steps[step], quantity).get(name), expected, shape).size for t in self._others
        )

    def tolerance(self, step: int, quantity: Quantity, name: str) -> float:
        """Return the tolerance for the deviation of a tensor; infinite if rounding is unknown or unbounded."""
        state = self._one.states.get(name)  # rounded to its own dtype, and to that of its parameter
        entries = [state, self._one.parameters.get(state.of if state else name)]
        least = max(roundoff(entry.dtype) for entry in entries if entry is not None)
        if quantity == "before":
            return self.margin * least
        grown = self._grown[quantity, name]
        if step >= len(grown):
            return math.inf
        own = self.margin * max(grown[step], self._medians[quantity][step], least)
        owner = self._one.states[name].of if quantity == "state" else ""
        if not owner or owner not in self._one.parameters:
            return own
        # A square, such as the second moment of Adam, deviates by twice as much as the gradient may.
        squared = 2 * self.tolerance(step, "gradient", owner)
        return max(own, squared) if math.isfinite(squared) else own

    def of_loss(self, step: int) -> float:
        """Return the tolerance for the loss, relative to the loss."""
        # A loss in float32 may be that of outputs in a narrower dtype.
        least = max([2.0**-24, *map(roundoff, self._one.modules.values())])
        return self.margin * max(self._losses[step], least) if step < len(self._losses) else math.inf

    def of_output(self, step: int, name: str) -> float:
        """Return the tolerance for the outputs of a module; infinite if it is unknown, or hides a factor of two."""
        grown = self._outputs.get(name, [])
        if step >= len(grown):
            return math.inf
        median = statistics.median(own[step] for own in self._outputs.values())
        own = self.margin * max(grown[step], median, roundoff(self._one.modules[name]))
        return own if own <= _USELESS else math.inf

    def drowned(self, steps: int, quantity: Quantity, name: str) -> int | None:
        """Return the first step at which rounding alone hides a factor of two in a tensor, or None."""
        return next((step for step in range(steps) if self.tolerance(step, quantity, name) > _USELESS), None)

    def leaves_numbers(self, step: int, quantity: Quantity, name: str) -> bool:
        """Return whether a tensor that is not finite on one device is finite in a run that differs only by rounding."""
        steps = [trace.steps[step] for trace in self._others if step < len(trace.steps)]
        summaries = [of_quantity(own, quantity).get(name) for own in steps]
        return any(summary is not None and summary.finite for summary in summaries)

    def useful_until(self, steps: int) -> int:
        """Return the number of steps before rounding alone hides a factor of two in half of the gradients."""
        for step in range(steps):
            medians = self._medians.get("gradient", [])
            if step >= len(medians) or self.margin * medians[step] > _USELESS:
                return step
        return steps


def _grown(spread: list[float]) -> list[float]:
    """Return, for each step, the largest deviation up to it or within the first `_WINDOW` steps.
    This maximum is over steps and for whole tensors; `numerics.steps` is for elements."""
    grown: list[float] = []
    reached = max((x for x in spread[:_WINDOW] if math.isfinite(x)), default=0.0)
    for value in spread:
        reached = max(reached, value)
        grown.append(reached)
    return grown


@dataclass(frozen=True)
class Repeat:
    """The first difference between two runs of the script on one device: the step from 0, and a clause."""

    step: int
    description: str


def repeatability(reference: Trace, repeated: Trace) -> Repeat | None:
    """Return the first difference between two runs on one device that exceeds rounding; None if there is none.
    Samples and initial parameters must be equal bit for bit. Later tensors may differ if kernels sum in no fixed order.
    A first difference in the upper half of the digits has another cause."""
    if len(reference.steps) != len(repeated.steps):
        counts = len(reference.steps), len(repeated.steps)
        return Repeat(min(counts), f"it made {counts[0]} and {counts[1]} steps")
    aligned = Aligned(reference, [repeated])
    if aligned.missing or aligned.extra:
        return Repeat(0, f"the runs train different parameters: {few(aligned.missing + aligned.extra, 3)}")
    spread = 0.0
    for number, (step, repeated_step) in enumerate(zip(reference.steps, repeated.steps, strict=True)):
        for name, summary in step.before.items():
            value, shape = repeated_step.before.get(name), reference.parameters[name].shape
            # The deviation of NaN from NaN is not 0, so equal bits are not sufficient.
            if value is None or value.bits != summary.bits or deviation(value, summary, shape).size:
                return Repeat(number, f"{name} had different values before the step")
        if step.samples != repeated_step.samples:
            return Repeat(number, "the model received different samples, or in a different order")
        before = spread
        for quantity in COMPARED:
            for name in aligned.names:
                pair = of_quantity(repeated_step, quantity).get(name), of_quantity(step, quantity).get(name)
                size = deviation(*pair, reference.parameters[name].shape).size
                if not before and size > math.sqrt(roundoff(reference.parameters[name].dtype)):
                    tensor = f"the gradient of {name}" if quantity == "gradient" else name
                    return Repeat(number, f"{tensor} differed, although the samples were the same")
                spread = max(spread, size)
    return None
