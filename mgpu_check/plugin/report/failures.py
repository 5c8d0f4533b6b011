"""Put the errors and the output of ranks into pytest's reports, its debugger, and the JUnit file.

``--pdb`` and ``--trace`` are adapted to tests that run in other processes. Ranks that died between tests are a separate
case in the JUnit file.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from mgpu_check.errors import CheckFailure, RankFailure, RankHang
from mgpu_check.plugin.private_names import (
    ExceptionRepr,
    ReprEntryNative,
    ReprExceptionInfo,
    ReprFileLocation,
    ReprTraceback,
)
from mgpu_check.plugin.report.replay import parts_of
from mgpu_check.plugin.session import GpuSession
from mgpu_check.processes.tracebacks import is_engine, is_installed

_ON_PURPOSE = (CheckFailure, pytest.fail.Exception, ValueError, TypeError, pytest.UsageError, RankHang)
_REPLAY = "repeat with"
_LOGGED = re.compile(r"^\[rank\d+\]:\[[A-Z]\d{4} [\d:.]+ ", re.MULTILINE)
"""How a line of torch's log begins, with rank, level, date and time."""
_TOLD_BELOW = "Failed to reproduce exception"


def add_output(item: pytest.Item, output: Sequence[tuple[str, str, str]], when: str) -> None:
    """Add the output of each rank (process, stream, text) as a report section; with ``-s``, also print it at once."""
    for title, text in joined(output):
        item.add_report_section(when, title, text)
    for who, stream, text in output:
        if item.config.option.capture == "no" and stream != "log":  # as pytest, which prints no log
            lines = "".join(f"[{who}] {line}\n" for line in text.splitlines())
            encoding = sys.stdout.encoding or "utf-8"
            sys.stdout.write(lines.encode(encoding, "backslashreplace").decode(encoding))


def joined(output: Sequence[tuple[str, str, str]]) -> list[tuple[str, str]]:
    """Return the sections of a report for outputs (process, stream, text).

    Torch logs the same warning in every process. Outputs that differ only in the rank and the time of such lines are
    one section.
    """
    sections: dict[tuple[str, str], tuple[list[str], str]] = {}
    for number, (who, stream, text) in enumerate(output):
        same = _LOGGED.sub("", text) if _LOGGED.match(text) else str(number)
        sections.setdefault((stream, same), ([], text))[0].append(who)
    return [
        (f"{stream} of {whose[0]}" + (f", and {len(whose) - 1} more alike" if whose[1:] else ""), text)
        for (stream, _), (whose, text) in sections.items()
    ]


def hide_engine(error: BaseException) -> None:
    """Remove the engine's frames from the tracebacks of `error` and of all errors behind it.
    An error that the engine does not raise on purpose is a defect of the engine, and keeps its frames."""
    errors = [error]
    for error in errors:  # which grows
        behind = [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]
        errors += [cause for cause in behind if cause is not None and not any(cause is listed for listed in errors)]
        tb, frames, of_engine = error.__traceback__, list[types.TracebackType](), False
        while tb is not None:
            file = tb.tb_frame.f_code.co_filename
            of_engine = is_engine(file) or (of_engine and is_installed(file))  # or of a library that the engine calls
            frames += [] if of_engine else [tb]
            tb = tb.tb_next
        if of_engine and not isinstance(error, _ON_PURPOSE):
            continue
        for frame, after in zip(frames, [*frames[1:], None], strict=False):
            frame.tb_next = after
        error.__traceback__ = frames[0] if frames else None
        if isinstance(error, pytest.fail.Exception) and all(
            is_installed(f.tb_frame.f_code.co_filename) for f in frames
        ):
            error.pytrace = False  # of pytest-timeout, outside of the test's body
            error.msg = "\n".join([str(error), *getattr(error, "__notes__", ())])


def replace_traceback(
    item: pytest.Item, report: pytest.TestReport, call: pytest.CallInfo[None], session: GpuSession, in_parent: bool
) -> None:
    """Replace the engine's traceback in the report by the errors of the ranks."""
    error = call.excinfo.value if call.excinfo is not None else None
    errors = parts_of(error)
    if error is None or not any(isinstance(p, (RankFailure, RankHang)) for p in errors):
        return
    lines: list[str] = []
    for number, leaf in enumerate(errors, 1):
        session.explain(leaf)
        if len(errors) > 1:
            lines += ["", f"{f' failure {number} of {len(errors)} ':=^100}"]
        lines += _story(leaf, item, report, in_parent)
    if isinstance(error, BaseExceptionGroup):
        notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(_TOLD_BELOW)]
        lines[:0] = [error.message, *notes, *([] if len(errors) > 1 else [""])]
    head = errors[0]
    location = _location_in_test(head, item, report)
    headline = f"{type(head).__name__}: {(str(head).splitlines() or [''])[0]}"
    if len(errors) > 1:
        headline += f" (and {len(errors) - 1} more)"
    crash = ReprFileLocation(location.path, location.lineno, _printable(headline))
    entry = ReprEntryNative([line + "\n" for line in _printable("\n".join(lines)).split("\n")])
    entries = [] if item.config.option.tbstyle == "line" else [entry]  # pytest prints the line itself
    report.longrepr = ReprExceptionInfo(ReprTraceback(entries, None, style="native"), crash)


