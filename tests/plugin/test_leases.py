"""Tests that run at the same time have devices of their own, in one run, and in two."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mgpu_check.devices.inventory import Device
from mgpu_check.devices.leases import DeviceLeases
from mgpu_check.plugin.device_leases import keys_of, tokens_of
from tests.plugin.conftest import Background, processes_with, wait_for

LIMIT = 120.0  # only what is broken lasts as long

# Shared by the inner runs: a journal in the order of time, and a way to wait for a line of it.
SHARED = f"""
import os, time
import pytest
from mgpu_check.plugin.stash import SESSION

JOURNAL = os.environ["JOURNAL"]

def note(*words):
    with open(JOURNAL, "ab", buffering=0) as file:
        file.write((" ".join(map(str, words)) + "\\n").encode())

def wait_for(condition):
    deadline = time.monotonic() + {LIMIT}
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.005)

def happened(text):
    with open(JOURNAL) as file:
        return text in file.read().splitlines()

class Use:
    # Writes down which devices a test has, from when, and until when.
    def __init__(self, request):
        session = request.config.stash[SESSION]
        self.name = request.node.name
        self.devices = [str(session.devices[i].uuid) if session.devices else str(i) for i in session.leasing.indices]
    def __enter__(self):
        note("begins", self.name, *self.devices)
    def __exit__(self, *error):
        note("ends", self.name)

@pytest.fixture
def use(request):
    return Use(request)
"""

# A machine with GPUs, as far as the tests look: the processes find devices, one for each that is visible.
FAKE_GPUS = """
import os, torch
import torch.distributed as dist
from mgpu_check.devices import inventory

def visible_devices():
    # GPU 3 and GPU-abc are the same, as on a real machine each has an index and a UUID.
    entries = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    names = [{"GPU-abc": "7"}.get(entry.strip(), entry.strip()) for entry in entries]
    return [inventory.Device(i, "Fake", 1 << 30, (9, 0), "uuid-" + name) for i, name in enumerate(names)]

inventory.visible_devices = visible_devices
torch.cuda.device_count = lambda: len(visible_devices())
torch.cuda.get_device_properties = lambda device: visible_devices()[device]
torch.cuda.set_device = lambda device: None
own = dist.init_process_group
dist.init_process_group = lambda backend=None, **options: own("gloo", **options)
"""

ON_FAKE_GPUS = """
import os
from pathlib import Path
import mgpu_check.plugin.session
from mgpu_check.devices import leases

mgpu_check.plugin.session.PRELOAD += ("fake_gpus",)
leases.MACHINE = Path(os.environ["LOCKS"])
"""


@pytest.fixture
def shared(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The journal of the inner runs."""
    journal = pytester.path / "journal"
    journal.touch()
    monkeypatch.setenv("JOURNAL", str(journal))
    pytester.makeconftest(SHARED)
    pytester.syspathinsert()
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
    return journal


