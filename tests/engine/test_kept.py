"""Imports that later runs share: how runs attach to a keeper, what ends with a run, and how a keeper ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mgpu_check.engine import keeper_socket
from mgpu_check.engine.forkserver import END
from mgpu_check.engine.keeper_socket import KeeperSocket, KeptServer, NotKept, attach, keeper_of, key_of
from mgpu_check.engine.launcher import LocalLauncher
from mgpu_check.engine.pool import RankPool
from mgpu_check.processes import environments
from tests.conftest import processes_with
from tests.engine.processes import gone, pids

pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.fixture(scope="module")
def own_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for the sockets of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("run")
        patch.setenv("XDG_RUNTIME_DIR", str(directory))
        yield directory


def launcher(keep: float = 60.0) -> LocalLauncher:
    return LocalLauncher(simulate="cpu", keep=keep)


def pool(keep: float = 60.0) -> RankPool:
    return RankPool(launcher(keep), slots=2, simulate="cpu", timeout=30.0)


@pytest.fixture(scope="module")
def keeper(own_directory: Path) -> Iterator[int]:
    """The process id of a keeper with torch."""
    first = pool()
    pids(first)
    first.close()
    found = keeper_of(*launcher().keeper())
    try:
        assert found is not None
        yield found
        last = pool(keep=0.0)  # ends it
        pids(last)
        last.close()
        assert ended(found)
    finally:
        kill_keepers("XDG_RUNTIME_DIR", own_directory)


def kill_keepers(variable: str, directory: Path) -> None:
    """Kill the keepers with a directory in their environment, which a failed test would leave for their whole time."""
    for pid in processes_with(variable, str(directory)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def ended(pid: int) -> bool:
    """Wait for the end of a process that is no child of this one."""
    try:
        opened = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([opened], [], [], 30.0)[0])
    finally:
        os.close(opened)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_a_run_attaches_to_the_keeper_and_takes_its_own_processes_along(keeper):
    run = pool()
    ranks = pids(run)
    server = parent_of(ranks[0])
    assert parent_of(server) == keeper
    assert keeper_of(*launcher().keeper()) == keeper
    run.close()
    assert all(gone(pid) for pid in [server, *ranks]) and not ended_now(keeper)


def ended_now(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_two_runs_at_once_share_a_keeper_and_nothing_else(keeper):
    one, other = pool(), pool()
    try:
        servers = {parent_of(pids(run)[0]) for run in (one, other)}
        assert len(servers) == 2 and {parent_of(server) for server in servers} == {keeper}

        def changed(value: str) -> str:
            torch.mine = value  # type: ignore[attr-defined]  # a mark, which the other run must not see
            return value

        assert one.run(changed, "one") == ["one", "one"]
        assert other.run(lambda: getattr(__import__("torch"), "mine", "")) == ["", ""]
        one.close()
        assert other.run(lambda rank: rank.index) == [0, 1]
    finally:
        one.close()
        other.close()


RUN = """
import os, signal
from mgpu_check.engine.launcher import LocalLauncher
from mgpu_check.engine.pool import RankPool

def body():
    import os, subprocess, sys
    return os.getpid(), subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True).pid

