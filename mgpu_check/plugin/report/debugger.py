"""Adapt ``--pdb`` and ``--trace`` to tests that run in other processes."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mgpu_check.errors import RankFailure, RankHang
from mgpu_check.plugin.report.replay import parts_of

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

    Args:
        pytests_own: the replaced plugin.
        where: returns where the body of an item ran: "ranks", "node" or "parent"; None for tests without ranks.
    """

    def __init__(self, pytests_own: Any, where: Callable[[pytest.Item], str | None]) -> None:
        self._own = pytests_own
        self._where = where

    def pytest_exception_interact(
        self, node: Any, call: pytest.CallInfo[Any], report: pytest.TestReport | pytest.CollectReport
    ) -> None:
        where = self._where(node) if isinstance(node, pytest.Item) else None
        info = call.excinfo
        parts = [] if info is None else parts_of(info.value)
        if where is None or info is None or not any(isinstance(part, (RankFailure, RankHang)) for part in parts):
            self._own.pytest_exception_interact(node=node, call=call, report=report)
            return
        frames = _to_file(info.value.__traceback__, node.path)
        if where == "parent" and frames is not None:
            info.value.__traceback__ = frames
            call.excinfo = pytest.ExceptionInfo.from_exception(info.value)
            self._own.pytest_exception_interact(node=node, call=call, report=report)
            return
        terminal = node.config.get_terminal_writer()
        terminal.line()
        terminal.sep(">", "traceback")
        report.toterminal(terminal)
        report._pdbshown = True  # type: ignore[union-attr]  # as pytest's plugin does, so that the summary does not repeat it
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
    for one in reversed(frames):
        cut = types.TracebackType(cut, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return cut
