"""The record of collectives, and what ranks must agree on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mgpu_check.errors import RankFailure, RankHang
from mgpu_check.ranks.record import comparable


def message(info: pytest.ExceptionInfo[BaseException]) -> list[str]:
    return str(info.value).splitlines()


def test_different_collectives_are_named_with_number_and_place(pool):
    def body(rank):
        import torch
        import torch.distributed as dist

        x = torch.ones(4, device=rank.device)
        for _ in range(6):
            dist.all_reduce(x)
        if rank.index == 2:
            dist.broadcast(x, 0)
        else:
            dist.all_reduce(x)

    with pytest.raises(RankHang) as info:
        pool.run(body, timeout=0.5)
    lines = message(info)
    assert lines[0] == "rank 2 of 4 did not finish body within 0.5 s"
    assert lines[1].startswith("ranks 0-1, 3 are in all_reduce #7 (")
    assert lines[1].endswith("), float32[4], sum")
    assert lines[2].startswith("rank 2 is in broadcast #7 (")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda dist, x, i: dist.all_reduce(x, dist.ReduceOp.MAX if i == 1 else dist.ReduceOp.SUM), "max, where"),
        (lambda dist, x, i: dist.all_reduce(x.view(__import__("torch").int32) if i == 1 else x), "int32[4], sum"),
        (lambda dist, x, i: dist.all_reduce(x, op=dist.ReduceOp.PRODUCT if i == 1 else dist.ReduceOp.SUM), "product"),
    ],
)
def test_a_disagreement_that_goes_unnoticed_by_gloo_is_a_failure(pool, what, said):
    """All ranks return, with garbage."""

    def body(rank):
        import torch
        import torch.distributed as dist

        what(dist, torch.ones(4), rank.index)

    with pytest.raises(RankFailure) as info:
        pool.run(body, size=3)
    assert info.value.ranks == (1,)
    lines = message(info)
    assert lines[0].startswith("rank 1 of 3 entered all_reduce #1 (")
    assert said in lines[0]
    assert ", where ranks 0, 2 entered all_reduce #1 (" in lines[0]
    assert len(pool.run(lambda rank: rank.index, size=3)) == 3


def test_a_disagreement_in_a_group_of_some_ranks(pool):
    def body(rank):
        import torch
        import torch.distributed as dist

        pair = dist.new_group([1, 3])
        if rank.index in (1, 3):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if rank.index == 3 else dist.ReduceOp.SUM, group=pair)

    with pytest.raises(RankFailure, match=r"rank \d of 4 entered all_reduce #1 of ranks 1,3 \("):
        pool.run(body)


def test_what_ranks_may_do_differently_is_no_disagreement(pool):
    def body(rank):
        import torch
        import torch.distributed as dist

        half = dist.new_group([0, 1])
        if rank.index < 2:
            dist.barrier(group=half)
        dist.all_reduce(torch.ones(6) if rank.index else torch.ones(2, 3))  # as many elements
        parts = [torch.zeros(rank.index + 1) for _ in range(rank.size)] if rank.index == 0 else None
        dist.gather(torch.zeros(1), parts, dst=0)
        objects = [None] * rank.size
        dist.all_gather_object(objects, "x" * rank.index)
        if rank.index == 0:
            dist.send(torch.ones(1), 1)
        elif rank.index == 1:
            dist.recv(torch.ones(1), 0)
        return objects

    assert pool.run(body) == [["", "x", "xx", "xxx"]] * 4


def test_a_wait_for_an_asynchronous_collective_is_a_place(pool):
    def body(rank):
        import torch
        import torch.distributed as dist

        if rank.index == 1:
            dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(2, 2), async_op=True).wait()

    with pytest.raises(RankHang) as info:
        pool.run(body, size=2, timeout=0.5)
    text = str(info.value)
    assert "rank 0 is in all_reduce #1 (" in text
    assert "), float32[2, 2], sum" in text
    assert "rank 1 is in recv (" in text
    assert "), float32[1], src=0" in text


def test_the_last_collective_of_each_rank_is_told(pool):
    def body(rank):
        import os

        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(3))
        if rank.index == 1:
            os._exit(7)

    with pytest.raises(RankFailure) as info:
        pool.run(body, size=3)
    assert message(info)[:2] == ["rank 1 of 3 died: exit code 7", "ranks 0, 2 finished"]
    assert message(info)[2].startswith("last collective of ranks 0-2: all_reduce #1 (")


def test_numbers_start_anew_with_each_call(pool):
    def body(rank, fail):
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(3))
        assert not fail

    for _ in range(3):
        pool.run(body, False, size=2)
    with pytest.raises(RankFailure, match=r"last collective of ranks 0-1: all_reduce #1 \("):
        pool.run(body, True, size=2)


def test_more_collectives_than_the_record_holds(pool):
    def body(rank):
        import torch.distributed as dist

        for _ in range(100):
            dist.barrier()
        raise ValueError

    with pytest.raises(RankFailure, match=r"last collective of ranks 0-1: barrier #100 \("):
        pool.run(body, size=2)


def test_functional_collectives_are_recorded(pool):
    def body(rank):
        import torch
        import torch.distributed as dist
        from torch.distributed import _functional_collectives as functional

        total = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        assert total.tolist() == [0, 0], "told"

    with pytest.raises(RankFailure, match=r"last collective of ranks 0-1: all_reduce #1 \(.*float32\[2\], sum"):
        pool.run(body, size=2)


COMPILED = """
import os, sys, torch, torch.distributed as dist
from mgpu_check.ranks.collectives import install, recorder

install()
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
file = open(sys.argv[1] + "-record", "w+b")
recorder.attach(file.fileno())

@torch.compile(backend="eager", fullgraph=True)
def step(x):
    dist.all_reduce(x)
    return x + 1

assert step(torch.ones(2)).tolist() == [2, 2]
assert recorder.agreement() == ()
dist.all_reduce(torch.ones(2))
assert recorder.agreement()[0][:2] == ((0,), 1)
os._exit(0)  # as ranks end: a thread of torch that still runs may abort the process as Python takes itself apart
"""


def test_compiled_code_is_left_alone(tmp_path):
    """In a process of its own: the simulated node has no collectives inside of one compiled graph."""
    done = subprocess.run([sys.executable, "-c", COMPILED, str(tmp_path / "store")], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    ("name", "operand", "expected"),
    [
        ("all_reduce", "float32[4, 2]", "float32 8"),
        ("all_reduce", "float32[]", "float32 1"),
        ("all_reduce", "float32[0]", "float32 0"),
        ("all_to_all", "float32[4]", ""),
        ("all_reduce", "", ""),
        ("broadcast", "2x float32[4]…", ""),
    ],
)
def test_what_is_compared(name, operand, expected):
    assert comparable(name, operand) == expected
