"""Show progress of `mgpu-check`: one line that lives on a terminal, a line per check in a log."""

from __future__ import annotations

import time

import pytest

from mgpu_check.pytest_plugin.report.table import row_of
from mgpu_check.pytest_plugin.session import GpuSession

__all__ = ["Progress"]

_INTERVAL = 0.1

# pytest's own, so that its last line counts as ever.
_CATEGORIES = {"passed": "passed", "FAILED": "failed", "skipped": "skipped", "known defect": "xfailed"}


class Progress:
    """A pytest plugin that replaces pytest's dots."""

    def __init__(self) -> None:
        self._terminal: pytest.TerminalReporter | None = None
        self._session: GpuSession | None = None
        self._total = 0
        self._done = 0
        self._failed = 0
        self._examples = 0
        self._current = ""
        self._running = False
        self._started = time.monotonic()
        self._shown = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        from mgpu_check.pytest_plugin.stash import SESSION

        self._terminal = config.pluginmanager.get_plugin("terminalreporter")
        self._session = config.stash[SESSION]
        self._session.on_example = self._count

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        if self._terminal is not None and self._session is not None:
            self._terminal.line(self._session.header())  # pytest's own header is off, and the rest of it of no use here

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = len(session.items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._current = nodeid.rpartition("::")[2]
        self._running = False
        self._show(now=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = row_of(report)
        if row is None or self._terminal is None:
            return
        self._done += 1
        self._examples += row.examples
        self._running = False
        self._failed += row.result not in ("passed", "skipped", "known defect")
        if not self._terminal.isatty:
            self._terminal.line(
                f"{row.result:<12} {row.property}: {row.check} ({row.examples} examples, {row.seconds:.1f} s)"
            )
        elif row.result.startswith(("FAILED", "ERROR")):
            self._terminal.rewrite("", erase=True)
            self._terminal.line(f"{row.result} {row.property}: {row.check}", red=True)
        self._show(now=True)

    def pytest_sessionfinish(self) -> None:
        if self._terminal is not None and self._terminal.isatty:
            self._terminal.rewrite("", erase=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print no letter for a check: this plugin reports in words how it went."""
        row = row_of(report)
        if row is None or row.result.startswith("ERROR"):
            return None
        return _CATEGORIES[row.result], "", row.result

    def _count(self) -> None:
        self._running = True
        self._show()

    def _show(self, now: bool = False) -> None:
        terminal, session = self._terminal, self._session
        if terminal is None or session is None or not terminal.isatty:
            return
        clock = time.monotonic()
        if not now and clock - self._shown < _INTERVAL:
            return
        self._shown = clock
        failed = f", {self._failed} failed" if self._failed else ""
        line = (
            f"[{self._done}/{self._total}{failed}] {clock - self._started:.0f} s, "
            f"{self._examples + (session.examples if self._running else 0)} examples: {self._current}"
        )
        terminal.rewrite(line[: terminal._tw.fullwidth - 1], erase=True)
