"""A test that passes leaves nothing to the next: its change is put back, or its ranks are replaced with a remark."""

from __future__ import annotations

import asyncio
import builtins
import contextvars
import copy
import copyreg
import decimal
import faulthandler
import fcntl
import functools
import gc
import glob
import io
import json
import locale
import logging
import math
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

LOCK = os.path.join(tempfile.gettempdir(), f"mgpu-check-left-behind-{os.getpid()}")


pytestmark = pytest.mark.usefixtures("this_module_by_value")


@pytest.fixture(autouse=True)
def locks_that_go():
    yield
    for path in glob.glob(f"{glob.escape(LOCK)}*"):
        shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def variable() -> contextvars.ContextVar[int]:
    """Return a context variable of the rank, where it stays."""
    return vars(contextvars).setdefault("left", contextvars.ContextVar("left"))


def raises(*args: Any, **kwargs: Any) -> Any:
    raise SystemExit("replaced by a test")


def program(text: str) -> str:
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.strip()


def listen(family: int, address: Any, kind: int = socket.SOCK_STREAM) -> Any:
    server = socket.socket(family, kind)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, kind == socket.SOCK_STREAM)  # connections may linger
    server.bind(address)
    if kind == socket.SOCK_STREAM:
        server.listen()
    return server


def keep(value: Any) -> None:
    threading.current_thread().__dict__.setdefault("kept", []).append(value)


def port() -> int:
    return 20_000 + 2 * (os.getppid() % 4000) + dist.get_rank()


def can_bind(kind: int = socket.SOCK_STREAM) -> str:
    listen(socket.AF_INET, ("127.0.0.1", port()), kind).close()
    return "free"


def can_lock(path: str) -> str:
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return "free"


def lock(number: int) -> None:
    fcntl.flock(number, fcntl.LOCK_EX)
    keep(number)


def own_path(directory: str = "") -> str:
    return os.path.join(directory, f"{LOCK}-{dist.get_rank()}")


def open_directory() -> int:
    os.makedirs(f"{own_path()}.d", exist_ok=True)
    return os.open(f"{own_path()}.d", os.O_RDONLY)


