"""The pool by itself, without pytest around it. Functions are defined inside tests, so that they travel by value."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

import mgpu_check
from mgpu_check.engine.launcher import LocalLauncher
from mgpu_check.engine.pool import RankPool
from mgpu_check.engine.sending import NotPicklable
from mgpu_check.engine.world import Abandoned, World
from mgpu_check.errors import RankDied, RankFailure, RankHang, StartupFailure


def pids(pool: RankPool, size: int | None = None) -> list[int]:
    return pool.run(os.getpid, size=size)


def comes_to(pid: int, states: str) -> bool:
    """Whether the process is in one of `states`, or gets there within 10 s; "Z" stands for one that is gone, too."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            state = "Z"
        if state in states:
            return True
        time.sleep(0.01)
    return False


def gone(pid: int) -> bool:
    """Whether the process has ended, or does so within 10 s; one that nobody waits for stays as a zombie."""
    return comes_to(pid, "Z")


def test_results_come_in_rank_order(pool):
    def body(rank, base):
        return base + rank.index

    assert pool.run(body, 10) == [10, 11, 12, 13]


def test_a_size_keeps_its_processes(pool):
    first = {size: pids(pool, size) for size in (4, 2, 3, 1)}
    assert {size: pids(pool, size) for size in (1, 2, 3, 4)} == first
    assert len({pid for group in first.values() for pid in group}) == 10


def test_every_size_has_a_default_group_of_that_size(pool):
    def body(rank):
        import torch
        import torch.distributed as dist

        x = torch.ones(1)
        dist.all_reduce(x)
        return dist.get_world_size(), int(x), torch.cuda.device_count()

    for size in (2, 4, 1, 3, 2):
        assert pool.run(body, size=size) == [(size, size, 4)] * size


@pytest.mark.parametrize("destroyed", [True, False], ids=["by the test", "when it has ended"])
def test_groups_that_are_gone_have_no_threads(pool, destroyed):
    def threads():
        return len(os.listdir("/proc/self/task"))

    def body(rank, destroyed):
        import torch
        import torch.distributed as dist

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
        import torch

        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        return torch.cuda.is_initialized(), torch.cuda.device_count()

    assert pool.run(looked, size=2) == [(True, 4)] * 2
    assert pool.call(pool.function(looked), (), {}, size=0) == [(True, 4)]


@pytest.mark.parametrize("size", [0, 5, -1, True, 2.0, "2"])
def test_a_wrong_size_is_a_value_error(pool, size):
    with pytest.raises(ValueError, match=r"ranks.run: size=.* is not a world size of this run; choose 1 to 4"):
        pool.run(os.getpid, size=size)


def test_ranks_run_on_the_devices_that_are_chosen_in_their_order_with_their_variables(pool):
    def body(rank):
        import torch
        import torch.distributed as dist

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
    cases = [
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


def test_a_wrong_timeout_is_a_value_error(pool):
    with pytest.raises(ValueError, match="timeout=0 is not valid"):
        pool.run(os.getpid, timeout=0)


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
        import torch

        x = torch.arange(3.0, device=rank.device)
        return {"x": x, "p": torch.nn.Parameter(x + 1), "nested": [(x.half(),)]}

    import torch

    for result in pool.run(body):
        assert type(result["x"]) is torch.Tensor
        assert result["x"].device.type == "cpu"
        assert result["x"].tolist() == [0, 1, 2]
        assert result["p"].tolist() == [1, 2, 3]
        assert result["nested"][0][0].dtype is torch.float16


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
        import torch
        import torch.distributed as dist

        if rank.index == 1:
            dist.all_reduce(torch.ones(1), async_op=True)
        raise ValueError("no")

    before = pids(pool, 2)
    with pytest.raises(RankFailure):
        pool.run(body, size=2)
    assert not set(pids(pool, 2)) & set(before)


def test_sends_and_receives_that_differ_between_ranks_are_no_reason_to_replace_them(pool):
    def body(rank):
        import torch
        import torch.distributed as dist

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
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(4), async_op=True)
        if rank.index == 0:
            dist.all_reduce(torch.ones(5), async_op=True)

    with pytest.raises((RankFailure, RankDied), match=r"pending|different numbers of operations.*rank 0: 2, rank 1: 1"):
        pool.run(body, size=2)
    assert len(pids(pool, 2)) == 2


