"""What `mgpu-check` shows on a terminal: the progress, the closing table, and the summary at the end of a run.

The progress is a live line, or in a log a line per property. The table has a row per property, or with ``-v`` one per
check.
"""

from __future__ import annotations

import contextlib
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from mgpu_check.asserts.known_defects import KNOWN_DEFECTS
from mgpu_check.plugin import device_leases
from mgpu_check.plugin.report.outcomes import defects_met, lacks_devices
from mgpu_check.plugin.session import GpuSession
from mgpu_check.version import torch_version

_LEAST_TEXT = 40
_NUMBERS = 25  # width of the columns "examples" and "seconds" and of all gaps

_LEVELS = {
    "quick": "a few examples of each check; --gpu-level=standard draws four times as many, tests larger tensors and "
    "more pairs of options, and takes about five times as long",
    "standard": "the usual number of examples; --gpu-level=long draws ten times as many",
    "long": "ten times the usual number of examples",
}

_RESULTS = {
    "passed": "passed",
    "failed": "FAILED",
    "skipped": "skipped",
    "known": "KNOWN",
    "xfailed": "known defect",
    "xpassed": "passed",
}


@dataclass
class Row:
    """The table row of one check of the suite."""

    property: str
    check: str
    examples: int
    sizes: str
    result: str
    seconds: float
    line: int
    reason: str = ""
    left_out: str = ""
    advice: str = ""


def row_of(report: pytest.TestReport | pytest.CollectReport) -> Row | None:
    """Return the row for the report of a check; None for other reports, and for a passed setup or teardown."""
    if isinstance(report, pytest.CollectReport):  # a file that cannot be imported
        return None
    properties = dict(report.user_properties)
    name = properties.get("mgpu_check.property")
    if name is None or (report.when != "call" and report.outcome == "passed"):
        return None
    outcome: str = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if outcome == "skipped" else "xpassed"
    showed, unseen = defects_met(report) if outcome == "passed" else ([], [])
    measured = [str(properties["mgpu_check.measured"])] if "mgpu_check.measured" in properties else []
    reason = "; ".join([*measured, *map(described_defect, showed), *map(described_absence, unseen)])
    if showed:
        outcome = "known"
    if outcome == "xfailed":
        reason = report.wasxfail
    elif outcome == "skipped" and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
    return Row(
        property=str(name),
        check=str(properties.get("mgpu_check.check", "")),
        examples=int(str(properties.get("mgpu_check.examples", 0))),
        sizes=str(properties.get("mgpu_check.world_sizes", "")) or "-",
        result=_RESULTS[outcome] if report.when == "call" or outcome == "skipped" else f"ERROR in {report.when}",
        seconds=report.duration,
        line=report.location[1] or 0,
        reason=reason,
        left_out=str(properties.get("mgpu_check.left_out", "")),
        advice=str(properties.get("mgpu_check.advice", "")),
    )


def described_defect(name: str) -> str:
    """Describe a known defect, with a link to its report."""
    defect = KNOWN_DEFECTS[name]
    return f"{defect.summary}: a known defect of others, {defect.link}"


def described_absence(name: str) -> str:
    """Return a remark that a test met the conditions of a known defect, and the defect did not occur."""
    defect = KNOWN_DEFECTS[name]
    return (
        f"the known defect {name} did not occur with torch {torch_version()}: it is fixed, or needs another condition; "
        f"see {defect.link}"
    )


def described_level(level: str) -> str:
    return f"level {level}: {_LEVELS[level]}"


def is_detailed(config: pytest.Config) -> bool:
    """Return whether the user wants a line per check: ``-v`` was given, on the command line or elsewhere.
    `mgpu-check` itself gives ``-q``, so its verbosity is 0 with ``-v``."""
    typed = any(re.fullmatch(r"-v+|--verbose", str(word)) for word in config.invocation_params.args)
    return typed or config.get_verbosity() > 0


def is_failure(row: Row) -> bool:
    return row.result.startswith(("FAILED", "ERROR"))


def counted(rows: Iterable[Row]) -> str:
    """Count the results of rows: "1 FAILED, 10 passed, 1 KNOWN"."""
    counts = Counter(row.result for row in sorted(rows, key=lambda row: (not is_failure(row), row.result != "passed")))
    return ", ".join(f"{count} {result}" for result, count in counts.items())


