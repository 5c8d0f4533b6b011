"""Restore the global state of torch and of the process after each call and each test.

Objects of modules that a test has replaced are put back. Functions, modules and hooks are only detected: a library may
have replaced a function during its import, which happens once per process. A fresh process has neither. Replacements
by installed packages do not count, because they happen in every process.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # no stubs
import _thread
import builtins
import contextlib
import copy
import copyreg
import ctypes
import gc
import itertools
import locale
import logging
import multiprocessing
import operator
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import is_
from typing import Any

import torch
import torch.__future__ as future
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._tensor_str import PRINT_OPTS

from mgpu_check.engine.rank_side.devices import own_gloo_devices
from mgpu_check.processes.channel import SEED, Clock
from mgpu_check.processes.child_processes import children_but_managers, name_and_state
from mgpu_check.processes.tracebacks import is_installed
from mgpu_check.torch_hooks import switches
from mgpu_check.torch_hooks.switches import Modes, seed_everything

Kept = tuple[str, Callable[[], Any], Callable[[Any], Any]]  # the name of a setting, its getter, and its setter


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
    ("niceness", lambda: os.getpriority(os.PRIO_PROCESS, 0), lambda value: os.setpriority(os.PRIO_PROCESS, 0, value)),
    ("processor affinity", lambda: os.sched_getaffinity(0), lambda value: os.sched_setaffinity(0, value)),
)
"""Settings that a process without privileges may be unable to restore."""


_state_of = operator.attrgetter("level", "propagate", "disabled", "handlers", "filters")
_LoggerState = tuple[int, bool, bool, list[logging.Handler], list[Any]]
_LOGGER = logging.Logger  # a test may replace the name
_FRESH_LOGGER: _LoggerState = (logging.NOTSET, True, False, [], [])


def _copied(logger: logging.Logger) -> Any:
    return tuple(map(copy.copy, _state_of(logger)))


class Loggers:
    """The states of the root logger and of loggers with at most two name parts, such as "torch.distributed".
    Most deeper loggers inherit from these. There are hundreds of them, too many to check after each test."""

    def __init__(self) -> None:
        table = logging.root.manager.loggerDict
        self._names = set(table)
        loggers = (logging.root, *(logger for name, logger in table.items() if name.count(".") < 2))
        self._states = {logger: _copied(logger) for logger in loggers if isinstance(logger, _LOGGER)}
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
                level, logger.propagate, logger.disabled, handlers, filters = state
                for handler in set(logger.handlers) - set(handlers):
                    logger.removeHandler(handler)
                    with contextlib.suppress(Exception):
                        handler.close()  # its file must not stay open in the next test
                logger.handlers[:], logger.filters[:] = handlers, filters
                logger.setLevel(level)


def open_files() -> dict[int, tuple[int, int]]:
    """Return file descriptor -> (device, inode) for all open files; empty without /proc."""
    identities: dict[int, tuple[int, int]] = {}
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return identities  # not Linux
    for number in map(int, numbers):
        try:
            status = os.fstat(number)
        except OSError:
            continue  # the descriptor of the listing itself, which is closed now
        identities[number] = status.st_dev, status.st_ino
    return identities


def left_open(before: dict[int, tuple[int, int]], now: dict[int, tuple[int, int]], ports: range) -> list[str]:
    """Return the files, locks and addresses that a test left open, which could block the next test.
    `ports`: ports that do not count, because the kernel chose them for a library."""
    addresses: set[str | None] = set()
    for number, identity in now.items():
        if before.get(number) != identity:
            with contextlib.suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{number}")
                if name.startswith("socket:"):
                    addresses.add(_own_address(number, ports))
                elif _is_locked(number) or (os.path.isfile(name) and not name.startswith(("/proc/", "/sys/", "/dev/"))):
                    addresses.add(name)
    return sorted(address for address in addresses if address is not None)


def _is_locked(number: int) -> bool:
    with open(f"/proc/self/fdinfo/{number}", encoding="ascii", errors="replace") as file:
        return any(line.startswith("lock:") for line in file)


def _own_address(number: int, ports: range) -> str | None:
    """Return the address that a socket occupies; None without an address, or if it is connected."""
    with socket.socket(fileno=os.dup(number)) as copied:
        try:
            copied.getpeername()
        except OSError:
            address: Any = copied.getsockname()
        else:
            return None
    if copied.family == socket.AF_UNIX:
        # NCCL has sockets of its own in the name space without files.
        return None if b"nccl" in os.fsencode(address) else f"socket {os.fsdecode(address)}".replace("\0", "@").rstrip()
    if copied.family in (socket.AF_INET, socket.AF_INET6) and address[1] and address[1] not in ports:
        return f"port {address[1]}"
    return None


def ports_of_libraries() -> range:
    """Return the ports that the kernel gives to sockets that ask for any port, as those of NCCL do."""
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        lowest, highest = map(int, file.read().split())
    return range(lowest, highest + 1)


_LIMITS = tuple(sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}))
_SIGNALS = tuple(sorted(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})))
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


class ProcessState:
    """The state of a fresh rank's process: `FreshState` takes it, and restores it after every test."""

    def __init__(self) -> None:
        self.path = tuple(sys.path)
        self.handlers = _handlers()
        self.blocked: frozenset[int] = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        self.limits = {limit: resource.getrlimit(limit) for limit in _LIMITS}
        self.files = open_files()
        self.children = frozenset(children_but_managers())
        self.kept = [get() for _, get, _ in _KEPT]
        self.of_system = [get() for _, get, _ in _OF_SYSTEM]
        self.loggers = Loggers()

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
        leftovers = []
        programs = [name_and_state(pid) for pid in children_but_managers() if pid not in self.children]
        if running := [name for name, state in programs if state not in ("", "Z", "X")]:
            leftovers.append(f"processes that still run: {', '.join(sorted(set(running)))}")
        if any(resource.getrlimit(limit)[1] != hard for limit, (_, hard) in self.limits.items()):
            leftovers.append("lowered resource limits")
        for name in ("stdout", "stderr"):
            if _is_closed(getattr(sys, name)):
                leftovers.append(f"a closed {name}")
        now = open_files()
        if changed := sorted(number for number, identity in self.files.items() if now.get(number) != identity):
            leftovers.append(f"closed or replaced file descriptors: {', '.join(map(str, changed))}")
        if still_open := left_open(self.files, now, ports):
            leftovers.append(f"files or addresses that are still open: {', '.join(still_open)}")
        if len(now) - len(self.files) > self.limits[resource.RLIMIT_NOFILE][0] // 2:
            leftovers.append(f"{len(now) - len(self.files)} open file descriptors")
        pairs = zip(_OF_SYSTEM, self.of_system, strict=True)
        return [*leftovers, *(f"another {name} of the process" for (name, get, _), value in pairs if get() != value)]


