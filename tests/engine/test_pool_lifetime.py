"""The processes of a pool: how they start, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import mgpu_check
from mgpu_check.engine.launcher import LocalLauncher
from mgpu_check.engine.pool import RankPool
from mgpu_check.errors import RankDied, RankHang, StartupFailure
from tests.engine.processes import comes_to, gone, pids


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
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pool = RankPool(LocalLauncher(simulate="cpu"), slots=2, simulate="cpu", timeout=30.0)

    def body():
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


@pytest.mark.gpus(1)
def test_threads_of_simulated_ranks_do_not_spin(ranks, monkeypatch):
    """The fork server has the variable, which OpenMP reads there. Ranks have the environment of this process."""
    name = "OMP_WAIT_POLICY"

    def body():
        return os.getppid(), os.environ.get(name)

    ((server, seen),) = ranks.run(body)
    assert f"{name}=".encode() in Path(f"/proc/{server}/environ").read_bytes()
    assert seen == os.environ.get(name)
    monkeypatch.setenv(name, "active")
    assert LocalLauncher(simulate="cpu").keeper()[2][name] == "active"
    monkeypatch.delenv(name)
    assert LocalLauncher(simulate="cpu").keeper()[2][name] == "passive"
    assert name not in LocalLauncher().keeper()[2]


def test_a_child_of_this_process_does_not_keep_the_ranks_alive():
    """What is forked from the pytest process inherits its sockets."""
    pool = RankPool(LocalLauncher(simulate="cpu"), slots=2, simulate="cpu", timeout=30.0)

    def body():
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
