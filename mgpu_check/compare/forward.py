"""Compare the outputs of modules with those of one device, to show where a forward pass parts.

They explain a difference, and never decide a verdict: correct ranks may compute partial results, which one device never
has.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

from mgpu_check.compare.alignment import Aligned, Deviation, output_deviation
from mgpu_check.compare.first_difference import FirstDifference, ratio_of
from mgpu_check.compare.outputs import OutputSummary, views
from mgpu_check.compare.rounding import Rounding
from mgpu_check.processes.rank_lists import named


@dataclass(frozen=True)
class ComparedOutput:
    """The outputs of a module at a step, compared with those of one device.

    Attributes:
        expected: those of one device; None if it has none.
        here: rank -> the whole outputs from its view; empty if they are not compared.
        why: why they are not compared; "" if they are.
    """

    expected: OutputSummary | None = None
    here: Mapping[int, OutputSummary] = field(default_factory=dict)
    why: str = ""

    def deviation(self, rank: int) -> Deviation:
        """Return the deviation on a rank."""
        return output_deviation(self.here[rank], self.expected)

    def wrong(self, tolerance: float) -> list[int]:
        """Return the ranks whose outputs deviate by more than the tolerance."""
        return [rank for rank in self.here if self.deviation(rank).size > tolerance]


def compared_output(aligned: Aligned, step: int, name: str, tolerance: float) -> ComparedOutput:
    """Compare the outputs of a module at a step, counted from 0.

    Args:
        tolerance: that of the module; it decides whether ranks have partial results.
    """
    expected = aligned.one.steps[step].outputs.get(name)
    at = {trace.rank: trace.steps[step] for trace in aligned.ranks}
    parts = {rank: own.outputs[name] for rank, own in at.items() if name in own.outputs}
    if expected is None or not parts:
        return ComparedOutput(expected, why="called on one side only, or its outputs cannot be read")
    seen = {rank: tuple(sorted(at[rank].seen)) for rank in parts}
    each, together, by_samples = views(parts, seen)
    whole = next(
        (v for v in (each, together, by_samples) if {own.count for own in v.values()} == {expected.count}), None
    )
    if whole is None:
        counts = sorted({part.count for part in parts.values()})
        return ComparedOutput(expected, why=f"ranks have {counts} elements, and one device {expected.count}")
    found = ComparedOutput(expected, whole)
    if whole is each and len(parts) > 1 and found.wrong(tolerance):
        size = tolerance * max(expected.norm, *(part.norm for part in parts.values()))
        sums = [part.sum for part in parts.values()]
        numbers = [len(at[rank].seen) for rank in parts]
        weights = numbers if all(numbers) else [1] * len(sums)
        mean = math.fsum(map(operator.mul, weights, sums)) / sum(
            weights
        )  # such as the mean loss of each rank's samples
        for name_of_result, result in (("sum", math.fsum(sums)), ("mean", mean)):
            if abs(result - expected.sum) <= size < max(abs(own - expected.sum) for own in sums):
                why = f"ranks have partial results, whose {name_of_result} is that of one device"
                return ComparedOutput(expected, why=why)
    return found


def told_outputs(difference: FirstDifference) -> str:
    """Name the first module whose outputs differ at the step of a wrong gradient; "" if that is unknown.

    A module whose outputs also differed at an earlier step, when all gradients were right, proves nothing.
    """
    aligned, rounding, step = difference.aligned, difference.rounding, difference.step
    if difference.kind != "gradient" or difference.others_seen:
        return ""
    right, wrong, left = [], [], 0
    for name in aligned.one.modules:
        tolerance = rounding.of_output(step, name)
        found = compared_output(aligned, step, name, tolerance)
        off = found.wrong(tolerance)
        if (
            found.why
            or math.isinf(tolerance)
            or (off and any(_differs(aligned, rounding, earlier, name) for earlier in range(step)))
        ):
            left += 1
        elif off:
            wrong.append((name, off, found))
        else:
            right.append(name)
    said = f"the outputs of {len(right)} module{'s' * (len(right) > 1)} are right" if right else ""
    not_compared = f"; {left} {'was' if left == 1 else 'were'} not compared" if left else ""
    if wrong:
        name, off, found = wrong[0]
        rank = max(off, key=lambda one: found.deviation(one).size)
        ratio = ratio_of(found.here[rank], found.expected)
        factor = f"; norm x {ratio:.5g}" if ratio is not None and abs(ratio - 1) > 1e-3 else ""
        where = f"{named(off)} ({found.deviation(rank)}{factor})"
        return f"forward: the first output that differs is that of {module_name(name)}, on {where}" + (
            f"; {said}" * bool(right) + not_compared
        )
    if right:
        whole = "" in right and not left
        so = ", so the error is in the loss, the backward pass or a reduction" if whole else ""
        return f"forward: {said}{so}{not_compared}"
    return ""


def module_name(name: str) -> str:
    """Return the name of a module in reports."""
    return name or "the model"


def _differs(aligned: Aligned, rounding: Rounding, step: int, name: str) -> bool:
    tolerance = rounding.of_output(step, name)
    return bool(compared_output(aligned, step, name, tolerance).wrong(tolerance))
