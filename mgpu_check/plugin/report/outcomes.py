"""The outcome of each test, and facts about it as properties of its report, for JUnit files and the closing table.

Outcomes are collected from the reports, whether a test ran here or in a pytest-xdist worker.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mgpu_check.applications import is_packaged, suite_of
from mgpu_check.errors import StartupFailure
from mgpu_check.plugin.private_names import GENERATED_SEED
from mgpu_check.plugin.private_names import SEED as SEED_OF_SOURCE
from mgpu_check.plugin.report.replay import parts_of
from mgpu_check.plugin.session import GpuSession
from mgpu_check.processes.channel import SEED

_LACK, _SHOWED, _UNSEEN = "lack", "known_defects", "known_defects_unseen"


def add_identity(item: pytest.Item, host: int | None) -> None:
    """Record the property and the title of a check of the packaged suite. Clears the record of an earlier try.
    `host`: host of the test, if the check runs on each of several hosts; otherwise None."""
    # From an earlier try, if failures are rerun.
    ours = {f"mgpu_check.{name}" for name in ("failed_ranks", "mistakes", "replay", "site", "advice")}
    item.user_properties[:] = [entry for entry in item.user_properties if entry[0] not in ours]
    if is_packaged(item):
        name = item.path.stem.removeprefix("test_")
        title = (getattr(item, "function", item).__doc__ or item.name).strip().splitlines()[0].rstrip(".")
        _set(item, "property", name)
        _set(item, "check", title if host is None else f"{title} (node {host})")


def add_usage(item: pytest.Item, session: GpuSession) -> None:
    """Record examples, world sizes, devices, seeds, left out cases, known defects and limits of passes of the test."""
    _set(item, "examples", session.test.examples)
    _set(item, "world_sizes", " ".join(map(str, session.sizes())))
    if session.test.left_out:
        reasons: dict[str, dict[str, None]] = {}
        for case, reason in session.test.left_out:
            reasons.setdefault(reason, {})[case] = None
        _set(item, "left_out", "; ".join(f"{', '.join(cases)}: {reason}" for reason, cases in reasons.items()))
    if session.test.not_seen:
        _set(item, "not_seen", "\n".join(session.test.not_seen))
    showed = dict.fromkeys(met.name for met in session.test.met if met.failed)
    _set(item, _SHOWED, " ".join(showed))
    _set(item, _UNSEEN, " ".join(dict.fromkeys(met.name for met in session.test.met if met.name not in showed)))
    _set(item, "simulated", session.settings.simulate or "")
    _set(item, "devices", session.describe_devices())
    _set(item, "seed", SEED)
    function = getattr(item, "function", None)
    for name in (SEED_OF_SOURCE, GENERATED_SEED):
        seed = getattr(function, name, None)
        if seed is not None:
            _set(item, "hypothesis_seed", seed)
            return
    seed = item.config.getoption("--hypothesis-seed", None)
    if seed is not None and getattr(function, "is_hypothesis_test", False):
        _set(item, "hypothesis_seed", seed)


def add_lack(item: pytest.Item, lack: str) -> None:
    """Record why there are too few devices for the test, which is skipped."""
    _set(item, _LACK, lack)


def lacks_devices(report: object) -> bool:
    """Return whether a test was skipped because there are too few devices."""
    return any(name == f"mgpu_check.{_LACK}" for name, _ in getattr(report, "user_properties", ()))


def defects_met(report: object) -> tuple[list[str], list[str]]:
    """Return the names of the known defects that a test has met: those that occurred, and those that did not."""
    properties = {str(name): str(value) for name, value in getattr(report, "user_properties", ())}
    showed, unseen = (properties.get(f"mgpu_check.{name}", "").split() for name in (_SHOWED, _UNSEEN))
    return showed, unseen


def add_failure(item: pytest.Item, error: BaseException | None, replay: Sequence[str], simulated: bool) -> None:
    """Record the failed ranks, the likely mistakes and their line, the replay lines, and an advice for the suite."""
    errors = parts_of(error)
    proven = all(isinstance(leaf, AssertionError) and not isinstance(leaf, StartupFailure) for leaf in errors)
    suite = suite_of(item)
    advice = suite.advice.get(simulated) if suite is not None else None
    if advice and errors and proven:  # a busy machine also makes ranks late, or refuses to start them
        _set(item, "advice", f"a failed check shows that the code or torch is wrong, or {advice}")
    mistakes = dict.fromkeys(name for leaf in errors for name in getattr(leaf, "mistakes", ()))
    if mistakes:
        _set(item, "mistakes", " ".join(mistakes))
    if site := next(filter(None, (getattr(leaf, "site", "") for leaf in errors)), ""):
        _set(item, "site", site)
    ranks = {rank for leaf in errors for rank in getattr(leaf, "ranks", ()) if isinstance(rank, int)}
    _set(item, "failed_ranks", " ".join(map(str, sorted(rank for rank in ranks if rank >= 0))))
    _set(item, "replay", "\n".join(replay))


def _set(item: pytest.Item, name: str, value: object) -> None:
    key = f"mgpu_check.{name}"
    item.user_properties[:] = [entry for entry in item.user_properties if entry[0] != key]
    item.user_properties.append((key, value))


_ORDER = ("failed", "errors", "passed", "skipped", "xfailed", "xpassed")
_REPLAY = re.compile(r"^-+ repeat with -+$", re.MULTILINE)
_OURS = re.compile(r"^(?:[\w.]+\.)?(\w+): ")  # mgpu_check.errors.ScalingMismatch: …


@dataclass
class TestOutcome:
    """The outcome of one test, or of one failed phase."""

    name: str
    category: str  # one of "failed", "errors", "passed", "skipped", "xfailed", "xpassed"
    phase: str = "call"  # "setup", "call", "teardown", or "" for a file that was not collected
    headline: str = ""  # the failure, or the reason for a skip, in one line
    story: str = ""  # the whole report of a failure, without the replay lines
    line: str = ""  # the line of the test's file where the failure is, "/home/me/tests/test_step.py:40"
    # the report's properties from mgpu-check, by the last part of their names
    properties: dict[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return "world_sizes" in self.properties

    @property
    def sizes(self) -> str:
        return self.properties.get("world_sizes", "")

    @property
    def replay(self) -> str:
        return self.properties.get("replay", "")

    @property
    def mistakes(self) -> list[str]:
        """The classes of mistakes that a failure looks like, most likely first."""
        return self.properties.get("mistakes", "").split()


class Outcomes:
    """The outcomes of a run. `root`: the directory that the paths in its reports start from.
    `Summaries` and `Annotations` make one each, where all reports arrive, and read it at the end of the run."""

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
        category = _kind_of(report)
        if category is None:
            return
        ours = "mgpu_check."
        properties = {
            name.removeprefix(ours): str(value)
            for name, value in report.user_properties
            if isinstance(name, str) and name.startswith(ours)
        }
        outcome = TestOutcome(report.nodeid, category, str(report.when), properties=properties)
        if category in ("failed", "errors"):
            story = report.longreprtext
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash is not None else report.longreprtext
            headline = next((line for line in message.splitlines() if line.strip()), "failed")
            outcome.headline, outcome.line = _OURS.sub(r"\1: ", headline.strip()), _line(report, self._root)
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
            (outcome for outcome in self._tests.values() if outcome.category in kinds),
            key=lambda outcome: outcome.name.split("::")[0],
        )

    def counts(self) -> dict[str, int]:
        categories = [outcome.category for outcome in (*self._failed, *self._tests.values())]
        counts = {category: categories.count(category) for category in _ORDER if category in categories}
        return {
            "error" if (category, count) == ("errors", 1) else category: count for category, count in counts.items()
        }


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
