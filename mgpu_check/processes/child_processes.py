"""The end of processes: signals and exit codes that the pytest process and ranks agree on, what Linux does with a
process when its parent ends, and what killed ranks leave behind (child processes, names of shared memory and
semaphores).

It imports no torch, because the pytest process and the fork server use it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def end_with_parent() -> None:
    """Have Linux kill this process when its parent ends. Check `os.getppid()` afterwards: it may have ended before."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals of Slurm, Kubernetes, systemd or a closed terminal that ask a process to end; Ctrl-C is separate."""

FROM_OUTSIDE = (*ENDING, signal.SIGINT)
"""Signals that a process gets from a person or a program, and never from an error of its own or of a device."""

# Training code uses SIGUSR1 and SIGUSR2 for preemption; a real-time signal is free on Linux.
STACKS_SIGNAL: int = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2

CONNECTION_LOST = 74  # exit code of a rank whose connection is broken at its own end (EX_IOERR)


class EndOnRequest:
    """Let signals that ask for the end interrupt the main thread as Ctrl-C does, once."""

    def __init__(self) -> None:
        self.by: str | None = None  # name of the signal that has interrupted the process; None if none has
        self._kept: dict[signal.Signals, signal.Handlers] = {}

    def begin(self) -> None:
        """Handle these signals from now on. Leave those that this process or its parent (nohup) handles otherwise."""
        for number in ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._interrupt)
                self._kept[number] = signal.SIG_DFL

    def hold_off(self) -> None:
        """Ignore these signals from now on: what remains, such as writing a report, takes little time."""
        for number in self._kept:
            signal.signal(number, signal.SIG_IGN)

    def end(self) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)
        self._kept.clear()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.by = signal.Signals(number).name
        self.hold_off()
        raise KeyboardInterrupt(self.by)


_BLOCKED_OR_PENDING = re.compile(r"^(?:SigBlk|SigPnd|ShdPnd):\s*([0-9a-f]+)$", re.MULTILINE)


def held_back(pid: int, number: int) -> int:
    """Return the number of a process's threads that block a signal or have it pending; 0 without proc(5).

    A handler in C blocks its signal while it runs. So the handler has ended once the number is back at its earlier
    value.
    """
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            masks = _BLOCKED_OR_PENDING.findall(status.read_text(encoding="utf-8", errors="replace"))
            count += any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
    return count


MARK = "_MGPU_CHECK_RANKS"  # environment variable of ranks and their children: the directory of their run

_NAMES = "names-{}"
_READ = "from multiprocessing.resource_tracker import main; main({})"
_MOST_ROUNDS = 100  # so that a program that keeps starting processes cannot hold `clear` forever


def file_of_names(directory: str, pid: int) -> Path:
    """Return the file of a rank's shared names, in the format of Python's resource tracker; see `shared_names`."""
    return Path(directory, _NAMES.format(pid))


def remove_names(directory: str, pid: int) -> None:
    """Remove the shared memory and semaphores that an ended rank made and did not remove."""
    with contextlib.suppress(OSError):
        path = file_of_names(directory, pid)
        if path.stat().st_size:
            _read(path)
        path.unlink()


def remove_all_names(directory: str) -> None:
    for path in Path(directory).glob(_NAMES.format("*")):
        remove_names(directory, int(path.name.rpartition("-")[2]))


def _read(path: Path) -> None:
    """Run Python's resource tracker on the file, in a new process, because it closes files and prints warnings."""
    with path.open("rb") as file:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _READ.format(file.fileno())],
            pass_fds=[file.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def children() -> list[int]:
    """Return the child processes of this process, including adopted orphans."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def children_but_managers() -> list[int]:
    """Return the child processes, except for torch's managers of shared memory."""
    return [pid for pid in children() if not _is_manager(pid)]


def name_and_state(pid: int) -> tuple[str, str]:
    """Return the name of a process and its state as one letter, see proc(5); both empty if it has ended."""
    name, fields = _stat(pid)
    return name, fields[0] if fields else ""


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process so far, in seconds, see proc(5); 0 if it has ended."""
    _, fields = _stat(pid)
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")  # in user mode, and in the kernel


def _stat(pid: int) -> tuple[str, list[str]]:
    """Return the name of a process and the fields after it, see proc(5); both empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
    except OSError:
        return "", []
    return name, rest.split()


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_manager(pid: int) -> bool:
    """Return whether a process is torch's manager of shared memory.

    The manager removes its names and ends 2 s after its last user. If it is killed, the names remain, and no other
    process can remove them safely: they contain a process id, which a process of another container may have, too.
    """
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "torch_shm_manager"
    return False


def clear(directory: str) -> None:
    """Kill the processes that the ranks of a run started, if their fork server could not, and remove their names."""
    ended: set[int] = set()
    for _ in range(_MOST_ROUNDS):  # a process may start another before it is killed
        pids = {pid for pid in _marked(directory) - ended if not _is_manager(pid)}
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        ended |= pids
        if not pids:
            break
    remove_all_names(directory)


def _marked(directory: str) -> set[int]:
    mark = os.fsencode(f"{MARK}={directory}")
    pids = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    pids.add(int(entry))
    return pids
