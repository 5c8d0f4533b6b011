"""Around every function of a pytest run, in the rank: assertions explain themselves, tracebacks look like pytest's.

This module is imported by the ranks, not by the pytest process. It leans on inner parts of pytest that plugins use but
pytest does not promise; wherever one is missing, the plain Python text stands in.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest import assertion
from _pytest._code import ExceptionInfo
from _pytest._code.code import Traceback, TracebackEntry
from _pytest._io import TerminalWriter
from _pytest.assertion import util

from mgpu_check.checks.covered import heard_by
from mgpu_check.checks.known_defects import reported_to
from mgpu_check.processes.frames import is_engine
from mgpu_check.processes.raised import EXPLAIN, without_engine
from mgpu_check.pytest_plugin.forwarding import Collector
from mgpu_check.pytest_plugin.replacements import replaced
from mgpu_check.rank_side import uncaught
from mgpu_check.rank_side.coverage import Measuring
from mgpu_check.rank_side.debuggers import refused, without_debugger
from mgpu_check.rank_side.worker import at_rest, tell

__all__ = ["call"]

_LINES, _CHARACTERS = 12, 1200


_collector = Collector(tell)
_measuring = Measuring(at_rest)
at_rest(_collector.forget)


def call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    filters: Sequence[tuple[Any, ...]],
    fault: str | None,
    drawn: bool,
    coverage: str | None,
    replacements: bytes = b"",
) -> Any:
    """Call `function` as pytest would.

    Args:
        filters: arguments of `warnings.filterwarnings`, the one that counts most first.
        fault: name of a planted fault to have in the process meanwhile, or None.
        drawn: whether Hypothesis may be told of an example.
        coverage: how to measure it; see `Measuring`.
        replacements: what fixtures have replaced in modules; see there.
    """
    example = _collector.example(function) if drawn else contextlib.nullcontext()
    _measuring.start(coverage)
    try:
        with (
            _explained_assertions(),
            _collector.filtered(reversed(filters)),
            _fault(fault),
            example,
            without_debugger(),
            replaced(replacements),
            reported_to(lambda met: tell(("known", (met.name, met.failed)))),
            heard_by(lambda facts: tell(("covered", dict(facts)))),
        ):
            result = function(*args, **kwargs)
            _warn_of_strays()
            return result
    except BaseException as raised:
        error = refused(raised)
        with contextlib.suppress(AttributeError):  # an exception with __slots__ keeps its plain traceback
            setattr(error, EXPLAIN, functools.partial(_render, error))
        if error is not raised:
            raise error from None
        raise


def _warn_of_strays() -> None:
    """Warn of exceptions that nobody could catch, as pytest does in its own process; raise where that is an error.

    Where the function itself has raised, they are told at the end of the test, as pytest does it.
    """
    errors: list[Warning] = []
    for one in uncaught.take():
        category = getattr(pytest, one.warning)
        try:
            warnings.warn_explicit(one.text, category, one.file, one.line)
        except category as error:
            if one.error is not None:
                error.args = (f"{one.summary}: {type(one.error).__name__}: {one.error}",)
            errors.append(error.with_traceback(getattr(one.error, "__traceback__", None)))
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup("several exceptions that nobody could catch", errors)


@contextlib.contextmanager
def _explained_assertions() -> Iterator[None]:
    """Set up what pytest sets up around a test in its own process: what explains a failed comparison."""
    util._reprcompare = _explain
    try:
        yield
    finally:
        util._reprcompare = None


class _Config:
    """The part of `pytest.Config` that pytest's explanation of comparisons asks for."""

    class pluginmanager:
        @staticmethod
        def has_plugin(name: str) -> bool:
            return False

    @staticmethod
    def get_verbosity(kind: str | None = None) -> int:
        return 1

    @staticmethod
    def get_terminal_writer() -> TerminalWriter:  # versions before 9 ask it for colours, whatever plugins there are
        return TerminalWriter(io.StringIO())

    @staticmethod
    def getini(name: str) -> object:
        return {
            "assertion_text_diff_style": "ndiff",
            "truncation_limit_lines": str(_LINES),
            "truncation_limit_chars": str(_CHARACTERS),
        }[name]


def _explain(op: str, left: object, right: object) -> str | None:
    try:
        lines = assertion.pytest_assertrepr_compare(config=_Config(), op=op, left=left, right=right)  # type: ignore[arg-type]
    except Exception:
        return None
    if not lines:
        return None
    return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")


@contextlib.contextmanager
def _fault(name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    from mgpu_check.faults.registry import planted

    with planted(name):
        yield


def _render(error: BaseException) -> str:
    """Render the traceback as pytest shows it, from the user's function on."""
    whole = error.__traceback__
    try:
        info: ExceptionInfo[BaseException] = ExceptionInfo.from_exception(error.with_traceback(without_engine(whole)))
        buffer = io.StringIO()
        info.getrepr(style="long", tbfilter=_users_frames_in_full).toterminal(TerminalWriter(buffer))
        return buffer.getvalue().strip("\n")
    finally:
        error.__traceback__ = whole


def _users_frames_in_full(info: ExceptionInfo[BaseException]) -> Traceback:
    """Choose the frames to show in full: the test, and the deepest function that is no installed package's; one line
    for all others.
    """
    entries = list(info.traceback.filter(info)) or list(info.traceback)
    entries = [entry for entry in entries if not is_engine(str(entry.path))] or entries
    deepest = max((i for i, entry in enumerate(entries) if not _installed(entry)), default=0)
    return Traceback([e if i in (0, deepest) else e.with_repr_style("short") for i, e in enumerate(entries)])


def _installed(entry: TracebackEntry) -> bool:
    return bool({"site-packages", "dist-packages"} & set(Path(entry.path).parts))
