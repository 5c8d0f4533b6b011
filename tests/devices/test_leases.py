"""Leases: a device has one holder at most, every process gets its turn, and dead processes hold none."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_check.devices import leases
from mgpu_check.devices.leases import DeviceLeases, LeaseError, machine_directory

Play = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    """Let processes take and give back as each of them has planned; their exit codes, and what happened."""
    program = Path(__file__).with_name("lease_processes.py")
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def play(processes: list[dict[str, Any]]) -> dict[str, Any]:
            with tempfile.TemporaryDirectory() as place:
                os.mkdir(os.path.join(place, "locks"))
                scenario = {
                    "processes": processes,
                    "directory": os.path.join(place, "locks"),
                    "journal": os.path.join(place, "journal"),
                }
                server.stdin.write(json.dumps(scenario) + "\n")
                server.stdin.flush()
                answer: dict[str, Any] = json.loads(server.stdout.readline())
                answer["left"] = sorted(os.listdir(os.path.join(place, "locks")))
                return answer

        yield play
        server.stdin.close()


def shared_devices(journal: list[str]) -> list[str]:
    """Return the places where a process got a device that another one had."""
    holders: dict[str, str] = {}
    wrong = []
    for line in journal:
        event, *words = line.split()
        if event == "has":
            for key in words[1:]:
                if key in holders:
                    wrong.append(f"{line}: {key} is held by {holders[key]}")
                holders[key] = words[0]
        elif event in ("gives", "killed"):
            holders = {key: holder for key, holder in holders.items() if holder != words[0]}
    return wrong


def overtaken(journal: list[str]) -> list[str]:
    """Return the places where a process was served before one that had waited longer for any of the same devices."""
    queue: list[tuple[str, set[str]]] = []
    wrong = []
    for line in journal:
        event, *words = line.split()
        if event == "queued":
            queue.append((words[0], set(words[1:])))
        elif event in ("direct", "served"):
            keys = next((keys for name, keys in queue if name == words[0]), set(words[1:]))
            for name, others in queue:
                if name == words[0]:
                    break
                if keys & others:
                    wrong.append(f"{line}: {name} had waited longer")
        if event in ("served", "killed"):
            queue = [(name, keys) for name, keys in queue if name != words[0]]
    return wrong


@st.composite
def processes(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Processes that share devices: each sees its own part of them, in its own order, and may be killed."""
    devices = draw(st.integers(1, 4))
    found = []
    for _ in range(draw(st.integers(2, 5))):
        keys = draw(
            st.lists(st.integers(0, devices - 1).map("gpu{}".format), min_size=1, max_size=devices, unique=True)
        )
        steps = []
        for count in draw(st.lists(st.integers(1, len(keys)), min_size=1, max_size=5)):
            steps += [("take", count), ("yield", draw(st.sampled_from([0, 10, 300]))), ("give",)]
        # A lease without contention takes some 60 lines.
        dies_at = draw(st.one_of(st.none(), st.integers(1, 300)))
        found.append({"keys": keys, "steps": steps, "dies_at": dies_at})
    return found


def check_that_devices_are_exclusive_and_all_are_served_in_order(play: Play, processes: list[dict[str, Any]]) -> None:
    answer = play(processes)
    assert [line for line in answer["journal"] if line.startswith("error")] == []
    assert shared_devices(answer["journal"]) == []
    assert overtaken(answer["journal"]) == []
    died = {line.split()[1] for line in answer["journal"] if line.startswith("killed")}
    for name, (process, code) in enumerate(zip(processes, answer["codes"], strict=True)):
        if str(name) in died:
            assert process["dies_at"]
            assert code == -9
        else:
            taken = [line.split()[2:] for line in answer["journal"] if line.startswith(f"has {name} ")]
            assert code == 0
            assert [len(keys) for keys in taken] == [step[1] for step in process["steps"] if step[0] == "take"]
    if not died:
        assert not [name for name in answer["left"] if name.startswith("ticket")]


@settings(max_examples=8, deadline=None)
@given(processes=processes())
def test_devices_are_exclusive_and_all_are_served_in_order(play, processes):
    check_that_devices_are_exclusive_and_all_are_served_in_order(play, processes)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(processes=processes())
def test_devices_are_exclusive_and_all_are_served_in_order_for_long(play, processes):
    check_that_devices_are_exclusive_and_all_are_served_in_order(play, processes)


def one(*steps: tuple[object, ...], keys: tuple[str, ...] = ("gpu0", "gpu1")) -> dict[str, Any]:
    return {"keys": keys, "steps": steps}


def order(answer: dict[str, Any], *events: str) -> list[str]:
    assert set(answer["codes"]) <= {0, -9}, answer
    return [line for line in answer["journal"] if line.startswith(events)]


