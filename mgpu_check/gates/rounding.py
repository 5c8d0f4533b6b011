"""How far rounding may lead from what one program gives on one device.

What the perturbed runs change is not determined by the precision of the step; see `mgpu_check.numerics.steps`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mgpu_check.gates.draws import Notes
from mgpu_check.gates.perturbing import ROUNDOFF
from mgpu_check.gates.program import Program
from mgpu_check.gates.runs import Measured, Part, Provisional, Runs, alike, left_alike, wide
from mgpu_check.gates.scenario import Scenario
from mgpu_check.mistakes.observed import Observation
from mgpu_check.mistakes.results import Result
from mgpu_check.numerics.steps import PAIRS, deviations, errors_seen, granted_at_least
from mgpu_check.rank_side.rank import Rank

__all__ = [
    "RUNS",
    "joined",
    "measured",
    "measured_in_part",
    "measured_provisionally",
    "rounding_seen",
    "slightly_moved",
]

RUNS = (0, 1, -1)
"""The runs of a provisional measurement: as it is (0), and perturbed in two opposite directions (1 and -1)."""


def measured_provisionally(
    rank: Rank, program: Program, scenario: Scenario, of_reference: bool, threads: int, notes: Notes
) -> Provisional | None:
    """Run the step, or the reference, three or four times in its own precision; see `numerics.steps.granted_at_least`.

    None if that is not conclusive, and `measured` has to be used.

    Args:
        threads: how many a large model may have.
        notes: see `measured`.
    """
    return Runs(rank, program, scenario, of_reference, threads).provisional(notes)


def measured_in_part(
    rank: Rank, program: Program, scenario: Scenario, of_reference: bool, run: int, elements: int
) -> Part:
    """Do one of the runs of `measured_provisionally`, of a step that is known to be simple, with one thread.

    Args:
        run: one of `RUNS`.
        elements: about as many as the results have.
    """
    return Runs(rank, program, scenario, of_reference, 1).part(run, elements)


def joined(parts: Sequence[Part], elements: int) -> Provisional | None:
    """Return what `measured_provisionally` returns, from a part for each of `RUNS`, in their order; None if they are not
    conclusive.

    Args:
        elements: as `measured_in_part` was given.
    """
    seen = [part.seen for part in parts if part.seen is not None and part.simple]
    if len(seen) < len(RUNS) or not all(left_alike(seen[0], other) for other in seen[1:]):
        return None
    single, *moved = seen
    granted = granted_at_least(wide(single.values), [wide(one.values) for one in moved], ROUNDOFF, deviations(elements))
    return Provisional(single, granted)


def slightly_moved(rank: Rank, program: Program, scenario: Scenario, of_reference: bool, threads: int) -> Observation:
    """Run the step, or the reference, as it is, on a batch whose elements are moved by one roundoff: what is rounded is
    rounded otherwise.
    """
    return Runs(rank, program, scenario, of_reference, threads).slightly_moved()


def rounding_seen(single: Observation, again: Observation) -> dict[Result, float] | None:
    """Return how large errors of a run as it is are, by what `slightly_moved` leaves; see `numerics.steps.errors_seen`.

    None where the two have not left the same things.
    """
    return errors_seen(wide(single.values), wide(again.values)) if alike(single, again) else None


def measured(
    rank: Rank, program: Program, scenario: Scenario, of_reference: bool, deep: bool, threads: int, notes: Notes
) -> Measured:
    """Run the step, or the reference, as often as it takes to find how exactly it is determined.

    Args:
        deep: measure what each step of an optimizer leaves, too.
        threads: how many a large model may have.
        notes: gets the dtypes and random numbers of the run as it is.
    """
    runs = Runs(rank, program, scenario, of_reference, threads)
    runs.as_it_is(notes, deep)
    runs.exactly()
    pairs = PAIRS - 1 if runs.large else PAIRS
    for pair in range(pairs):
        runs.perturb(pair)
    if runs.narrow:
        runs.perturb(2 * pairs, coherent=True)
    if nudge := runs.undecided():
        # What they are moved by is the same each time; in large models, where all is slow, once will do.
        for pair in range(1 if runs.large else pairs):
            runs.perturb(pairs + pair, nudge)
    return runs.measured(deep)
