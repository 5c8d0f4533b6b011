"""The pool by itself, without pytest around it. Functions are defined inside tests, so that they travel by value."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_check.engine.world import NotPicklable
from mgpu_check.errors import RankFailure, RankHang
from tests.engine.processes import pids


def test_a_size_keeps_its_processes_and_its_default_group(pool):
    def body(rank):
        x = torch.ones(1)
        dist.all_reduce(x)
        return dist.get_world_size(), int(x), torch.cuda.device_count()

    first = {size: pids(pool, size) for size in (4, 2, 3, 1)}
    for size in (2, 4, 1, 3, 2):
        assert pool.run(body, size=size) == [(size, size, 4)] * size
    assert {size: pids(pool, size) for size in (1, 2, 3, 4)} == first
    assert len({pid for group in first.values() for pid in group}) == 10


@pytest.mark.parametrize("destroyed", [True, False], ids=["by the test", "when it has ended"])
def test_groups_that_are_gone_have_no_threads(pool, destroyed):
    def threads():
        return len(os.listdir("/proc/self/task"))

    def body(rank, destroyed):
        for members in ([0, 1], [1, 0, 2]):
            group = dist.new_group(members)
            if rank.index in members:
                dist.all_reduce(torch.ones(1, device=rank.device), group=group)
            if destroyed:
                dist.destroy_process_group(group)

    pool.run(body, destroyed)
    pool.end_test(failed=False)
    pool.begin_test()
    before = pool.run(threads)
    for _ in range(3):
        pool.run(body, destroyed)
        pool.end_test(failed=False)
        pool.begin_test()
    assert pool.run(threads) == before


def test_ranks_and_the_node_process_have_looked_at_their_devices(pool):
    """As on real devices: the mask that a test sets is for the processes that it starts."""

    def looked():
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        return torch.cuda.is_initialized(), torch.cuda.device_count()

    assert pool.run(looked, size=2) == [(True, 4)] * 2
    assert pool.call(pool.function(looked), (), {}, size=0) == [(True, 4)]


def test_ranks_run_on_the_devices_that_are_chosen_in_their_order_with_their_variables(pool):
    def body(rank):
        total = torch.full((3,), float(rank.index + 1), device=rank.device)
        dist.all_reduce(total)
        own = os.environ.get("NCCL_P2P_DISABLE")
        return rank.index, rank.size, str(rank.device), torch.cuda.current_device(), total.tolist(), own, os.getpid()

    def at_birth():
        with open("/proc/self/environ") as file:
            return "NCCL_P2P_DISABLE" in os.environ, "NCCL_P2P_DISABLE" in file.read()

    first = pool.run(body, devices=[2, 0])
    assert [seen[:-1] for seen in first] == [(0, 2, "cuda:2", 2, [3.0] * 3, None), (1, 2, "cuda:0", 0, [3.0] * 3, None)]
    assert pool.run(body, devices=[2, 0]) == first, "the world stays warm"
    arm = pool.run(body, devices=[2, 0], environment={"NCCL_P2P_DISABLE": "1"})
    assert [seen[:-1] for seen in arm] == [(*seen[:-2], "1") for seen in first]
    others = pool.run(body, devices=[0, 2]) + pool.run(body, size=2)
    assert [seen[3] for seen in others] == [0, 2, 0, 1]
    assert len({seen[-1] for seen in (*first, *arm, *others)}) == 8, "each world has processes of its own"
    assert [seen[3] for seen in pool.run(body, devices=[3])] == [3]
    assert pool.sizes == {1, 2}
    node = pool.function(at_birth)
    assert pool.call(node, (), {}, size=0, environment={"NCCL_P2P_DISABLE": "1"}) == [(True, False)]
    assert pool.call(node, (), {}, size=0) == [(False, False)]


def test_variables_of_a_world_stay_while_those_of_the_pytest_process_change(pool, monkeypatch):
    def change():
        os.environ["NCCL_SHM_DISABLE"] = "changed by the test"

    def now():
        return os.environ["NCCL_SHM_DISABLE"], os.environ.get("RATE")

    monkeypatch.setenv("NCCL_SHM_DISABLE", "0")
    pool.run(change, size=2, environment={"NCCL_SHM_DISABLE": "1"})
    monkeypatch.setenv("RATE", "7")
    assert pool.run(now, size=2, environment={"NCCL_SHM_DISABLE": "1"}) == [("1", "7")] * 2
    assert pool.run(now, size=2) == [("0", "7")] * 2


def test_wrong_devices_and_variables_are_value_errors(pool):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"devices": [0, 4]}, r"devices=\[0, 4\]: 4 is not a device of this test; choose different numbers of 0 to 3"),
        ({"devices": [-1]}, "-1 is not a device"),
        ({"devices": [True]}, "True is not a device"),
        ({"devices": [1, 1]}, "each rank needs a device of its own"),
        ({"devices": 2}, "devices=2 is not a non-empty list of devices"),
        ({"devices": []}, r"devices=\[\] is not a non-empty list of devices"),
        ({"devices": "01"}, "devices='01': '0' is not a device"),
        ({"devices": [0, 1], "size": 3}, r"size=3, but devices=\[0, 1\]; leave the size out"),
        ({"environment": {"RANK": "1"}}, "RANK is set for each rank; choose other variables than CUDA_VISIBLE_DEVICES"),
        ({"environment": {"A=B": "1"}}, "'A=B' is not a valid variable name"),
        ({"environment": {"A": 1}}, "A=1 is not a valid value; choose a str"),
        ({"environment": "A=1"}, "environment='A=1' is not a mapping"),
    ]
    for wrong, said in cases:
        with pytest.raises(ValueError, match="^ranks.run: .*" + said):
            pool.run(os.getpid, **wrong)


def test_what_cannot_travel_is_named(pool):
    lock = threading.Lock()
    with pytest.raises(NotPicklable, match="argument 0, of type lock, cannot be pickled"):
        pool.run(lambda x: x, lock)
    with pytest.raises(NotPicklable, match="it refers to 'lock', of type lock"):
        pool.run(lambda: lock)
    with pytest.raises(RankFailure, match="the result, of type lock, cannot be sent"):
        pool.run(threading.Lock)
    assert len(pids(pool)) == 4


def test_device_tensors_come_back_as_cpu_tensors(pool):
    def body(rank):
        x = torch.arange(3.0, device=rank.device)
        return {"x": x, "p": torch.nn.Parameter(x + 1), "nested": [(x.half(),)]}

    for result in pool.run(body):
        assert type(result["x"]) is torch.Tensor
        assert result["x"].device.type == "cpu"
        assert result["x"].tolist() == [0, 1, 2]
        assert result["p"].tolist() == [1, 2, 3]
        assert result["nested"][0][0].dtype is torch.float16


def test_calls_from_several_threads_wait_for_each_other(pool):
    results = []

    def call(number):
        results.append(pool.run(lambda rank, k: k + rank.index, number, size=2, timeout=20))

    threads = [threading.Thread(target=call, args=(10 * k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [[10 * k, 10 * k + 1] for k in range(6)]


def test_functions_that_are_called_once_are_not_kept(pool):
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def call(times):
        for _ in range(times):
            data = bytes(20_000_000)
            pool.run(lambda data=data: len(data), size=1)
        return pool.run(resident, size=1)[0]

    before = call(2)  # the allocator keeps some
    assert call(10) - before < 100_000_000


def test_the_environment_of_now_reaches_warm_ranks(pool, monkeypatch, tmp_path):
    def seen():
        return os.environ.get("MODE"), os.getcwd(), os.environ["RANK"]

    home = os.getcwd()
    assert pool.run(seen, size=1) == [(None, home, "0")]
    monkeypatch.setenv("MODE", "fast")
    monkeypatch.chdir(tmp_path)
    assert pool.run(seen, size=1) == [("fast", str(tmp_path), "0")]
    monkeypatch.undo()
    assert pool.run(seen, size=1) == [(None, home, "0")]


def test_a_call_ends_with_what_its_simulated_streams_have_to_do(pool):
    """As on real devices: what a stream still does when the function has returned belongs to this call, and no
    other."""

    def sleep(rank, cycles):
        if rank.index == 1:
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(cycles)

    with pytest.raises(RankHang, match=r"rank 1 is done, except for work that is queued on its devices"):
        pool.run(sleep, 10**15, size=2, timeout=0.5)
    pool.run(sleep, 30_000_000, size=2)  # 20 ms
    assert pool.run(lambda rank: rank.index, size=2) == [0, 1]


def test_output_of_each_rank_since_the_test_began(pool):
    pool.run(lambda: print("before"), size=2)
    pool.end_test(failed=False)
    pool.begin_test()

    def body(rank):
        print("out", rank.index)
        print("err", file=sys.stderr)
        os.write(1, b"raw\n")

    pool.run(body, size=2)
    assert pool.output() == [
        ("rank 0 of 2", "stdout", "out 0\nraw\n"),
        ("rank 0 of 2", "stderr", "err\n"),
        ("rank 1 of 2", "stdout", "out 1\nraw\n"),
        ("rank 1 of 2", "stderr", "err\n"),
    ]


def test_of_much_output_the_beginning_and_the_end_are_kept_and_the_rest_leaves_the_disk(pool):
    def body():
        print("first")
        print("x" * 50_000_000)
        print("last")
        while os.fstat(1).st_blocks * 512 > 20_000_000:
            time.sleep(0.01)

    pool.run(body, size=1)
    ((_, _, text),) = pool.output()
    assert len(text) < 70_000
    assert text.startswith("first\nxxx")
    assert text.endswith("xxx\nlast\n")
    left_out = len("first\n" + "\n" + "last\n") + 50_000_000 - 64 * 1024
    assert f"\n[{left_out} bytes are left out here]\n" in text
    assert "\0" not in text


def test_the_same_seed_on_every_rank_and_in_every_call(pool):
    def body():
        return torch.rand(1).item(), random.random()

    assert len({*pool.run(body), *pool.run(body), *pool.run(body, size=2)}) == 1
