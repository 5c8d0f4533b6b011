"""Show the progress of `mgpu-check`: a live line on a terminal, or a line per property in a log."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence

import pytest

from mgpu_check.plugin.report.table import Row, counted, is_detailed, is_failure, row_of, told_level
from mgpu_check.plugin.session import GpuSession

_INTERVAL = 0.1  # seconds between two updates of the live line
_SILENCE = 30.0
"""Seconds between lines in a log about a running check: shorter intervals would fill the log."""

_KNOWN = 0.05
"""Share of the checks that must have ended before the time left is estimated from them."""

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

    It bypasses pytest's capturing, so it can be written while a test runs.

    Args:
        terminal: pytest's terminal reporter, or None.
        clock: returns seconds from any fixed time.
    """

    def __init__(self, terminal: pytest.TerminalReporter | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = terminal
        self._clock = clock
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
        """Erase the line, to make room for permanent output."""
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

    Args:
        clock: returns seconds from any fixed time.
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
        self._tell(told_level(self._session.settings.depth))

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
        return (
            f"[{self._done}/{self._total}{failed}] {self._clock() - self._started:.0f} s{self._left_over()}, "
            f"{self._examples + running} examples: {self._current}"
        )

    def _left_over(self) -> str:
        """Return an estimate of the time left: the checks to come take as long on average as those that have ended."""
        done = self._done
        if self._first is None or done < max(1, _KNOWN * self._total):
            return ""
        each = (self._clock() - self._first) / done
        return f", about {each * (self._total - done):.0f} s left"


def _file(nodeid: str) -> str:
    """Return the file of a test: all checks of a property are in one file."""
    return nodeid.partition("::")[0]


def _work(*rows: Row) -> str:
    return f"({sum(row.examples for row in rows)} examples, {sum(row.seconds for row in rows):.1f} s)"