def _is_closed(stream: Any) -> bool:
    try:
        return bool(stream.closed)
    except ValueError:
        return True  # it is detached from its file


def _handlers() -> dict[int, Any]:
    # `signal.getsignal` would convert each of 62 answers to an enum after each test.
    return {number: handler for number in _SIGNALS if (handler := _signal.getsignal(number)) is not None}


def _flags(owner: Any, flag_names: str) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    return [(partial(getattr, owner, name), partial(setattr, owner, name)) for name in flag_names.split()]


_numpy: Any = sys.modules.get("numpy")
_TORCH_STATE: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch._C._get_default_device, lambda _: torch.set_default_tensor_type(torch.FloatTensor)),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    (switches.saved_precision, switches.restore_precision),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    (torch.is_warn_always_enabled, torch.set_warn_always),
    (lambda: copy.copy(PRINT_OPTS), lambda value: vars(PRINT_OPTS).update(vars(value))),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (future.get_overwrite_module_params_on_conversion, future.set_overwrite_module_params_on_conversion),
    (future.get_swap_module_params_on_conversion, future.set_swap_module_params_on_conversion),
    (torch.serialization.get_default_load_endianness, torch.serialization.set_default_load_endianness),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch.backends.cuda.preferred_linalg_library, torch.backends.cuda.preferred_linalg_library),
    (c10d.get_debug_level, c10d.set_debug_level),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    *_flags(torch.backends.cudnn, "enabled benchmark deterministic benchmark_limit"),
    *_flags(torch.backends.opt_einsum, "enabled strategy"),
    *_flags(torch.utils.deterministic, "fill_uninitialized_memory"),
    *([(_numpy.random.get_bit_generator, _numpy.random.set_bit_generator)] if _numpy else ()),
    *([(_numpy.geterr, lambda value: _numpy.seterr(**value))] if _numpy else ()),
)

