"""Measure the results of a step on one device, and their tolerances, in a rank that is alone in its world."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch

from mgpu_check.diagnosis.observed import Expected, ObservedRun
from mgpu_check.diagnosis.results import Result
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.draws import Notes, entered
from mgpu_check.gates.observing import observe
from mgpu_check.gates.program import Program
from mgpu_check.gates.rounding import (
    joined,
    measured,
    measured_in_part,
    measured_provisionally,
    slightly_moved,
)
from mgpu_check.gates.runs import Provisional, RunPart
from mgpu_check.gates.scenario import Scenario
from mgpu_check.numerics.bounds import unit_roundoff
from mgpu_check.numerics.steps import MeasuredStep, full_precision, with_roundings
from mgpu_check.torch_hooks.tensors import name_of
from mgpu_check.torch_hooks.threads import one_thread

_FACTORS = tuple(2.0**power for power in range(30, -1, -1))


def measure(rank: Rank, program: Program, scenario: Scenario, deep: bool = False, alone: bool = True) -> Expected:
    """Run the reference, or else the step, unchanged, in float64, and perturbed; `numerics.steps` explains why.

    Args:
        deep: also measure the results after each optimizer step.
        alone: if there is a reference, also run the step at world size 1, which shows which batches suit the step and
            which random numbers it draws. The tolerance comes from the reference only.
    """
    remarks: list[str] = []
    narrower: set[torch.dtype] = set()
    with full_precision(), one_thread() as threads:
        notes = Notes()
        by_reference = program.reference is not None
        main = measured(rank, program, scenario, by_reference, deep, threads, notes)
        drawn = tuple(notes.drawn)
        own = None
        if by_reference and alone:
            of_step = Notes()
            with contextlib.suppress(Exception):  # a reference may be given because the step does not run alone
                own = observe(rank, program, scenario, around=lambda model, batches: entered(of_step))
                drawn = tuple(of_step.drawn)
                narrower = of_step.seen - notes.seen
                notes.seen |= of_step.seen
    remarks += main.remarks
    if not main.precise:
        remarks.append(
            "the step does not run in float64, or draws other random numbers there; the exact values are those of "
            "float32"
        )
    expected = Expected(
        main.single,
        own,
        by_reference,
        undetermined=main.undetermined,
        drawn=drawn,
        narrow=tuple(sorted(map(name_of, notes.seen))),
        remarks=remarks,
    )
    *earlier, last = [_with_room_for(stage, narrower) for stage in main.stages]
    expected.exact, expected.tolerance = last.reference, last.tolerance
    expected.snapshots = [stage.reference for stage in earlier]
    expected.allowances = [stage.tolerance for stage in earlier]
    return expected


def measure_provisionally(rank: Rank, program: Program, scenario: Scenario, alone: bool = True) -> Expected | None:
    """Run the reference, or else the step, unchanged and perturbed, in its own precision.

    Most right steps are recognised by that.

    Return None if the result is inconclusive, so that `measure` is needed.

    Args:
        alone: see `measure`; here the step runs beside a reference only if batches were changed, to check that they
            suit the step.
    """
    own = None
    with full_precision(), one_thread() as threads:
        notes = Notes()
        by_reference = program.reference is not None
        main = measured_provisionally(rank, program, scenario, by_reference, threads, notes)
        if main is None:
            return None
        if by_reference and alone and scenario.change:
            try:
                own = observe(rank, program, scenario)
            except Exception:
                return None
    main.single.initial = {}
    return _provisional(program, main, own, notes.drawn, notes.seen)


def measure_in_parts(
    rank: Rank, program: Program, scenario: Scenario, runs: Sequence[int], elements: int
) -> list[RunPart]:
    """Do this rank's share of the runs of `measure_provisionally`; see `rounding.measured_in_part`."""
    with full_precision(), one_thread():
        return [measured_in_part(rank, program, scenario, program.reference is not None, run, elements) for run in runs]


def of_parts(program: Program, parts: Sequence[RunPart], elements: int) -> Expected | None:
    """Join one part for each of `rounding.RUNS` as `measure_provisionally` does; None if inconclusive."""
    main = joined(parts, elements)
    return None if main is None else _provisional(program, main, None, parts[0].drawn, parts[0].narrow)


def _provisional(
    program: Program,
    main: Provisional,
    own: ObservedRun | None,
    drawn: Iterable[tuple[int, ...]],
    narrow: Iterable[torch.dtype],
) -> Expected:
    return Expected(
        main.single,
        own,
        program.reference is not None,
        {name: main.single.values[name] for name in main.tolerance},
        main.tolerance,
        drawn=tuple(drawn),
        narrow=tuple(sorted(map(name_of, narrow))),
        provisional=True,
    )


def measure_slightly_moved(rank: Rank, program: Program, scenario: Scenario) -> ObservedRun:
    """Run the reference, or else the step, once more; see `rounding.slightly_moved`.

    The difference from the first run shows rounding inside operators, which a perturbation of their results cannot
    show.
    """
    with full_precision(), one_thread() as threads:
        seen = slightly_moved(rank, program, scenario, program.reference is not None, threads)
    seen.initial = {}
    return seen


def largest_factor(rank: Rank, program: Program, scenario: Scenario) -> float | None:
    """Return the largest factor of the batch that keeps all results of one device finite in float16.

    Return None if the step does not compute in float16, or if no factor gives finite results.
    """
    notes = Notes()
    observe(rank, program, scenario, of_reference=False, around=lambda model, batches: entered(notes))
    if torch.float16 not in notes.seen:
        return None
    for factor in _FACTORS:
        scaled = Scenario(1, scenario.samples, 1, "scaled", factor, scenario.seed, scenario.batches)
        seen = observe(rank, program, scaled)
        if all(bool(value.isfinite().all()) for value in seen.values.values()):
            return factor
    return None


def _with_room_for(stage: MeasuredStep[Result], narrower: Iterable[torch.dtype]) -> MeasuredStep[Result]:
    """Return the stage with tolerances for rounding to dtypes that only the step uses, not the reference.

    The tolerances follow from the dtypes, not from the results of the step. Whole numbers, such as counts, must be
    exact.
    """
    roundoff = max(map(unit_roundoff, narrower), default=0.0)
    if not roundoff:
        return stage
    tolerance = dict(stage.tolerance)
    for name, exact in stage.reference.items():
        if not torch.equal(exact, exact.round()):
            tolerance[name] = with_roundings(tolerance[name], exact, roundoff)
    return MeasuredStep(stage.reference, tolerance, stage.amplification)
