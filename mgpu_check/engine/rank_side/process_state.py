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
from functools import partial
from typing import Any

from mgpu_check.processes.leftovers import children_but_managers

Kept = tuple[str, Callable[[], Any], Callable[[Any], Any]]
"""The name of a setting, its getter, and its setter."""


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _name_of(current: Callable[[], Any]) -> Kept:
    return current.__name__, lambda: current().name, lambda name: setattr(current(), "name", name)


def _format_of(name: str) -> Kept:
    get = operator.attrgetter("encoding", "errors")
    return (
        name,
        lambda: get(getattr(sys, name)),
        lambda value: getattr(sys, name).reconfigure(encoding=value[0], errors=value[1]),
    )


_KEPT: tuple[Kept, ...] = (
    ("umask", _umask, os.umask),
    ("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    ("gc", gc.isenabled, lambda value: gc.enable() if value else gc.disable()),
    ("gc thresholds", gc.get_threshold, lambda value: gc.set_threshold(*value)),
    ("gc flags", gc.get_debug, gc.set_debug),
    ("socket timeout", socket.getdefaulttimeout, socket.setdefaulttimeout),
    ("switch interval", sys.getswitchinterval, sys.setswitchinterval),
    ("digits of integers", sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    ("flags of dlopen", sys.getdlopenflags, sys.setdlopenflags),
    ("hooks of generators", sys.get_asyncgen_hooks, lambda value: sys.set_asyncgen_hooks(*value)),
    ("origins of coroutines", sys.get_coroutine_origin_tracking_depth, sys.set_coroutine_origin_tracking_depth),
    *map(_format_of, ("stdout", "stderr")),
    *(("blocking", partial(os.get_blocking, file), partial(os.set_blocking, file)) for file in range(3)),
    _name_of(threading.current_thread),
    _name_of(multiprocessing.current_process),
    ("stack size of threads", threading.stack_size, threading.stack_size),
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
)
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
_LoggerState = tuple[int, bool, bool, list[logging.Handler], list[Any]]
_LOGGER = logging.Logger  # a test may replace the name
_FRESH_LOGGER: _LoggerState = (logging.NOTSET, True, False, [], [])


def _copied(logger: logging.Logger) -> Any:
    return tuple(map(copy.copy, _state_of(logger)))


def _restore(logger: logging.Logger, state: _LoggerState) -> None:
    level, logger.propagate, logger.disabled, handlers, filters = state
    for handler in set(logger.handlers) - set(handlers):
        logger.removeHandler(handler)
        with contextlib.suppress(Exception):
            handler.close()  # its file must not stay open in the next test
    logger.handlers[:], logger.filters[:] = handlers, filters
    logger.setLevel(level)


class Loggers:
    """The states of the root logger and of loggers with at most two name parts, such as "torch.distributed".

    Most deeper loggers inherit from these. There are hundreds of them, too many to check after each test.
    """

    def __init__(self) -> None:
        table = logging.root.manager.loggerDict
        self._names = set(table)
        known = (logger for name, logger in table.items() if name.count(".") < 2)
        self._states = {logger: _copied(logger) for logger in (logging.root, *known) if isinstance(logger, _LOGGER)}
        self._disabled = logging.root.manager.disable

    def restore(self, imported: bool) -> None:
        """Restore the loggers. New loggers keep the state that the import of their module gave them."""
        table = logging.root.manager.loggerDict
        if logging.root.manager.disable != self._disabled:
            logging.disable(self._disabled)
        for name in table.keys() - self._names:
            self._names.add(name)
            if isinstance(logger := table[name], _LOGGER):
                self._states[logger] = _copied(logger) if imported else _FRESH_LOGGER
        for logger, state in self._states.items():
            if logger is not logging.root and table.get(logger.name) is not logger:
                table[logger.name] = logger
            if _state_of(logger) != state:
                _restore(logger, state)


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


def left_open(before: dict[int, tuple[int, int]], now: dict[int, tuple[int, int]], ports: range) -> list[str]:
    """Return the files, locks and addresses that a test left open, which could block the next test.

    Args:
        ports: ports that do not count, because the kernel chose them for a library.
    """
    names = set()
    for number, identity in now.items():
        if before.get(number) != identity:
            with contextlib.suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{number}")
                if name.startswith("socket:"):
                    names.add(_own_address(number, ports))
                elif _is_locked(number) or (os.path.isfile(name) and not name.startswith(("/proc/", "/sys/", "/dev/"))):
                    names.add(name)
    return sorted(names - {""})


def _is_locked(number: int) -> bool:
    with open(f"/proc/self/fdinfo/{number}", encoding="ascii", errors="replace") as file:
        return any(line.startswith("lock:") for line in file)


def _own_address(number: int, ports: range) -> str:
    """Return the address that a socket occupies; empty without an address, or if it is connected."""
    with socket.socket(fileno=os.dup(number)) as copied:
        try:
            copied.getpeername()
        except OSError:
            address: Any = copied.getsockname()
        else:
            return ""
    if copied.family == socket.AF_UNIX:
        # NCCL has sockets of its own in the name space without files.
        return "" if b"nccl" in os.fsencode(address) else f"socket {os.fsdecode(address)}".replace("\0", "@").rstrip()
    if copied.family in (socket.AF_INET, socket.AF_INET6) and address[1] and address[1] not in ports:
        return f"port {address[1]}"
    return ""


def ports_of_libraries() -> range:
    """Return the ports that the kernel gives to sockets that ask for any port, as those of NCCL do."""
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        first, last = map(int, file.read().split())
    return range(first, last + 1)


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
    of_system: list[Any]
    loggers: Loggers

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
            of_system=[get() for _, get, _ in _OF_SYSTEM],
            loggers=Loggers(),
        )

    def restore(self, imported: bool) -> None:
        """Undo the changes of a test, as far as a process can."""
        for timer in _TIMERS:
            if signal.getitimer(timer)[0]:
                signal.setitimer(timer, 0)
        for number, handler in _handlers().items():
            if handler is not self.handlers.get(number):
                signal.signal(number, self.handlers[number])
        # A signal that the test had blocked would end the rank as soon as it is not blocked any more.
        while pending := signal.sigpending() - self.blocked:
            signal.sigtimedwait(pending, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
        for limit, (soft, hard) in self.limits.items():
            now = resource.getrlimit(limit)
            if now != (soft, hard) and now[1] == hard:
                resource.setrlimit(limit, (soft, hard))
        for (_, get, put), value in zip((*_KEPT, *_OF_SYSTEM), (*self.kept, *self.of_system), strict=True):
            with contextlib.suppress(OSError, ValueError):  # of a closed file, which `left_behind` reports
                if get() != value:
                    put(value)
        time.tzset()  # the variable TZ is restored already, but the time zone may still be the test's
        self.loggers.restore(imported)
        if sys.path != list(self.path):
            sys.path[:] = self.path

    def left_behind(self, ports: range) -> list[str]:
        """Describe the changes that cannot be undone in a living process; see `left_open`."""
        found = []
        if running := [name for pid in children_but_managers() if pid not in self.children and (name := _command(pid))]:
            found.append(f"processes that still run: {', '.join(sorted(set(running)))}")
        if any(resource.getrlimit(limit)[1] != hard for limit, (_, hard) in self.limits.items()):
            found.append("lowered resource limits")
        for name in ("stdout", "stderr"):
            if _is_closed(getattr(sys, name)):
                found.append(f"a closed {name}")
        now = open_files()
        if other := sorted(number for number, identity in self.files.items() if now.get(number) != identity):
            found.append(f"closed or replaced file descriptors: {', '.join(map(str, other))}")
        if left := left_open(self.files, now, ports):
            found.append(f"files or addresses that are still open: {', '.join(left)}")
        if len(now) - len(self.files) > self.limits[resource.RLIMIT_NOFILE][0] // 2:
            found.append(f"{len(now) - len(self.files)} open file descriptors")
        pairs = zip(_OF_SYSTEM, self.of_system, strict=True)
        return [*found, *(f"another {name} of the process" for (name, get, _), value in pairs if get() != value)]


def _is_closed(stream: Any) -> bool:
    try:
        return bool(stream.closed)
    except ValueError:
        return True  # it is detached from its file


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
