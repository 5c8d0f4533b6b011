"""Restore the process state that a test may change, apart from torch's."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # no stubs
import contextlib
import copy
import gc
import locale
import logging
import multiprocessing
import operator
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mgpu_check.processes.leftovers import children_but_managers

Kept = tuple[str, Callable[[], Any], Callable[[Any], Any]]
"""The name of a setting, its getter, and its setter."""


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _content(name: str, values: list[Any]) -> Kept:
    def put(value: list[Any]) -> None:
        values[:] = value

    return name, lambda: list(values), put


_KEPT: tuple[Kept, ...] = (
    ("umask", _umask, os.umask),
    ("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    ("gc", gc.isenabled, lambda value: gc.enable() if value else gc.disable()),
    ("gc thresholds", gc.get_threshold, lambda value: gc.set_threshold(*value)),
    ("gc flags", gc.get_debug, gc.set_debug),
    _content("gc callbacks", gc.callbacks),
    ("socket timeout", socket.getdefaulttimeout, socket.setdefaulttimeout),
    ("switch interval", sys.getswitchinterval, sys.setswitchinterval),
    ("trace function", sys.gettrace, sys.settrace),
    ("profile function", sys.getprofile, sys.setprofile),
    ("trace function of threads", threading.gettrace, threading.settrace),
    ("profile function of threads", threading.getprofile, threading.setprofile),
    ("locale", lambda: locale.setlocale(locale.LC_ALL), lambda value: locale.setlocale(locale.LC_ALL, value)),
    (
        "start method",
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda value: multiprocessing.set_start_method(value, force=True),
    ),
    ("arguments", lambda: list(sys.argv), lambda value: setattr(sys, "argv", value)),
)
_OF_SYS = (
    "stdin",
    "stdout",
    "stderr",
    "excepthook",
    "displayhook",
    "breakpointhook",
    "dont_write_bytecode",
    "tracebacklimit",
)
"""Attributes that are set again after every test: another stream may compare equal, and a test may delete one."""
_OF_SYSTEM: tuple[Kept, ...] = (
    ("user", os.getresuid, lambda value: os.setresuid(*value)),  # first: the others may need its privileges
    ("group", os.getresgid, lambda value: os.setresgid(*value)),
    (
        "niceness",
        lambda: os.getpriority(os.PRIO_PROCESS, 0),
        lambda value: os.setpriority(os.PRIO_PROCESS, 0, value),
    ),
    ("processor affinity", lambda: os.sched_getaffinity(0), lambda value: os.sched_setaffinity(0, value)),
)
"""Settings that a process without privileges may be unable to restore."""


_state_of = operator.attrgetter("level", "propagate", "disabled", "handlers", "filters")


def _restore(logger: logging.Logger, state: tuple[int, bool, bool, list[logging.Handler], list[Any]]) -> None:
    level, logger.propagate, logger.disabled, handlers, filters = state
    for handler in set(logger.handlers) - set(handlers):
        logger.removeHandler(handler)
        with contextlib.suppress(Exception):
            handler.close()  # its file must not stay open in the next test
    logger.handlers[:], logger.filters[:] = handlers, filters
    logger.setLevel(level)


def _loggers() -> list[logging.Logger]:
    """Return the root logger and those with at most two name parts, such as "torch.distributed".

    Most deeper loggers inherit from these. There are hundreds of them, too many to check after each test.
    """
    found = [(name, one) for name, one in logging.root.manager.loggerDict.items() if name.count(".") < 2]
    return [logging.root, *(one for _, one in found if isinstance(one, logging.Logger))]


def open_files() -> dict[int, tuple[int, int]]:
    """Return file descriptor -> (device, inode) for all open files; empty without /proc."""
    found: dict[int, tuple[int, int]] = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return found  # not Linux
    for number in map(int, names):
        try:
            status = os.fstat(number)
        except OSError:
            continue  # the descriptor of the listing itself, which is closed now
        found[number] = status.st_dev, status.st_ino
    return found


def files_left_open(before: dict[int, tuple[int, int]], now: dict[int, tuple[int, int]]) -> list[str]:
    """Return the regular files that a test left open. A lock on one could block the next test."""
    names = []
    for number, identity in now.items():
        if before.get(number) != identity:
            with contextlib.suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{number}")
                if (
                    name.startswith(os.sep)
                    and os.path.isfile(name)
                    and not name.startswith(("/proc/", "/sys/", "/dev/"))
                ):
                    names.append(name)
    return sorted(set(names))


_LIMITS = tuple(sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}))
_SIGNALS = tuple(sorted(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})))
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


@dataclass
class ProcessState:
    """The state of a fresh rank's process, which `restore` restores after every test."""

    path: tuple[str, ...]
    handlers: dict[int, Any]
    blocked: frozenset[int]
    limits: dict[int, tuple[int, int]]
    files: dict[int, tuple[int, int]]
    children: frozenset[int]
    kept: list[Any]
    of_sys: dict[str, Any]
    of_system: list[Any]
    loggers: list[tuple[logging.Logger, Any]]
    disabled: int

    @classmethod
    def take(cls) -> ProcessState:
        return cls(
            path=tuple(sys.path),
            handlers=_handlers(),
            blocked=frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            limits={limit: resource.getrlimit(limit) for limit in _LIMITS},
            files=open_files(),
            children=frozenset(children_but_managers()),
            kept=[get() for _, get, _ in _KEPT],
            of_sys={name: getattr(sys, name) for name in _OF_SYS if hasattr(sys, name)},
            of_system=[get() for _, get, _ in _OF_SYSTEM],
            loggers=[(logger, tuple(map(copy.copy, _state_of(logger)))) for logger in _loggers()],
            disabled=logging.root.manager.disable,
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
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        for limit, (soft, hard) in self.limits.items():
            now = resource.getrlimit(limit)
            if now != (soft, hard) and now[1] == hard:
                resource.setrlimit(limit, (soft, hard))
        for (_, get, put), value in zip((*_KEPT, *_OF_SYSTEM), (*self.kept, *self.of_system), strict=True):
            if get() != value:
                with contextlib.suppress(OSError):
                    put(value)
        for name, attribute in self.of_sys.items():
            setattr(sys, name, attribute)
        time.tzset()  # the variable TZ is restored already, but the time zone may still be the test's
        if logging.root.manager.disable != self.disabled:
            logging.disable(self.disabled)
        for logger, state in self.loggers:
            if _state_of(logger) != state:
                _restore(logger, state)
        if sys.path != list(self.path):
            sys.path[:] = self.path

    def left_behind(self) -> list[str]:
        """Describe the changes that cannot be undone in a living process."""
        found = []
        if running := [name for pid in children_but_managers() if pid not in self.children and (name := _command(pid))]:
            found.append(f"processes that still run: {', '.join(sorted(set(running)))}")
        if any(resource.getrlimit(limit)[1] != hard for limit, (_, hard) in self.limits.items()):
            found.append("lowered resource limits")
        for name in ("stdout", "stderr"):
            if getattr(getattr(sys, name, None), "closed", False):
                found.append(f"a closed {name}")
        now = open_files()
        if other := sorted(number for number, identity in self.files.items() if now.get(number) != identity):
            found.append(f"closed or replaced file descriptors: {', '.join(map(str, other))}")
        if left := files_left_open(self.files, now):
            found.append(f"files that are still open: {', '.join(left)}")
        pairs = zip(_OF_SYSTEM, self.of_system, strict=True)
        return [*found, *(f"another {name} of the process" for (name, get, _), value in pairs if get() != value)]


def _handlers() -> dict[int, Any]:
    """Return signal number -> handler, without handlers that were set outside Python."""
    # `signal.getsignal` would convert each of 62 answers to an enum after each test.
    return {number: handler for number in _SIGNALS if (handler := _signal.getsignal(number)) is not None}


def _command(pid: int) -> str:
    """Return the name of a running process; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
    except OSError:
        return ""
    return "" if rest.split()[0] in ("Z", "X") else name
