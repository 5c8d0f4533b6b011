"""Temporary directories go with the last process that uses them, and not before."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mgpu_check.processes.scratch import Scratch, sweep

# A process that uses a directory of the given kind and name, says which, and waits.
USES = """
import sys
from mgpu_check.processes.scratch import Scratch
scratch = Scratch.new(sys.argv[1]) if len(sys.argv) == 2 else Scratch.named(*sys.argv[1:])
(scratch.path / "file").touch()
print(scratch.path, flush=True)
sys.stdin.read()
"""

# The same with that of a run of `compare` that gives the script a directory of its own.
COMPARES = """
import sys
from mgpu_check.compare.processes import fresh_directory
with fresh_directory() as directory:
    print(directory.parent, flush=True)
    sys.stdin.read()
"""

# A run that is killed together with its fork server: something that its ranks have shared, and a process of theirs.
SHARES = """
import multiprocessing, os, signal, subprocess, sys
from mgpu_check.processes.child_processes import MARK
from mgpu_check.processes.scratch import Scratch
from mgpu_check.engine.rank_side.python_hooks import note_names
scratch = Scratch.new("ranks")
note_names(os.fspath(scratch.path))
semaphore = multiprocessing.get_context("spawn").Semaphore()
environment = {**os.environ, MARK: os.fspath(scratch.path)}
child = subprocess.Popen(["sleep", "3600"], env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
print(semaphore._semlock.name[1:], child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

# Use one directory and leave it, many times, beside others: no process loses it meanwhile.
IN_TURNS = """
from mgpu_check.processes.scratch import Scratch
for turn in range(100):
    scratch = Scratch.named("leases", "run")
    here = scratch.path / f"{__import__('os').getpid()}-{turn}"
    here.touch()
    assert here.exists()
    scratch.leave()
    scratch._close()  # as if the process had ended
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def user(*arguments: str) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", USES, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_has_left_goes_when_nobody_uses_it(place):
    (place / "mgpu-check-leases-00000000-run").mkdir()  # of another machine
    (place / "mgpu-check-leases").mkdir()
    (place / "mine").mkdir()
    kept = {"mgpu-check-leases-00000000-run", "mgpu-check-leases", "mine"}
    (one, first), (both, second), (too, same) = user("ranks"), user("leases", "run"), user("leases", "run")
    assert second == same != first
    (place / first.name.replace("ranks", "suite")).symlink_to(place / "mine")
    kept.add(first.name.replace("ranks", "suite"))
    for process, left in ((one, kept | {second.name}), (both, kept | {second.name}), (too, kept)):
        sweep(place)
        assert {path.name for path in place.iterdir()} >= left
        with process:
            process.kill()
        sweep(place)
        assert {path.name for path in place.iterdir()} == left


def test_what_a_killed_comparison_has_left_goes(place, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("project"))
    process = subprocess.Popen(
        [sys.executable, "-c", COMPARES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        assert Path(process.stdout.readline().strip()).parent == place
        sweep(place)
        assert list(place.iterdir()) != []
        process.kill()
    sweep(place)
    assert list(place.iterdir()) == []


def test_what_ranks_of_a_killed_run_have_left_goes_with_its_directory(place):
    killed = subprocess.run([sys.executable, "-c", SHARES], stdout=subprocess.PIPE, text=True)
    assert killed.returncode == -signal.SIGKILL
    name, pid = killed.stdout.split()
    semaphore, process = Path(f"/dev/shm/sem.{name}"), os.pidfd_open(int(pid))
    assert semaphore.exists()
    for _ in range(100):
        sweep(place)  # again, while the kernel still tears down the killed process, which holds a lock
        if select.select([process], [], [], 0.1)[0]:
            break
    else:
        pytest.fail("the process has not ended")
    os.close(process)
    assert not semaphore.exists()
    assert list(place.iterdir()) == []


def test_the_last_one_who_leaves_removes_it_and_a_new_one_removes_what_others_left(place):
    process, path = user("leases", "run")
    own = Scratch.named("leases", "run")
    assert own.path == path
    assert not own.leave()
    assert (path / "file").exists()
    with process:
        process.kill()
    assert own.leave()
    assert own.leave(), "a second time it is nothing"
    assert list(place.iterdir()) == []
    process, path = user("suite")
    with process:
        process.kill()
    assert path.exists()
    new = Scratch.new("ranks")
    assert list(place.iterdir()) == [new.path]
    new.remove()


def test_a_forked_process_neither_keeps_nor_removes_it(place):
    scratch = Scratch.new("ranks")
    removed, report = os.pipe()
    child = os.fork()
    if child == 0:
        scratch.remove()
        os.write(report, b"done")
        signal.pause()
    try:
        os.read(removed, 4)
        assert scratch.path.exists()
        assert scratch.leave()
        assert list(place.iterdir()) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(removed)
        os.close(report)


def test_nobody_loses_a_directory_that_others_leave(place):
    processes = [subprocess.Popen([sys.executable, "-c", IN_TURNS]) for _ in range(3)]
    while any(process.poll() is None for process in processes):
        sweep(place)
    assert [process.returncode for process in processes] == [0, 0, 0]
    sweep(place)
    assert list(place.iterdir()) == []


def test_what_is_in_the_way_is_an_error(place):
    scratch = Scratch.named("leases", "run")
    scratch.remove()
    scratch.path.write_text("a file")
    with pytest.raises(NotADirectoryError):
        Scratch(scratch.path)
