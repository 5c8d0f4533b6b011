"""Developers' tools in a rank: coverage is measured there too, and a debugger is refused, because there is no terminal."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Measuring", "coverage_here", "refused", "without_debugger"]

_REFUSED = (
    "a debugger has no terminal here: this runs in another process than pytest. Print, and see the output of each rank in "
    "the report; or set PYTHONBREAKPOINT to a debugger that listens on a socket, and give it time with --rank-timeout"
)


def coverage_here() -> str | None:
    """How coverage.py measures this process, for `Measuring` in another; None where it does not."""
    coverage = sys.modules.get("coverage")
    current = getattr(getattr(coverage, "Coverage", None), "current", lambda: None)()
    if current is None:
        return None
    try:
        configuration: str = current.config.serialize()
    except AttributeError:  # before 7.10
        return None
    return configuration


class Measuring:
    """Coverage of what one rank runs.

    Args:
        at_rest: called with a function that is to be called at the end of each test: data is written then, because a
            rank may end by a signal at any time afterwards.
    """

    def __init__(self, at_rest: Callable[[Callable[[], None]], None]) -> None:
        self._at_rest = at_rest
        self._measured: Any = None
        self._runs = False

    def start(self, configuration: str | None) -> None:
        """Measure from here to the end of the test, by what `coverage_here` said in the pytest process."""
        if configuration is None or self._runs:
            return
        if self._measured is None:
            import coverage

            inherited = coverage.Coverage.current()
            if inherited is not None:  # of the fork server
                inherited._auto_save = False
                inherited.stop()
            # A file for each rank; pytest-cov combines them with its own.
            self._measured = coverage.Coverage(config_file=f":data:{configuration}", data_suffix=True)
            for kind in ("no_data", "unimported_source", "preimported_source"):
                setattr(self._measured, f"_warn_{kind}", False)
            self._at_rest(self._write)
        self._measured.start()
        self._runs = True

    def _write(self) -> None:
        if self._runs:
            self._runs = False
            self._measured.stop()
            self._measured.save()


@contextlib.contextmanager
def without_debugger() -> Iterator[None]:
    """Refuse ``breakpoint()``, which would read from a terminal; a debugger that PYTHONBREAKPOINT names works."""
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
    """In place of what a debugger raises that has found no terminal, our own words; any other error as it is."""
    if type(error).__name__ == "BdbQuit" and type(error).__module__ == "bdb":
        return RuntimeError(_REFUSED).with_traceback(_without_debugger(error.__traceback__))
    if isinstance(error, RuntimeError) and str(error) == _REFUSED:
        error.__traceback__ = _without_debugger(error.__traceback__)
    return error


def _without_debugger(tb: types.TracebackType | None) -> types.TracebackType | None:
    """`tb` that ends where the debugger was called."""
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
