"""What can go wrong in a rank. Imported by the ranks."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import resource
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from changes import CHANGES, share

from mgpu_check.processes.channel import _BUFFER, _HEADER, _MAGIC, frame

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


VARIATIONS = Path(__file__).with_name("variations.txt").read_text().split()
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


@_add("death")
def sigkill_with_shared_memory() -> None:
    share(on=CULPRIT)
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
def message_of_another_kind() -> None:
    _say(frame({"not": "an answer"}))


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


FAULTS.update({name: Fault("state", act, _wait) for name, act in CHANGES.items()})