_MOMENT = 0.2  # seconds for threads to end: ample for a thread that is ending, and little compared to new ranks

_DEVICES = (torch.device("cpu"), torch.device("cuda"))


def _default_device() -> torch.device | None:
    mode = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if mode is None else mode.device


class FreshState:
    """The state of torch and of the process in a fresh rank.
    `Worker` records it once, when the process group is there. It restores torch before each call, and everything at the
    end of each test, where `left_behind` names what only a new process could undo."""

    def __init__(self, device: int | None, simulated: bool) -> None:
        self.device, self.simulated = device, simulated
        self.torch_state = [get() for get, _ in _TORCH_STATE]
        self.environment, self.environment_of_c = dict(os.environ), _variables_of_c()
        self.directory = os.getcwd()
        self.threads, self.count = frozenset(threading.enumerate()), _thread._count()
        self.group = _world()
        self.sharing: str = torch.multiprocessing.get_sharing_strategy()
        self.modes = Modes()
        self.replaceable = Replaceable()
        self.process = ProcessState()
        self.modules = len(sys.modules)
        self.interop_threads = torch.get_num_interop_threads()

    def restore(self) -> None:
        """Undo the changes of a call. This must be cheap, because it runs between any two examples."""
        if _default_device() is not None:
            torch.set_default_device(None)
        self.modes.restore()
        for (get, put), value in zip(_TORCH_STATE, self.torch_state, strict=True):
            if get() != value:
                put(value)
        if torch.cuda.is_initialized() and torch.cuda.current_device() != (self.device or 0):
            torch.cuda.set_device(self.device or 0)
        seed_everything(SEED)

    def restore_process(self) -> None:
        """Undo the changes of a test to the process."""
        imported = len(sys.modules) > self.modules
        self.modules = len(sys.modules)
        self.replaceable.restore(imported)
        self.restore_context()
        self.process.restore(imported)
        if torch.multiprocessing.get_sharing_strategy() != self.sharing:
            torch.multiprocessing.set_sharing_strategy(self.sharing)
        _destroy_extra_groups()

    def restore_context(self) -> None:
        if dict(os.environ) != self.environment:
            os.environ.clear()
            os.environ.update(self.environment)
            time.tzset()
        if (now := _variables_of_c()) != self.environment_of_c:
            for name in now.keys() - self.environment_of_c.keys():
                os.unsetenv(name)
            for name, value in self.environment_of_c.items():
                os.putenv(name, value)
        with contextlib.suppress(OSError):  # if the directory is gone, a test that needs it fails with its own error
            os.chdir(self.directory)

    def left_behind(self) -> tuple[str, ...]:
        """Describe the changes that cannot be undone in a living process."""
        leftovers = []
        threads = _still_running(thread for thread in threading.enumerate() if thread not in self.threads)
        # `_thread` may have started threads that `threading` does not know.
        strangers = _thread._count() - self.count
        if threads or strangers > 0:
            shown = ", ".join(threads) or f"{strangers} that threading does not know"
            leftovers.append(f"threads that still run: {shown}")
        if (group := _world()) is not self.group:
            how = "destroyed" if group is None else "left initialized" if self.group is None else "replaced by another"
            leftovers.append(f"the default process group was {how}")
        if torch.get_num_interop_threads() != self.interop_threads:
            leftovers.append("another number of interop threads of torch, which can be set once")
        # NCCL listens at ports that the kernel chooses, and so does each gloo group that does not share its device.
        listening = not self.simulated or os.getpid() in own_gloo_devices
        left_open = self.process.left_behind(ports_of_libraries() if listening else range(0))
        return (*leftovers, *self.replaceable.changed(), *left_open)


_environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")


def _variables_of_c() -> dict[bytes, bytes]:
    """Return the environment of programs that this process starts, which `os.environ` may differ from."""
    entries = itertools.takewhile(bool, map(_environ.__getitem__, itertools.count())) if _environ else ()
    return {name: value for name, _, value in (entry.partition(b"=") for entry in entries)}


def _still_running(threads: Iterable[threading.Thread]) -> list[str]:
    """Wait a moment for threads to end, and return the names of the threads that still run.
    The thread of a queue, for example, ends shortly after the last use of the queue."""
    deadline = Clock.now() + _MOMENT
    running = []
    for thread in threads:
        # Started in C, so that it cannot be joined (threading.py, _DummyThread.join, Python 3.11).
        foreign = isinstance(thread, threading._DummyThread)
        if not foreign:
            thread.join(Clock.until(deadline))
        if foreign or thread.is_alive():
            running.append(thread.name)
    return running


def _destroy_extra_groups() -> None:
    if not dist.is_initialized():
        return
    world = dist.group.WORLD
    extra = [group for group in dist.distributed_c10d._world.pg_map if group is not world]
    for group in extra:
        dist.destroy_process_group(group)
    if extra and "torch.distributed.tensor" in sys.modules:
        # DTensor caches sharding decisions by equal meshes, and a cached mesh may have groups that are destroyed now.
        # torch recommends this function (torch/distributed/tensor/debug/__init__.py, torch 2.13).
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


class Steps:
    """Counts the operations of the default group from now on: collectives, and with gloo sends and receives, too.
    CPU tensors and tensors on devices may have separate backends with separate counts. A common backend counts for CPU
    tensors."""

    def __init__(self) -> None:
        self._group = _world()
        self._backends = backends_of(self._group)
        self._before = tuple(number_of(backend) for backend in self._backends)

    def taken(self) -> tuple[int, ...]:
        """Return the number of operations per backend; all -1 if the group was destroyed or replaced."""
        if _world() is not self._group:
            return (-1,) * len(self._before)
        return tuple(number_of(backend) - then for backend, then in zip(self._backends, self._before, strict=True))


def operations() -> int:
    """Return the number of operations that all backends of the current default group have counted; see `Steps`."""
    return sum(map(number_of, backends_of(_world())))


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def backends_of(group: Any) -> tuple[Any, Any]:
    """Return the backends for CPU tensors and for devices; None for a missing backend, or for one that does both."""
    backends = []
    for device in _DEVICES:
        try:
            backends.append(None if group is None else group._get_backend(device))
        except RuntimeError:
            backends.append(None)
    return backends[0], None if backends[1] is backends[0] else backends[1]


def number_of(backend: Any) -> int:
    try:
        return 0 if backend is None else int(backend._get_sequence_number_for_group())
    except RuntimeError:
        return 0  # this backend does not number its operations


def groups_made() -> int:
    """Return the number of groups made in this process, which determines the name of the next group."""
    return dist.distributed_c10d._world.group_count if dist.is_initialized() else 0


def _loaded(module_names: str) -> list[Any]:
    return [sys.modules[name] for name in module_names.split() if name in sys.modules]


def _classes(module_names: str) -> list[type]:
    values = (value for module in _loaded(module_names) for value in vars(module).values())
    return list(dict.fromkeys(value for value in values if isinstance(value, type)))