def print_table(terminal: pytest.TerminalReporter, level: str) -> None:
    """Print the table and a line about `level`, if checks of the packaged suite have run."""
    rows = [
        row
        for reports in terminal.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and (row := row_of(report)) is not None
    ]
    if not rows:
        return
    rows.sort(key=lambda row: (row.property, row.line))
    terminal.section("checks", sep="-")
    detailed = is_detailed(terminal.config)
    (_print_checks if detailed else _print_properties)(terminal, rows)
    terminal.line(
        f"{len(rows)} checks of {len({row.property for row in rows})} properties, "
        f"{sum(row.examples for row in rows)} examples, {sum(row.seconds for row in rows):.1f} s"
        + ("" if detailed else "; -v shows each check"),
        bold=True,
    )
    terminal.line(described_level(level))
    for advice in dict.fromkeys(row.advice for row in rows if row.advice):
        terminal.line(f"mgpu-check: {advice}", red=True)


def _print_properties(terminal: pytest.TerminalReporter, rows: Sequence[Row]) -> None:
    """Print a row per property, and below it each check that did not simply pass."""
    properties: dict[str, list[Row]] = {}
    for row in rows:
        properties.setdefault(row.property, []).append(row)
    width = max(len("property"), *map(len, properties))
    terminal.line(f"{'property':<{width}}  checks  examples  seconds  result", bold=True)
    for name, checks in properties.items():
        examples, seconds = sum(row.examples for row in checks), sum(row.seconds for row in checks)
        terminal.write(f"{name:<{width}}  {len(checks):>6}  {examples:>8}  {seconds:7.1f}  ")
        worst = min(checks, key=lambda row: (not is_failure(row), row.result == "passed"))
        terminal.line(counted(checks), **_colour(worst))
        for row in checks:
            if row.result != "passed" or row.left_out:
                _below(terminal, width, f"{row.result}: {row.check}", "")
                _below_check(terminal, width, row)


def _print_checks(terminal: pytest.TerminalReporter, rows: Sequence[Row]) -> None:
    width = max(len("property"), *(len(row.property) for row in rows))
    sizes = max(len("world sizes"), *(len(row.sizes) for row in rows))
    results = max(len("result"), *(len(row.result) for row in rows))
    checks = max(_LEAST_TEXT, terminal._tw.fullwidth - width - sizes - results - _NUMBERS)
    terminal.line(
        f"{'property':<{width}}  {'check':<{checks}}  examples  "
        f"{'world sizes':<{sizes}}  {'result':<{results}}  seconds",
        bold=True,
    )
    last = ""
    for row in rows:
        head, *continuation = textwrap.wrap(row.check, checks)
        terminal.write(f"{row.property if row.property != last else '':<{width}}  {head:<{checks}}  ")
        terminal.write(f"{row.examples:>8}  {row.sizes:<{sizes}}  ")
        terminal.write(f"{row.result:<{results}}", **_colour(row))
        terminal.line(f"  {row.seconds:7.1f}")
        for line in continuation:
            terminal.line(f"{'':<{width}}  {line}")
        _below_check(terminal, width, row)
        last = row.property


def _below_check(terminal: pytest.TerminalReporter, indent: int, row: Row) -> None:
    """Print the remarks of a check: why it did not simply pass, and what a pass does not show."""
    _below(terminal, indent, row.reason, "- ")
    _below(terminal, indent, row.left_out and f"left out: {row.left_out}", "- ")


