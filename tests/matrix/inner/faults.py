"""What can go wrong in a rank, and what a rank looks like to the test that comes after. Imported by the ranks."""

from __future__ import annotations

import _thread
import atexit
import ctypes
import faulthandler
import gc
import hashlib
import io
import logging
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu_check.processes.channel import _BUFFER, _HEADER, _MAGIC, frame
from mgpu_check.processes.leftovers import MARK
from mgpu_check.processes.pickling import Pickled
from mgpu_check.processes.protocol import Outcome

SIZE, CULPRIT = 3, 1


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        kind: "error", the rank raises; "death", it ends; "hang", it never answers; "wire", it breaks its connection,
            and would go on; "state", it leaves something to the next test.
        act: run by the rank at fault; in a "state" all are.
        others: run by its peers meanwhile.
    """

    kind: Literal["error", "death", "hang", "wire", "state"]
    act: Callable[[], Any]
    others: Callable[[], Any]

    @property
    def culprits(self) -> tuple[int, ...]:
        return tuple(range(SIZE)) if self.kind == "state" else (CULPRIT,)


FAULTS: dict[str, Fault] = {}


VARIATIONS = frozenset(
    {"memory-of-torch", "unpicklable-error", "cpu-limit", "exit-of-a-thread", "shuts-its-connection-down"}
    | {"closes-all-files", "a-few-bytes-of-garbage", "garbage-as-a-message", "answer-to-another-call"}
    | {"message-that-cannot-be-loaded", "spins-in-c-without-the-lock", "deadlock", "receives-what-nobody-sends"}
    | {"modes-of-torch", "settings-of-python", "user", "replaced-functions", "hook-of-all-modules", "thread-of-c"}
    | {"another-default-group", "open-file", "replaced-input", "all-signal-handlers", "timer-of-faulthandler"}
    | {"group-alone", "deaf", "half-a-message", "is-to-receive-what-nobody-sends", "gathers-another-dtype"}
    | {"shared-memory-with-names", "sigkill-with-shared-memory"}
)
"""Ways to do what others here do as well: they are tried in the body and while idle, and not in each situation."""


TAKE_LONGER = frozenset({"shared-memory-with-names", "sigkill-with-shared-memory", "prints-50-mb", "huge-result"})
"""They compute, or start a large program: on a machine with much else to do, the deadline of the others is none for
them."""


def _wait() -> None:
    dist.barrier()  # place: waiting


def _add(kind: Any, others: Callable[[], Any] = _wait) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(act: Callable[[], Any]) -> Callable[[], Any]:
        FAULTS[act.__name__.replace("_", "-")] = Fault(kind, act, others)
        return act

    return add


def happen(rank: Any, name: str, value: object = None) -> Any:
    """Let it go wrong here and now. All ranks have met before, so the last collective of each is known."""
    what = FAULTS[name]
    dist.all_reduce(torch.ones(2))  # place: meeting
    if rank.index not in what.culprits:
        return what.others()
    result = what.act()
    return what.others() if what.kind == "wire" else result


def arm(rank: Any, name: str, pipe: str) -> int:
    """Let it go wrong when SIGUSR1 comes; what is written to `pipe` tells "1" when it begins and "2" when it is
    over."""
    what = FAULTS[name]
    if rank.index in what.culprits:
        told = os.open(f"{pipe}{rank.index}", os.O_WRONLY)

        begun = threading.Event()

        def now(*_: object) -> None:
            if begun.is_set():
                return  # it was sent again before this process could say that it had come
            begun.set()
            os.write(told, b"1")
            what.act()
            os.write(told, b"2")
            os.close(told)

        signal.signal(signal.SIGUSR1, now)
    dist.all_reduce(torch.ones(2))  # place: arming
    return os.getpid()


# Errors ----------------------------------------------------------------------------------------------------------


@_add("error")
def raises() -> None:
    raise ValueError("planted")  # place: raises


@_add("error")
def sys_exit() -> None:
    sys.exit(3)  # place: sys-exit


@_add("error")
def keyboard_interrupt() -> None:
    raise KeyboardInterrupt  # place: keyboard-interrupt


@_add("error")
def overflow() -> None:
    overflow()  # place: overflow


def _limit_memory(spare: int) -> None:
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + spare, resource.RLIM_INFINITY))


@_add("error")
def memory() -> None:
    _limit_memory(100 << 20)
    bytearray(1 << 30)  # place: memory


@_add("error")
def memory_of_torch() -> None:
    _limit_memory(100 << 20)
    torch.empty(1 << 30)  # place: memory-of-torch


@_add("error")
def memory_used_up() -> None:
    """Nothing is left to tell it with."""
    _limit_memory(30 << 20)
    held: list[Any] = []
    size = 1 << 20
    while True:
        try:
            held.append(bytearray(size))  # place: memory-used-up
        except MemoryError:
            if size < 64:
                raise
            size //= 2


@_add("error")
def prints_50_mb() -> None:
    line = "x" * 999
    for _ in range(50_000):
        print(line)
    raise ValueError("printed")  # place: prints-50-mb


@_add("error", others=lambda: None)
def unpicklable_result() -> object:
    return threading.Lock()


@_add("error", others=lambda: None)
def unpicklable_argument() -> None:
    """See `argument`: it never gets here."""


def argument(name: str) -> object:
    """What the test passes to the ranks besides the name of the fault."""
    return threading.Lock() if name == "unpicklable-argument" else None


class Difficult(Exception):
    """Cannot be pickled, and has no message."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())

    def __str__(self) -> str:
        raise RuntimeError("no message")