def test_small_ones_run_side_by_side(play):
    answer = play([one(("take", 1), ("await", "has 1"), ("give",)), one(("take", 1), ("await", "has 0"), ("give",))])
    assert sorted(order(answer, "has")) in (["has 0 gpu0", "has 1 gpu1"], ["has 0 gpu1", "has 1 gpu0"])


WANTS_ALL = one(("await", "has 0"), ("take", 2), ("give",))
WANTS_ONE = one(("await", "queued 1"), ("take", 1), ("give",))


def test_a_large_one_is_not_overtaken(play):
    answer = play([one(("take", 1), ("await", "queued 2"), ("give",)), WANTS_ALL, WANTS_ONE])
    assert [line.split()[1] for line in order(answer, "has")] == ["0", "1", "2"]
    assert overtaken(answer["journal"]) == []


def test_who_sees_other_devices_does_not_wait(play):
    answer = play(
        [
            one(("take", 1), ("await", "has 2"), ("give",), keys=("gpu0",)),
            one(("await", "has 0"), ("take", 1), ("give",), keys=("gpu0",)),
            one(("await", "queued 1"), ("take", 1), ("give",), keys=("gpu1",)),
        ]
    )
    assert order(answer, "has") == ["has 0 gpu0", "has 2 gpu1", "has 1 gpu0"]


@pytest.mark.parametrize("child", ["", "fork", "spawn"])
def test_what_a_killed_process_held_is_free_whatever_its_children_do(play, child):
    inherit = [(child,)] if child else []
    answer = play(
        [one(("take", 2), *inherit, ("await", "queued 1"), ("die",)), one(("await", "has 0"), ("take", 2), ("give",))]
    )
    assert answer["codes"] == [-9, 0]
    assert order(answer, "has")[-1] == "has 1 gpu0 gpu1"


def test_who_is_killed_in_the_queue_stands_in_nobodys_way(play):
    answer = play(
        [
            one(("take", 1), ("await", "has 2"), ("give",)),
            {**one(("await", "has 0"), ("take", 2)), "dies_waiting": True},
            one(("await", "killed 1"), ("take", 1), ("give",)),
        ]
    )
    assert answer["codes"] == [0, -9, 0]
    assert answer["left"] == ["device-gpu0", "device-gpu1", "numbers.lock"]


def test_a_lease_that_locks_nothing_is_found_out(play):
    side_by_side = [one(("take", 1), ("await", "has 1")), one(("take", 1), ("await", "has 0"))]
    answer = play([{**process, "kind": "without locks"} for process in side_by_side])
    assert len(shared_devices(answer["journal"])) == 1


def test_a_queue_that_can_be_jumped_is_found_out(play):
    # Process 2 waits for both, behind 1, so that gpu1 is free and yet not to be had.
    jumps = {**one(("await", "queued 2"), ("take", 1), ("give",), keys=("gpu1",)), "kind": "pushing"}
    answer = play(
        [
            one(("take", 1), ("await", "has 3"), ("give",), keys=("gpu0",)),
            one(("await", "has 0"), ("take", 1), ("give",), keys=("gpu0",)),
            one(("await", "queued 1"), ("take", 2), ("give",)),
            jumps,
        ]
    )
    assert overtaken(answer["journal"]) == ["direct 3 gpu1: 2 had waited longer"]


def test_the_devices_of_the_last_lease_come_first(tmp_path):
    first, second = (DeviceLeases("abcd", tmp_path) for _ in range(2))
    held = first.take(2)
    assert held.indices == (0, 1)
    other = second.take(1)
    assert other.indices == (2,)
    other.give_back()
    held.give_back()
    assert second.take(2).indices == (0, 2)


@pytest.mark.parametrize("count", [0, -1, 5])
def test_a_wrong_number_of_devices_is_refused(tmp_path, count):
    with pytest.raises(ValueError, match=f"count={count} devices cannot be leased; choose 1 to 4"):
        DeviceLeases("abcd", tmp_path).take(count)


@pytest.mark.parametrize("keys", [("a", "a"), ("a", "")])
def test_a_device_without_a_key_of_its_own_is_refused(keys):
    with pytest.raises(ValueError, match="every device needs one of its own"):
        DeviceLeases(keys)


def test_after_a_while_who_holds_the_devices_is_told_and_then_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "_FIRST_WORD", 0.0)
    told: list[str] = []
    held = DeviceLeases("ab", tmp_path).take(1, "test_long")
    waiting = DeviceLeases("ab", tmp_path, patience=0.0, on_wait=told.append)
    state = rf"waiting 0 s for 2 of 2 devices\n  device 0 is held by process {os.getpid()} since .*: test_long"
    with pytest.raises(LeaseError, match=f"nothing has moved for 0 s while {state}\n  device 1 is kept already"):
        waiting.take(2, "test_stuck")
    held.give_back()
    assert waiting.take(2).indices == (0, 1), "nothing is left behind"


