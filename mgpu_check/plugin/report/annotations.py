"""Annotate the line of the user's code that a failed test is about, for the page of a pull request."""

from __future__ import annotations

import pytest

from mgpu_check.annotations import annotation
from mgpu_check.diagnosis.registry import all_mistakes
from mgpu_check.plugin.report.outcomes import Outcomes, TestOutcome


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
    title, lines = failed.name, [failed.headline]
    known = all_mistakes() if failed.mistakes else {}
    if (mistake := known.get(next(iter(failed.mistakes), ""))) is not None:
        title = f"{mistake.name}: {mistake.title}"
        lines += [f"do: {mistake.advice}", f"see: {mistake.page}"]
    lines += [f"test: {failed.name}", *(f"repeat with: {line}" for line in failed.replay.splitlines()[:1])]
    return annotation(title, "\n".join(lines), failed.properties.get("site") or failed.line)
