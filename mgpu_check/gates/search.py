"""Search for the smallest scenario that fails."""

from __future__ import annotations

from typing import Protocol, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.errors import Flaky, Unsatisfiable
from hypothesis.reporting import with_reporter

from mgpu_check.errors import RankHang
from mgpu_check.gates.scenario import Scenario

_MOST_SHRINKS = 40
"""Most cases that are run after a failure to find a smaller failing case."""

Failed = TypeVar("Failed", covariant=True)


class Tries(Protocol[Failed]):
    def knows(self, scenario: Scenario) -> bool: ...

    def run(self, scenario: Scenario) -> Failed | None: ...


def smallest_failure(
    trials: Tries[Failed], scenarios: st.SearchStrategy[Scenario], examples: int, most_shrinks: int = _MOST_SHRINKS
) -> Failed | None:
    """Return the smallest failure that Hypothesis finds; None if all scenarios pass, or none can be drawn."""
    found: list[Failed] = []
    left = most_shrinks

    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=True,  # a gate must give the same verdict for the same code each time
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @hypothesis.given(scenarios)
    def try_one(scenario: Scenario) -> None:
        nonlocal left
        if found:
            left -= 1
            if left < 0 and not trials.knows(scenario):
                return
        try:
            trial = trials.run(scenario)
        except RankHang:
            if not found:
                raise
            left = 0  # stop shrinking: each hang takes the whole deadline
            return
        if trial is not None:
            found.append(trial)
            raise _ScenarioFailed

    with with_reporter(lambda text: None):  # the gate reports the failing example in more detail
        try:
            try_one()
        except Unsatisfiable:
            return None
        except (_ScenarioFailed, Flaky):  # an intermittent failure is a failure
            if not found:
                raise
            return found[-1]
    return None


class _ScenarioFailed(AssertionError):
    """A scenario failed; Hypothesis then searches for a smaller one."""
