"""Hooks in the Python of a rank: debuggers are refused, uncaught exceptions are collected, names of shared memory and
semaphores are noted, and coverage is measured, with the configuration that coverage.py has in the pytest process.

A rank has no terminal for `breakpoint()`, nor for direct calls of a debugger.

Uncaught exceptions are those that end a thread, and those of finalizers, such as ``__del__``. Python prints them
and continues. They are kept here until the rank reports them, as pytest does in its own process.

The noted names can be removed after the rank has ended. Python itself notes them in a resource tracker, a separate
process. A rank's tracker would be killed with the rank's process group before it could remove the names, and would
count as left behind by the test.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

from mgpu_check.processes.child_processes import file_of_names
from mgpu_check.torch_hooks.patches import replaced

_REFUSED = (
    "a debugger has no terminal here: this runs in another process than pytest. Print, and see the output of each "
    "rank in the report; or set PYTHONBREAKPOINT to a debugger that listens on a socket, and give it time with "
    "--rank-timeout"
)


def without_debugger() -> AbstractContextManager[None]:
    """Make ``breakpoint()`` raise an error, unless PYTHONBREAKPOINT names a debugger."""
    has_debugger = os.environ.get("PYTHONBREAKPOINT")
    return contextlib.nullcontext() if has_debugger else replaced(sys, "breakpointhook", _refuse)


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
    entry = tb
    while entry is not None:
        if not _is_debugger(entry.tb_frame.f_code.co_filename):
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None
    return tb


@functools.lru_cache(maxsize=256)
def _is_debugger(filename: str) -> bool:
    return filename == __file__ or Path(filename).name in ("bdb.py", "pdb.py", "debugging.py")


_MOST = 100  # kept until the next `take`, so that a failing thread in each step does not fill the memory


@dataclass(frozen=True)
class Stray:
    """An exception or warning that no call reported."""

    warning: str  # name of pytest's warning class for it
    summary: str  # the thread or object that raised it, in one line
    text: str  # the same with the traceback
    file: str
    line: int
    error: BaseException | None

    @property
    def plain(self) -> tuple[str, str, str, int]:
        return self.warning, self.text, self.file, self.line


_strays: deque[Stray] = deque(maxlen=_MOST)


def listen() -> None:
    threading.excepthook = _of_thread
    sys.unraisablehook = _of_finalizer


def take() -> list[Stray]:
    return [_strays.popleft() for _ in range(len(_strays))]


def _of_thread(args: Any) -> None:
    name = "<unknown>" if args.thread is None else args.thread.name
    _keep("PytestUnhandledThreadExceptionWarning", f"Exception in thread {name}", args)
    threading.__excepthook__(args)  # also print it, because the rank may die before it reports


def _of_finalizer(args: Any) -> None:
    try:
        summary = f"{args.err_msg or 'Exception ignored in'}: {args.object!r}"
    except Exception:
        summary = f"{args.err_msg or 'Exception ignored in'}: an object of {type(args.object).__name__}"
    _keep("PytestUnraisableExceptionWarning", summary, args)
    sys.__unraisablehook__(args)


def _keep(warning: str, summary: str, args: Any) -> None:
    frames = traceback.extract_tb(args.exc_traceback)
    file, line = (frames[-1].filename, frames[-1].lineno or 0) if frames else ("<unknown>", 0)
    lines = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
    _strays.append(Stray(warning, summary, f"{summary}\n\n{lines}", file, line, args.exc_value))


def note_names(directory: str) -> None:
    """Note the names that this process and its spawned children make from now on, in a file in `directory`."""
    # A file descriptor replaces the tracker, as in spawned processes, which inherit that of their parent's tracker
    # (multiprocessing/spawn.py, spawn_main, Python 3.11).
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = os.open(
        file_of_names(directory, os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    tracker._pid = None
    _pass_over_attached()


def _pass_over_attached() -> None:
    """Keep Python from noting shared memory that is only attached, whose owner would lose it when this process ends.
    Python notes both (python/cpython#82300). Its remedy, ``track=False`` since 3.13, is for callers to choose."""
    original = shared_memory.SharedMemory.__init__
    created: set[str] = set()

    @functools.wraps(original)
    def initialize(self: Any, name: str | None = None, create: bool = False, size: int = 0, **options: Any) -> None:
        original(self, name, create, size, **options)
        if create:
            created.add(self._name)
        elif self._name not in created:
            resource_tracker.unregister(self._name, "shared_memory")

    shared_memory.SharedMemory.__init__ = initialize  # type: ignore[method-assign]


def coverage_here() -> str | None:
    """Return the configuration of coverage.py in this process, for `Measuring` in a rank, or None."""
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
    """Coverage of one rank.
    `at_rest`: registers a function to call at the end of each test. The data is written then, because a signal may end
    the rank at any later time."""

    def __init__(self, at_rest: Callable[[Callable[[], None]], None]) -> None:
        self._at_rest = at_rest
        self._measured: Any = None
        self._runs = False

    def start(self, configuration: str | None) -> None:
        """Measure from here to the end of the test; `configuration` is from `coverage_here` in the pytest process."""
        if configuration is None or self._runs:
            return
        if self._measured is None:
            import coverage

            inherited = coverage.Coverage.current()
            if inherited is not None and inherited.config.serialize() == configuration:
                # coverage.py measures every process, and so this one since its fork: only write its data at rest.
                self._at_rest(inherited.save)
                self._runs = True
                return
            if inherited is not None:  # of the fork server; as coverage.py does after a fork (control.py, 7.17)
                inherited._auto_save = False
                inherited.stop()
            # Each rank has its own data file, which pytest-cov combines with its own.
            self._measured = coverage.Coverage(config_file=f":data:{configuration}", data_suffix=True)
            for warning in ("no_data", "unimported_source", "preimported_source"):
                setattr(self._measured, f"_warn_{warning}", False)
            self._at_rest(self._write)
        self._measured.start()
        self._runs = True

    def _write(self) -> None:
        if self._runs:
            self._runs = False
            self._measured.stop()
            self._measured.save()
