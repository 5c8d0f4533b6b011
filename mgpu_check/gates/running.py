"""Run one case of the step in a rank as it is, and choose what of it goes back to the pytest process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from mgpu_check.gates.events import traced
from mgpu_check.gates.module_outputs import noting_outputs
from mgpu_check.gates.observing import observe
from mgpu_check.gates.operands import Rows
from mgpu_check.gates.program import Program, modules_of
from mgpu_check.gates.scenario import Scenario
from mgpu_check.mistakes.observed import Observation, Trace
from mgpu_check.numerics.steps import full_precision
from mgpu_check.rank_side.rank import Rank

__all__ = ["run_step", "run_traced", "run_traced_alone"]

_SMALL = 100_000
"""Elements up to which the values of every rank travel; above, those of rank 0, and the others' checksums."""


def run_step(rank: Rank, program: Program, scenario: Scenario, whole: bool = False) -> Observation:
    """Return the step on this rank; with the values of every rank where `whole`."""
    with full_precision():
        seen = observe(_placed(rank, program, scenario), program, scenario)
    if not whole and sum(value.numel() for value in seen.values.values()) > _SMALL:
        seen.initial = {}  # it tells of mistakes, for which all is taken down once more
        if rank.index and not seen.pieces and not seen.unused:
            seen.values = {}
    return seen


def run_traced(rank: Rank, program: Program, scenario: Scenario) -> tuple[Observation, Trace]:
    """Return the step on this rank, with what each optimizer step leaves, and what the step has called."""
    return _traced(_placed(rank, program, scenario), program, scenario, of_reference=False)


def run_traced_alone(rank: Rank, program: Program, scenario: Scenario) -> Trace:
    """Return what the reference calls, or the step at world size 1 where there is none."""
    return _traced(rank, program, scenario, of_reference=program.reference is not None)[1]


def _traced(rank: Rank, program: Program, scenario: Scenario, of_reference: bool) -> tuple[Observation, Trace]:
    trace = Trace()
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
def _noting(model: Any, trace: Trace, rows: Rows) -> Iterator[None]:
    with noting_outputs(modules_of(model), trace), traced(model, trace, rows):
        yield


def _placed(rank: Rank, program: Program, scenario: Scenario) -> Rank:
    return dataclasses.replace(rank, size=scenario.world_size) if program.single_process else rank