def _story(error: BaseException, item: pytest.Item, report: pytest.TestReport, in_parent: bool) -> list[str]:
    notes = [line for note in getattr(error, "__notes__", ()) for line in ("", note)]
    if not isinstance(error, (RankFailure, RankHang)):
        return [str(pytest.ExceptionInfo.from_exception(error).getrepr(style="short")), *notes]
    if not in_parent:
        return [str(error), *notes]
    # A test that calls `ranks.run` itself also has a failing line in this process.
    location = _location_in_test(error, item, report)
    return [f"{location.path}:{location.lineno}: in {item.name}", "", str(error), *notes]


def add_replay(report: pytest.TestReport, lines: Sequence[str]) -> None:
    """End the report of a failure with the shell lines that repeat it."""
    if isinstance(report.longrepr, ExceptionRepr):
        report.longrepr.addsection(_REPLAY, "\n".join(lines))
    elif isinstance(report.longrepr, str):
        report.longrepr = "\n".join([report.longrepr, f"{f' {_REPLAY} ':-^80}", *lines])


def _printable(text: str) -> str:
    """Escape lone surrogates, which neither files nor xdist's channels accept."""
    return text.encode(errors="backslashreplace").decode()


def _location_in_test(error: BaseException, item: pytest.Item, report: pytest.TestReport) -> ReprFileLocation:
    """Return the innermost line of the test's file in the error's traceback; without one, the start of the test."""
    path, line, _ = report.location
    if error.__traceback__ is not None:
        for entry in reversed(pytest.ExceptionInfo.from_exception(error).traceback):
            if Path(str(entry.path)) == item.path:
                return ReprFileLocation(path, entry.lineno + 1, "")
    return ReprFileLocation(path, (line or 0) + 1, "")


REFUSED_TRACE = (
    "--trace steps through tests in the pytest process, but this one runs in another, which has no terminal; "
    "call the code under test from a test with the fixture 'ranks', or leave --trace out"
)

_NO_POST_MORTEM = (
    "mgpu-check: no debugger for this test: it ran in other processes, which have no terminal. The report above shows "
    "the line and the values where each process stopped. To debug inside a rank, set PYTHONBREAKPOINT to a debugger "
    "that listens on a socket, call breakpoint(), and raise --rank-timeout."
)


class PostMortem:
    """Replaces pytest's plugin for ``--pdb``, and opens no debugger for tests that ran in other processes.

    `pytests_own`: the replaced plugin. `where`: returns where the body of an item ran: "ranks", "node" or "parent";
    None for tests without ranks.
    """

    def __init__(self, pytests_own: Any, processes_of: Callable[[pytest.Item], str | None]) -> None:
        self._own, self._where = pytests_own, processes_of

    def pytest_exception_interact(
        self, node: Any, call: pytest.CallInfo[Any], report: pytest.TestReport | pytest.CollectReport
    ) -> None:
        processes = self._where(node) if isinstance(node, pytest.Item) else None
        info = call.excinfo
        errors = [] if info is None else parts_of(info.value)
        if processes is None or info is None or not any(isinstance(leaf, (RankFailure, RankHang)) for leaf in errors):
            self._own.pytest_exception_interact(node=node, call=call, report=report)
            return
        frames = _to_file(info.value.__traceback__, node.path)
        if processes == "parent" and frames is not None:
            info.value.__traceback__ = frames
            call.excinfo = pytest.ExceptionInfo.from_exception(info.value)
            self._own.pytest_exception_interact(node=node, call=call, report=report)
            return
        terminal = node.config.get_terminal_writer()
        terminal.line()
        terminal.sep(">", "traceback")
        report.toterminal(terminal)
        # As pytest's plugin does, so that the summary does not repeat it (_pytest/debugging.py, _enter_pdb, 9.2).
        report._pdbshown = True  # type: ignore[union-attr]
        terminal.line(_NO_POST_MORTEM, yellow=True)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._own.pytest_internalerror(excinfo=excinfo)


def _to_file(tb: types.TracebackType | None, path: Path) -> types.TracebackType | None:
    """Cut `tb` after the last function frame in the test's own file; return None if there is no such frame."""
    frames = []
    while tb is not None:
        frames.append(tb)
        tb = tb.tb_next
    while frames and (
        Path(frames[-1].tb_frame.f_code.co_filename) != path or frames[-1].tb_frame.f_code.co_name == "<module>"
    ):
        frames.pop()
    cut: types.TracebackType | None = None
    for entry in reversed(frames):
        cut = types.TracebackType(cut, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return cut


_CASE = "mgpu_check::ranks that died while no test used them"


def add_idle_case(config: pytest.Config, deaths: Sequence[str]) -> None:
    """Add a failed case to the JUnit file, if one is written, for readers that see only this file."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "LogXML" and hasattr(plugin, "pytest_runtest_logreport"):
            # Only to this plugin: no test has failed, so other plugins must neither count nor rerun it.
            plugin.pytest_runtest_logreport(report=_report("setup", "\n".join(deaths)))
            plugin.pytest_runtest_logreport(report=_report("teardown", None))


def _report(when: Literal["setup", "teardown"], error: str | None) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=_CASE,
        location=("mgpu_check", None, _CASE.partition("::")[2]),
        keywords={},
        outcome="failed" if error else "passed",
        longrepr=error,
        when=when,
    )