@_add("error")
def unpicklable_error() -> None:
    raise Difficult  # place: unpicklable-error


@_add("error", others=lambda: None)
def sends_what_nobody_receives() -> None:
    dist.isend(torch.full((2,), 7.0), 0)  # place: sends-what-nobody-receives


@_add("error", others=lambda: None)
def is_to_receive_what_nobody_sends() -> None:
    dist.irecv(torch.zeros(2), 0)  # place: is-to-receive-what-nobody-sends


def _gather_to_0(dtype: torch.dtype) -> None:
    parts = [torch.zeros(2) for _ in range(SIZE)] if dist.get_rank() == 0 else None
    dist.gather(torch.ones(2, dtype=dtype), parts, dst=0)  # place: gather-to-0


@_add("error", others=lambda: _gather_to_0(torch.float32))
def gathers_another_dtype() -> None:
    _gather_to_0(torch.int32)


# Deaths ----------------------------------------------------------------------------------------------------------


@_add("death")
def exit_0() -> None:
    os._exit(0)


@_add("death", others=lambda: dist.all_reduce(torch.ones(3)))
def exit_7_after_the_last_collective() -> None:
    dist.all_reduce(torch.ones(3))  # place: exit-7-after-the-last-collective
    os._exit(7)


@_add("death")
def sigkill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _share() -> None:
    """Make shared memory and semaphores that have names, in each way that there is, and keep them."""
    segment = shared_memory.SharedMemory(create=True, size=64)
    semaphore: Any = multiprocessing.get_context("spawn").Semaphore()
    names, kept = [segment.name, f"sem.{semaphore._semlock.name[1:]}"], [segment, semaphore]
    if dist.get_rank() == CULPRIT:  # on one rank: torch starts a large program for it
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        kept.append(torch.ones(3).share_memory_())
        names.append(kept[-1].untyped_storage()._share_filename_cpu_()[1].decode()[1:])
        torch.multiprocessing.set_sharing_strategy(before)
    sys.left = kept  # type: ignore[attr-defined]
    with open(os.environ["MGPU_MATRIX_NAMES"], "a") as file:
        file.write("\n".join([*names, ""]))