def _below(terminal: pytest.TerminalReporter, indent: int, text: str, begin: str) -> None:
    """Print a note below a row, wrapped to the terminal's width without breaking links."""
    width = max(_LEAST_TEXT, terminal._tw.fullwidth - indent - 2)
    margin = " " * len(begin)
    lines = textwrap.wrap(
        text, width, initial_indent=begin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
    for line in lines:
        terminal.line(f"{'':<{indent}}  {line}")


def _colour(row: Row) -> dict[str, bool]:
    if row.result == "passed":
        return {"green": True}
    return {"red": True} if is_failure(row) else {"yellow": True}


_INTERVAL = 0.1  # seconds between two updates of the live line
_SILENCE = 30.0  # seconds between lines in a log about a running check: shorter intervals would fill the log
_KNOWN = 0.05  # share of the checks that must have ended before the time left is estimated from them

# pytest's own categories, so that its last line keeps its usual counts.
_CATEGORIES = {
    "passed": "passed",
    "FAILED": "failed",
    "skipped": "skipped",
    "known defect": "xfailed",
    "KNOWN": "KNOWN",
}


class LiveLine:
    """A line at the bottom of a terminal that is rewritten during a run. In a log, only permanent lines are written.

    It bypasses pytest's capturing, so it can be written while a test runs. `terminal`: pytest's terminal reporter, or
    None. `clock`: returns seconds from any fixed time.
    """

    def __init__(self, terminal: pytest.TerminalReporter | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal, self._clock = terminal, clock
        self._shown = -_INTERVAL

    @property
    def lives(self) -> bool:
        """True if the output is a terminal."""
        return self._terminal is not None and bool(self._terminal.isatty)

    def show(self, text: Callable[[], str], now: bool = False) -> None:
        """Write the line, at most once per 0.1 s; with `now`, in any case."""
        clock = self._clock()
        if self._terminal is not None and self.lives and (now or clock - self._shown >= _INTERVAL):
            self._shown = clock
            with self._past_capture() as terminal:
                terminal.rewrite(text()[: terminal._tw.fullwidth - 1], erase=True)

    def clear(self) -> None:
        if self._terminal is not None and self.lives:
            with self._past_capture() as terminal:
                terminal.rewrite("", erase=True)
                terminal.rewrite("")  # back to the first column

    def stay(self, text: str, **markup: bool) -> None:
        """Write a permanent line above the live one."""
        if self._terminal is not None:
            self.clear()
            with self._past_capture() as terminal:
                terminal.line(text, **markup)

    @contextlib.contextmanager
    def _past_capture(self) -> Iterator[pytest.TerminalReporter]:
        assert self._terminal is not None
        capture = self._terminal.config.pluginmanager.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
            yield self._terminal
            self._terminal.flush()


class Progress:
    """A pytest plugin that replaces pytest's dots.

    A log gets a line per property, when its last check has ended, and a line per failure; with ``-v`` a line per check.
    `clock`: returns seconds from any fixed time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._terminal: pytest.TerminalReporter | None = None
        self._session: GpuSession | None = None
        self._total = 0
        self._detailed = False
        self._left: Counter[str] = Counter()  # checks by file
        self._rows: dict[str, list[Row]] = {}  # by file
        self._done = 0
        self._failed = 0
        self._examples = 0
        self._current = ""
        self._running = False
        self._started = self._written = clock()
        self._first: float | None = None  # when the first check began
        self._line = LiveLine(None)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        from mgpu_check.plugin.stash import SESSION

        self._terminal = config.pluginmanager.get_plugin("terminalreporter")
        self._line = LiveLine(self._terminal, self._clock)
        self._detailed = is_detailed(config)
        self._session = config.stash[SESSION]
        self._session.on_example = self._count

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionstart(self) -> Generator[None, None, None]:
        assert self._session is not None
        if self._session.settings.simulate != "cpu":
            self._tell("mgpu-check: counting the GPUs of this machine")  # takes seconds: a process imports torch for it
        yield
        self._tell(self._session.header())  # because pytest's own header is off
        self._tell(described_level(self._session.settings.depth))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect([item.nodeid for item in session.items])
        if self._total and not session.config.option.collectonly:
            self._tell(f"{self._total} checks; the first waits until the ranks have imported torch")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._expect(ids)

    def _expect(self, ids: Sequence[str]) -> None:
        self._total = len(ids)
        self._left = Counter(map(_file, ids))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._current = nodeid.rpartition("::")[2]
        self._running = False
        self._first = self._clock() if self._first is None else self._first
        self._show(now=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = row_of(report)
        if row is None or self._terminal is None:
            return
        self._done += 1
        self._examples += row.examples
        self._running = False
        self._failed += is_failure(row)
        self._rows.setdefault(_file(report.nodeid), []).append(row)
        if not self._terminal.isatty and (self._detailed or is_failure(row)):
            self._tell(f"{self._count_of_done()} {row.result:<12} {row.property}: {row.check} {_work(row)}")
        elif is_failure(row):
            self._line.stay(f"{row.result} {row.property}: {row.check}", red=True)
        self._show(now=True)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        file = _file(nodeid)
        self._left[file] -= 1
        rows = self._rows.get(file, [])
        if rows and self._left[file] == 0 and not (self._detailed or self._line.lives):
            self._tell(f"{self._count_of_done()} {rows[0].property}: {counted(rows)} {_work(*rows)}")

    def pytest_sessionfinish(self) -> None:
        self._line.clear()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print no letter for a check, because this plugin writes a line about it."""
        row = row_of(report)
        if row is None or row.result.startswith("ERROR"):
            return None
        return _CATEGORIES[row.result], "", row.result

    def _count(self) -> None:
        self._running = True
        self._show()
        if not self._line.lives and self._clock() - self._written >= _SILENCE:
            self._tell(self._text())

    def _count_of_done(self) -> str:
        return f"[{self._done:>{len(str(self._total))}}/{self._total}]"

    def _tell(self, text: str) -> None:
        self._written = self._clock()
        self._line.stay(text)

    def _show(self, now: bool = False) -> None:
        self._line.show(self._text, now)

    def _text(self) -> str:
        failed = f", {self._failed} failed" if self._failed else ""
        running = self._session.test.examples if self._running and self._session is not None else 0
        done, left = self._done, ""
        # The checks to come take as long on average as those that have ended.
        if self._first is not None and done >= max(1, _KNOWN * self._total):
            left = f", about {(self._clock() - self._first) / done * (self._total - done):.0f} s left"
        return (
            f"[{done}/{self._total}{failed}] {self._clock() - self._started:.0f} s{left}, "
            f"{self._examples + running} examples: {self._current}"
        )


def _file(nodeid: str) -> str:
    """Return the file of a test: all checks of a property are in one file."""
    return nodeid.partition("::")[0]


def _work(*rows: Row) -> str:
    return f"({sum(row.examples for row in rows)} examples, {sum(row.seconds for row in rows):.1f} s)"


def print_summary(terminal: pytest.TerminalReporter, session: GpuSession) -> None:
    """Print the closing table, interrupted and dead ranks, remarks, and tests skipped because of too few devices."""
    print_table(terminal, session.settings.depth)
    if session.notes.interrupted:
        terminal.section("ranks that were interrupted", red=True)
        terminal.line(session.notes.interrupted)
    if session.notes.deaths:
        terminal.section("ranks that died while no test used them", red=True)
        for line in session.notes.deaths:
            terminal.line(line, red=True)
    for line in [*session.notes.lines, *device_leases.described_waits(session.notes.waits)]:
        terminal.line(f"mgpu-check: {line}", yellow=True)
    skipped = [report for report in terminal.stats.get("skipped", []) if lacks_devices(report)]
    if skipped:
        terminal.line(
            f"mgpu-check: {len(skipped)} tests were skipped because there are too few GPUs; --strict-gpus makes that "
            "a failure",
            yellow=True,
        )
    reports = [report for category in list(terminal.stats.values()) for report in category]
    showed, unseen = ({name for report in reports for name in defects_met(report)[which]} for which in (0, 1))
    for name in sorted(unseen - showed):
        terminal.line(f"mgpu-check: {described_absence(name)}", yellow=True)
    if session.settings.simulate and session.settings.asked:
        # A category of its own appears in pytest's last line: "3 passed, 4 SIMULATED GPUs in 1.20s".
        # pytest has cached it if the run stopped early (_pytest/terminal.py, _get_main_color, 9.2).
        terminal._known_types = None
        terminal.stats.setdefault("SIMULATED GPUs", [SimpleNamespace() for _ in range(session.settings.gpus or 0)])


def tell(config: pytest.Config, line: str) -> None:
    """Print a line to stderr at once, past pytest's capturing."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
        print(f"\nmgpu-check: {line}", file=sys.stderr, flush=True)
