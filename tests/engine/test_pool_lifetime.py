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
from mgpu_check.errors import StartupFailure
from tests.engine.processes import gone, pids


def test_idle_worlds_beyond_the_limit_are_let_go(pool, monkeypatch):
    monkeypatch.setattr("mgpu_check.engine.pool._LEAST_KEPT", 5)
    monkeypatch.setattr("mgpu_check.engine.pool._KEPT_PER_DEVICE", 1)
    for size in range(1, 5):
        pids(pool, size)
        pool.end_test(failed=False)
        pool.begin_test()
    assert sum(len(world.processes) for _, world in pool._worlds) <= 5
    assert len(pids(pool, 1)) == 1


def test_close_leaves_no_process_and_no_file(tmp_path, monkeypatch):
    """Also where ranks could not start, and where a child of this process inherits the sockets of the ranks."""
    (here := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    (other := tmp_path / "mgpu_check").mkdir()
    (other / "__init__.py").write_text("raise AssertionError('this is another version')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launcher = LocalLauncher()
    with pytest.raises(StartupFailure, match=r"rank \d of 2 could not start: "):
        pids(RankPool(launcher, slots=2, simulate="cuda:0", timeout=30.0))
    pool = RankPool(launcher, slots=2, simulate="cpu", timeout=30.0)

    def body():
        command = [sys.executable, "-c", "import time; time.sleep(3600)"]
        return [subprocess.Popen(command).pid, subprocess.Popen(command, start_new_session=True).pid]

    started = pids(pool) + [pid for group in pool.run(body) for pid in group]
    assert pool.run(lambda: __import__("mgpu_check").__file__) == [mgpu_check.__file__] * 2
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        pool.close()
        # The last of them only if the fork server has ended by itself, and was not killed.
        assert all(gone(pid) for pid in started)
        assert list(here.iterdir()) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


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


@pytest.mark.slow
def test_a_failing_preload_is_told():
    pool = RankPool(LocalLauncher(["no_such_module"]), slots=1, simulate="cpu", timeout=30.0)
    try:
        with pytest.raises(StartupFailure, match="No module named 'no_such_module'"):
            pids(pool)
    finally:
        pool.close()


@pytest.mark.slow
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
