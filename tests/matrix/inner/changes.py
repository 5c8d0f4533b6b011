"""Changes of a rank that outlive the test, and what the test that comes after sees of them. Imported by the ranks."""

from __future__ import annotations

import _thread
import atexit
import faulthandler
import gc
import io
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import shared_memory
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu_check.processes.child_processes import MARK

CHANGES: dict[str, Callable[[], Any]] = {}


def _change(act: Callable[[], Any]) -> Callable[[], Any]:
    CHANGES[act.__name__.replace("_", "-")] = act
    return act


def share(on: int) -> None:
    """Make shared memory and semaphores that have names, in each way that there is, and keep them.

    Args:
        on: the rank that shares a tensor: torch starts a large program for it.
    """
    segment = shared_memory.SharedMemory(create=True, size=64)
    semaphore: Any = multiprocessing.get_context("spawn").Semaphore()
    names, kept = [segment.name, f"sem.{semaphore._semlock.name[1:]}"], [segment, semaphore]
    if dist.get_rank() == on:
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        kept.append(torch.ones(3).share_memory_())
        names.append(kept[-1].untyped_storage()._share_filename_cpu_()[1].decode()[1:])
        torch.multiprocessing.set_sharing_strategy(before)
    sys.left = kept  # type: ignore[attr-defined]
    with open(os.environ["MGPU_MATRIX_NAMES"], "a") as file:
        file.write("\n".join([*names, ""]))


@_change
def thread() -> None:
    threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()


@_change
def group() -> None:
    dist.new_group([0, 1])


@_change
def destroyed_group() -> None:
    dist.destroy_process_group()


@_change
def environment() -> None:
    os.environ["LEFT"] = "1"
    os.environ.pop("RANK", None)


@_change
def vanished_directory() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)


@_change
def hard_resource_limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))


@_change
def closed_output() -> None:
    sys.stdout.close()


@_change
def at_exit() -> None:
    atexit.register(time.sleep, 3600)


@_change
def huge_result() -> object:
    return torch.zeros(1_000_000)  # twenty times what the socket holds


@_change
def children() -> None:
    subprocess.Popen(["sleep", "3600"])


@_change
def orphans() -> None:
    """Children of a child that has ended, in a session of their own."""
    subprocess.run(["sh", "-c", "setsid sleep 3600 & setsid sleep 3600 &"], check=True)


@_change
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


@_change
def settings_of_torch() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("cuda:2")
    torch.cuda.set_device(2)
    torch.manual_seed(12345)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(7)


@_change
def signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])
    signal.setitimer(signal.ITIMER_REAL, 3600)


@_change
def settings_of_python() -> None:
    random.seed(12345)
    sys.path.insert(0, "/nowhere")
    gc.disable()
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
    sys.stdout = io.StringIO()
    os.umask(0o777)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    sys.setrecursionlimit(150)


@_change
def user() -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    else:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # replaced as well


@_change
def replaced_functions() -> None:
    dist.all_reduce = torch.nn.functional.relu = lambda *_, **__: None  # type: ignore[assignment]


@_change
def hook_of_all_modules() -> None:
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)


@_change
def another_default_group() -> None:
    dist.destroy_process_group()
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's list of names lacks it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


@_change
def open_file() -> None:
    sys.left = os.open(os.path.abspath(sys.executable), os.O_RDONLY)  # type: ignore[attr-defined]


@_change
def replaced_input() -> None:
    reading, _ = os.pipe()
    os.dup2(reading, 0)


@_change
def all_signal_handlers() -> None:
    """Also those that would write the stacks of a hang."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, lambda *_: None)


@_change
def timer_of_faulthandler() -> None:
    faulthandler.dump_traceback_later(0.3, exit=True)


@_change
def thread_of_c() -> None:
    _thread.start_new_thread(time.sleep, (3600,))


@_change
def shared_memory_with_names() -> None:
    share(on=1)


@_change
def forks_and_returns_twice() -> None:
    """The child goes on as if it were the rank."""
    os.fork()


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
