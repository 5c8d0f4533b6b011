"""Pauses in the middle of a call: the calls of the ranks so far are compared before any of them continues."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_check.engine.failures import Who
from mgpu_check.engine.lockstep import Pauses
from mgpu_check.engine.rank_side.worker import pause
from mgpu_check.errors import RankDied, RankFailure, RankHang
from mgpu_check.processes.channel import Group
from mgpu_check.processes.collective_records import Entered, Record, ahead, uneven


def headline(info: pytest.ExceptionInfo[BaseException]) -> str:
    return str(info.value).splitlines()[0]


def test_a_collective_that_a_rank_skips_does_not_pair_with_a_later_one(pool):
    def body(rank):
        one = torch.ones(1, device=rank.device)
        dist.all_reduce(one)
        if rank.index != 1:
            dist.all_reduce(one)  # the one that is skipped
        dist.all_reduce(one)
        pause("step 1")
        dist.all_reduce(one)

    with pytest.raises(RankFailure) as info:
        pool.run(body, size=2)
    line = body.__code__.co_firstlineno + 4
    assert re.fullmatch(
        rf"rank 1 made 2 collectives in the default group by the end of step 1, rank 0 made 3: all_reduce #2 "
        rf"\(\S+:{line}\), float32\[1\], sum, is not matched on rank 1",
        headline(info),
    )
    assert info.value.ranks == (0,)


class Waiting:
    """A process that waits in a collective."""

    def __init__(self, name: str, on_this_host: bool) -> None:
        self.on_this_host = on_this_host
        self.looks = 0
        self._record = Record((Entered(name, 1, "", "", "float32[4]", "", "", "train.py", 3, "inside"),), 1)

    def runnable(self) -> bool:
        return False

    def record(self) -> Record:
        self.looks += 1
        return self._record


@pytest.mark.parametrize(
    ("names", "on_this_host", "may_answer", "looks"),
    [
        (("all_gather", "all_reduce"), True, [True, False], 2),
        (("all_reduce", "all_reduce"), True, [True, True], 2),
        (("all_gather", "all_reduce"), False, [True, True], 0),
    ],
)
def test_only_ranks_of_this_host_are_looked_at_while_none_pauses(names, on_this_host, may_answer, looks):
    processes = {rank: Waiting(name, on_this_host) for rank, name in enumerate(names)}
    pauses = Pauses(processes, Who(2))  # type: ignore[arg-type]  # as much of a process as a look needs
    assert [pauses.look((0, 1)) for _ in range(2)] == may_answer
    assert pauses.crossed is not may_answer[-1]
    assert {process.looks for process in processes.values()} == {looks}


def test_a_collective_that_nobody_waits_for_is_found_after_its_step(pool):
    def body(rank):
        if rank.index == 1:
            dist.all_reduce(torch.ones(1, device=rank.device), async_op=True)
        pause("step 1")
        dist.all_reduce(torch.ones(1, device=rank.device))  # would pair with it

    with pytest.raises(RankFailure, match=r"rank 0 made 0 collectives .* rank 1 made 1: all_reduce #1 .* on rank 0"):
        pool.run(body, size=2)
    assert pool.run(lambda rank: rank.index, size=2) == [0, 1]


def test_the_group_is_named_as_its_maker_has_called_it(pool):
    def body(rank):
        mesh = dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))  # type: ignore[attr-defined]
        for _ in range(1 + (rank.index == 3)):
            dist.all_reduce(torch.ones(1, device=rank.device), group=mesh["tp"].get_group(), async_op=True)
        pause("step 1")

    with pytest.raises(RankFailure, match=r"rank 2 made 1 collective in group mesh_tp of ranks 2-3 .* rank 3 made 2"):
        pool.run(body, size=4)


def test_what_is_entered_by_cpp_alone_is_counted(pool):
    def body(rank):
        if rank.index == 1:
            torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD.group_name)
        pause("step 1")

    with pytest.raises(RankFailure, match=r"rank 0 made 0 operations \(including calls from C\+\+\) .* rank 1 made 1"):
        pool.run(body, size=2)


def test_a_message_may_be_received_after_a_pause_unless_it_is_the_last(pool):
    def body(rank, last):
        one = torch.full((1,), 7.0)
        work = dist.isend(one, 1) if rank.index == 0 else None
        pause("step 1", last=last)
        if rank.index == 1:
            dist.recv(one.zero_(), 0)
        elif work is not None:
            work.wait()
        pause("step 2", last=True)
        return one.item()

    assert pool.run(body, False, size=2) == [7.0, 7.0]
    with pytest.raises(RankFailure, match=r"rank 0 of 2 has sent float32\[1\] to rank 1 .* rank 1 has not received it"):
        pool.run(body, True, size=2)


def test_what_some_ranks_hold_no_part_of_is_named(pool):
    def body(rank):
        pause("step 1", slices=[("gradient of a", (0, 1))] if rank.index == 0 else [])

    with pytest.raises(RankFailure, match="gradient of a: of ranks 0-1 that hold a part each, rank 1 had none") as info:
        pool.run(body, size=2)
    assert info.value.ranks == (1,)


def test_ranks_go_on_that_have_called_alike_in_each_group(pool):
    """Groups of different ranks, with other numbers of collectives in each; works that are waited for later;
    messages."""

    def body(rank):
        evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
        mine, own = (odds, 1) if rank.index % 2 else (evens, 3)
        works: list[Any] = []
        found = torch.ones(4, device=rank.device)
        pause("the start")
        for step in range(3):
            for _ in range(own):
                dist.all_reduce(torch.ones(1, device=rank.device), group=mine)
            for work in works:
                work.wait()
            works = [dist.all_reduce(torch.ones(1, device=rank.device), async_op=True)]
            if rank.index == 0:
                dist.send(found, 3)
            if rank.index == 3:
                dist.recv(found, 0)
            parts = [torch.empty(1 + other, device=rank.device) for other in range(4)]
            dist.all_gather(parts, torch.ones(1 + rank.index, device=rank.device))
            dist.broadcast(torch.ones(1, device=rank.device), 1)
            dist.all_gather_object([None] * 4, rank.index)
            dist.barrier()
            pause(f"step {step}", last=step == 2)
        works[0].wait()
        return True

    assert pool.run(body, size=4) == [True] * 4


def test_a_rank_that_dies_or_raises_is_told_and_not_those_that_wait_for_it(pool):
    def body(rank, how):
        if rank.index == 1:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("its own fault")
        pause("step 1")

    with pytest.raises(RankDied, match="rank 1 of 2 died"):
        pool.run(body, "dies", size=2)
    with pytest.raises(RankFailure, match="rank 1 of 2 raised ValueError: its own fault\nrank 0 finished step 1"):
        pool.run(body, "raises", size=2)


def test_a_hang_says_which_ranks_have_done_their_part(pool):
    def body(rank):
        if rank.index == 1:
            signal.pause()
        pause("step 1")

    with pytest.raises(RankHang) as info:
        pool.run(body, size=2, timeout=1.0)
    assert str(info.value).startswith("rank 1 of 2 did not finish body within 1 s\nrank 1 is in ")
    assert "rank 0 finished step 1" in str(info.value)
    assert info.value.ranks == (1,)


def entered(number: int, line: int, group: str = "", name: str = "") -> Entered:
    return Entered("all_reduce", number, name, group, "float32[1]", "sum", "float32[1]", "a.py", line, "done")


DEFAULT = Group("", (0, 1))


@pytest.mark.parametrize(
    ("mine", "line"),
    [
        ([3], 4),  # the last
        ([4], 3),  # one before
        ([9], 4),  # where ranks take other branches, both have a collective of their own there
    ],
)
def test_the_collective_is_named_that_has_no_partner(mine, line):
    more = Record((entered(1, 3), entered(2, 4)), 2)
    less = Record(tuple(entered(i, one) for i, one in enumerate(mine, 1)), 1)
    found = uneven({0: {DEFAULT: 2}, 1: {DEFAULT: 1}}, {0: more, 1: less}, {})
    assert found is not None and [one.line for one in found.unmatched.values()] == [line]


def test_who_has_entered_more_than_one_that_is_done_waits_in_vain():
    inside = Record((entered(1, 3, "0,1", "g"), entered(2, 4, "0,1", "g")), 2)
    group = Group("g", (0, 1))
    records = {0: inside, 1: Record((), 0), 2: Record((), 0)}
    found = ahead({1: {group: 1}, 2: {}}, [0], records, 3, {"g": "mesh_dp"})
    assert found is not None and found.counts == {0: 2, 1: 1} and found.described == "mesh_dp"
    assert ahead({1: {group: 2}, 2: {}}, [0], records, 3, {}) is None
