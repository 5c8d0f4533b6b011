"""This machine: how much of it this process may use, also in a container, and how to tell it from others, also where
several have the same name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mgpu_check.processes.rank_lists import grouped

_CGROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_memory() -> int | None:
    """Return the bytes that are available to this process: of the host, or of its control group. None if unknown."""
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
    most, usage = limit_of_group("memory.max"), limit_of_group("memory.current")
    return available if most is None or usage is None else min(available, most - usage)


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


_SHOWN = 8  # characters of a boot id that are shown: enough to distinguish the machines of a run


def boot_id() -> str:
    """Return the id of this boot of this machine's kernel, which no other machine has; "" if it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def distinct_names(hosts: Sequence[tuple[str, str]]) -> list[str]:
    """Return a name for each host: its own, with its boot id if another host has the same name.

    Hosts with one name and one boot id, as containers of one machine, get their place among the hosts. `hosts`: name
    and boot id of each; empty where unknown.
    """
    of_name = dict(grouped(hosts))
    distinct = []
    for index, (name, boot) in enumerate(hosts):
        boots = of_name[name]
        if not name:
            distinct.append(f"host {index}")
        elif len(boots) == 1:
            distinct.append(name)
        elif all(boots) and len(set(boots)) == len(boots):
            distinct.append(f"{name} (boot {boot[:_SHOWN]})")
        else:
            distinct.append(f"{name} (node {index})")
    return distinct