run = RankPool(LocalLauncher(simulate="cpu", keep=60.0), slots=2, simulate="cpu", timeout=30.0)
pids = [pid for pair in run.run(body) for pid in pair]
print(*pids, run._launcher._server.pid, run._launcher._directory.path, flush=True)
signal.pause()
"""


@pytest.mark.unmeasured
def test_a_killed_run_leaves_no_process_and_no_file(keeper):
    process = subprocess.Popen([sys.executable, "-P", "-c", RUN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    *started, directory = process.stdout.readline().split()
    kept = parent_of(int(started[-1]))  # it may have started over
    process.kill()
    process.communicate()
    assert all(ended(int(pid)) for pid in started)
    assert not Path(directory).exists()
    assert keeper_of(*launcher().keeper()) == kept


def test_what_a_killed_fork_server_leaves_is_killed(keeper):
    run = pool()

    def body():
        child = os.fork()
        if child == 0:
            os.setsid()  # not in the process group of its rank
            signal.pause()
        return child

    try:
        children = run.run(body)
        os.kill(parent_of(pids(run)[0]), signal.SIGKILL)
        assert all(ended(pid) for pid in children)
    finally:
        run.close()
    assert keeper_of(*launcher().keeper()) == keeper


@pytest.mark.parametrize(
    ("variable", "same"), [("OMP_NUM_THREADS", False), ("PYTHONHASHSEED", False), ("SHLVL", True), ("PYTEST_X", True)]
)
def test_another_environment_has_another_keeper(keeper, monkeypatch, variable, same):
    monkeypatch.setenv(variable, "3")
    assert (keeper_of(*launcher().keeper()) == keeper) is same


def test_another_directory_and_other_limits_have_another_keeper(keeper, monkeypatch, tmp_path):
    before = os.umask(0o027)
    try:
        assert keeper_of(*launcher().keeper()) is None
    finally:
        os.umask(before)
    monkeypatch.chdir(tmp_path)
    assert keeper_of(*launcher().keeper()) is None


def test_a_directory_that_was_made_again_has_another_keeper(monkeypatch, tmp_path):
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    before = key_of([], {})
    held = os.open(here, os.O_RDONLY)  # as a keeper does
    here.rmdir()
    here.mkdir()
    monkeypatch.chdir(here)
    assert key_of([], {}) != before
    os.close(held)


# Keepers without torch


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., tuple[KeptServer, socket.socket]]]:
    """Ask a keeper of modules in `tmp_path` for a fork server; return it with its control socket."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    opened = []

    def ask(*modules: str, keep: float = 60.0, preload: tuple[str, ...] = ()) -> tuple[KeptServer, socket.socket]:
        ours, theirs = socket.socketpair()
        opened.append(ours)
        interpreter, environment = environments.interpreter("keeper", "")
        with theirs, tempfile.TemporaryFile() as log:
            server = attach(
                *(interpreter, modules, environment, (theirs.fileno(), log.fileno())),
                keep=keep,
                directory=tempfile.mkdtemp(dir=tmp_path),
                preload=preload,
            )
        return server, ours

    yield ask
    for control in opened:
        control.close()
    kill_keepers("PYTHONPATH", tmp_path)


def told(control: socket.socket) -> dict[str, str]:
    control.settimeout(30.0)
    event: dict[str, str] = json.loads(control.recv(65536).splitlines()[0])
    return event


def end(server: KeptServer, control: socket.socket) -> None:
    control.send(END)
    assert server.wait(30.0) == 0


@pytest.fixture
def ready(ask):
    """Ask like `ask`, and wait for the fork server; return it with its control socket and the keeper."""

    def ready(*modules: str, **options: Any) -> tuple[KeptServer, socket.socket, int]:
        server, control = ask(*modules, **options)
        assert told(control) == {"event": "ready"} and server.poll() is None  # which also hears its process id
        return server, control, parent_of(server.pid)

    return ready


def test_a_keeper_ends_when_no_run_has_used_it_for_the_time(ask, own_directory):
    server, control = ask(keep=0.05)
    before = server._pid  # nothing was heard yet
    assert told(control) == {"event": "ready"}
    assert server.poll() is None  # which also hears its process id
    keeper = parent_of(server.pid)
    assert before == keeper != os.getpid()
    end(server, control)
    assert ended(keeper)
    assert {path.name for path in own_directory.glob("*/*")} <= {"lock", *sockets_of_others(own_directory)}


def sockets_of_others(directory: Path) -> set[str]:
    """The names of keepers that are still served, and their logs."""
    found = set()
    for path in directory.glob("*/*"):
        place = KeeperSocket(path.stem)
        connection = place.connected()
        place.close()
        if connection is not None:
            connection.close()
            found |= {path.stem, f"{path.stem}.log"}
    return found


def test_code_that_has_changed_never_runs_stale(ready, tmp_path):
    module, seen = tmp_path / "kept_module.py", tmp_path / "seen"
    code = f"VALUE = %d\ndef note(): open({str(seen)!r}, 'a').write(f'{{VALUE}} ')\n"
    module.write_text(code % 1)
    os.utime(module, (1, 1))
    of = {"preload": ("kept_module:note",)}
    one, control, keeper = ready("kept_module", **of)
    module.write_text(code % 22)
    other, another, heir = ready("kept_module", **of)
    assert seen.read_text() == "1 22 "
    assert parent_of(one.pid) == keeper == parent_of(heir)  # which hands its socket over
    end(one, control)
    assert ended(keeper)
    assert other.poll() is None
    module.write_text(code % 333)
    end(other, another)
    third, last, keeper = ready("kept_module", keep=0.0, **of)
    assert seen.read_text() == "1 22 333 "
    assert keeper == heir  # which has no run, and runs its program again
    end(third, last)
    assert ended(heir)


