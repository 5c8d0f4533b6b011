"""Remove what outlives ranks that were killed: names of shared memory and semaphores, and their children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["MARK", "children", "children_but_managers", "clear", "file_of_names", "remove_all_names", "remove_names"]

MARK = "_MGPU_CHECK_RANKS"
"""A variable that ranks, and what they start, have: the directory of their run."""

_NAMES = "names-{}"
_READ = "from multiprocessing.resource_tracker import main; main({})"
_MOST_ROUNDS = 100


def file_of_names(directory: str, pid: int) -> Path:
    """Return the file where a rank notes what it makes by a name, as Python does for its tracker; see `shared_names`."""
    return Path(directory, _NAMES.format(pid))


def remove_names(directory: str, pid: int) -> None:
    """Remove what a rank, which has ended, has made by a name and has not removed itself."""
    with contextlib.suppress(OSError):
        path = file_of_names(directory, pid)
        if path.stat().st_size:
            _read(path)
        path.unlink()


def remove_all_names(directory: str) -> None:
    """Remove names as `remove_names` does, for all ranks of a run."""
    for path in Path(directory).glob(_NAMES.format("*")):
        remove_names(directory, int(path.name.rpartition("-")[2]))


def _read(path: Path) -> None:
    """Have Python's own tracker read the file. In a process, because it closes files, and says of each name what it does."""
    with path.open("rb") as file:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _READ.format(file.fileno())],
            pass_fds=[file.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def children() -> list[int]:
    """Return the processes that this one has started, or has inherited from them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def children_but_managers() -> list[int]:
    """Return the same without managers of torch's shared memory."""
    return [pid for pid in children() if not _is_manager(pid)]


def _is_manager(pid: int) -> bool:
    """Return whether it is torch's manager of shared memory, which removes names, and ends, 2 s after the last that has
    used it.

    Killed before, it leaves them; and nobody else knows them well enough: they have the number of a process in them, which
    may be that of another in a container that shares the memory.
    """
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "torch_shm_manager"
    return False


def clear(directory: str) -> None:
    """End what the ranks of a run have started and their fork server could not end; and remove their names."""
    ended: set[int] = set()
    for _ in range(_MOST_ROUNDS):  # each of them may just have started another
        found = {pid for pid in _marked(directory) - ended if not _is_manager(pid)}
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        ended |= found
        if not found:
            break
    remove_all_names(directory)


def _marked(directory: str) -> set[int]:
    """Return the processes that have the mark of a run, but for this one."""
    mark = os.fsencode(f"{MARK}={directory}")
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.add(int(entry))
    return found
