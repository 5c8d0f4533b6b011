"""Restore the process state that a test may change, apart from torch's."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # no stubs
import gc
import os
import resource
import signal
import sys
from dataclasses import dataclass
from typing import Any

from mgpu_check.engine.rank_side.interpreter import InterpreterState, files_left_open, open_files
from mgpu_check.processes.leftovers import children_but_managers

_LIMITS = tuple(sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}))
_SIGNALS = tuple(sorted(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})))
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


@dataclass
class ProcessState:
    """The state of a fresh rank's process, which `restore` restores after every test."""

    path: tuple[str, ...]
    handlers: dict[int, Any]
    blocked: frozenset[int]
    umask: int
    limits: dict[int, tuple[int, int]]
    recursion_limit: int
    collects: bool
    streams: tuple[Any, Any]
    files: dict[int, tuple[int, int]]
    children: frozenset[int]
    interpreter: InterpreterState

    @classmethod
    def take(cls) -> ProcessState:
        return cls(
            path=tuple(sys.path),
            handlers=_handlers(),
            blocked=frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            umask=_umask(),
            limits={limit: resource.getrlimit(limit) for limit in _LIMITS},
            recursion_limit=sys.getrecursionlimit(),
            collects=gc.isenabled(),
            streams=(sys.stdout, sys.stderr),
            files=open_files(),
            children=frozenset(children_but_managers()),
            interpreter=InterpreterState.take(),
        )

    def restore(self) -> None:
        """Undo the changes of a test, as far as a process can."""
        for timer in _TIMERS:
            if signal.getitimer(timer)[0]:
                signal.setitimer(timer, 0)
        for number, handler in _handlers().items():
            if handler is not self.handlers.get(number):
                signal.signal(number, self.handlers[number])
        # After the handlers, because this delivers signals that the test had blocked.
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        os.umask(self.umask)
        for limit, (soft, hard) in self.limits.items():
            now = resource.getrlimit(limit)
            if now != (soft, hard) and now[1] == hard:
                resource.setrlimit(limit, (soft, hard))
        if sys.getrecursionlimit() != self.recursion_limit:
            sys.setrecursionlimit(self.recursion_limit)
        if gc.isenabled() != self.collects:
            (gc.enable if self.collects else gc.disable)()
        sys.stdout, sys.stderr = self.streams
        self.interpreter.restore()
        if sys.path != list(self.path):
            sys.path[:] = self.path

    def left_behind(self) -> list[str]:
        """Describe the changes that cannot be undone in a living process."""
        found = []
        if running := [name for pid in children_but_managers() if pid not in self.children and (name := _command(pid))]:
            found.append(f"processes that still run: {', '.join(sorted(set(running)))}")
        if any(resource.getrlimit(limit)[1] != hard for limit, (_, hard) in self.limits.items()):
            found.append("lowered resource limits")
        for name, stream in zip(("stdout", "stderr"), self.streams, strict=True):
            if getattr(stream, "closed", False):
                found.append(f"a closed {name}")
        now = open_files()
        if other := sorted(number for number, identity in self.files.items() if now.get(number) != identity):
            found.append(f"closed or replaced file descriptors: {', '.join(map(str, other))}")
        if left := files_left_open(self.files, now):
            found.append(f"files that are still open: {', '.join(left)}")
        return [*found, *self.interpreter.left_behind()]


def _handlers() -> dict[int, Any]:
    """Return signal number -> handler, without handlers that were set outside Python."""
    # `signal.getsignal` would convert each of 62 answers to an enum after each test.
    return {number: handler for number in _SIGNALS if (handler := _signal.getsignal(number)) is not None}


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _command(pid: int) -> str:
    """Return the name of a running process; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
    except OSError:
        return ""
    return "" if rest.split()[0] in ("Z", "X") else name
