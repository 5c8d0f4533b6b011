"""Errors and deaths of ranks: who is named, and which ranks are kept."""

from __future__ import annotations

import os
import threading
import time
import unittest

import pytest
import torch
import torch.distributed as dist

from mgpu_check.engine.failures import Account, Died, Raised, Who
from mgpu_check.engine.world import Abandoned
from mgpu_check.errors import RankDied, RankFailure
from mgpu_check.processes.channel import RaisedInRank
from tests.engine.processes import pids


def test_a_failure_on_all_ranks_keeps_them(pool):
    def body(rank):
        raise ValueError("no")

    before = pids(pool)
    with pytest.raises(RankFailure, match=r"ranks 0-3 of 4 raised ValueError: no") as info:
        pool.run(body)
    assert info.value.ranks == (0, 1, 2, 3)
    assert isinstance(info.value.__cause__, ValueError)
    assert pids(pool) == before


def test_ranks_out_of_lockstep_are_replaced(pool):
    """All answer, but one has entered a collective more: the next collective would pair up wrongly."""

    def body(rank):
        if rank.index == 1:
            dist.all_reduce(torch.ones(1), async_op=True)
        raise ValueError("no")

    before = pids(pool, 2)
    with pytest.raises(RankFailure):
        pool.run(body, size=2)
    assert not set(pids(pool, 2)) & set(before)


def test_sends_and_receives_that_differ_between_ranks_are_no_reason_to_replace_them(pool):
    def body(rank):
        x = torch.zeros(1)
        if rank.index == 0:
            for other in range(1, rank.size):
                dist.recv(x, other)
        else:
            dist.send(x + 1, 0)

    before = pids(pool)
    pool.run(body)
    assert pids(pool) == before


def test_a_collective_that_only_one_rank_has_begun_is_a_failure(pool):
    """All answer, and the next collective would pair up with what is pending."""

    def body(rank):
        dist.all_reduce(torch.ones(4), async_op=True)
        if rank.index == 0:
            dist.all_reduce(torch.ones(5), async_op=True)

    with pytest.raises((RankFailure, RankDied), match=r"pending|different numbers of operations.*rank 0: 2, rank 1: 1"):
        pool.run(body, size=2)
    assert len(pids(pool, 2)) == 2


def test_a_death_out_of_lockstep_is_a_death(pool):
    def body(rank):
        if rank.index == 0:
            dist.all_reduce(torch.ones(3), async_op=True)
        else:
            threading.Timer(0.05, os._exit, (3,)).start()

    with pytest.raises(RankDied, match=r"rank 1 of 2 died .*: exit code 3") as info:
        pool.run(body, size=2)
    assert info.value.ranks == (1,)


def test_an_end_that_the_connection_hides_is_told_at_once(pool):
    """A grandchild in a session of its own holds the rank's connection open."""

    def body(rank):
        if rank.index == 1:
            if os.fork() == 0:
                os.setsid()
                time.sleep(3600)
            os._exit(5)

    with pytest.raises(RankDied, match="rank 1 of 2 died: exit code 5"):
        pool.run(body, size=2, timeout=20)


def test_errors_with_difficult_classes(pool):
    class Two(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} {b}")

    class Skipped(Exception):
        """No skip: its name is the user's."""

    def body(which):
        raise {"two": Two(1, 2), "skipped": Skipped("the optimizer skipped")}[which]

    with pytest.raises(RankFailure, match="Two: 1 2"):
        pool.run(body, "two", size=1)
    with pytest.raises(RankFailure, match="Skipped: the optimizer skipped"):
        pool.run(body, "skipped", size=1)


def test_a_raise_just_before_the_deadline_is_no_hang(pool):
    def body(rank):
        if rank.index == 1:
            time.sleep(0.9)
            raise ValueError("the cause")
        dist.barrier()

    with pytest.raises(RankFailure, match=r"\Arank 1 of 2 raised ValueError: the cause"):
        pool.run(body, size=2, timeout=1.2)


def test_skips_of_all_are_a_skip_and_of_some_a_failure(pool):
    def body(rank, which):
        if rank.index in which:
            raise unittest.SkipTest("not today")

    with pytest.raises(Abandoned, match="not today") as info:
        pool.run(body, [0, 1], size=2)
    assert info.value.failure.kind == "skip"
    rule = "a test is skipped on all ranks or on none: decide it by values that all ranks have"
    with pytest.raises(RankFailure, match=rf"rank 1 of 2 raised SkipTest: not today\n{rule}\n"):
        pool.run(body, [1], size=2)
    with pytest.raises(RankFailure) as failure:
        pool.run(lambda rank: [][rank.index], size=2)
    assert "all ranks or on none" not in str(failure.value)


def raised(kind: str, message: str) -> Raised:
    return Raised(RaisedInRank("error", kind, message, f"traceback of {message}", "train.py", 31, None))


def test_errors_that_differ_in_the_address_of_a_peer_are_one():
    """As gloo raises them on all ranks that were connected to a dead one."""
    endings = {
        rank: raised("RuntimeError", f"Read error [127.0.0.1]:{port}: Connection reset by peer")
        for rank, port in ((2, 22441), (0, 18066), (1, 4247))
    }
    error = Account({**endings, 3: Died("signal SIGKILL", "")}, Who(4), "test_step").error()
    assert str(error).splitlines()[:2] == [
        "rank 3 of 4 died: signal SIGKILL",
        "ranks 0-2 of 4 raised RuntimeError: Read error [127.0.0.1]:18066: Connection reset by peer",
    ]


def test_errors_that_differ_in_values_are_told_apart_as_far_as_that_helps():
    endings = {rank: raised("ValueError", str(rank)) for rank in range(5)}
    error = Account(endings, Who(5), "test_step").error()
    assert str(error).splitlines()[:4] == [
        "rank 0 of 5 raised ValueError: 0",
        "rank 1 of 5 raised ValueError: 1",
        "rank 2 of 5 raised ValueError: 2",
        "ranks 3-4 of 5 raised the same error with other values",
    ]
