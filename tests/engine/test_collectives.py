"""The record of collectives, and what ranks must agree on."""

from __future__ import annotations

import fnmatch
import inspect
import os
import re
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from mgpu_check.errors import RankFailure, RankHang


def message(info: pytest.ExceptionInfo[BaseException]) -> list[str]:
    return str(info.value).splitlines()


def test_every_collective_of_torch_is_recorded_and_simulated():
    """A collective of a new version of torch must be in the tables that CONTRIBUTING lists."""
    from mgpu_check.simulated.distributed.collective_calls import PARSERS, parser_of
    from mgpu_check.torch_hooks.collective_table import COLLECTIVES, METHODS
    from mgpu_check.torch_hooks.collectives import FLOWS

    operands = {"tensor", "tensors", "input", "output", "input_tensor", "output_tensor_list", "object_list", "obj"}
    functions = {name: function for name, function in vars(c10d).items() if type(function) is types.FunctionType}
    parameters = {
        name: set(inspect.signature(functions[name]).parameters) for name in c10d.__all__ if name in functions
    }
    there = {name for name, of in parameters.items() if "group" in of and (of & operands or "barrier" in name)}
    assert {"all_reduce", "gather_object", "barrier"} <= there
    assert there - set(COLLECTIVES) == set()

    traced = {"isend_inplace", "irecv_inplace"}  # in compiled code only, which is left alone
    begun = {
        name
        for name, function in inspect.getmembers(functional, inspect.isfunction)
        if "group" in inspect.signature(function).parameters
        and not name.startswith("_")
        and "torch.ops._c10d_functional." in inspect.getsource(function)
    }
    assert "all_reduce" in begun
    assert begun - set(COLLECTIVES) - traced == set()

    methods = {
        name for name in dir(dist.ProcessGroup) if re.match(r"_?(all|broadcast|gather|re(duce|cv)|sc|send)", name)
    }
    methods -= {"reconfigure"}
    assert methods - set(METHODS) == set()
    assert {name for name, method in METHODS.items() if parser_of(name) is None} == {"barrier", "monitored_barrier"}
    assert set(PARSERS) <= {method.function for method in METHODS.values()} | set(METHODS)
    assert set(FLOWS) == {name for name, one in COLLECTIVES.items() if one.sizes == "paired"}


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_in_different_collectives_are_not_waited_for(pool):
    def body(rank):
        x = torch.ones(4, device=rank.device)
        group = dist.new_group([0, 1])
        if rank.index == 0:
            dist.all_gather([torch.ones(4, device=rank.device) for _ in range(2)], x, group=group)
        elif rank.index == 1:
            dist.reduce_scatter_tensor(torch.ones(2, device=rank.device), x, group=group)
        dist.all_reduce(x)

    with pytest.raises(RankHang) as info:
        pool.run(body, size=4, timeout=600)  # longer than a test may take
    assert "the ranks wait for each other in different calls, so more time would not help" in message(info)
    assert "rank 0 is in all_gather #1 of ranks 0,1 (" in str(info.value)
    assert pool.run(lambda rank: rank.index, size=2) == [0, 1]
    with pytest.raises(RankHang) as info:
        pool.run(lambda rank: rank.index or dist.all_reduce(torch.ones(4)), size=2, timeout=600)
    said = "the ranks wait for each other or for finished ranks, so more time would not help"
    assert said in message(info)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda dist, x, i: dist.all_reduce(x, dist.ReduceOp.MAX if i == 1 else dist.ReduceOp.SUM), "max, where"),
        (lambda dist, x, i: dist.all_reduce(x.view(__import__("torch").int32) if i == 1 else x), "int32[4], sum"),
        (lambda dist, x, i: dist.group.WORLD.allreduce(x.int() if i == 1 else x).wait(), "int32[4], where"),
        (
            lambda dist, x, i: dist.group.WORLD.allreduce([x], dist.ReduceOp.MAX if i == 1 else dist.ReduceOp.SUM),
            "max,",
        ),
        (
            lambda dist, x, i: dist.all_reduce(x, dist.ReduceOp(dist.ReduceOp.MAX if i == 1 else dist.ReduceOp.MIN)),
            "max, w",
        ),
        (lambda dist, x, i: dist.all_reduce_coalesced([x.int() if i == 1 else x] * 2), "2x int32[4], sum"),
    ],
)
def test_a_disagreement_that_goes_unnoticed_by_gloo_is_a_failure(pool, what, said):
    """All ranks return, with garbage."""

    def body(rank):
        what(dist, torch.ones(4), rank.index)

    with pytest.raises(RankFailure) as info:
        pool.run(body, size=3)
    assert info.value.ranks == (1,)
    lines = message(info)
    assert re.match(r"rank 1 of 3 entered all_reduce(_coalesced)? #1 \(", lines[0])
    assert said in lines[0]
    assert re.search(r", where ranks 0, 2 entered all_reduce(_coalesced)? #1 \(", lines[0])
    assert len(pool.run(lambda rank: rank.index, size=3)) == 3