def test_a_death_out_of_lockstep_is_a_death(pool):
    def body(rank):
        import os
        import threading

        import torch
        import torch.distributed as dist

        if rank.index == 0:
            dist.all_reduce(torch.ones(3), async_op=True)
        else:
            threading.Timer(0.05, os._exit, (3,)).start()

    with pytest.raises(RankDied, match=r"rank 1 of 2 died .*: exit code 3"):
        pool.run(body, size=2)


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


def test_a_rank_that_closes_its_output_harms_no_other(pool):
    before = pids(pool, 3)

    def body(rank):
        import sys

        if rank.index == 1:
            sys.stdout.close()

    pool.run(body, size=2)
    assert pids(pool, 3) == before


def test_functions_that_are_called_once_are_not_kept(pool):
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    (before,) = pool.run(resident, size=1)
    for _ in range(10):
        data = bytes(20_000_000)
        pool.run(lambda data=data: len(data), size=1)
    (after,) = pool.run(resident, size=1)
    assert after - before < 100_000_000


def test_an_end_that_the_connection_hides_is_told_at_once(pool):
    """A grandchild in a session of its own holds the rank's connection open."""

    def body(rank):
        import os
        import time

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

    class Unspeakable(Exception):
        def __str__(self):
            raise RuntimeError("no")

    class Skipped(Exception):
        """No skip: its name is the user's."""

    def body(which):
        raise {"two": Two(1, 2), "unspeakable": Unspeakable(), "skipped": Skipped("the optimizer skipped")}[which]

    with pytest.raises(RankFailure, match="Two: 1 2"):
        pool.run(body, "two", size=1)
    with pytest.raises(RankFailure, match=r"Unspeakable: <str\(\) of it raised RuntimeError>"):
        pool.run(body, "unspeakable", size=1)
    with pytest.raises(RankFailure, match="Skipped: the optimizer skipped"):
        pool.run(body, "skipped", size=1)


def test_a_raise_just_before_the_deadline_is_no_hang(pool):
    def body(rank):
        import time

        import torch.distributed as dist

        if rank.index == 1:
            time.sleep(0.9)
            raise ValueError("the cause")
        dist.barrier()

    with pytest.raises(RankFailure, match=r"\Arank 1 of 2 raised ValueError: the cause"):
        pool.run(body, size=2, timeout=1.2)


def test_the_environment_of_now_reaches_warm_ranks(pool, monkeypatch, tmp_path):
    def seen():
        import os

        return os.environ.get("MODE"), os.getcwd(), os.environ["RANK"]

    home = os.getcwd()
    assert pool.run(seen, size=1) == [(None, home, "0")]
    monkeypatch.setenv("MODE", "fast")
    monkeypatch.chdir(tmp_path)
    assert pool.run(seen, size=1) == [("fast", str(tmp_path), "0")]
    monkeypatch.undo()
    assert pool.run(seen, size=1) == [(None, home, "0")]


def test_one_raises_while_others_wait(pool):
    def body(rank):
        import torch.distributed as dist

        if rank.index == 2:
            raise KeyError("only here")
        dist.barrier()

    with pytest.raises(RankFailure, match=r"rank 2 of 4 raised KeyError(.|\n)*ranks 0-1, 3 still ran") as info:
        pool.run(body)
    assert info.value.ranks == (2,)
    assert "in barrier" in str(info.value)
    assert len(pids(pool)) == 4


def test_different_errors_are_told_apart_and_equal_ones_folded(pool):
    def body(rank):
        raise ValueError("odd") if rank.index % 2 else TypeError("even")

    with pytest.raises(RankFailure) as info:
        pool.run(body)
    text = str(info.value)
    assert "ranks 1, 3 of 4 raised ValueError: odd" in text
    assert "ranks 0, 2 of 4 raised TypeError: even" in text


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGKILL, "signal SIGKILL"), (signal.SIGSEGV, "signal SIGSEGV"), (signal.SIGTERM, "signal SIGTERM")],
)
def test_death_by_signal(pool, number, said):
    def body(rank, number):
        import os

        if rank.index == 1:
            os.kill(os.getpid(), number)
        return rank.index

    with pytest.raises(RankDied, match=rf"rank 1 of 3 died: {said}(.|\n)*ranks 0, 2 finished") as info:
        pool.run(body, int(number), size=3)
    assert info.value.ranks == (1,)
    assert len(pids(pool, 3)) == 3


