"""Run one case of the step in a rank, and choose the results that go back to the pytest process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from mgpu_check.diagnosis.observed import ObservedRun, RankTrace
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.draws import redrawing
from mgpu_check.gates.events import traced
from mgpu_check.gates.module_outputs import noting_outputs
from mgpu_check.gates.observing import observe
from mgpu_check.gates.operands import Rows
from mgpu_check.gates.program import Program, modules_of
from mgpu_check.gates.scenario import Scenario
from mgpu_check.gates.targets import NotingLabels
from mgpu_check.numerics.steps import full_precision

_SMALL = 100_000
"""Most elements whose values every rank sends; above, only rank 0 does, and the others send checksums."""


def run_step(
    rank: Rank, program: Program, scenario: Scenario, whole: bool = False, histories: bool = False
) -> ObservedRun:
    """Run the step on this rank and return its results.

    Args:
        whole: every rank sends all values.
        histories: see `observe`.
    """
    with full_precision():
        seen = observe(_placed(rank, program, scenario), program, scenario, histories=histories)
    if not whole and sum(value.numel() for value in seen.values.values()) > _SMALL:
        seen.initial = {}  # only the diagnosis needs it, and that runs the step again
        if rank.index and not seen.pieces and not seen.unused:
            seen.values = {}
    return seen


def run_traced(rank: Rank, program: Program, scenario: Scenario) -> tuple[ObservedRun, RankTrace]:
    """Run the step on this rank, and return its results (also after each optimizer step) with the calls it made."""
    return _traced(_placed(rank, program, scenario), program, scenario, of_reference=False)


def run_redrawn(rank: Rank, program: Program, scenario: Scenario, times: int) -> ObservedRun:
    """Run the step on this rank with other random numbers from the same seeds; see `redrawing`."""
    with full_precision():
        placed = _placed(rank, program, scenario)
        return observe(placed, program, scenario, traced=True, around=lambda model, batches: redrawing(times))


def run_traced_alone(rank: Rank, program: Program, scenario: Scenario) -> RankTrace:
    """Return the calls of the reference; without a reference, the calls of the step at world size 1."""
    return _traced(rank, program, scenario, of_reference=program.reference is not None)[1]


def _traced(rank: Rank, program: Program, scenario: Scenario, of_reference: bool) -> tuple[ObservedRun, RankTrace]:
    trace = RankTrace()
    with full_precision():
        seen = observe(
            rank,
            program,
            scenario,
            of_reference=of_reference,
            deep=True,
            traced=True,
            around=lambda model, batches: _noting(model, trace, Rows(batches)),
        )
    return seen, trace


@contextlib.contextmanager
def _noting(model: Any, trace: RankTrace, rows: Rows) -> Iterator[None]:
    with NotingLabels(trace.labels), noting_outputs(modules_of(model), trace), traced(model, trace, rows):
        yield


def _placed(rank: Rank, program: Program, scenario: Scenario) -> Rank:
    return dataclasses.replace(rank, size=scenario.world_size) if program.single_process else rank