def test_a_poll_drops_no_lock(tmp_path, monkeypatch):
    """The finalizer of a lock may swallow Ctrl-C."""
    made: list[Path] = []
    lock = leases._lock

    def counted(path: Path) -> FileLock:
        made.append(path)
        return lock(path)

    monkeypatch.setattr(leases, "_lock", counted)
    counts: list[int] = []

    def sleep(seconds: float) -> None:
        counts.append(len(made))
        if len(counts) == 4:
            raise KeyboardInterrupt

    held = DeviceLeases("ab", tmp_path).take(1)
    with pytest.raises(KeyboardInterrupt):
        DeviceLeases("ab", tmp_path, sleep=sleep).take(2)
    assert len(set(counts)) == 1
    held.give_back()


def test_a_wait_can_be_interrupted_and_leaves_nothing_behind(tmp_path):
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    held = DeviceLeases("ab", tmp_path).take(1)
    with pytest.raises(KeyboardInterrupt):
        DeviceLeases("ab", tmp_path, sleep=interrupted).take(2)
    held.give_back()
    assert [path.name for path in tmp_path.glob("ticket-*")] == []
    assert DeviceLeases("ab", tmp_path, sleep=interrupted).take(2).indices == (0, 1)


def test_giving_back_twice_frees_nobody_elses_devices(tmp_path):
    first, second = (DeviceLeases("a", tmp_path) for _ in range(2))
    held = first.take(1)
    held.give_back()
    other = second.take(1)
    held.give_back()
    with pytest.raises(LeaseError):
        DeviceLeases("a", tmp_path, patience=0.0).take(1)
    other.give_back()


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "leases"
    monkeypatch.setattr(leases, "MACHINE", path)
    return path


def test_the_directory_of_the_machine_is_for_all_users_and_nobody_removes_anothers_files(machine):
    assert machine_directory() == machine
    assert stat.S_IMODE(machine.stat().st_mode) == 0o1777
    old = os.umask(0o077)
    try:
        DeviceLeases(["GPU/1"]).take(1).give_back()
    finally:
        os.umask(old)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in machine.iterdir()} == {
        "numbers.lock": 0o666,
        "device-GPU_1": 0o666,
    }


def test_a_directory_of_ones_own_that_is_too_narrow_is_opened(machine):
    machine.mkdir(mode=0o700)
    assert stat.S_IMODE(machine_directory().stat().st_mode) == 0o1777


def test_a_link_in_the_place_of_the_directory_is_refused(machine, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o1777)
    machine.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LeaseError, match=r"leases is where devices are leased, but it is not a directory; remove"):
        DeviceLeases(["a"]).check()


def test_a_directory_that_cannot_be_made_is_an_error_that_names_it(machine, monkeypatch):
    monkeypatch.setattr(leases, "MACHINE", machine / "below")
    with pytest.raises(LeaseError, match=r"devices cannot be leased: .*No such file or directory: .*below"):
        DeviceLeases(["a"]).check()


def test_links_in_the_directory_are_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    locks = tmp_path / "locks"
    locks.mkdir()
    (locks / "device-a").hardlink_to(victim)
    DeviceLeases("a", locks).take(1).give_back()
    (locks / "device-b").symlink_to(victim)
    with pytest.raises(LeaseError, match="devices cannot be leased in"):
        DeviceLeases("b", locks).take(1)
    (locks / "ticket-00000001").symlink_to(victim)
    with pytest.raises(LeaseError, match=r"devices cannot be leased in .*ticket-00000001"):
        DeviceLeases("c", locks).take(1)
    (locks / "numbers.lock").unlink()
    (locks / "numbers.lock").symlink_to(victim)
    with pytest.raises(LeaseError, match=r"devices cannot be leased in .*numbers.lock"):
        DeviceLeases("c", locks).check()
    assert victim.read_text() == "precious"


def test_a_ticket_gets_a_number_that_nobody_had_who_was_waited_for(tmp_path):
    class Joining(DeviceLeases):
        def _join(self, request, directory):
            served = super()._join(request, directory)
            ticket.unlink()
            in_queue.release()
            return served

    ticket = tmp_path / "ticket-00000001"
    held = DeviceLeases("a", tmp_path).take(1)
    in_queue = FileLock(ticket)
    in_queue.acquire()
    assert Joining("a", tmp_path, patience=0.0, sleep=lambda seconds: held.give_back()).take(1).indices == (0,)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"keys": 3}', '{"keys": ["other"], "since": "now"}'])
def test_a_ticket_of_a_dead_process_is_removed_whatever_is_in_it(tmp_path, content):
    (tmp_path / "ticket-00000007").write_text(content)
    (tmp_path / "ticket-x").write_text("none of ours")
    assert DeviceLeases("a", tmp_path).take(1).waited < 60
    assert (tmp_path / "ticket-00000007").exists() == ("other" in content)