@pytest.mark.parametrize("code", [0, 7])
def test_death_by_exit(pool, code):
    """An exit code of 0 in mid-test is a death like any other."""

    def body(rank, code):
        import os

        if rank.index == 0:
            os._exit(code)

    with pytest.raises(RankDied, match=rf"rank 0 of 2 died: exit code {code}"):
        pool.run(body, code, size=2)


def test_a_call_ends_with_what_its_simulated_streams_have_to_do(pool):
    """As on real devices: what a stream still does when the function has returned belongs to this call, and no
    other."""

    def sleep(rank, cycles):
        import torch

        if rank.index == 1:
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(cycles)

    with pytest.raises(RankHang, match=r"rank 1 is done, except for work that is queued on its devices"):
        pool.run(sleep, 10**15, size=2, timeout=0.5)
    pool.run(sleep, 30_000_000, size=2)  # 20 ms
    assert pool.run(lambda rank: rank.index, size=2) == [0, 1]


def test_a_hang_has_the_stacks_of_all_and_names_the_culprit(pool):
    def body(rank):
        import time

        import torch.distributed as dist

        if rank.index == 1:
            time.sleep(3600)
        dist.barrier()

    before = pids(pool, 3)
    with pytest.raises(RankHang) as info:
        pool.run(body, size=3, timeout=0.5)
    assert info.value.ranks == (0, 1, 2)
    lines = str(info.value).splitlines()
    assert lines[0] == "rank 1 of 3 did not finish body within 0.5 s"
    assert lines[1].startswith("rank 1 is in body (")
    assert lines[2].startswith("ranks 0, 2 are in barrier #1 (")
    assert all(gone(pid) for pid in before)
    assert len(pids(pool, 3)) == 3


def test_a_stopped_rank_is_a_hang_without_stacks(pool):
    def body(rank):
        import os
        import signal

        if rank.index == 0:
            os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(
        RankHang, match=r"rank 0 of 2 did not finish(.|\n)*rank 0 is stopped by a signal, such as SIGSTOP"
    ):
        pool.run(body, size=2, timeout=0.5)
    assert len(pids(pool, 2)) == 2


def test_skips_of_all_are_a_skip_and_of_some_a_failure(pool):
    def body(rank, which):
        import unittest

        if rank.index in which:
            raise unittest.SkipTest("not today")

    with pytest.raises(Abandoned, match="not today") as info:
        pool.run(body, [0, 1], size=2)
    assert info.value.failure.kind == "skip"
    with pytest.raises(RankFailure, match=r"rank 1 of 2 raised SkipTest: not today"):
        pool.run(body, [1], size=2)


def test_an_interrupt_of_the_parent_breaks_the_world(pool):
    """After Ctrl-C in mid-call, answers of the old call must not be taken for those of the next."""

    def body(rank):
        import time

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
        import os
        import signal
        from pathlib import Path

        from mgpu_check.processes.signals import STACKS_SIGNAL

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


def test_output_of_each_rank_since_the_test_began(pool):
    pool.run(lambda: print("before"), size=2)
    pool.end_test(failed=False)
    pool.begin_test()

    def body(rank):
        import os
        import sys

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
        import os
        import time

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


def test_idle_worlds_beyond_the_limit_are_let_go():
    pool = RankPool(LocalLauncher(simulate="cpu"), slots=12, simulate="cpu", timeout=30.0)
    try:
        for size in range(1, 13):
            pool.begin_test()
            pids(pool, size)
            pool.end_test(failed=False)
        assert sum(len(world.processes) for _, world in pool._worlds) <= 64
        assert len(pids(pool, 1)) == 1
    finally:
        pool.close()


