"""Processes that the script starts with an interpreter of their own, by "spawn" or "forkserver": which of them are ranks.

One that makes a process group is a rank that the script starts itself. It would wait for others, and its parent for it, for
as long as a run may. Such an interpreter is not recorded; so what it is to run brings the watch along.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from multiprocessing import popen_forkserver, popen_spawn_posix, reduction
from pathlib import Path
from typing import Any

from mgpu_check.compare.trace import Writer
from mgpu_check.torch_hooks.patches import Patches

__all__ = ["install"]

# What init_process_group calls first, with a store or without one: the script may have a name of its own for that function.
_IN_MAKING_A_GROUP = ("rendezvous", "_new_process_group_helper")
_HOME = str(Path(__file__).parents[2])


def install(fd: int) -> None:
    """Have "starts" noted in the trace `fd` by each process that is started from now on and makes a process group."""
    for kind in (popen_spawn_posix.Popen, popen_forkserver.Popen):
        Patches().wrap(kind, "_launch", functools.partial(_with_watch, fd=fd))


def _with_watch(launch: Any, fd: int) -> Any:
    @functools.wraps(launch)
    def watched(self: Any, process: Any) -> Any:
        added = _HOME not in sys.path  # the path goes with the process, which must be able to import this module
        if added:
            sys.path.append(_HOME)
        try:
            return launch(self, _Watched(process, fd))
        finally:
            if added:
                sys.path.remove(_HOME)

    return watched


class _Watched:
    """Stands for a process object while that is sent."""

    def __init__(self, process: Any, fd: int) -> None:
        self._process, self._fd = process, fd

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def __reduce__(self) -> Any:
        return _arrived, (self._process, reduction.DupFd(self._fd))


def _arrived(process: Any, trace: Any) -> Any:
    """Watch a new process, which has imported what the script imports, and give it what it is to run."""
    fd = trace.detach()
    os.set_inheritable(fd, False)
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    for name in _IN_MAKING_A_GROUP if c10d is not None else ():
        setattr(c10d, name, functools.partial(_starts, Writer(fd)))
    return process


def _starts(writer: Writer, *args: object, **kwargs: object) -> None:
    writer.write("starts", after=0)
    threading.Event().wait()