UNMATCHED = {
    "receive": (
        lambda dist, x, y, i: i == 1 and dist.irecv(x, 2, tag=7) and None,
        "rank 1 of 3 has begun to receive float32[4] from rank 2 with tag 7 in irecv (*), and rank 2 has not sent it",
        (1, 2),
    ),
    "receive from any": (
        lambda dist, x, y, i: i == 1 and dist.irecv(x) and None,
        "rank 1 of 3 has begun to receive float32[4] from any rank in irecv (*), and none has sent it",
        (1,),
    ),
    "dtype": (
        lambda dist, x, y, i: (i == 0 and dist.send(x, 1)) or (i == 1 and dist.recv(y, 0) and None),
        "rank 0 of 3 has sent float32[4] to rank 1 in send (*), where rank 1 has received int32[4] in recv (*)",
        (0, 1),
    ),
    "batch": (
        lambda dist, x, y, i: i == 0 and dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 2)]) and None,
        "rank 0 of 3 has sent float32[4] to rank 2 in isend (*), and rank 2 has not received it",
        (0, 2),
    ),
    "method": (
        lambda dist, x, y, i: i == 0 and dist.group.WORLD.send([x], 2, 5) and None,
        "rank 0 of 3 has sent float32[4] to rank 2 with tag 5 in send (*), and rank 2 has not received it",
        (0, 2),
    ),
    "all_gather": (
        lambda dist, x, y, i: dist.all_gather([y if i == 1 else x] * 3, y if i == 1 else x),
        "rank 0 of 3 has sent float32[4] to rank 1 in all_gather (*), where rank 1 has received int32[4] in *",
        (1,),
    ),
    "scatter": (
        lambda dist, x, y, i: dist.scatter(y if i == 1 else x, [x] * 3 if i == 0 else None, src=0),
        "rank 0 of 3 has sent float32[4] to rank 1 in scatter (*), where rank 1 has received int32[4] in scatter (*)",
        (0, 1),
    ),
    "all_to_all_single": (
        lambda dist, x, y, i: dist.all_to_all_single(*((y[:3], y[:3]) if i == 1 else (x[:3], x[1:]))),
        "rank 0 of 3 has sent float32[1] to rank 1 in all_to_all_single (*), where rank 1 has received int32[1] in *",
        (1,),
    ),
}


@pytest.mark.slow
def test_what_one_side_of_a_transfer_lacks_is_a_failure_and_hurts_no_later_call(pool):
    """gloo keeps what was sent for the next who receives, and takes the bytes of one dtype for those of another."""

    def body(rank, what):
        dist.barrier()
        return what(dist, torch.ones(4), torch.ones(4, dtype=torch.int32), rank.index)

    def innocent(rank):
        x = torch.zeros(4)
        for sender, receiver in ((0, 1), (0, 2), (2, 1)):
            if rank.index == sender:
                dist.send(torch.full((4,), 5.0), receiver)
            elif rank.index == receiver:
                dist.recv(x, sender)
                assert x.tolist() == [5] * 4
        return os.getpid()

    for name, (what, said, involved) in UNMATCHED.items():
        before = pool.run(innocent, size=3)
        with pytest.raises(RankFailure) as info:
            pool.run(body, what, size=3)
        assert fnmatch.fnmatchcase(message(info)[0], said.replace("[", "[[]")), name
        assert info.value.ranks == involved, name
        assert not set(before) & set(pool.run(innocent, size=3)), name  # another world


def test_what_is_balanced_is_no_failure(pool):
    def body(rank):
        x, right, left = torch.ones(4), (rank.index + 1) % rank.size, (rank.index - 1) % rank.size
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, torch.zeros(2, 2), left)]
        ):
            work.wait()
        pair = dist.new_group([1, 3])
        if rank.index == 1:
            for number in range(200):  # more kinds than are kept apart
                dist.send(torch.ones(number), 3, group=pair, tag=1)
            dist.group.WORLD.send([x], 0, 9).wait()
        if rank.index == 3:
            for number in range(200):
                dist.recv(torch.ones(number), group=pair, group_src=0, tag=1)
        if rank.index == 0:
            assert dist.recv(x, tag=9) == 1
            for _ in range(50):  # from whoever sends, at two places in turn: more than are kept apart, too
                dist.recv(x, tag=5)
                dist.recv(x, tag=5)
            dist.send_object_list(["a"], 2)
        if rank.index == 2:
            for _ in range(100):
                dist.send(x, 0, tag=5)
            got = [None]
            dist.recv_object_list(got, 0)
            with pytest.raises(ValueError):
                dist.send(x, 2)
        if torch.__version__ >= "2.12":  # before, gloo has none
            dist.all_to_all([torch.zeros(2)] * 4, [torch.ones(2)] * 4)
        dist.all_to_all_single(torch.zeros(4), torch.ones(4), [1] * 4, [1] * 4)
        # Rank 0 has nothing for anybody, and takes a row of each other rank.
        rows = [int(rank.index > 0)] * 4
        dist.all_to_all_single(torch.zeros(3, 2), torch.ones(sum(rows), 2), [0, 1, 1, 1], rows)
        taken, given = torch.tensor([0, 1, 1, 1]).numpy(), torch.tensor(rows).numpy()  # as of Megatron's dispatcher
        dist.all_to_all_single(torch.zeros(3, 2), torch.ones(sum(rows), 2), taken, given)
        return os.getpid()

    assert pool.run(body) == pool.run(body)