def lock_directory() -> None:
    fcntl.flock(number := open_directory(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(number)


class Unjoinable(threading.Thread):
    def run(self) -> None:
        threading.Event().wait()

    def join(self, timeout: float | None = None) -> None:
        raise ValueError("this thread cannot be joined")


class Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        raise ImportError(f"{name} is hidden by a test")


def pending_signal() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    signal.raise_signal(signal.SIGUSR1)  # pending for this thread


def closed_loop() -> None:
    asyncio.set_event_loop(loop := asyncio.new_event_loop())
    loop.close()


def run_loop() -> None:
    loop = asyncio.get_event_loop_policy().get_event_loop()
    assert not loop.is_closed()
    loop.close()


def new_logger() -> None:
    logger = logging.getLogger("left.behind.by.a.test")
    logger.setLevel(logging.ERROR)
    logger.addHandler(logging.StreamHandler())


def detach(name: str) -> None:
    setattr(sys, name, io.TextIOWrapper(getattr(sys, name).detach(), encoding="utf-8", errors="replace"))


def reopen_errors() -> None:
    sys.stderr = open(sys.stderr.detach().fileno(), "w", closefd=False)  # type: ignore[union-attr]  # noqa: SIM115


def stubs() -> None:
    """Leave as many modules as there were."""
    del sys.modules["json.decoder"]
    sys.modules["no_such_package"] = types.ModuleType("no_such_package")


def finders() -> list[str]:
    return [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path]


def importable(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def both(first: Callable[[], Any], second: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: (first(), second())[1]


def replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def open_many() -> None:
    for number in [os.dup(0) for _ in range(descriptors() // 2)]:
        os.close(number)


def described(owner: Any, name: str) -> str:
    value = getattr(owner, name, "missing")
    return f"{type(value)} {getattr(value, '__qualname__', value)}"


def attribute(owner: Any, name: str, value: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    return replace(owner, name, value), lambda: described(owner, name)


Change = tuple[Callable[[], Any], Callable[[], Any]]
"""The first function leaves something behind, and the second observes it in the next test."""


# Changes of one round do not touch, and are left together.
SETTINGS: dict[str, Change] = {
    "os.environ is a dict": attribute(os, "environ", {"A": "1"}),
    "variable of C": (lambda: os.putenv("LEFT", "1"), lambda: program("import os; print(os.environ.get('LEFT'))")),
    "sys.path is a tuple": (lambda: setattr(sys, "path", (*sys.path, "/left")), lambda: (type(sys.path), sys.path[-1])),
    "sys.argv": attribute(sys, "argv", ("left",)),
    "sys.excepthook": attribute(sys, "excepthook", None),
    "sys.displayhook": (lambda: delattr(sys, "displayhook"), lambda: callable(sys.displayhook)),
    "sys.unraisablehook": attribute(sys, "unraisablehook", raises),
    "threading.excepthook": attribute(threading, "excepthook", raises),
    "sys.frozen": attribute(sys, "frozen", True),
    "sys.tracebacklimit": attribute(sys, "tracebacklimit", 0),
    "new builtin": attribute(builtins, "left", 1),
    "new logger": (
        new_logger,
        lambda: [getattr(logging.getLogger("left.behind.by.a.test"), name) for name in ("level", "handlers")],
    ),
    "root logger": (lambda: setattr(logging, "root", logging.Logger("left")), lambda: logging.getLogger().name),
    "names of levels": (lambda: logging.addLevelName(logging.INFO, "LEFT"), lambda: logging.getLevelName(logging.INFO)),
    "last resort of logging": attribute(logging, "lastResort", None),
    "warning filters": attribute(warnings, "filters", []),
    "context of decimal": (lambda: setattr(decimal.getcontext(), "prec", 3), lambda: decimal.getcontext().prec),
    "context variable": (both(lambda: variable().set(1), lambda: None), lambda: variable().get(0)),
    "encoding of output": (lambda: sys.stdout.reconfigure(encoding="ascii"), lambda: sys.stdout.encoding),  # type: ignore[union-attr]
    "output that does not block": (lambda: os.set_blocking(1, False), lambda: os.get_blocking(1)),
    "sys.__stdout__": (lambda: delattr(sys, "__stdout__"), lambda: hasattr(sys, "__stdout__")),
    "name of the thread": (
        lambda: setattr(threading.current_thread(), "name", "left"),
        lambda: threading.current_thread().name,
    ),
    "generator of NumPy": (
        lambda: np.random.set_bit_generator(np.random.PCG64(1)),  # type: ignore[attr-defined]
        lambda: float(np.random.rand()),
    ),
    "errors of NumPy": (lambda: np.seterr(all="raise"), np.geterr),
    "directory of models": (lambda: torch.hub.set_dir("/left"), torch.hub.get_dir),
    "locale": (lambda: locale.setlocale(locale.LC_ALL, "C"), lambda: locale.setlocale(locale.LC_ALL)),
    "temporary directory": attribute(tempfile, "tempdir", "/left"),
    "event loop": (closed_loop, run_loop),
    "socket timeout": (lambda: socket.setdefaulttimeout(0.1), socket.getdefaulttimeout),
    "digits of integers": (lambda: sys.set_int_max_str_digits(700), sys.get_int_max_str_digits),
    "stack size of threads": (lambda: threading.stack_size(1 << 20), threading.stack_size),
    "hooks of generators": (lambda: sys.set_asyncgen_hooks(raises), lambda: sys.get_asyncgen_hooks().firstiter),
    "pickling of a type": (lambda: copyreg.pickle(complex, raises), lambda: copyreg.dispatch_table[complex].__name__),
    "pending signal": (pending_signal, lambda: signal.getsignal(signal.SIGUSR1)),
    "handler of faulthandler": (
        lambda: faulthandler.register(signal.SIGUSR2, sys.__stderr__, chain=False),
        lambda: faulthandler.unregister(signal.SIGUSR2),
    ),
    "generator of torch": (
        lambda: setattr(torch, "default_generator", torch.Generator()),
        lambda: (torch.default_generator.initial_seed(), torch.rand(1).item()),
    ),
    "generator of Python": (lambda: setattr(random, "_inst", random.Random(1)), random.random),
    "type of tensors": (lambda: torch.set_default_tensor_type(torch.DoubleTensor), lambda: torch.ones(1).dtype),
    "printed tensors": (lambda: torch.set_printoptions(precision=1), lambda: str(torch.tensor([0.123456]))),
    "warn always": (lambda: torch.set_warn_always(True), torch.is_warn_always_enabled),
    "backward in one thread": (
        lambda: torch._C._set_multithreading_enabled(False),
        torch._C._is_multithreading_enabled,
    ),
    "debug level": (lambda: c10d.set_debug_level(c10d.DebugLevel.DETAIL), lambda: c10d.get_debug_level().name),
    "sys.meta_path": (lambda: sys.meta_path.insert(0, Finder()), finders),
}
OTHER_SETTINGS: dict[str, Change] = {
    "os.environ is an equal dict": (
        lambda: setattr(os, "environ", dict(os.environ)),
        both(lambda: os.environ.update(SET="1"), lambda: program("import os; print(os.environ.get('SET'))")),
    ),
    "content of sys.argv": (lambda: sys.argv.append("left"), lambda: sys.argv),
    "manager of loggers": (
        lambda: setattr(logging.Logger, "manager", logging.Manager(logging.root)),
        lambda: logging.getLogger("torch").manager is logging.root.manager,
    ),
    "disabled logging": (lambda: logging.disable(logging.CRITICAL), lambda: logging.root.manager.disable),
    "no event loop": (lambda: asyncio.run(asyncio.sleep(0)), run_loop),
    "garbage collector": (
        both(lambda: gc.disable(), lambda: gc.callbacks.append(raises)),
        lambda: (gc.isenabled(), len(gc.callbacks)),
    ),
    "sys.path_hooks": (lambda: sys.path_hooks.insert(0, raises), lambda: len(sys.path_hooks)),
    "sys.meta_path without finders": (lambda: sys.meta_path.clear(), finders),
}
MORE_SETTINGS: dict[str, Change] = {
    "os.environ is a copy": (
        both(lambda: setattr(os, "environ", copy.deepcopy(os.environ)), lambda: os.environ.update(LEFT="1")),
        lambda: program("import os; print(os.environ.get('LEFT'))"),
    ),
    "table of loggers": (
        lambda: logging.Logger.manager.loggerDict.clear(),
        lambda: (logging.getLogger("torch").level, len(logging.getLogger("torch").handlers)),
    ),
    "policy of event loops": (
        lambda: asyncio.set_event_loop_policy(mock.Mock(spec=asyncio.AbstractEventLoopPolicy)),
        lambda: asyncio.get_event_loop_policy().__module__,
    ),
    "sys.meta_path is another list": (lambda: setattr(sys, "meta_path", []), finders),
    "sys.modules is a dict": (
        lambda: setattr(sys, "modules", {}),
        lambda: (sys.modules["torch"] is torch, importable("torch")),
    ),
}

# The same, with the remark.
LEFT_OPEN: dict[str, Any] = {
    "listener": (lambda: keep(listen(socket.AF_INET, ("127.0.0.1", port()))), can_bind, "port "),
    "unix socket": (
        lambda: keep(listen(socket.AF_UNIX, f"\0left-{port()}")),
        lambda: listen(socket.AF_UNIX, f"\0left-{port()}").close(),
        "socket @left-",
    ),
    "locked file": (
        lambda: lock(os.open(own_path(), os.O_CREAT | os.O_RDWR)),
        lambda: can_lock(own_path()),
        f"{LOCK}-0, ",
    ),
    "locked directory": (lambda: lock(open_directory()), lock_directory, f"{LOCK}-0.d, "),
    "locked shared memory": (
        lambda: lock(os.open(f"/dev/shm/{os.path.basename(own_path())}", os.O_CREAT | os.O_RDWR)),
        lambda: can_lock(f"/dev/shm/{os.path.basename(own_path())}"),
        "open: /dev/shm/",
    ),
    "output to nowhere": (lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 1), lambda: None, "descriptors: 1"),
    "interop threads": (
        lambda: torch.set_num_interop_threads(torch.get_num_interop_threads() + 1),
        torch.get_num_interop_threads,
        "interop threads",
    ),
}
OTHERS_LEFT_OPEN: dict[str, Any] = {
    "datagrams": (
        lambda: keep(listen(socket.AF_INET, ("127.0.0.1", port()), socket.SOCK_DGRAM)),
        lambda: can_bind(socket.SOCK_DGRAM),
        "open: port ",
    ),
    "detached output": (lambda: detach("stdout"), lambda: print("é"), "a closed stdout"),
    "no errors": (lambda: os.close(2), lambda: os.fstat(2) and None, "descriptors: 2"),
    "stub of a package": (stubs, lambda: importable("no_such_package"), "no_such_package"),
    "hidden package": (lambda: sys.modules.__setitem__("json", None), lambda: importable("json"), ": json"),
}
MORE_LEFT_OPEN: dict[str, Any] = {
    "package that is gone": (
        lambda: sys.modules.pop("torch.nn"),
        lambda: sys.modules["torch.nn"] is torch.nn,
        "torch.nn",
    ),
    "store": (
        lambda: keep(c10d.TCPStore("127.0.0.1", port(), 1, is_master=True, wait_for_workers=False)),
        can_bind,
        "open: port ",
    ),
    "detached errors": (lambda: detach("stderr"), lambda: print("é", file=sys.stderr), "a closed stderr"),
    "hook of all optimizers": (
        lambda: sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(raises),
        lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step(),
        "hooks on all modules or optimizers",
    ),
}
ALONE: dict[str, Any] = {
    "thread that cannot be joined": (lambda: Unjoinable(daemon=True).start(), threading.active_count, "be joined"),
    "errors without a file": (reopen_errors, lambda: print("é", file=sys.stderr), "a closed stderr"),
    "many files": (
        lambda: keep([os.pipe() for _ in range(descriptors() // 2 - 100)]),
        open_many,
        "open file descriptors",
    ),
}

# Functions without which a rank cannot even answer, each by itself; and others, together.
FUNCTIONS: tuple[tuple[tuple[Any, str, Any], ...], ...] = (
    ((os, "listdir", raises),),
    ((gc, "collect", raises),),
    ((builtins, "open", raises), (builtins, "print", raises), (builtins, "int", float)),
    ((pickle, "loads", raises),),
    ((os, "_exit", raises), (os, "getpid", lambda: 1), (time, "time", lambda: 0.0)),
    ((signal, "signal", lambda *_: None), (functools, "partial", raises), (os.path, "exists", lambda path: False)),
    (
        *((socket, "socket", raises), (subprocess.Popen, "wait", raises), (threading.Thread, "start", raises)),
        *((warnings, "warn", mock.Mock()), (json, "dumps", mock.Mock(return_value="")), (math, "sqrt", raises)),
        *((copy, "deepcopy", raises), (torch, "add", raises), (torch.Tensor, "add", raises)),
        *((random, "random", lambda: 0.5), (torch.nn.Linear, "forward", raises)),
        (ssl, "_create_default_https_context", ssl._create_unverified_context),
    ),
)


def call_all(functions: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: function() for name, function in functions.items()}


def leave_all(functions: dict[str, Callable[[], Any]]) -> None:
    for function in functions.values():
        function()


def remarks_on(pool: Any, leave: dict[str, Callable[[], Any]], observe: dict[str, Callable[[], Any]]) -> str:
    """The remarks on what is left behind, which the next test must not see."""
    expected = pool.run(call_all, observe, size=2)
    assert pool.end_test(failed=False) == [], "the observation itself leaves something"
    pool.begin_test()
    pool.run(leave_all, leave, size=2)
    remarks = pool.end_test(failed=False)
    pool.begin_test()
    assert pool.run(call_all, observe, size=2) == expected
    return "\n".join(remarks)


def column(changes: dict[str, Any], number: int) -> dict[str, Callable[[], Any]]:
    return {name: change[number] for name, change in changes.items()}


@pytest.mark.parametrize("changes", [SETTINGS, OTHER_SETTINGS, MORE_SETTINGS])
def test_changes_are_put_back(pool: Any, changes: dict[str, Change]) -> None:
    assert remarks_on(pool, column(changes, 0), column(changes, 1)) == ""


@pytest.mark.parametrize("changes", [LEFT_OPEN, OTHERS_LEFT_OPEN, MORE_LEFT_OPEN, *({k: ALONE[k]} for k in ALONE)])
def test_ranks_are_replaced_with_a_remark(pool: Any, changes: dict[str, Any]) -> None:
    remarks = remarks_on(pool, column(changes, 0), column(changes, 1))
    assert [name for name, remark in column(changes, 2).items() if str(remark) not in remarks] == [], remarks


@pytest.mark.parametrize("functions", FUNCTIONS, ids=lambda functions: ", ".join(name for _, name, _ in functions))
def test_ranks_with_replaced_functions_are_replaced(pool: Any, functions: tuple[tuple[Any, str, Any], ...]) -> None:
    changes = {f"{owner.__name__}.{name}": attribute(owner, name, value) for owner, name, value in functions}
    remarks = remarks_on(pool, column(changes, 0), column(changes, 1))
    if changes.keys() & {"os.listdir", "gc.collect"}:  # without them it cannot be found out
        assert "replaced by a test" in remarks
    else:
        assert f"replaced functions: {', '.join(sorted(changes))}" in remarks
