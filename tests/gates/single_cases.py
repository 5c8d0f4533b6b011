"""Programs that are tried on cases of a test's choice: a gate tries many more, makes the smallest, and diagnoses it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from mgpu_check.diagnosis.observations import KINDS
from mgpu_check.gates.gate_arguments import Program, RanksFixture
from mgpu_check.gates.search.scenarios import Scenario
from mgpu_check.gates.search.trials import Trial, Trials

NOTHING: Mapping[str, str] = MappingProxyType({})
NO_MESH: Mapping[str, int] = MappingProxyType({})


def failures(
    ranks: RanksFixture,
    program: Program,
    *cases: Scenario,
    kinds: Collection[str] = KINDS,
    unjudged: Mapping[str, str] = NOTHING,
) -> list[Trial]:
    """The cases that fail. If none does, all parameters but those of `unjudged` were compared with one device."""
    trials = Trials(ranks, program, frozenset(kinds), None, "step")
    failing = []
    for case in cases:
        compared = trials.completed.total()
        if (trial := trials.run(case)) is not None:
            failing.append(trial)
        else:
            assert trials.completed.total() > compared, f"{case} was not compared"
    if not failing:
        trials.coverage.finish(unjudged)
    return failing


def failure(
    ranks: RanksFixture, program: Program, size: int, samples: int, steps: int = 1, mesh: Mapping[str, int] = NO_MESH
) -> Trial | None:
    case = Scenario(size, samples, steps, mesh=tuple(mesh.items()))
    return next(iter(failures(ranks, program, case)), None)