def test_a_disagreement_in_a_group_of_some_ranks(pool):
    def body(rank):
        pair = dist.new_group([1, 3])
        if rank.index in (1, 3):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if rank.index == 3 else dist.ReduceOp.SUM, group=pair)

    with pytest.raises(RankFailure, match=r"rank \d of 4 entered all_reduce #1 of ranks 1,3 \("):
        pool.run(body)


def test_what_ranks_may_do_differently_is_no_disagreement(pool):
    def body(rank):
        half = dist.new_group([0, 1])
        if rank.index < 2:
            dist.barrier(group=half)
        dist.all_reduce(torch.ones(6) if rank.index else torch.ones(2, 3))  # as many elements
        dist.all_reduce(torch.ones(1), dist.ReduceOp(dist.ReduceOp.MAX) if rank.index else dist.ReduceOp.MAX)
        with dist.distributed_c10d._coalescing_manager():
            dist.all_reduce(torch.ones(1))
            dist.all_reduce(torch.ones(2))
        own = dist._make_nccl_premul_sum(rank.index + 1.0)  # type: ignore[attr-defined]  # a factor for each rank
        with pytest.raises((RuntimeError, ValueError)):  # gloo has none
            dist.all_reduce(torch.ones(1), own)
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
        if rank.index == 1:
            dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(2, 2), async_op=True).wait()

    with pytest.raises(RankHang) as info:
        pool.run(body, size=2, timeout=0.5)
    assert info.value.ranks == (0, 1)
    text = str(info.value)
    assert "rank 0 is in all_reduce #1 (" in text
    assert "), float32[2, 2], sum" in text
    assert "rank 1 is in recv (" in text
    assert "), float32[1], src=0" in text


def test_more_collectives_than_the_record_holds(pool):
    """And a functional one."""

    def body(rank):
        for _ in range(100):
            dist.barrier()
        assert functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist() == [0, 0], "told"

    with pytest.raises(RankFailure, match=r"last collective of ranks 0-1: all_reduce #101 \(.*float32\[2\], sum"):
        pool.run(body, size=2)


COMPILED = """
import os, sys, torch, torch.distributed as dist
from mgpu_check.torch_hooks.collectives import install, recorder

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
assert recorder.agreement()[0][:2] == (("", (0,)), 1)
os._exit(0)  # as ranks end: a thread of torch that still runs may abort the process as Python takes itself apart
"""


@pytest.mark.slow
def test_compiled_code_is_left_alone(tmp_path):
    """In a process of its own: the simulated node has no collectives inside of one compiled graph."""
    done = subprocess.run([sys.executable, "-c", COMPILED, str(tmp_path / "store")], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_a_gate_reads_functions_and_methods_alike(pool):
    def body(rank):
        from mgpu_check.diagnosis.observations import RankTrace
        from mgpu_check.gates.run.call_events import Rows, traced

        group = dist.new_group([1, 3])
        trace = RankTrace()
        x = torch.ones(2)
        with traced(nn.Linear(1, 1), trace, Rows([])):
            if rank.index in (1, 3):
                dist.broadcast(x, group=group, group_src=1)
                group.broadcast(x, 1).wait()
                dist.all_reduce(x, dist.ReduceOp.MAX, group)
                group.allreduce([x], dist.ReduceOp.MAX).wait()
                functional.all_reduce(x, "max", group).sum()
        return [
            (event.name, *map(event.details.get, ("group", "src", "op")), [one["shape"] for one in event.tensors])
            for event in trace.of("collective")
        ]

    found = pool.run(body)
    assert found[0] == found[2] == []
    broadcast = ("broadcast", (1, 3), 3, None, [(2,)])
    reduced = ("all_reduce", (1, 3), None, "max", [(2,)])
    assert found[1] == found[3] == [broadcast, broadcast, reduced, reduced, reduced]
