"""Annotate the line of the user's code that a failed test is about, for the page of a pull request."""

from __future__ import annotations

import pytest

from mgpu_check.annotations import annotation
from mgpu_check.plugin.report.outcomes import Outcomes, TestOutcome
from mgpu_check.plugin.report.sarif import origin_of, problem_of


class Annotations:
    """A pytest plugin that prints an annotation for each failure of a test that used ranks or GPUs.

    It runs in the process that receives the reports of all tests.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._outcomes = Outcomes(config.rootpath)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.add(report)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for failed in self._outcomes.failed:
            if failed.ours:
                terminalreporter.line(_annotation(failed))


def _annotation(failed: TestOutcome) -> str:
    problem = problem_of(failed)
    lines = [problem.message]
    title = failed.name
    if problem.page:
        title = f"{problem.rule}: {problem.title}"
        lines += [f"do: {problem.advice}", f"see: {problem.page}"]
    return annotation(title, "\n".join([*lines, *origin_of(failed)]), problem.site)
