"""Shared memory, semaphores, processes and directories go with the ranks that made them, however those end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from multiprocessing import get_context, shared_memory
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from mgpu_check.engine.rank_side.state import _still_running
from mgpu_check.errors import RankDied
from tests.engine.processes import alive

SHARED = Path("/dev/shm")


pytestmark = pytest.mark.usefixtures("this_module_by_value")


def await_gone(condition):
    """Files of a killed process are removed a moment later."""
    deadline = time.monotonic() + 30
    while condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition() == []


def share(directory):
    """Make one of each kind, keep it, and write down their names."""
    segment = shared_memory.SharedMemory(create=True, size=64)
    gone = shared_memory.SharedMemory(create=True, size=64)
    gone.close()
    gone.unlink()
    semaphore: Any = get_context("spawn").Semaphore()
    tensors = []
    before = mp.get_sharing_strategy()
    for strategy in mp.get_all_sharing_strategies():
        mp.set_sharing_strategy(strategy)
        tensors.append(torch.ones(3).share_memory_())
    by_name = tensors[-1].untyped_storage()._share_filename_cpu_()[1].decode()
    mp.set_sharing_strategy(before)
    held = (segment, semaphore, tensors)
    torch.kept_by_the_test = held  # type: ignore[attr-defined]
    names = [segment.name, f"sem.{semaphore._semlock.name[1:]}", by_name.lstrip("/")]
    Path(directory, f"{os.getpid()}.names").write_text("\n".join(names))
    return names


def left_in(directory):
    """What is there of what ranks have made."""
    names = [name for file in Path(directory).glob("*.names") for name in file.read_text().split()]
    pids = [file.stem for file in Path(directory).glob("*.names")]
    left = [name for name in names if (SHARED / name).exists()]
    return left + [entry.name for pid in pids for entry in SHARED.glob(f"torch_{pid}_*") if entry.name not in names]


def managers(directory):
    """Return the files of torch's shared memory that belong to the ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (entry / "exe").readlink().name == "torch_shm_manager" and os.fspath(directory) in (
                entry / "environ"
            ).read_text(errors="replace"):
                found.append(entry.name)
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_nobody_loses_what_ranks_have_only_attached(pool):
    segment = shared_memory.SharedMemory(create=True, size=8)

    def attach(name):
        attached = shared_memory.SharedMemory(name)
        attached.buf[0] = 7
        own = shared_memory.SharedMemory(create=True, size=8)
        shared_memory.SharedMemory(own.name).close()
        return own.name

    try:
        (own,) = pool.run(attach, segment.name, size=1)
        pool.end_test(failed=True)
        await_gone(lambda: [own] if (SHARED / own).exists() else [])
        assert segment.buf[0] == 7
        assert (SHARED / segment.name).exists()
    finally:
        segment.close()
        segment.unlink()


@pytest.mark.slow
def test_what_ranks_share_by_name_goes_with_them(pool, tmp_path, monkeypatch):
    monkeypatch.setenv("WHOSE", str(tmp_path))
    (names,) = pool.run(share, tmp_path, size=1)
    assert [name for name in names if not (SHARED / name).exists()] == []
    assert pool.end_test(failed=False) == [], "it may be kept between tests, and nothing of it is a process of the test"
    pool.begin_test()

    def dies(rank):
        names = share(tmp_path)
        if rank.index == 0:
            assert all((SHARED / name).exists() for name in names)
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()  # the other is killed

    with pytest.raises(RankDied):
        pool.run(dies, size=2)
    (server,) = pool.run(os.getppid, size=1)
    assert len(left_in(tmp_path)) >= 3, "the rank that lives still has its own"
    os.kill(server, signal.SIGKILL)
    pool.close()
    await_gone(lambda: left_in(tmp_path))
    await_gone(lambda: managers(tmp_path))


def start_children(directory):
    share(directory)
    forked = os.fork()
    if forked == 0:
        os.setsid()
        signal.pause()
    return forked, subprocess.Popen(["sleep", "3600"], start_new_session=True).pid


def test_nothing_is_left_where_the_fork_server_is_killed(pool, tmp_path, monkeypatch):
    monkeypatch.setenv("WHOSE", str(tmp_path))
    started = [pid for pids in pool.run(start_children, tmp_path, size=2) for pid in pids]
    (server, _) = pool.run(os.getppid, size=2)
    os.kill(server, signal.SIGKILL)
    with pytest.raises(RankDied):
        pool.run(lambda: threading.Event().wait(), size=2)
    await_gone(lambda: [pid for pid in started if alive(pid)])
    await_gone(lambda: left_in(tmp_path))
    await_gone(lambda: managers(tmp_path))


def test_threads_that_end_in_a_moment_are_not_left_behind(monkeypatch):
    ends = threading.Event()
    threads = [threading.Thread(target=ends.wait, name=f"waits {number}") for number in range(3)]
    for thread in threads:
        thread.start()
    granted = []
    join = threading.Thread.join

    def joined(self: threading.Thread, timeout: float | None = None) -> None:
        granted.append(timeout)
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", joined)
    assert _still_running(threads) == ["waits 0", "waits 1", "waits 2"]
    assert sum(granted) < 2 * granted[0], "they have one moment together, not one each"

    def joined_as_it_ends(self: threading.Thread, timeout: float | None = None) -> None:
        ends.set()  # as what it has to do is done just then
        join(self, 60)

    monkeypatch.setattr(threading.Thread, "join", joined_as_it_ends)
    assert _still_running(threads) == []