@_add("death")
def sigkill_with_shared_memory() -> None:
    _share()
    os.kill(os.getpid(), signal.SIGKILL)


@_add("death")
def sigsegv() -> None:
    ctypes.string_at(0)  # place: sigsegv


@_add("death")
def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@_add("death")
def abort() -> None:
    os.abort()  # place: abort


@_add("death")
def cpu_limit() -> None:
    """As the kernel does it to a process that has used up its RLIMIT_CPU."""
    os.kill(os.getpid(), signal.SIGXCPU)


def _gather(length: int) -> None:
    dist.all_gather([torch.zeros(length) for _ in range(SIZE)], torch.ones(length))  # place: gather


@_add("death", others=lambda: _gather(3))
def gathers_another_shape() -> None:
    _gather(7)


@_add("death")
def exit_of_a_thread() -> None:
    waiting = threading.Event()
    threading.Thread(target=lambda: waiting.wait() and os._exit(9), daemon=True).start()
    waiting.set()
    threading.Event().wait()


def _connection() -> int:
    """The file descriptor by which this rank hears from the pytest process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family is socket.AF_UNIX:
                    return int(name)
        except OSError:
            continue
    raise AssertionError("this rank has no connection")


@_add("wire")
def closes_its_connection() -> None:
    os.close(_connection())


@_add("wire")
def shuts_its_connection_down() -> None:
    """The pytest process sees the end, and the rank goes on."""
    with socket.socket(fileno=os.dup(_connection())) as one:
        one.shutdown(socket.SHUT_RDWR)


@_add("death")
def closes_all_files() -> None:
    os.closerange(0, 1024)


def _say(data: bytes) -> None:
    with socket.socket(fileno=os.dup(_connection())) as one:
        one.sendall(data)


@_add("wire")
def garbage() -> None:
    _say(b"\xff\xfe\xfd garbage \x00\x01" * 50)


@_add("wire")
def a_few_bytes_of_garbage() -> None:
    _say(b"\xff")


@_add("wire")
def garbage_as_a_message() -> None:
    _say(_HEADER.pack(_MAGIC, 20) + b"\x80\x05 this is no pickle"[:20].ljust(20))


@_add("wire")
def message_of_another_kind() -> None:
    _say(frame({"not": "an answer"}))


@_add("wire")
def answer_to_another_call() -> None:
    _say(frame(Outcome(10**6, Pickled(b"", ()), None, (0, 0), ())))


@_add("wire")
def message_that_cannot_be_loaded() -> None:
    data = b"cno_such_module\nno_such_name\n."
    _say(_HEADER.pack(_MAGIC, len(data)) + data)


@_add("wire")
def buffer_of_no_message() -> None:
    _say(_HEADER.pack(_BUFFER, 20) + bytes(20))


@_add("wire")
def buffer_beyond_all_memory() -> None:
    _say(_HEADER.pack(_BUFFER, 1 << 62))


@_add("death")
def kills_the_fork_server() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


# Hangs -----------------------------------------------------------------------------------------------------------


@_add("hang")
def sleeps() -> None:
    time.sleep(3600)  # place: sleeps


@_add("hang")
def spins_in_c() -> None:
    re.match(r"(x+x+)+y", "x" * 64)  # place: spins-in-c


@_add("hang")
def spins_in_c_without_the_lock() -> None:
    hashlib.pbkdf2_hmac("sha256", b"x", b"x", 2_000_000_000)  # place: spins-in-c-without-the-lock


@_add("hang")
def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # place: deadlock


@_add("hang", others=lambda: None)
def collective_alone() -> None:
    dist.all_reduce(torch.ones(4))  # place: collective-alone


@_add("hang", others=lambda: dist.all_reduce(torch.ones(4)))  # place: other-collective-others
def other_collective() -> None:
    dist.broadcast(torch.ones(4), CULPRIT)  # place: other-collective


@_add("hang", others=lambda: None)
def receives_what_nobody_sends() -> None:
    dist.recv(torch.ones(1), 0)  # place: receives-what-nobody-sends


@_add("hang", others=lambda: None)
def group_alone() -> None:
    dist.new_group([0, 1, 2])  # place: group-alone


@_add("hang")
def sigstop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@_add("hang")
def deaf() -> None:
    """The request for its stacks does not reach the thread that hangs."""
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
    time.sleep(3600)  # place: deaf


@_add("hang")
def half_a_message() -> None:
    _say(_HEADER.pack(_MAGIC, 1000) + b"half")
    time.sleep(3600)  # place: half-a-message


# Changes that outlive the test -----------------------------------------------------------------------------------


@_add("state")
def thread() -> None:
    threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()


@_add("state")
def group() -> None:
    dist.new_group([0, 1])


@_add("state")
def destroyed_group() -> None:
    dist.destroy_process_group()


@_add("state")
def dtype() -> None:
    torch.set_default_dtype(torch.float64)


@_add("state")
def device() -> None:
    torch.set_default_device("cuda:2")
    torch.cuda.set_device(2)


@_add("state")
def seed() -> None:
    torch.manual_seed(12345)
    random.seed(12345)


@_add("state")
def environment() -> None:
    os.environ["LEFT"] = "1"
    os.environ.pop("RANK", None)


@_add("state")
def directory() -> None:
    os.chdir("/")


@_add("state")
def vanished_directory() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)


@_add("state")
def grad_mode() -> None:
    torch.set_grad_enabled(False)


@_add("state")
def deterministic() -> None:
    torch.use_deterministic_algorithms(True)


@_add("state")
def threads_of_torch() -> None:
    torch.set_num_threads(7)


@_add("state")
def module_path() -> None:
    sys.path.insert(0, "/nowhere")


@_add("state")
def signal_handler() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@_add("state")
def blocked_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])


@_add("state")
def alarm_clock() -> None:
    signal.setitimer(signal.ITIMER_REAL, 3600)


@_add("state")
def file_mask() -> None:
    os.umask(0o777)


@_add("state")
def resource_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))


@_add("state")
def hard_resource_limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))


@_add("state")
def recursion_limit() -> None:
    sys.setrecursionlimit(150)


@_add("state")
def collector() -> None:
    gc.disable()


@_add("state")
def replaced_output() -> None:
    sys.stdout = io.StringIO()


@_add("state")
def closed_output() -> None:
    sys.stdout.close()


@_add("state")
def at_exit() -> None:
    atexit.register(time.sleep, 3600)


@_add("state")
def huge_result() -> object:
    return torch.zeros(1_000_000)  # twenty times what the socket holds


@_add("state")
def children() -> None:
    subprocess.Popen(["sleep", "3600"])


@_add("state")
def children_in_their_own_session() -> None:
    subprocess.Popen(["sleep", "3600"], start_new_session=True)


@_add("state")
def orphans() -> None:
    """Children of a child that has ended, in a session of their own."""
    subprocess.run(["sh", "-c", "setsid sleep 3600 & setsid sleep 3600 &"], check=True)


@_add("state")
def modes_of_torch() -> None:
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    mode = torch.inference_mode()
    mode.__enter__()
    sys.left = mode  # type: ignore[attr-defined]
    torch.set_flush_denormal(True)
    torch.multiprocessing.set_sharing_strategy("file_system")

    class Zero(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {})) * 0

    Zero().__enter__()


@_add("state")
def settings_of_python() -> None:
    gc.set_threshold(1, 1, 1)
    socket.setdefaulttimeout(0.01)
    sys.settrace(lambda *_: None)
    threading.settrace(lambda *_: None)
    for owner, name in ((sys, "excepthook"), (threading, "excepthook"), (sys, "unraisablehook")):
        setattr(owner, name, lambda *_: None)
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()
    logging.getLogger().setLevel(1)
    logging.getLogger().addHandler(logging.FileHandler(os.devnull))
    logging.disable()
    os.nice(3)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


@_add("state")
def user() -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    else:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # replaced as well


@_add("state")
def replaced_functions() -> None:
    dist.all_reduce = torch.nn.functional.relu = lambda *_, **__: None  # type: ignore[assignment]


@_add("state")
def hook_of_all_modules() -> None:
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)


@_add("state")
def another_default_group() -> None:
    dist.destroy_process_group()
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's list of names lacks it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


@_add("state")
def open_file() -> None:
    sys.left = os.open(os.path.abspath(sys.executable), os.O_RDONLY)  # type: ignore[attr-defined]


@_add("state")
def replaced_input() -> None:
    reading, _ = os.pipe()
    os.dup2(reading, 0)


@_add("state")
def all_signal_handlers() -> None:
    """Also those that would write the stacks of a hang."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, lambda *_: None)


