"""Set torch's number of CPU threads for a while."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

_MOST = 16


@contextlib.contextmanager
def one_thread() -> Iterator[int]:
    """Compute with one thread, because small steps on a shared machine do not profit from more.

    Yield the former number.
    """
    before = torch.get_num_threads()
    with _threads(1):
        yield before


@contextlib.contextmanager
def some_threads(most: int, needed: bool = True) -> Iterator[None]:
    """Compute with one thread per idle processor, at most `most` and 16; change nothing unless `needed`."""
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
    """Return the number of processors that no other process uses at the moment; 1 if unknown.

    If threads share a processor with other processes, all threads wait for the slowest at the end of every operator.
    """
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        return len(os.sched_getaffinity(0)) - running + 1
    except (OSError, ValueError, IndexError):
        return 1
