"""End what the processes of a run leave behind, also outside of their process groups."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from mgpu_check.processes import prctl
from mgpu_check.processes.leftovers import children

__all__ = ["adopt", "end_orphans"]

_TIMEOUT = 5.0


def adopt() -> set[int]:
    """Have what the processes leave behind become children of this one; those that it has already."""
    prctl.adopt_orphans()
    return set(children())


def end_orphans(before: set[int]) -> None:
    """End every child of this process that is not among `before`; their own children come here in turn."""
    deadline = time.monotonic() + _TIMEOUT
    while (left := set(children()) - before) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