def test_a_module_that_is_saved_during_its_import_never_runs_stale(ready, tmp_path):
    module, seen = tmp_path / "saved_module.py", tmp_path / "seen"
    after = f"def note(): open({str(seen)!r}, 'a').write(f'{{VALUE}} ')\n"
    module.write_text(f"VALUE = 1\nopen(__file__, 'w').write({'VALUE = 22' + chr(10) + after!r})\n{after}")
    os.utime(module, (1, 1))
    server, control, _ = ready("saved_module", keep=0.0, preload=("saved_module:note",))
    assert seen.read_text() == "22 "
    end(server, control)


def test_a_socket_without_a_keeper_is_replaced(ready):
    first, _, keeper = ready()
    os.kill(keeper, signal.SIGKILL)
    assert ended(keeper)
    assert first.wait(30.0) == -signal.SIGKILL  # how it ended is unknown
    second, another, heir = ready(keep=0.0)
    assert heir != keeper
    end(second, another)


def test_a_keeper_whose_socket_was_removed_leaves_that_of_the_next_one(ready, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    first, control, keeper = ready(keep=0.0)
    (at,) = [path for path in tmp_path.glob("mgpu-check-*/*") if path.is_socket()]
    at.unlink()
    second, another, heir = ready()
    end(first, control)
    assert ended(keeper)
    third, last, kept = ready(keep=0.0)
    assert kept == heir != keeper
    end(third, last)
    end(second, another)


def test_imports_that_fail_are_told(ask):
    server, control = ask("no_such_module")
    event = told(control)
    assert event["event"] == "failed" and "No module named 'no_such_module'" in event["headline"]
    assert server.wait(30.0) == -signal.SIGKILL


def test_a_keeper_that_ends_during_its_imports_is_told_with_its_output(ask, tmp_path):
    os.mkfifo(gate := tmp_path / "gate")
    (tmp_path / "deadly.py").write_text(
        f"import os; open({str(gate)!r}).read(); os.write(2, b'no such driver'); os._exit(3)"
    )
    server, _ = ask("deadly")
    gate.write_text("")  # the keeper has its request
    assert server.wait(30.0) == -signal.SIGKILL
    assert server.end_of_keeper == "the keeper ended during its imports. Its output:\nno such driver"


def test_a_keeper_that_was_killed_before_it_is_asked_is_replaced(ready, monkeypatch):
    first, _, keeper = ready()
    connected = KeeperSocket.connected

    def killed(place: KeeperSocket) -> socket.socket | None:
        connection = connected(place)
        if connection is not None and not ended_now(keeper):
            os.kill(keeper, signal.SIGKILL)
            assert ended(keeper)
        return connection

    monkeypatch.setattr(KeeperSocket, "connected", killed)
    second, another, heir = ready(keep=0.0)
    assert first.wait(30.0) == -signal.SIGKILL
    assert heir != keeper
    end(second, another)


def test_a_fork_server_of_a_stopped_keeper_is_killed_without_it(ready, monkeypatch):
    monkeypatch.setattr(keeper_socket, "_AFTER_KILL", 0.1)
    server, _, keeper = ready(keep=0.0)
    os.kill(keeper, signal.SIGSTOP)
    try:
        server.kill()
        assert server.wait() == -signal.SIGKILL
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert ended(keeper)


def test_a_directory_that_is_not_this_users_alone_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    mine = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: mine + 1)
        with pytest.raises(NotKept, match=rf"--gpu-keep-warm: the directory .* belongs to user {mine}, and this is"):
            KeeperSocket("key")
    directory = tmp_path / f"mgpu-check-{mine}"
    directory.mkdir()
    directory.chmod(0o755)
    with pytest.raises(NotKept, match=r"is open to other users \(mode 055\); chmod 700 it, or remove it"):
        KeeperSocket("key")
    directory.rename(tmp_path / "elsewhere")
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotKept, match="is not a directory of this user"):
        KeeperSocket("key")

    def mkdir(path: Path, mode: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(NotKept, match=r"cannot be created: Permission denied; set XDG_RUNTIME_DIR to .*, or omit the"):
        KeeperSocket("key")