_OF_TORCH: tuple[Any, ...] = (
    *_loaded("torch torch.nn.functional torch.nn.init torch.autograd torch.cuda torch.random torch.fft torch.linalg"),
    *_loaded("torch.special torch.distributed torch.distributed.distributed_c10d numpy numpy.random"),
    *_classes("torch.nn torch.nn.parallel torch.optim torch.utils.data"),
    *(torch.distributed.ProcessGroup, torch.distributed.Work),
)
_PROCESS_WIDE: tuple[Any, ...] = (
    *_loaded(
        "asyncio.events builtins decimal gc io locale logging multiprocessing os random signal socket ssl subprocess"
    ),
    *_loaded("sys tempfile threading time warnings"),
    *_classes("logging"),
)
"""Modules and classes of Python whose data act on the whole process."""

_OF_PYTHON: tuple[Any, ...] = (
    *_PROCESS_WIDE,
    *(cls for cls in _classes("threading socket subprocess random pathlib") if cls.__flags__ & 1 << 9),  # not of C
    *_loaded("copy functools getpass glob importlib json math os.path pathlib pickle platform posix shutil uuid"),
)
_HOOKS_OF_PYTHON = ("excepthook", "displayhook", "breakpointhook", "unraisablehook")
_ADDED_TO = (builtins, os, sys)
_LISTS = ((sys, "argv"), (sys, "meta_path"), (sys, "path_hooks"), (sys, "warnoptions"), (gc, "callbacks"))
_TABLES = ((logging, "_levelToName"), (logging, "_nameToLevel"), (copyreg, "dispatch_table"))
_HOOKS = tuple(
    (owner, name)
    for owner in _loaded("torch.nn.modules.module torch.optim.optimizer")
    for name, value in vars(owner).items()
    if name.startswith("_global_") and isinstance(value, dict)
)
_KINDS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, staticmethod, classmethod, property)
_MAKERS = (type, types.FunctionType)
_MISSING = object()


def _is_function(owner: Any, name: str, value: Any) -> bool:
    if owner in _PROCESS_WIDE:
        return callable(value) and name not in _HOOKS_OF_PYTHON
    return issubclass(type(value), (*_KINDS, type) if owner in _OF_PYTHON else (*_KINDS, types.MethodDescriptorType))


def _variables(owner: Any, functions: list[str]) -> list[str]:
    """Return the names of data, without the numbers that are constants: `socket` and `ssl` have hundreds."""
    data = vars(owner).keys() - functions
    return [name for name in data if not (name.isupper() and isinstance(vars(owner)[name], int))]


# Computed once, in the fork server: each value that a rank touches makes it copy a page of memory.
_FUNCTIONS = (
    *(
        (owner, [name for name, value in vars(owner).items() if _is_function(owner, name, value)])
        for owner in (*_OF_TORCH, *_OF_PYTHON)
    ),
    (torch.Tensor, [name for name in dir(torch.Tensor) if callable(getattr(torch.Tensor, name))]),  # also inherited
)
_DATA = (
    *((owner, _variables(owner, attributes)) for owner, attributes in _FUNCTIONS if owner in _PROCESS_WIDE),
    *((owner, ["default_generator"]) for owner in (torch, torch.random)),
    (torch.hub, ["_hub_dir"]),
)


