"""Watch the processes of a run: the collectives that each has entered, and ranks that a process starts itself.

On real devices a collective returns at once, and a rank waits later, for example in ``loss.item()``. The runner reads
the counts of entered collectives while the process hangs, to name the rank that the others wait for.

Ranks are detected among the processes that the script starts by "spawn" or "forkserver": a process that makes a process
group is a rank that the script starts itself. It would wait for other ranks, and its parent for it, until the timeout.
Its new interpreter is not recorded, so the pickled process object installs the watch there.

Imports no torch: the runner, and such a process, may do without.
"""

from __future__ import annotations

import functools
import os
import struct
import sys
import threading
from collections.abc import Callable
from multiprocessing import popen_forkserver, popen_spawn_posix, reduction
from pathlib import Path
from typing import Any

from mgpu_check.compare.trace import Writer
from mgpu_check.processes import collective_records
from mgpu_check.torch_hooks.patches import Patches, around

_NUMBER = struct.Struct("=Q")


def install_count(fd: int) -> Callable[[], None]:
    """Record each collective that the script's process enters in the file `fd`. Return a function that also records the
    operations that the C++ reducer of DistributedDataParallel has entered so far."""
    from mgpu_check.engine.rank_side.state import operations
    from mgpu_check.torch_hooks import collectives

    collectives.recorder.attach(fd)
    collectives.install()

    def count() -> None:
        os.pwrite(fd, _NUMBER.pack(operations()), collective_records.SIZE)

    return count


def entered(fd: int) -> tuple[int, int]:
    """Read from the file of a process how many operations and collectives it has entered.

    Return the number of operations that the backends of the default group had counted when it was last written, with
    those of DistributedDataParallel's C++ reducer, and the current number of calls of collectives, in any group. Each
    is 0 until the process has written it.
    """
    data = os.pread(fd, collective_records.SIZE + _NUMBER.size, 0)
    number = data[collective_records.SIZE :]
    return (_NUMBER.unpack(number)[0] if number else 0), collective_records.parse(data[: collective_records.SIZE]).total


# init_process_group calls one of these first (torch/distributed/distributed_c10d.py, torch 2.13). They are replaced
# instead of it, because the script may have imported it by name.
_IN_MAKING_A_GROUP = ("rendezvous", "_new_process_group_helper")
_HOME = str(Path(__file__).parents[2])


def install_watch(fd: int) -> None:
    """Record "starts" in the trace `fd` for each process that is started from now on and makes a process group."""
    for process_class in (popen_spawn_posix.Popen, popen_forkserver.Popen):
        Patches().wrap(process_class, "_launch", around(functools.partial(_with_watch, fd)))


def _with_watch(fd: int, launch: Any, self: Any, process: Any) -> Any:
    # sys.path is sent to the process, which must be able to import this module: Lib/multiprocessing/spawn.py,
    # get_preparation_data, Python 3.11.
    added = _HOME not in sys.path
    if added:
        sys.path.append(_HOME)
    try:
        return launch(self, _Watched(process, fd))
    finally:
        if added:
            sys.path.remove(_HOME)


class _Watched:
    """Replaces a process object while it is pickled: `_with_watch` makes it; the new process calls `_arrived`."""

    def __init__(self, process: Any, fd: int) -> None:
        self._process, self._fd = process, fd

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def __reduce__(self) -> Any:
        return _arrived, (self._process, reduction.DupFd(self._fd))


def _arrived(process: Any, trace: Any) -> Any:
    """Install the watch in the new process, after the imports of the script, and return the process object to run."""
    fd = trace.detach()
    os.set_inheritable(fd, False)
    writer = Writer(fd)

    def starts(*args: object, **kwargs: object) -> None:
        writer.write("starts", after=0)
        threading.Event().wait()

    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    for name in _IN_MAKING_A_GROUP if c10d is not None else ():
        setattr(c10d, name, starts)
    return process
