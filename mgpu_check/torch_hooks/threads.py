"""With how many threads torch computes on the CPU, for a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["one_thread", "some_threads"]

_MOST = 16


@contextlib.contextmanager
def one_thread() -> Iterator[int]:
    """Compute with one thread, as ranks do that share a machine: small steps gain nothing from more. Yield how many there
    were.
    """
    before = torch.get_num_threads()
    with _threads(1):
        yield before


@contextlib.contextmanager
def some_threads(most: int, needed: bool = True) -> Iterator[None]:
    """Compute with `most` threads at most, where that is needed: with as many as processors are idle."""
    with _threads(max(1, min(most, _MOST, _idle_processors())) if needed else torch.get_num_threads()):
        yield


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _idle_processors() -> int:
    """Return how many processors this process may use, itself included, while others are left theirs.

    Threads that share a processor with other processes have each other wait at the end of every operator.
    """
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        return len(os.sched_getaffinity(0)) - running + 1
    except (OSError, ValueError, IndexError):
        return 1