class Replaceable:
    """The objects, functions, modules and hooks of a fresh rank that a test could replace.

    A rank makes it once, before its first call. After each call it restores the data, and describes what else changed.
    """

    def __init__(self) -> None:
        self._functions = [(owner, names, list(map(vars(owner).get, names))) for owner, names in _FUNCTIONS]
        self._values = [[*vars(owner).values()] for owner, _ in _FUNCTIONS]
        self._data = [(owner, names, list(map(vars(owner).get, names))) for owner, names in _DATA]
        self._lists = [(value, list(value)) for value in (getattr(owner, name) for owner, name in _LISTS)]
        self._tables = [(value, dict(value)) for value in (getattr(owner, name) for owner, name in _TABLES)]
        self._added_to = [(owner, frozenset(vars(owner))) for owner in _ADDED_TO]
        self._known = frozenset(sys.modules)
        self._modules = {name: value for name, value in sys.modules.items() if name.count(".") < 2}
        self._needed = [(owner.__name__, vars(owner), dict(vars(owner))) for owner in (builtins, pickle)]
        self._put_back: set[str] = set()
        self._hooks = [dict(getattr(owner, name)) for owner, name in _HOOKS]

    def put_back_what_messages_need(self) -> None:
        """Put back functions without which a rank cannot read its next message. A replaced one stays in `changed`."""
        replaced = []
        for owner, present, fresh in self._needed:  # a call of a function would use what a test has replaced
            for name in fresh if present != fresh else ():
                if name not in present or present[name] is not fresh[name]:
                    replaced += [(owner, present, name, present.get(name))]
                    present[name] = fresh[name]
        for owner, present, name, value in replaced:
            if _by_a_test(value):
                self._put_back.add(f"{owner}.{name}")
            else:
                present[name] = value

    def restore(self, imported: bool) -> None:
        """Put back what no library needs to be replaced: data, hooks of Python, and the contents of lists and tables.

        `imported`: whether the test has imported a module, which may have added names to other modules.
        """
        for owner, attributes, values in self._data:
            present = vars(owner)
            if not all(map(is_, map(present.get, attributes), values)):  # equal objects are not the same
                for name, value in zip(attributes, values, strict=True):
                    if present.get(name, _MISSING) is not value:
                        setattr(owner, name, value)
        for values, before in self._lists:
            if len(values) != len(before) or not all(map(is_, values, before)):
                added = (value for value in values if not any(value is entry for entry in before))
                makers = ((value, value if isinstance(value, _MAKERS) else type(value)) for value in added)
                values[:] = [*before, *(value for value, maker in makers if not _by_a_test(maker))]
        for table, original in self._tables:
            table.update(original)
        for owner, fresh in self._added_to if not imported else ():
            for name in vars(owner).keys() - fresh if len(vars(owner)) > len(fresh) else ():
                delattr(owner, name)

    def changed(self) -> list[str]:
        """Describe the functions, modules and hooks that have changed."""
        replaced = set(self._put_back)
        for number, (owner, attributes, functions) in enumerate(self._functions):
            present = vars(owner)
            values = [*present.values()]
            if _are_equal(values, self._values[number]):
                continue
            for name, function in zip(attributes, functions, strict=True):
                now = present.get(name)
                if now is not function and _by_a_test(now, owner):
                    replaced.add(f"{owner.__name__}.{name}")
            self._values[number] = values
        lines = [f"replaced functions: {', '.join(sorted(replaced))}"] if replaced else []
        if entries := sorted({*self._changed_modules()}):
            lines.append(f"changed entries of sys.modules: {', '.join(entries)}")
        if any(dict(getattr(owner, name)) != hooks for (owner, name), hooks in zip(_HOOKS, self._hooks, strict=True)):
            lines.append("hooks on all modules or optimizers")
        return lines

    def _changed_modules(self) -> Iterator[str]:
        if not all(map(is_, map(sys.modules.get, self._modules), self._modules.values())):
            yield from (name for name, module in self._modules.items() if sys.modules.get(name, _MISSING) is not module)
        if sys.modules.keys() <= self._known:  # as it nearly always is, and without another set
            return
        for name in sys.modules.keys() - self._known:
            # An import gives a module its specification, which a stub of a test lacks.
            # So does the module of types that Cython's extensions share.
            expected = "." in name or name == "__mp_main__" or name.startswith("_cython_")
            if not expected and getattr(sys.modules[name], "__spec__", None) is None:
                yield name


def _are_equal(values: list[Any], before: list[Any]) -> bool:
    try:
        return values == before  # by far the fastest way to compare thousands
    except Exception:  # a tensor in the place of another has no truth
        return False


def _by_a_test(value: Any, owner: Any = sys) -> bool:
    """Return whether a test has set a value, rather than an installed package.

    Python itself does not replace its functions, so a test has set a function of Python in the place of another.
    """
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    if code is not None:
        file = str(code.co_filename)
    elif isinstance(value, type):
        file = getattr(sys.modules.get(value.__module__), "__file__", None) or ""
    else:
        return True
    return not is_installed(file) or (owner in _OF_PYTHON and "-packages/" not in file)
