"""Collect the outcome of each test from its reports, whether it ran here or in a pytest-xdist worker."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_ORDER = ("failed", "errors", "passed", "skipped", "xfailed", "xpassed")
_REPLAY = re.compile(r"^-+ repeat with -+$", re.MULTILINE)
_OURS = re.compile(r"^(?:[\w.]+\.)?(\w+): ")  # mgpu_check.errors.ScalingMismatch: …


@dataclass
class TestOutcome:
    """The outcome of one test, or of one failed phase.

    Attributes:
        kind: one of "failed", "errors", "passed", "skipped", "xfailed", "xpassed".
        phase: "setup", "call", "teardown", or "" for a file that was not collected.
        headline: the failure, or the reason for a skip, in one line.
        story: the whole report of a failure, without the replay lines.
        line: the line of the test's file where the failure is, "/home/me/tests/test_step.py:40".
        properties: the report's properties from mgpu-check, by the last part of their names.
    """

    name: str
    kind: str
    phase: str = "call"
    headline: str = ""
    story: str = ""
    line: str = ""
    properties: dict[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """True if the test has used GPUs or ranks."""
        return "world_sizes" in self.properties

    @property
    def sizes(self) -> str:
        return self.properties.get("world_sizes", "")

    @property
    def examples(self) -> str:
        return self.properties.get("examples", "")

    @property
    def replay(self) -> str:
        return self.properties.get("replay", "")

    @property
    def mistakes(self) -> list[str]:
        """The classes of mistakes that a failure looks like, most likely first."""
        return self.properties.get("mistakes", "").split()


class Outcomes:
    """The outcomes of a run.

    Args:
        root: the directory that the paths in its reports start from.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tests: dict[str, TestOutcome] = {}
        self._failed: list[TestOutcome] = []

    def collected(self, report: pytest.CollectReport) -> None:
        """Record a file that cannot be collected, or was skipped as a whole."""
        if report.outcome == "failed":
            story = report.longreprtext
            last = story.strip().rpartition("\n")[2].removeprefix("E").strip()
            self._failed.append(TestOutcome(report.nodeid, "errors", "", f"not collected: {last}", story))
        elif report.outcome == "skipped":
            self._tests[report.nodeid] = TestOutcome(report.nodeid, "skipped", "", _reason(report))

    def add(self, report: pytest.TestReport) -> None:
        """Record the report of one phase of a test."""
        kind = _kind_of(report)
        if kind is None:
            return
        ours = "mgpu_check."
        properties = {
            name.removeprefix(ours): str(value)
            for name, value in report.user_properties
            if isinstance(name, str) and name.startswith(ours)
        }
        outcome = TestOutcome(report.nodeid, kind, str(report.when), properties=properties)
        if kind in ("failed", "errors"):
            story = report.longreprtext
            outcome.headline, outcome.line = _headline(report), _line(report, self._root)
            outcome.story = _REPLAY.split(story)[0].rstrip() if outcome.replay else story
            self._failed.append(outcome)
            if report.when != "teardown":
                self._tests.pop(report.nodeid, None)
            return
        outcome.headline = _reason(report)
        self._tests[report.nodeid] = outcome

    @property
    def failed(self) -> list[TestOutcome]:
        """Failures in order of time; a test may fail in its call and in its teardown."""
        return self._failed

    def of(self, *kinds: str) -> list[TestOutcome]:
        """Return the tests of these kinds, sorted by file, then by time."""
        return sorted(
            (one for one in self._tests.values() if one.kind in kinds), key=lambda one: one.name.split("::")[0]
        )

    def counts(self) -> dict[str, int]:
        """Return the count of each kind, named as in pytest's last line."""
        kinds = [one.kind for one in (*self._failed, *self._tests.values())]
        found = {kind: kinds.count(kind) for kind in _ORDER if kind in kinds}
        return {"error" if (kind, count) == ("errors", 1) else kind: count for kind, count in found.items()}


def _kind_of(report: pytest.TestReport) -> str | None:
    """Return the kind of a phase; None if it does not decide the outcome, such as a passed setup or a rerun."""
    outcome: str = report.outcome
    if hasattr(report, "wasxfail"):
        return "xfailed" if outcome == "skipped" else "xpassed"
    if outcome == "failed":
        return "failed" if report.when == "call" else "errors"
    if outcome == "skipped" or (outcome == "passed" and report.when == "call"):
        return outcome
    return None


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}".rstrip(": ")
    longrepr: Any = report.longrepr
    return str(longrepr[2]).removeprefix("Skipped: ") if isinstance(longrepr, tuple) else ""


def _line(report: pytest.TestReport, root: Path) -> str:
    path, line, _ = report.location
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None and Path(crash.path).name == Path(path).name:
        return f"{root / crash.path}:{crash.lineno}"
    return f"{root / path}:{(line or 0) + 1}"


def _headline(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else report.longreprtext
    first = next((line for line in message.splitlines() if line.strip()), "failed")
    return _OURS.sub(r"\1: ", first.strip())
