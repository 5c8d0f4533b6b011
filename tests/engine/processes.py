"""The processes of a pool, and whether they have ended."""

from __future__ import annotations

import os
import time

from mgpu_check.engine.pool import RankPool


def pids(pool: RankPool, size: int | None = None) -> list[int]:
    return pool.run(os.getpid, size=size)


def alive(pid: int) -> bool:
    """Whether the process runs; one that nobody waits for stays as a zombie, and does not."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int) -> bool:
    """Whether the process has ended, or does so within 10 s."""
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)
