"""Call a test function in a rank as pytest would: with explained assertions, pytest's tracebacks and its warnings.

Only the ranks import this module. It uses internals of pytest; if one is missing, the plain Python text is shown. A raw
error of torch in a check of the packaged suite becomes a finding that names the call.
"""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest

from mgpu_check.asserts.known_defects import heard_by, reported_to
from mgpu_check.engine.rank_side import python_hooks
from mgpu_check.engine.rank_side.python_hooks import Measuring, refused, without_debugger
from mgpu_check.engine.rank_side.worker import at_rest, log_files, tell
from mgpu_check.errors import CheckFailure, UnexpectedError
from mgpu_check.plugin.private_names import ExceptionInfo, TerminalWriter, Traceback, TracebackEntry, assertion, util
from mgpu_check.plugin.rank_messages import Collector, logged
from mgpu_check.plugin.serialization import Shipped
from mgpu_check.processes.rank_pickling import EXPLAIN, without_engine
from mgpu_check.processes.tracebacks import is_check, is_engine, is_of_checks
from mgpu_check.torch_hooks.patches import replaced

_LONGEST = 160
_KINDS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


def as_finding(error: BaseException) -> BaseException:
    """Return the finding for an error that a call in a check raised; return any other error unchanged.
    Subclasses, such as torch's error about full memory, keep their type, which shows their cause."""
    if not isinstance(error, _KINDS) or type(error).__module__ != "builtins":
        return error
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_engine(frame.filename)]
    if not frames or not is_of_checks(frames[0].filename):
        return error
    last = next(frame for frame in reversed(frames) if is_of_checks(frame.filename))
    location = f"{last.filename.rpartition('/mgpu_check/')[2].partition('/')[2]}:{last.lineno}"
    message = f"{_call(last)} raised {type(error).__name__}: {error} (in {location})"
    return UnexpectedError(message).with_traceback(error.__traceback__)


def _call(frame: traceback.FrameSummary) -> str:
    """Return the source of the expression that raised, in one line; the name of the function if there is none."""
    start, end = frame.lineno or 0, frame.end_lineno or frame.lineno or 0
    lines = [linecache.getline(frame.filename, number).encode() for number in range(start, end + 1)]
    if not start or not all(lines):
        return frame.name
    if frame.colno is not None and frame.end_colno is not None:
        lines[-1] = lines[-1][: frame.end_colno]
        lines[0] = lines[0][frame.colno :]
    text = " ".join(b" ".join(lines).decode(errors="replace").split())
    if text.startswith("raise "):
        return frame.name
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


_LINES, _CHARACTERS = 12, 1200


_collector = Collector(tell)
_measuring = Measuring(at_rest)
at_rest(_collector.forget)


def call(shipped: Shipped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function that a rank has received as pytest would."""
    example = _collector.example(shipped.function) if shipped.drawn else contextlib.nullcontext()
    _measuring.start(shipped.coverage)
    try:
        with (
            # As pytest does around a test in its own process (_pytest/assertion/__init__.py, pytest_runtest_protocol).
            replaced(util, "_reprcompare", _explain),
            _collector.filtered(reversed(shipped.filters)),
            reported_to(lambda met: tell(("known", (met.name, met.failed)))),
            heard_by(lambda case: tell(("left_out", case))),
            contextlib.nullcontext() if shipped.fault is None else shipped.fault.planted(),
            example,
            without_debugger(),
            shipped.changes or contextlib.nullcontext(),
            logged(shipped.how_to_log, log_files, tell),
        ):
            result = shipped.function(*args, **kwargs)
            _warn_of_strays()
            return result
    except BaseException as raised:
        error = as_finding(refused(raised))
        with contextlib.suppress(AttributeError):  # an exception with __slots__ keeps its plain traceback
            setattr(error, EXPLAIN, functools.partial(_render, error))
        if error is not raised:
            raise error from None
        raise


def _warn_of_strays() -> None:
    """Warn of uncaught exceptions, as of threads, like pytest does in its own process. Raise if filters make it an
    error.

    If the function itself raised, they are reported at the end of the test, as pytest does.
    """
    errors: list[Warning] = []
    for stray in python_hooks.take():
        category = getattr(pytest, stray.warning)
        try:
            warnings.warn_explicit(stray.text, category, stray.file, stray.line)
        except category as error:
            if stray.error is not None:
                error.args = (f"{stray.summary}: {type(stray.error).__name__}: {stray.error}",)
            errors.append(error.with_traceback(getattr(stray.error, "__traceback__", None)))
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup("several uncaught exceptions of threads or finalizers", errors)


class _Config:
    """The part of `pytest.Config` that pytest's explanation of comparisons uses."""

    class pluginmanager:
        @staticmethod
        def has_plugin(name: str) -> bool:
            return False

    @staticmethod
    def get_verbosity(kind: str | None = None) -> int:
        return 1

    @staticmethod
    def get_terminal_writer() -> TerminalWriter:  # pytest before 9 needs it for colours
        return TerminalWriter(io.StringIO())

    @staticmethod
    def getini(name: str) -> object:
        return {
            "assertion_text_diff_style": "ndiff",
            "truncation_limit_lines": str(_LINES),
            "truncation_limit_chars": str(_CHARACTERS),
        }[name]


def _explain(op: str, ours: object, theirs: object) -> str | None:
    try:
        lines = assertion.pytest_assertrepr_compare(config=_Config(), op=op, left=ours, right=theirs)  # type: ignore[arg-type]
    except Exception:
        return None
    if not lines:
        return None
    return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")


def _render(error: BaseException) -> str:
    """Render the traceback in pytest's style, starting at the user's function."""
    full = error.__traceback__
    try:
        info: ExceptionInfo[BaseException] = ExceptionInfo.from_exception(error.with_traceback(without_engine(full)))
        buffer = io.StringIO()
        info.getrepr(style="long", tbfilter=_users_frames_in_full).toterminal(TerminalWriter(buffer))
        return buffer.getvalue().strip("\n")
    finally:
        error.__traceback__ = full


def _users_frames_in_full(info: ExceptionInfo[BaseException]) -> Traceback:
    """Show two frames in full, the test and the deepest function outside installed packages; shorten all others.
    The frames of a check of the packaged suite are left out, because its finding says more than its lines."""
    entries = list(info.traceback.filter(info)) or list(info.traceback)
    entries = [entry for entry in entries if not is_engine(str(entry.path))] or entries
    if isinstance(info.value, CheckFailure) and not isinstance(info.value, UnexpectedError):
        entries = [entry for entry in entries if not is_check(str(entry.path))] or entries[-1:]
    deepest = max((i for i, entry in enumerate(entries) if not _installed(entry)), default=0)
    return Traceback([e if i in (0, deepest) else e.with_repr_style("short") for i, e in enumerate(entries)])


def _installed(entry: TracebackEntry) -> bool:
    return bool({"site-packages", "dist-packages"} & set(Path(entry.path).parts))