@pytest.fixture
def locks(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, shared: Path) -> Path:
    """The directory of leases of the inner runs, for devices that they take for real ones."""
    path = pytester.path / "locks"
    monkeypatch.setenv("LOCKS", str(path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pytester.makepyfile(fake_gpus=FAKE_GPUS)
    pytester.makeconftest(SHARED + ON_FAKE_GPUS)
    return path


def overlaps(journal: Path) -> list[str]:
    """Return the places where two tests have the same device."""
    users: dict[str, str] = {}
    wrong = []
    for line in journal.read_text().splitlines():
        event, name, *devices = line.split()
        if event == "begins":
            wrong += [f"{line}: {device} is that of {users[device]}" for device in devices if device in users]
            users.update(dict.fromkeys(devices, name))
        elif event == "ends":
            users = {device: user for device, user in users.items() if user != name}
    return wrong


@pytest.mark.slow
def test_a_test_has_as_many_devices_as_it_needs_and_ranks_outside_of_a_test_have_some_too(pytester, run, shared):
    pytester.makepyfile(
        test_inside="""
        import pytest, torch
        from hypothesis import given, strategies as st
        from mgpu_check.strategies import all_devices, world_sizes

        @pytest.mark.gpus(2)
        def test_ranks(ranks):
            assert ranks.size == 2
            assert ranks.run(lambda rank: (rank.device.index, torch.cuda.device_count())) == [(0, 2), (1, 2)]
            with pytest.raises(ValueError, match="size=3 is not a world size of this run; choose 1 to 2"):
                ranks.run(print, size=3)

        @pytest.mark.gpus(2)
        @given(size=world_sizes(least=2), count=all_devices())
        def test_strategies(ranks, size, count):
            assert size == count == 2

        @given(count=all_devices())
        def test_all(ranks, count):
            assert ranks.size == count == 4

        @pytest.mark.ranks(2)
        def test_rank(rank):
            assert torch.cuda.device_count() == 2

        @pytest.mark.gpus(3)
        def test_gpus(gpus):
            assert len(gpus) == torch.cuda.device_count() == 3

        def test_other():
            from mgpu_check.settings import active
            assert active().gpus == 4
        """,
        test_outside="""
        import pytest, torch

        @pytest.fixture(scope="module")
        def table(ranks):
            yield ranks.run(torch.cuda.device_count)
            # It ends with the last test, which has all of them.
            assert ranks.run(torch.cuda.device_count, size=3) == [4] * 3

        @pytest.mark.gpus(2)
        def test_first(table):
            assert table == [2, 2]

        def test_last(request):
            assert request.getfixturevalue("ranks").run(torch.cuda.device_count) == [4] * 4
        """,
    )
    run("--gpus=4", "--simulate", "-n1").assert_outcomes(passed=8)


@pytest.mark.slow
def test_a_killed_worker_gives_its_devices_back(pytester, run, shared):
    pytester.makepyfile(
        """
        import os, signal
        import pytest
        from conftest import happened, note, wait_for
        from mgpu_check.plugin.stash import SESSION

        @pytest.mark.parametrize("n", range(2))
        def test_use(request, ranks, n):
            directory = request.config.stash[SESSION].shared
            if n == 0:
                note("begun")
                ranks.run(lambda: None)
                wait_for(lambda: list(directory.glob("ticket-*")))
                os.kill(os.getpid(), signal.SIGKILL)

        def test_meanwhile():  # the other worker's first, so that it cannot be through with its tests before that one begins
            wait_for(lambda: happened("begun"))

        @pytest.mark.parametrize("n", range(2))
        def test_more(ranks, n):
            pass
        """
    )
    result = run("--gpus=4", "--simulate", "-n2")
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(["*worker 'gw*' crashed while running 'test_a_killed_worker*test_use?0?'*"])


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_run_whose_tests_nobody_hands_out_any_more_leaves_no_directory(pytester, run, shared, monkeypatch, number):
    temporary = pytester.mkdir("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    with open("conftest.py", "a") as file:
        file.write(
            """
def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        note(os.getpid())
"""
        )
    pytester.makepyfile(
        f"""
        import os, pytest
        from pathlib import Path
        from conftest import JOURNAL, happened, note, wait_for

        @pytest.mark.gpus(2)
        @pytest.mark.parametrize("n", range(2))
        def test_it(ranks, n):
            assert list(Path({str(temporary)!r}).glob("mgpu-check-leases-*"))
            ranks.run(lambda: None)
            note("begun", n)
            if n == 0:
                wait_for(lambda: happened("begun 1"))
                os.kill(int(Path(JOURNAL).read_text().split()[0]), {int(number)})
        """
    )
    result = run("--gpus=4", "--simulate", "-n2", "-k", "test_it")
    assert result.ret == (-number if number == signal.SIGKILL else pytest.ExitCode.INTERRUPTED)
    wait_for(lambda: not list(temporary.glob("mgpu-check-*")) and not processes_with(str(pytester.path)))


def wait_until(condition: Callable[[], bool], run: Background) -> None:
    """Until the inner run has brought `condition` about."""
    wait_for(lambda: condition() or run.process.poll() is not None)
    assert condition(), run.output


def test_waiting_is_told(pytester, in_background, locks):
    """Also from a worker, by way of the process that has the terminal."""
    pytester.makepyfile("def test_all(ranks): pass")
    patch = """
leases._FIRST_WORD = 0.0

import mgpu_check.plugin.device_leases
mgpu_check.plugin.device_leases._A_WAIT = mgpu_check.plugin.device_leases._WORTH_TELLING = 0.0

from mgpu_check.plugin.report import terminal
tell = terminal.tell
def told(config, line):
    tell(config, line)
    note("told")
terminal.tell = told
"""
    pytester.makeconftest(SHARED + ON_FAKE_GPUS + patch)
    locks.mkdir(mode=0o1777)
    held = DeviceLeases(["uuid-2"], locks).take(1, "somebody else")
    waits = in_background("--gpus=all", "-n1", variables={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    wait_until(lambda: "told" in locks.with_name("journal").read_text(), waits)
    held.give_back()
    code, output = waits.process.wait(LIMIT), waits.output
    assert code == 0, output
    assert re.search(
        r"\nmgpu-check: waiting 0 s for 4 of 4 devices\n(  device . is kept already\n)*"
        rf"  device 2 is held by process {os.getpid()} since .*: somebody else\n(  device . is kept already\n)*",
        output,
    ), output
    assert re.search(r"\nmgpu-check: 1 test waited .* s in total for devices that other tests had leased\n", output), (
        output
    )


@pytest.mark.slow
def test_ranks_see_entries_of_the_outer_mask_and_no_others(pytester, run, locks, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5,GPU-abc")
    pytester.makepyfile(
        """
        import os
        import pytest

        def mask():
            return os.environ["CUDA_VISIBLE_DEVICES"]

        @pytest.mark.parametrize("count, number", [pytest.param(n, n, marks=pytest.mark.gpus(n)) for n in (1, 2, 3, 2, 1)])
        def test_some(ranks, use, count, number):
            with use:
                (seen,) = set(ranks.run(lambda rank: (mask(), rank.device.index - rank.index)))
                names = {"uuid-3": "3", "uuid-5": "5", "uuid-7": "GPU-abc"}
                assert seen == (",".join(names[device] for device in use.devices), 0)
                assert len(use.devices) == number

        def test_all(ranks):
            assert ranks.run(mask) == ["3,5,GPU-abc"] * 3

        @pytest.mark.gpus(2)
        def test_gpus(gpus):
            assert len(mask().split(",")) == len(gpus) == 2
            assert set(mask().split(",")) < {"3", "5", "GPU-abc"}
        """
    )
    run("--gpus=all", "-n2").assert_outcomes(passed=7)
    assert overlaps(locks.with_name("journal")) == []
    assert sorted(path.name for path in locks.glob("device-*")) == ["device-uuid-3", "device-uuid-5", "device-uuid-7"]


def test_two_runs_on_one_machine_wait_for_each_other_where_they_must(pytester, in_background, locks):
    pytester.makepyfile(
        test_one="""
        import os
        from pathlib import Path
        from conftest import happened, wait_for

        def test_one(ranks, use):
            with use:
                wait_for(lambda: list(Path(os.environ["LOCKS"]).glob("ticket-*")) and happened("begins test_beside uuid-9"))
        """,
        test_both="""
        def test_both(ranks, use):
            with use:
                pass
        """,
        test_beside="""
        from conftest import happened, wait_for

        def test_beside(ranks, use):
            with use:
                wait_for(lambda: happened("begins test_one uuid-7"))
        """,
    )
    one, beside = (
        in_background("--gpus=all", name, variables={"CUDA_VISIBLE_DEVICES": mask})
        for mask, name in (("7", "test_one.py"), ("9", "test_beside.py"))
    )
    # Its devices are another's under other names.
    wait_until(lambda: "begins test_one uuid-7" in locks.with_name("journal").read_text(), one)
    both = in_background("--gpus=all", "test_both.py", variables={"CUDA_VISIBLE_DEVICES": "5,GPU-abc"})
    codes = [each.process.wait(LIMIT) for each in (one, beside, both)]
    assert codes == [0, 0, 0], [each.output for each in (one, beside, both)]
    lines = locks.with_name("journal").read_text().splitlines()
    assert lines.index("begins test_both uuid-5 uuid-7") > lines.index("ends test_one")
    assert overlaps(locks.with_name("journal")) == []


def test_a_wait_ends_with_ctrl_c(pytester, in_background, locks):
    pytester.makepyfile("def test_it(ranks): pass")
    locks.mkdir()
    held = DeviceLeases(["uuid-0"], locks).take(1)
    waits = in_background("--gpus=all", variables={"CUDA_VISIBLE_DEVICES": "0"})
    wait_until(lambda: bool(list(locks.glob("ticket-*"))), waits)
    os.kill(waits.process.pid, signal.SIGINT)
    assert waits.process.wait(LIMIT) == pytest.ExitCode.INTERRUPTED, waits.output
    assert not list(locks.glob("ticket-*"))
    held.give_back()


def test_where_devices_cannot_be_leased_the_run_is_refused(pytester, run, locks):
    locks.write_text("in the way")
    pytester.makepyfile("def test_it(ranks): pass")
    result = run("--gpus=all")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: mgpu-check: *locks is where devices are leased, but it is not a directory; remove *"]
    )


@pytest.mark.parametrize(
    ("outer", "expected"),
    [
        (None, ["0", "1", "2"]),
        ("3,5,7", ["3", "5", "7"]),
        (" GPU-abc , MIG-1,2", ["GPU-abc", "MIG-1", "2"]),
        ("6,4,2,-1,0", ["6", "4", "2"]),  # CUDA sees none from the first that is not valid
    ],
)
def test_a_visible_device_is_named_by_its_entry_of_the_mask(outer, expected):
    assert tokens_of({} if outer is None else {"CUDA_VISIBLE_DEVICES": outer}, 3) == expected


def test_a_device_is_known_by_its_uuid_however_it_is_written():
    for uuids, keys in (
        (["GPU-AB", "cd"], ["ab", "cd"]),
        (["", ""], ["index-0", "index-1"]),
        (["ab", "ab"], ["ab", "ab-1"]),
    ):
        assert keys_of([Device(i, "GPU", 1, (9, 0), uuid) for i, uuid in enumerate(uuids)]) == keys
