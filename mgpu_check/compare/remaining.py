"""End the processes that a run leaves behind, also outside of its process groups."""

from __future__ import annotations

import contextlib
import os
import time

from mgpu_check.processes import child_processes
from mgpu_check.processes.child_processes import children, kill

_TIMEOUT = 5.0  # seconds; a killed process normally ends at once


def adopt() -> set[int]:
    """Let orphans become children of this process from now on, and return the pids of its present children."""
    child_processes.adopt_orphans()
    return set(children())


def end_orphans(before: set[int]) -> None:
    """End every child of this process that is not in `before`. Their children become orphans, and are ended in turn."""
    deadline = time.monotonic() + _TIMEOUT
    while (left := set(children()) - before) and time.monotonic() < deadline:
        kill(left)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
