"""Code under test that damages the engine, by accident or not: the verdict stays right, and comes in time."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import signal
import sys
import tempfile
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mgpu_check.engine.launcher import LocalLauncher
from mgpu_check.engine.pool import RankPool
from mgpu_check.errors import RankDied, RankFailure, RankHang, StartupFailure

pytestmark = pytest.mark.usefixtures("this_module_by_value")


class Tee:
    """Has not all that a file has."""

    def write(self, text):
        return len(text)


class Quits(Exception):
    def __str__(self):
        raise SystemExit(3)


def quit_here(kind):
    raise kind


class CannotBeLoaded(Exception):
    def __init__(self, kind):
        super().__init__("told")
        self.kind = kind

    def __reduce__(self):
        return quit_here, (self.kind,)


def raises(error):
    def body(*_, **__):
        raise error

    return body


def chained():
    error = None
    for number in range(3000):
        following = ValueError(number)
        following.__cause__, error = error, following
    raise error


def without_output():
    sys.stdout = None
    raise ValueError("told")


def with_another_output():
    sys.stdout = sys.stderr = Tee()
    raise ValueError("told")


VERDICTS = {
    "no output": (without_output, "ranks 0-1 of 2 raised ValueError: told"),
    "an output that cannot be flushed": (with_another_output, "ranks 0-1 of 2 raised ValueError: told"),
    "an error that quits when it is shown": (
        lambda: quit_here(Quits()),
        "ranks 0-1 of 2 raised Quits: <str() of it raised SystemExit>",
    ),
    "thousands of chained errors": (chained, "ranks 0-1 of 2 raised ValueError: 2999"),
    "an error that interrupts when it is loaded": (
        lambda: quit_here(CannotBeLoaded(KeyboardInterrupt)),
        "ranks 0-1 of 2 raised CannotBeLoaded: told",
    ),
    "an error that quits when it is loaded": (
        lambda: quit_here(CannotBeLoaded(SystemExit)),
        "ranks 0-1 of 2 raised CannotBeLoaded: told",
    ),
    "a result that interrupts when it is loaded": (
        lambda rank: CannotBeLoaded(KeyboardInterrupt) if rank.index == 1 else None,
        "rank 1 of 2 returned a result that cannot be loaded in the pytest process: KeyboardInterrupt: ",
    ),
}


def test_verdicts_stay_what_they_are(pool):
    before = pool.run(os.getpid, size=2)
    for name, (body, expected) in VERDICTS.items():
        with pytest.raises(RankFailure) as info:
            pool.run(body, size=2)
        assert not isinstance(info.value, RankDied), name
        assert str(info.value).splitlines()[0] == expected, name
        assert len(str(info.value)) < 50_000, name
    assert pool.run(os.getpid, size=2) == before


def test_two_groups_of_the_same_ranks_in_two_threads(pool):
    """Each thread goes at its own pace on each rank."""

    def body(rank):
        def go(group, dtype, first):
            for number in range(20):
                if rank.index == first:
                    os.sched_yield()
                dist.all_reduce(torch.ones(3, dtype=dtype), group=group)
                pair = [torch.zeros(number, dtype=dtype) for _ in range(2)]
                dist.all_gather(pair, pair[0], group=group)

        groups = [dist.new_group([0, 1]) for _ in range(2)]
        other = threading.Thread(target=go, args=(groups[0], torch.int32, 0))
        if rank.index == 0:
            other.start()
            go(groups[1], torch.float32, 1)
        else:
            go(groups[1], torch.float32, 1)
            other.start()
        other.join()

    pool.run(body, size=2)


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 0, -1])
def test_timeouts_that_are_none(pool, timeout):
    with pytest.raises(ValueError, match=r"timeout=.* is not valid; choose a finite number of seconds above 0"):
        pool.run(os.getpid, timeout=timeout)


def test_a_frozen_clock(pool, monkeypatch):
    for name in ("monotonic", "time", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: 5.0)
    with pytest.raises(RankHang):
        pool.run(lambda: threading.Event().wait(), size=2, timeout=0.5)
    assert len(pool.run(os.getpid, size=2)) == 2


def test_a_message_without_end(pool):
    def body(rank):
        from mgpu_check.processes import channel

        if rank.index == 1:
            (end,) = (one for one in gc.get_objects() if type(one) is channel.RankEnd)
            end._socket.sendall(channel._HEADER.pack(channel._MAGIC, channel._LONGEST_FRAME))
            while True:
                end._socket.sendall(bytes(1 << 16))

    with pytest.raises(RankHang):
        pool.run(body, size=2, timeout=0.5)


@contextlib.contextmanager
def own_pool(*preload):
    pool = RankPool(LocalLauncher(preload), slots=2, simulate="cpu", timeout=30.0)
    pool.begin_test()
    try:
        yield pool
    finally:
        pool.close()


def test_another_program_in_the_place_of_a_rank(pool):
    def body(rank):
        if rank.index == 1:
            os.execvp("sleep", ["sleep", "3600"])

    with pytest.raises(
        RankDied, match="rank 1 of 2 died: another program ran in its place, by exec: sleep 3600; start"
    ):
        pool.run(body, size=2)


class Sent:
    """An object that a program would give to processes that it spawns."""

    def __init__(self, number):
        self.number = number


def spawned(index, sent, doubled):
    assert type(sent) is Sent
    doubled[index] = 2 * sent.number


@pytest.mark.slow
def test_ranks_can_spawn_functions_of_a_test_module(pool):
    def body():
        doubled = torch.zeros(1).share_memory_()
        mp.spawn(spawned, args=(Sent(4), doubled))  # type: ignore[attr-defined]
        return doubled.tolist()

    assert pool.run(body, size=1, timeout=300) == [[8.0]]  # an interpreter imports torch


def use_multiprocessing():
    """As it is done by managers, and by queues of processes that are spawned."""
    import multiprocessing.util

    return multiprocessing.util.get_temp_dir()


@pytest.mark.slow
def test_a_rank_that_dies_while_it_starts_is_told_at_once_and_a_stopped_fork_server_is_replaced(tmp_path, monkeypatch):
    """As one bad device would do it: the others wait for that rank in the rendezvous.

    And nothing is left in a temporary directory of any name.
    """
    from mgpu_check.engine import world_processes

    directory = tmp_path / "ünï #c%41?d"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setattr(world_processes, "_START_TIMEOUT", 20.0)
    with own_pool() as pool:
        (server,) = pool.run(os.getppid, size=1)
        original = pool._launcher.launch

        def launch(slots, seeds_apart=False):
            processes = original(slots, seeds_apart)
            os.kill(processes[1].pid, signal.SIGKILL)
            return processes

        with monkeypatch.context() as patch:
            patch.setattr(pool._launcher, "launch", launch)
            with pytest.raises(StartupFailure, match="rank 1 of 2 died while it started: signal SIGKILL"):
                pool.run(os.getpid, size=2)

        os.kill(server, signal.SIGSTOP)
        with pytest.raises(StartupFailure, match=r"the fork server does not run: it was stopped by a signal"):
            pool.run(os.getpid, size=2)
        assert server not in pool.run(os.getppid, size=2)
        assert all(made.startswith(str(directory)) for made in pool.run(use_multiprocessing))
    assert list(directory.iterdir()) == []


NO_ROOM = "cannot be opened: No space left on device. Make room in .*, or name another .* TMPDIR"

REFUSING = """
import errno, os

def once():
    fork = os.fork
    def refuse():
        os.fork = fork
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    os.fork = refuse
"""


@pytest.mark.slow
def test_resources_that_are_used_up_are_told_with_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "refusing.py").write_text(REFUSING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with own_pool("refusing:once") as pool:
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "mkdtemp", raises(full))
            with pytest.raises(StartupFailure, match=NO_ROOM):
                pool.run(os.getppid)
        with pytest.raises(StartupFailure) as refused:
            pool.run(os.getppid)
        assert re.search(
            r"refused a process for a rank: .*Resource temporarily unavailable; limits of processes and threads: "
            r"of this user \(ulimit -u\) \w+.* Raise the limit that was reached",
            str(refused.value),
        )
        servers = pool.run(os.getppid)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", raises(full))
            pool.end_test(failed=True)
            pool.begin_test()
            pool._worlds.close()
            with pytest.raises(StartupFailure, match=NO_ROOM):
                pool.run(os.getppid)
        assert pool.run(os.getppid) == servers