@_add("state")
def timer_of_faulthandler() -> None:
    faulthandler.dump_traceback_later(0.3, exit=True)


@_add("state")
def thread_of_c() -> None:
    _thread.start_new_thread(time.sleep, (3600,))


@_add("state")
def shared_memory_with_names() -> None:
    _share()


@_add("state")
def forks_and_returns_twice() -> None:
    """The child goes on as if it were the rank."""
    os.fork()


# What the next test sees -----------------------------------------------------------------------------------------


SELDOM_THE_SAME = ("PYTEST_CURRENT_TEST", MARK)


def observe(rank: Any) -> dict[str, Any]:
    """All that a test may find changed in its rank."""
    total = torch.ones(2) * (rank.index + 1)
    dist.all_reduce(total)
    message = torch.ones(2)
    if rank.index < 2:
        (dist.recv if rank.index == 0 else dist.send)(message, 1 - rank.index)
    print("printed")
    mask = os.umask(0)
    os.umask(mask)
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT")}
    handlers = {}
    for number in range(1, signal.NSIG):
        try:
            handlers[number] = str(signal.getsignal(number))
        except ValueError:
            continue
    return {
        "total": total.tolist(),
        "message": message.tolist(),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.empty(1).device),
        "current device": torch.cuda.current_device(),
        "seeds": (torch.rand(2).tolist(), random.random()),
        "environment": {name: value for name, value in os.environ.items() if name not in SELDOM_THE_SAME},
        "directory": os.getcwd(),
        "path": list(sys.path),
        "grad mode": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": [one.name for one in threading.enumerate()],
        "threads of torch": torch.get_num_threads(),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "file mask": mask,
        "limits": limits,
        "handlers": handlers,
        "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "alarm": signal.getitimer(signal.ITIMER_REAL),
        "recursion limit": sys.getrecursionlimit(),
        "collector": gc.isenabled(),
        "output": type(sys.stdout).__name__,
        "autocast": torch.is_autocast_enabled("cpu"),
        "inference mode": torch.is_inference_mode_enabled(),
        "values": (torch.ones(1) * 2).tolist(),
        "denormals": sys.float_info.min / 2,
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "thresholds": gc.get_threshold(),
        "socket timeout": socket.getdefaulttimeout(),
        "trace": (sys.gettrace(), threading.gettrace()),
        "exception hooks": [str(getattr(hook, "__module__", hook)) for hook in (sys.excepthook, sys.unraisablehook)],
        "time zone": time.tzname,
        "logging": (logging.root.level, len(logging.root.handlers), logging.root.manager.disable),
        "niceness": os.nice(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "user": os.getresuid(),
        "functions": [dist.all_reduce.__module__, torch.nn.functional.relu.__module__],
        "hooks of modules": len(torch.nn.modules.module._global_forward_hooks),
        "world size": dist.get_world_size(),
        "input": os.readlink("/proc/self/fd/0"),
        "threads of C": _thread._count(),
    }