def test_close_leaves_no_process_and_no_file(tmp_path, monkeypatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pool = RankPool(LocalLauncher(simulate="cpu"), slots=2, simulate="cpu", timeout=30.0)

    def body():
        import subprocess
        import sys

        command = [sys.executable, "-c", "import time; time.sleep(3600)"]
        return [subprocess.Popen(command).pid, subprocess.Popen(command, start_new_session=True).pid]

    started = pids(pool) + [pid for group in pool.run(body) for pid in group]
    pool.close()
    assert all(gone(pid) for pid in started)
    assert list(tmp_path.iterdir()) == []


def test_the_fork_server_is_replaced_too():
    pool = RankPool(LocalLauncher(simulate="cpu"), slots=2, simulate="cpu", timeout=30.0)
    try:
        ranks = pids(pool)
        os.kill(pool.run(os.getppid)[0], signal.SIGKILL)
        assert all(gone(pid) for pid in ranks)
        with pytest.raises((RankDied, StartupFailure)):
            pids(pool)
        assert len(set(pids(pool)) - set(ranks)) == 2
    finally:
        pool.close()


def test_a_child_of_this_process_does_not_keep_the_ranks_alive():
    """What is forked from the pytest process inherits its sockets."""
    pool = RankPool(LocalLauncher(simulate="cpu"), slots=2, simulate="cpu", timeout=30.0)

    def body():
        import subprocess
        import sys

        command = [sys.executable, "-c", "import time; time.sleep(3600)"]
        return subprocess.Popen(command, start_new_session=True).pid

    started = pids(pool) + pool.run(body)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        pool.close()
        # The last of them only if the fork server has ended by itself, and was not killed.
        assert all(gone(pid) for pid in started)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_failing_preload_is_told():
    pool = RankPool(LocalLauncher(["no_such_module"]), slots=1, simulate="cpu", timeout=30.0)
    try:
        with pytest.raises(StartupFailure, match="No module named 'no_such_module'"):
            pids(pool)
    finally:
        pool.close()


def test_ranks_have_this_package_and_no_other_version(monkeypatch, tmp_path):
    (tmp_path / "mgpu_check").mkdir()
    (tmp_path / "mgpu_check" / "__init__.py").write_text("raise AssertionError('this is another version')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = RankPool(LocalLauncher(), slots=1, simulate="cpu", timeout=30.0)
    try:
        [found] = pool.run(lambda: __import__("mgpu_check").__file__)
        assert found == mgpu_check.__file__
    finally:
        pool.close()


def test_a_rank_that_cannot_start_is_told():
    pool = RankPool(LocalLauncher(), slots=2, simulate="cuda:0", timeout=30.0)
    try:
        with pytest.raises(StartupFailure, match=r"rank \d of 2 could not start: "):
            pids(pool)
    finally:
        pool.close()


def test_the_same_seed_on_every_rank_and_in_every_call(pool):
    def body():
        import random

        import torch

        return torch.rand(1).item(), random.random()

    assert len({*pool.run(body), *pool.run(body), *pool.run(body, size=2)}) == 1


def test_a_rank_that_does_not_answer_at_the_end_of_a_test_is_told(pool, monkeypatch):
    from mgpu_check.engine import world

    monkeypatch.setattr(world, "_REST_TIMEOUT", 0.5)
    (pid, _) = pids(pool, 2)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankHang, match=r"rank 0 of 2 did not finish its answer at the end of the test within 0.5 s"):
        pool.end_test(failed=False)
    assert gone(pid)
    assert len(pids(pool, 2)) == 2


def test_a_rank_that_is_stopped_while_idle_harms_no_test(pool):
    victim = pids(pool, 2)[1]
    os.kill(victim, signal.SIGSTOP)
    assert comes_to(victim, "T")
    (line,) = pool.died_idle()
    assert line == (
        "rank 1 of 2 did not run any more while no test used it: stopped by a signal, such as SIGSTOP, or by a debugger"
    )
    assert len(pids(pool, 2)) == 2


def test_a_fork_server_that_still_imports_ends_with_its_parent(tmp_path):
    waiting, go_on = tmp_path / "waiting", tmp_path / "go_on"
    os.mkfifo(waiting)
    os.mkfifo(go_on)
    (tmp_path / "imports_for_ever.py").write_text(
        f"import os; open({str(waiting)!r}, 'w').write(str(os.getpid())); open({str(go_on)!r}).read()"
    )
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from mgpu_check.engine.launcher import LocalLauncher as L; launcher = L(['imports_for_ever']); "
            "launcher.start()\nimport signal; signal.pause()",
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    server = int(waiting.read_text())
    parent.kill()
    parent.wait()
    assert gone(server)


class TestApart:
    """Several ranks, each alone in its world, that compute at the same time."""

    def test_each_has_its_arguments_and_its_device(self, pool):
        def body(rank, first, second):
            return rank.size, rank.index, rank.device.index, first + second

        found = pool.run_apart(body, [(1, 2), (3, 4), (5, 6)])
        assert found == [(1, 0, 0, 3), (1, 0, 1, 7), (1, 0, 2, 11)]
        assert pool.run_apart(body, []) == []

    @pytest.mark.parametrize("size", [0, 10_000_000], ids=["small", "more than a socket takes"])
    def test_they_compute_at_the_same_time(self, pool, tmp_path, size):
        path, data = tmp_path / "fifo", bytes(size)
        os.mkfifo(path)

        def meet(mode, data):
            with open(path, mode) as file:  # waits for the other
                return file.write("met") if mode == "w" else file.read()

        assert pool.run_apart(meet, [("r", data), ("w", data)], timeout=60) == ["met", 3]

    def test_one_that_takes_no_arguments_hinders_no_other(self, pool):
        stopped, other = pool.run_apart(os.getpid, [(), ()])
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(RankHang, match="is stopped by a signal"):
            pool.run_apart(len, [(bytes(10_000_000),)] * 2, timeout=0.5)
        assert pool.run_apart(os.getpid, [(), ()])[1] == other

    def test_the_first_error_is_raised_when_all_have_ended(self, pool):
        def body(number):
            if number:
                raise ArithmeticError(f"planted {number}")
            return os.getpid()

        before = pool.run_apart(body, [(0,), (0,), (0,)])
        with pytest.raises(RankFailure, match="planted 1"):
            pool.run_apart(body, [(0,), (1,), (2,)])
        assert pool.run_apart(body, [(0,), (0,), (0,)]) == before

    def test_one_that_hangs_is_ended_and_replaced(self, pool):
        def body(hangs):
            if hangs:
                threading.Event().wait()
            return os.getpid()

        first, second = pool.run_apart(body, [(False,), (False,)])
        with pytest.raises(RankHang, match=r"did not finish body within 0\.5 s"):
            pool.run_apart(body, [(True,), (False,)], timeout=0.5)
        assert gone(first)
        again = pool.run_apart(body, [(False,), (False,)])
        assert again[0] != first and again[1] == second

    def test_those_beside_one_that_hangs_get_no_time_of_their_own(self, pool, monkeypatch):
        finish, granted = World.finish, []

        def noted(world, call, timeout):
            granted.append(timeout)
            return finish(world, call, timeout)

        monkeypatch.setattr(World, "finish", noted)
        with pytest.raises(RankHang, match=r"did not finish <lambda> within 2 s"):
            pool.run_apart(lambda: threading.Event().wait(), [(), (), ()], timeout=2.0)
        assert granted[0] == 2.0 and all(timeout < 2.0 for timeout in granted[1:])

    def test_the_error_of_one_that_began_comes_before_that_of_one_that_could_not(self, pool):
        def body(given):
            raise ArithmeticError("planted")

        with pytest.raises(RankFailure, match="planted"):
            pool.run_apart(body, [(0,), (threading.Lock(),)])

    def test_more_than_there_are_devices(self, pool):
        with pytest.raises(ValueError, match="devices"):
            pool.run_apart(os.getpid, [()] * 9)
        assert len(pids(pool, 2)) == 2

    def test_from_outside(self, pool, monkeypatch):
        """What ends the test from outside, as Ctrl-C does, leaves none that would answer the next call."""
        before = pool.run_apart(os.getpid, [(), ()])

        def hangs():
            threading.Event().wait()

        def interrupted(*args):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(World, "finish", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.run_apart(hangs, [(), ()])
        assert isinstance(pool.stopped(), RankHang)
        after = pool.run_apart(os.getpid, [(), ()])
        assert set(after).isdisjoint(before)
