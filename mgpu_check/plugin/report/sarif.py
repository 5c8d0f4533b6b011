"""Write the failures of tests that used ranks or GPUs in SARIF, for code scanning."""

from __future__ import annotations

import pytest

from mgpu_check import sarif
from mgpu_check.diagnosis.registry import all_mistakes
from mgpu_check.plugin.report.outcomes import Outcomes, TestOutcome
from mgpu_check.sarif import Problem

_JUDGED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)

BEGUN = sarif.document([], "the run has not ended: it was killed, or failed to start")
"""The content of a file before its run ends."""


def problem_of(failed: TestOutcome) -> Problem:
    """Return the failure of a test as a problem at the line of the user's code that it is about."""
    known = all_mistakes() if failed.mistakes else {}
    site = failed.properties.get("site") or failed.line
    if (mistake := known.get(next(iter(failed.mistakes), ""))) is not None:
        return Problem(mistake.name, mistake.title, failed.headline, mistake.advice, mistake.page, site)
    return Problem("failed-test", "a test that uses ranks or GPUs fails", failed.headline, site=site)


def origin_of(failed: TestOutcome) -> list[str]:
    """Return lines that name the test, and how to repeat it."""
    return [f"test: {failed.name}", *(f"repeat with: {line}" for line in failed.replay.splitlines()[:1])]


def render(outcomes: Outcomes, exit_status: int, stopped: str) -> str:
    """Return the text of a file. A run that was not judged as a whole says so in it.

    Args:
        stopped: why pytest has stopped before the last test, as with ``-x``; "" if it has not.
    """
    problems = []
    for failed in outcomes.failed:
        if failed.ours:
            problem = problem_of(failed)
            message = "\n".join([problem.message, *origin_of(failed)])
            problems.append(Problem(**{**vars(problem), "message": message}))
    others = len(outcomes.failed) - len(problems)
    why = "" if exit_status in _JUDGED else f"the run ended with exit code {int(exit_status)}"
    if stopped and not why:
        why = f"the run ended before its last test: {stopped}"
    if others and not why:
        number, are = ("1 failure", "is") if others == 1 else (f"{others} failures", "are")
        why = f"{number} without ranks, of a test or of a file that was not collected, {are} not in this file"
    return sarif.document(problems, why)
