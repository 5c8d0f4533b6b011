"""Refuse debuggers in a rank, which has no terminal: `breakpoint()`, and direct calls of a debugger."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

_REFUSED = (
    "a debugger has no terminal here: this runs in another process than pytest. Print, and see the output of each "
    "rank in the report; or set PYTHONBREAKPOINT to a debugger that listens on a socket, and give it time with "
    "--rank-timeout"
)


@contextlib.contextmanager
def without_debugger() -> Iterator[None]:
    """Make ``breakpoint()`` raise an error, unless PYTHONBREAKPOINT names a debugger."""
    hook = sys.breakpointhook
    if not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = _refuse
    try:
        yield
    finally:
        sys.breakpointhook = hook


def _refuse(*args: object, **kwargs: object) -> None:
    raise RuntimeError(_REFUSED)


def refused(error: BaseException) -> BaseException:
    """Replace the error of a debugger without a terminal by one that says what to do."""
    if type(error).__name__ == "BdbQuit" and type(error).__module__ == "bdb":
        return RuntimeError(_REFUSED).with_traceback(_without_debugger(error.__traceback__))
    if isinstance(error, RuntimeError) and str(error) == _REFUSED:
        error.__traceback__ = _without_debugger(error.__traceback__)
    return error


def _without_debugger(tb: types.TracebackType | None) -> types.TracebackType | None:
    last = tb
    one = tb
    while one is not None:
        if not _is_debugger(one.tb_frame.f_code.co_filename):
            last = one
        one = one.tb_next
    if last is not None:
        last.tb_next = None
    return tb


@functools.lru_cache(maxsize=256)
def _is_debugger(filename: str) -> bool:
    return filename == __file__ or Path(filename).name in ("bdb.py", "pdb.py", "debugging.py")
