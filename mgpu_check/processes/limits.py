"""Read how much of the host this process may use, also in a container."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_memory() -> int | None:
    """Return the bytes that are available to this process: of the host, or of its control group. None if unknown."""
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
    most, used = limit_of_group("memory.max"), limit_of_group("memory.current")
    return available if most is None or used is None else min(available, most - used)


def available_processors() -> int:
    """Return how many processors this process may keep busy: by its affinity, and by the quota of its control group."""
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = map(int, (_CGROUPS / "cpu.max").read_text(encoding="ascii").split())
    except (OSError, ValueError):  # no such file, or "max 100000"
        return count
    return max(1, min(count, quota // period))


def limit_of_group(name: str) -> int | None:
    """Return a number of this process's control group; None if there is no limit."""
    try:
        return int((_CGROUPS / name).read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None
