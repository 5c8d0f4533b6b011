"""Ranks that do not answer, and interrupts: who is named, and where each rank was."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from pathlib import Path

import pytest

from mgpu_check.errors import RankHang
from tests.engine.processes import pids


def test_a_result_that_takes_too_long_is_named(pool):
    class Slow:
        """A result that takes long to pickle, as one of gigabytes does."""

        __reduce__ = staticmethod(functools.partial(time.sleep, 3600))

    with pytest.raises(RankHang) as info:
        pool.run(lambda rank: Slow() if rank.index else None, size=2, timeout=0.5)
    assert str(info.value).splitlines()[:2] == [
        "rank 1 of 2 did not finish <lambda> within 0.5 s",
        "rank 1 is sending its result, which takes long if it is large: return less, or allow more time",
    ]
    assert info.value.ranks == (1,)


def test_a_hang_in_a_method_of_the_result_is_named_by_its_line(pool):
    class Endless:
        def __reduce__(self):
            time.sleep(3600)

    with pytest.raises(RankHang, match=r"rank 1 is in __reduce__ \(.*test_pool_hangs.py:\d+\)"):
        pool.run(lambda rank: Endless() if rank.index else None, size=2, timeout=0.5)


def test_an_interrupt_of_the_parent_breaks_the_world(pool):
    """After Ctrl-C in mid-call, answers of the old call must not be taken for those of the next."""

    def body(rank):
        time.sleep(0.5)
        return "old"

    def interrupt(*_: object) -> None:
        raise LookupError("interrupted")

    pids(pool, 2)
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(LookupError, match="interrupted"):
            pool.run(body, size=2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert pool.run(lambda: "new", size=2) == ["new", "new"]


def test_after_an_interrupt_it_is_told_where_ranks_were_also_those_that_cannot_answer(pool):
    def body(rank, ranks, parent):
        from mgpu_check.processes.child_processes import STACKS_SIGNAL

        if rank.index == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
        if rank.index == 1:
            while Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                os.sched_yield()
            os.kill(parent, signal.SIGALRM)
        while True:
            signal.pause()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ranks = pids(pool, 2)
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.run(body, ranks, os.getpid(), size=2)
    finally:
        signal.signal(signal.SIGALRM, previous)
    told = str(pool.stopped())
    assert re.search(r"^ranks 0-1 of 2 did not finish body within [\d.]+ s$", told, re.MULTILINE)
    assert "rank 0 is stopped by a signal, such as SIGSTOP" in told
    assert "rank 1 is in an unknown place" in told
    assert pool.stopped() is None
