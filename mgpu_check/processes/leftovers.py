"""Clean up after killed ranks: remove names of shared memory and semaphores, and kill child processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

MARK = "_MGPU_CHECK_RANKS"
"""Environment variable of ranks and their children: the directory of their run."""

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
    """Call `remove_names` for all ranks of a run."""
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
        found = {pid for pid in _marked(directory) - ended if not _is_manager(pid)}
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        ended |= found
        if not found:
            break
    remove_all_names(directory)


def _marked(directory: str) -> set[int]:
    """Return the other processes whose environment has the mark of a run."""
    mark = os.fsencode(f"{MARK}={directory}")
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.add(int(entry))
    return found
