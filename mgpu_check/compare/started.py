"""Detect ranks among the processes that the script starts by "spawn" or "forkserver".

A process that makes a process group is a rank that the script starts itself. It would wait for other ranks, and its
parent for it, until the timeout. Its new interpreter is not recorded, so the pickled process object installs the watch
there.
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

# init_process_group calls one of these first. They are replaced instead of it, because the script may have imported it
# by name.
_IN_MAKING_A_GROUP = ("rendezvous", "_new_process_group_helper")
_HOME = str(Path(__file__).parents[2])


def install(fd: int) -> None:
    """Record "starts" in the trace `fd` for each process that is started from now on and makes a process group."""
    for kind in (popen_spawn_posix.Popen, popen_forkserver.Popen):
        Patches().wrap(kind, "_launch", functools.partial(_with_watch, fd=fd))


def _with_watch(launch: Any, fd: int) -> Any:
    @functools.wraps(launch)
    def watched(self: Any, process: Any) -> Any:
        added = _HOME not in sys.path  # sys.path is sent to the process, which must be able to import this module
        if added:
            sys.path.append(_HOME)
        try:
            return launch(self, _Watched(process, fd))
        finally:
            if added:
                sys.path.remove(_HOME)

    return watched


class _Watched:
    """Replaces a process object while it is pickled."""

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
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    for name in _IN_MAKING_A_GROUP if c10d is not None else ():
        setattr(c10d, name, functools.partial(_starts, Writer(fd)))
    return process


def _starts(writer: Writer, *args: object, **kwargs: object) -> None:
    writer.write("starts", after=0)
    threading.Event().wait()
