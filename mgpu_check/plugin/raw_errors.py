"""Turn a raw error of torch in a check of the packaged suite into a finding that names the call."""

from __future__ import annotations

import linecache
import traceback

from mgpu_check.errors import UnexpectedError
from mgpu_check.plugin.packaged import SUITE
from mgpu_check.processes.frames import is_engine

_FOLDER = f"/{SUITE.replace('.', '/')}/"
_LONGEST = 160
_KINDS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


def as_finding(error: BaseException) -> BaseException:
    """Return the finding for an error that a call in a check raised; return any other error unchanged.

    Subclasses, such as torch's error about full memory, keep their type, which shows their cause.
    """
    if not isinstance(error, _KINDS) or type(error).__module__ != "builtins":
        return error
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_engine(frame.filename)]
    if not frames or _FOLDER not in frames[0].filename:
        return error
    last = next(frame for frame in reversed(frames) if _FOLDER in frame.filename)
    place = f"{last.filename.rpartition(_FOLDER)[2]}:{last.lineno}"
    message = f"{_call(last)} raised {type(error).__name__}: {error} (in {place})"
    return UnexpectedError(message).with_traceback(error.__traceback__)


def _call(frame: traceback.FrameSummary) -> str:
    """Return the source of the expression that raised, in one line; the name of the function if it raised the error
    itself, or if there is no source."""
    first, last = frame.lineno or 0, frame.end_lineno or frame.lineno or 0
    lines = [linecache.getline(frame.filename, number).encode() for number in range(first, last + 1)]
    if not first or not all(lines):
        return frame.name
    if frame.colno is not None and frame.end_colno is not None:
        lines[-1] = lines[-1][: frame.end_colno]
        lines[0] = lines[0][frame.colno :]
    text = " ".join(b" ".join(lines).decode(errors="replace").split())
    if text.startswith("raise "):
        return frame.name
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
