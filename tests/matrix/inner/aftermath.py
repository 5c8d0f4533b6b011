"""The tests that come before and after each fault; the modules of all situations have the second."""

from __future__ import annotations

import os
import time
from typing import Any

import changes
import faults

GONE_WITHIN = 5.0
MANAGER = "torch_shm_manag"


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            text = file.read()
    except OSError:
        return ""
    return "" if text.rpartition(")")[2].split()[0] == "Z" else text.partition("(")[2].rpartition(")")[0]


def strangers(server: int, expected: list[int]) -> list[str]:
    """Processes below the fork server that are no ranks of now, once those have had time to go that are being killed.

    Nor managers of torch's shared memory: those of warm ranks stay as long as these.
    """
    deadline = time.monotonic() + GONE_WITHIN
    while True:
        found, todo = [], [server]
        while todo:
            some = _children(todo.pop())
            todo += some
            found += [
                f"{name} ({pid})"
                for pid in some
                if pid not in expected and (name := _command(pid)) not in ("", MANAGER)
            ]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.005)


def look(rank: Any) -> tuple[int, int, dict[str, Any]]:
    return os.getpid(), os.getppid(), changes.observe(rank)


def before(name: str, warm: object) -> None:
    """The ranks are up: what is timed is not their start."""


def after(ranks: Any, clean: list[dict[str, Any]], name: str, record_property: Any) -> None:
    """The next test passes, does not notice the fault, and no part of the fault survives."""
    pids, servers, seen = zip(*ranks.run(look, size=faults.SIZE), strict=True)
    changed = {
        f"rank {rank}: {what}": (before[what], now[what])
        for rank, (before, now) in enumerate(zip(clean, seen, strict=True))
        for what in before
        if before[what] != now[what]
    }
    # Under pytest-xdist the ranks of a test may have other devices than those of the one before, which stay warm.
    worlds = [world for _, world in ranks._session.pool._worlds]
    warm = [process.pid for world in worlds for process in world.processes.values()]
    survivors = strangers(servers[0], [*pids, *warm])
    record_property("changed", repr(changed) if changed else "")
    record_property("survivors", ", ".join(survivors))
