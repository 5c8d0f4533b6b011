"""Restore the state of Python, its standard library, and the process's user, group and scheduling after a test."""

from __future__ import annotations

import contextlib
import copy
import gc
import locale
import logging
import multiprocessing
import operator
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Kept = tuple[str, Callable[[], Any], Callable[[Any], Any]]
"""The name of a setting, its getter, and its setter."""


def _attribute(owner: Any, name: str) -> Kept:
    return f"{owner.__name__}.{name}", lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _set_threshold(value: tuple[int, int, int]) -> None:
    gc.set_threshold(*value)


def _set_callbacks(value: list[Any]) -> None:
    gc.callbacks[:] = value


def _set_start_method(value: str | None) -> None:
    multiprocessing.set_start_method(value, force=True)


_KEPT: tuple[Kept, ...] = (
    ("gc thresholds", gc.get_threshold, _set_threshold),
    ("gc flags", gc.get_debug, gc.set_debug),
    ("gc callbacks", lambda: list(gc.callbacks), _set_callbacks),
    ("socket timeout", socket.getdefaulttimeout, socket.setdefaulttimeout),
    ("switch interval", sys.getswitchinterval, sys.setswitchinterval),
    ("trace function", sys.gettrace, sys.settrace),
    ("profile function", sys.getprofile, sys.setprofile),
    ("trace function of threads", threading.gettrace, threading.settrace),
    ("profile function of threads", threading.getprofile, threading.setprofile),
    ("locale", lambda: locale.setlocale(locale.LC_ALL), lambda value: locale.setlocale(locale.LC_ALL, value)),
    ("start method", lambda: multiprocessing.get_start_method(allow_none=True), _set_start_method),
    ("arguments", lambda: list(sys.argv), lambda value: setattr(sys, "argv", value)),
    *(_attribute(sys, name) for name in ("excepthook", "displayhook", "breakpointhook", "stdin")),
    *(_attribute(sys, name) for name in ("dont_write_bytecode", "tracebacklimit") if hasattr(sys, name)),
)


def _set_affinity(value: set[int]) -> None:
    os.sched_setaffinity(0, value)


def _set_niceness(value: int) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, value)


_OF_SYSTEM: tuple[Kept, ...] = (
    ("user", os.getresuid, lambda value: os.setresuid(*value)),  # first: the others may need its privileges
    ("group", os.getresgid, lambda value: os.setresgid(*value)),
    ("niceness", lambda: os.getpriority(os.PRIO_PROCESS, 0), _set_niceness),
    ("processor affinity", lambda: os.sched_getaffinity(0), _set_affinity),
)


@dataclass
class InterpreterState:
    """The state of the interpreter in a fresh rank, which `restore` restores after every test."""

    kept: list[Any]
    of_system: list[Any]
    loggers: list[tuple[logging.Logger, Any]]
    disabled: int

    @classmethod
    def take(cls) -> InterpreterState:
        return cls(
            kept=[get() for _, get, _ in _KEPT],
            of_system=[get() for _, get, _ in _OF_SYSTEM],
            loggers=[(logger, tuple(map(copy.copy, _state_of(logger)))) for logger in _loggers()],
            disabled=logging.root.manager.disable,
        )

    def restore(self) -> None:
        """Undo the changes of a test, as far as a process can."""
        for (_, get, put), value in zip((*_KEPT, *_OF_SYSTEM), (*self.kept, *self.of_system), strict=True):
            if get() != value:
                with contextlib.suppress(OSError):
                    put(value)
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        time.tzset()  # the variable TZ is restored already, but the time zone may still be the test's
        if logging.root.manager.disable != self.disabled:
            logging.disable(self.disabled)
        for logger, state in self.loggers:
            if _state_of(logger) != state:
                _restore(logger, state)

    def left_behind(self) -> list[str]:
        """Describe the changes that could not be undone."""
        pairs = zip(_OF_SYSTEM, self.of_system, strict=True)
        return [f"another {name} of the process" for (name, get, _), value in pairs if get() != value]


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
