"""Progress of a running acceptance: one live line on a terminal, or a line per minute in a log.

The line shows the tests done, the time left and the verdict so far.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean

import pytest

from mgpu_check.acceptance.report.summary import OUTCOMES, seconds_text, what
from mgpu_check.devices.observations import Observation, SubjectResult
from mgpu_check.plugin.report.terminal import LiveLine

_LEAST = 3  # finished tests before the time left is estimated; a quarter of the tests if that is fewer
_APART = 60.0  # seconds between lines of a log. The end of a check always prints a line.


class Live:
    """A pytest plugin that replaces pytest's dots in an acceptance.
    `pytest_runtestloop` of `conftest.py` registers it when the order of tests is known, and ends it after the second
    looks. The log of the run calls `heard` with each new result."""

    def __init__(
        self,
        terminal: pytest.TerminalReporter | None,
        tests: Mapping[str, str],
        expected_seconds: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._line, self._clock = LiveLine(terminal, clock), clock
        self._tests, self._expected_seconds = dict(tests), dict(expected_seconds or {})
        self._started = self._began = self._said = clock()
        self._took: dict[str, list[float]] = {check: [] for check in self._tests.values()}
        self._left = Counter(self._tests.values())
        self._seen: Counter[str] = Counter()
        self._of_check: Counter[str] = Counter()
        self._doing = self._check = ""
        self._until: float | None = None

    def heard(self, results: Iterable[SubjectResult]) -> None:
        """Count new observations, and print the first failure."""
        for entry in results:
            if isinstance(entry, Observation):
                self._seen[entry.outcome] += 1
                self._of_check[entry.outcome] += 1
                if entry.outcome == "failed" and self._seen["failed"] == 1:
                    self._stay(f"{entry.check}: {entry.subject}: {entry.seen}", red=True)
        self.tick()

    def tick(self) -> None:
        self._line.show(self.text)
        if not self._line.lives and self._clock() - self._said >= _APART:
            self._stay(self.text())

    def phase(self, doing: str, at_most: float | None = None) -> None:
        """Show a phase outside of the tests, such as second looks, and the seconds that it may take; None: unknown."""
        self._doing, self._check = doing, ""
        self._until = None if at_most is None else self._clock() + at_most
        if at_most is not None and not self._line.lives:
            self._stay(self.text())
        self._line.show(self.text, now=True)

    def end(self) -> None:
        self._line.clear()

    def text(self) -> str:
        """Return the line: tests done and total, time, time left, the verdict so far, the current test."""
        seconds_left = self.left()
        remaining = "" if seconds_left is None else f", {seconds_text(_coarse(seconds_left))} left"
        if self._until is not None:
            remaining = f", at most {seconds_text(_coarse(max(0.0, self._until - self._clock())))} left"
        so_far = f"no failure in {what(self._seen.total(), 'look')}"
        if self._seen["failed"]:
            so_far = f"REJECTED so far, {what(self._seen['failed'], 'failure')}"
        if self._seen["unknown"]:
            so_far += f", {self._seen['unknown']} unknown"
        done = len(self._tests) - self._left.total()
        passed = seconds_text(round(self._clock() - self._started))
        return f"[{done}/{len(self._tests)}] {passed}{remaining}; {so_far}: {self._doing}".rstrip(": ")

    def left(self) -> float | None:
        """Estimate the seconds left; None if too few tests have finished, or all have.

        A test counts with the mean time of the finished tests of its check, or of all checks if it is the first of its
        check.
        """
        if not self._left.total() or len(self._tests) - self._left.total() < min(_LEAST, len(self._tests) // 4):
            return None
        remaining = 0.0
        unforeseen = (seconds for check, seconds in self._took.items() if check not in self._expected_seconds)
        durations = list(itertools.chain.from_iterable(unforeseen))
        for check, count in self._left.items():
            if not count:
                continue
            if check in self._expected_seconds:
                remaining += max(0.0, self._expected_seconds[check] - sum(self._took[check]))
            elif self._took[check] or durations:
                remaining += count * fmean(self._took[check] or durations)
            else:
                return None
        running = self._clock() - self._began if self._check else 0.0
        return max(0.0, remaining - running)

    def _stay(self, text: str, red: bool = False) -> None:
        self._said = self._clock()
        self._line.stay(text, **({"red": True} if red else {}))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        check = self._tests.get(nodeid)
        if check is None:
            return
        if check != self._check:
            self._of_check = Counter()
        self._check, self._began = check, self._clock()
        self._doing = f"{check}: {nodeid.rpartition('::')[2]}"
        self._line.show(self.text, now=True)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        check = self._tests.get(nodeid)
        if check is None or not self._left[check]:
            return
        self._took[check].append(self._clock() - self._began)
        self._left[check] -= 1
        if not self._left[check]:
            counts = ", ".join(f"{self._of_check[name]} {name}" for name in OUTCOMES if self._of_check[name])
            self._stay(f"{check:<12} {counts or 'nothing seen'}, {seconds_text(sum(self._took[check]))}")
            self._check = ""
        self.tick()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print no letter for a test of an acceptance. Errors of setup and teardown are left to pytest."""
        if report.nodeid not in self._tests or (report.when != "call" and report.failed):
            return None
        if report.when != "call" and not report.skipped:
            return "", "", ""
        return report.outcome, "", report.outcome


def _coarse(seconds: float) -> float:
    """Round an estimated time: to seconds, or to ten seconds from a minute on."""
    return round(seconds, -1) if seconds >= 60 else round(seconds)
