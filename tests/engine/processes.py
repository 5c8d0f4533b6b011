"""The processes of a pool, and whether they have ended."""

from __future__ import annotations

import os
import time

from mgpu_check.engine.pool import RankPool


def pids(pool: RankPool, size: int | None = None) -> list[int]:
    return pool.run(os.getpid, size=size)


def comes_to(pid: int, states: str) -> bool:
    """Whether the process is in one of `states`, or gets there within 10 s; "Z" stands for one that is gone, too."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            state = "Z"
        if state in states:
            return True
        time.sleep(0.01)
    return False


def gone(pid: int) -> bool:
    """Whether the process has ended, or does so within 10 s; one that nobody waits for stays as a zombie."""
    return comes_to(pid, "Z")
