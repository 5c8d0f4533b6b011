"""Measure how far rounding may move the results of a program on one device.

The precision of the step does not determine a result that the perturbed runs change; see `mgpu_check.numerics.steps`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mgpu_check.diagnosis.observed import ObservedRun
from mgpu_check.diagnosis.results import Result
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.draws import Notes
from mgpu_check.gates.perturbing import ROUNDOFF
from mgpu_check.gates.program import Program
from mgpu_check.gates.runs import Measured, Provisional, RunPart, Runs, alike, left_alike, wide
from mgpu_check.gates.scenario import Scenario
from mgpu_check.numerics.steps import PAIRS, deviations, errors_seen, granted_at_least

RUNS = (0, 1, -1)
"""The runs of a provisional measurement: unperturbed (0), and perturbed in two opposite directions (1 and -1)."""


def measured_provisionally(
    rank: Rank, program: Program, scenario: Scenario, of_reference: bool, threads: int, notes: Notes
) -> Provisional | None:
    """Run the step, or the reference, three or four times in its own precision; see `numerics.steps.granted_at_least`.

    Return None if these runs are inconclusive: then use `measured`.
    """
    return Runs(rank, program, scenario, of_reference, threads).provisional(notes)


def measured_in_part(
    rank: Rank, program: Program, scenario: Scenario, of_reference: bool, run: int, elements: int
) -> RunPart:
    """Do one run of `measured_provisionally` with one thread, for a step that is known to be simple.

    Args:
        run: one of `RUNS`.
        elements: approximate number of elements of the results.
    """
    return Runs(rank, program, scenario, of_reference, 1).part(run, elements)


def joined(parts: Sequence[RunPart], elements: int) -> Provisional | None:
    """Join the parts of all `RUNS` to the result of `measured_provisionally`; None if inconclusive."""
    seen = [part.seen for part in parts if part.seen is not None and part.simple]
    if len(seen) < len(RUNS) or not all(left_alike(seen[0], other) for other in seen[1:]):
        return None
    single, *moved = seen
    granted = granted_at_least(wide(single.values), [wide(one.values) for one in moved], ROUNDOFF, deviations(elements))
    return Provisional(single, granted)


def slightly_moved(rank: Rank, program: Program, scenario: Scenario, of_reference: bool, threads: int) -> ObservedRun:
    """Run the step, or the reference, unperturbed on a batch moved by one roundoff, so that sums round differently."""
    return Runs(rank, program, scenario, of_reference, threads).slightly_moved()


def rounding_seen(single: ObservedRun, again: ObservedRun) -> dict[Result, float] | None:
    """Return the errors of an unperturbed run, from the results of `slightly_moved`; see `numerics.steps.errors_seen`.

    None if the two runs left results of other names or shapes, are finite in other places, or took other steps.
    """
    return errors_seen(wide(single.values), wide(again.values)) if alike(single, again) else None


def measured(
    rank: Rank, program: Program, scenario: Scenario, of_reference: bool, deep: bool, threads: int, notes: Notes
) -> Measured:
    """Run the step, or the reference, as often as needed to measure the tolerance of its results.

    Args:
        deep: also measure the results of each optimizer step.
    """
    runs = Runs(rank, program, scenario, of_reference, threads)
    runs.as_it_is(notes, deep)
    runs.exactly()
    pairs = PAIRS - 1 if runs.large else PAIRS
    for pair in range(pairs):
        runs.perturb(pair)
    if runs.narrow:
        runs.dither()
    if nudge := runs.undecided():
        # Every nudge moves gradients by the same amounts, so one pair suffices for large, slow models.
        for pair in range(1 if runs.large else pairs):
            runs.perturb(pairs + pair, nudge)
    return runs.measured(deep)
