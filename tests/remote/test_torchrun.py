"""Two torchrun agents on one machine. They, and what they launch, are forked; one test has interpreters of its own."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.remote.conftest import Launch, Run, Torchrun

ORDER = """
import os, signal, time

import pytest, torch, torch.distributed as dist
from hypothesis import given, settings

from mgpu_check import strategies
from mgpu_check.devices.inventory import WorldSize


def total(rank):
    x = torch.full((3,), rank.index + 1.0, device=rank.device)
    dist.all_reduce(x)
    return x[0].item()


def agent(rank):
    with open(f"/proc/{os.getppid()}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
"""

GREEN_AND_RED = (
    ORDER
    + """
NAMES = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "HOME_OF_AGENT", "SET_LATER"]


def place(rank):
    own = [os.environ.get(name) for name in NAMES]
    return rank.index, rank.size, rank.local_index, rank.node_index, str(rank.device), *own


def test_ranks_know_their_place(ranks, monkeypatch):
    monkeypatch.setenv("SET_LATER", "yes")
    assert ranks.run(place) == [
        (0, 4, 0, 0, "cuda:0", "0", "0", "4", "2", "0", "2", "first", "yes"),
        (1, 4, 1, 0, "cuda:1", "1", "1", "4", "2", "0", "2", "first", "yes"),
        (2, 4, 0, 1, "cuda:0", "2", "0", "4", "2", "1", "2", "second", "yes"),
        (3, 4, 1, 1, "cuda:1", "3", "1", "4", "2", "1", "2", "second", "yes"),
    ]


def test_ranks_of_worlds_below_the_whole(ranks):
    assert [found[:7] for found in ranks.run(place, size=WorldSize([1, 1]))] == [
        (0, 2, 0, 0, "cuda:0", "0", "0"), (1, 2, 0, 1, "cuda:0", "1", "0")
    ]
    assert [found[:7] for found in ranks.run(place, size=WorldSize([0, 2]))] == [
        (0, 2, 0, 0, "cuda:0", "0", "0"), (1, 2, 1, 0, "cuda:1", "1", "1")
    ]
    assert [found[3] for found in ranks.run(place, size=3)] == [0, 0, 1]


def test_ranks_on_chosen_devices_of_both_hosts(ranks):
    found = ranks.run(place, devices=[3, 0, 2], environment={"SET_LATER": "by the world"})
    assert found == [
        (0, 3, 0, 1, "cuda:1", "0", "0", "3", "2", "1", "2", "second", "by the world"),
        (1, 3, 0, 0, "cuda:0", "1", "0", "3", "1", "0", "2", "first", "by the world"),
        (2, 3, 1, 1, "cuda:0", "2", "1", "3", "2", "1", "2", "second", "by the world"),
    ]
    assert ranks.run(total, devices=[3, 0, 2], environment={"SET_LATER": "by the world"}) == [6.0] * 3


def test_worlds_are_drawn_within_hosts_and_across(ranks):
    seen = set()

    @settings(max_examples=60, deadline=None, database=None)
    @given(size=strategies.world_sizes())
    def draw(size):
        assert ranks.run(total, size=size) == [size * (size + 1) / 2] * size
        seen.add(size.per_host)

    draw()
    assert {(1, 0), (0, 1), (2, 0), (0, 2), (1, 1), (2, 1), (2, 2)} <= seen


@pytest.mark.ranks(2, 4)
def test_marked(rank):
    assert total(rank) == rank.size * (rank.size + 1) / 2


@given(device=strategies.places(cpu=False), count=strategies.all_devices())
@settings(max_examples=5, deadline=None, database=None)
def test_in_one_process(gpus, device, count):
    assert [str(gpu) for gpu in gpus] == ["cuda:0", "cuda:1"]
    assert count == 2 and torch.ones(2, device=device).sum() == 2
    print("HOME", os.environ["HOME_OF_AGENT"])


@pytest.mark.ranks
def test_raises(rank):
    if rank.index == 2:
        raise ValueError("planted")


@pytest.mark.ranks(timeout=3)
def test_hangs(rank):
    if rank.index == 3:
        time.sleep(60)
    total(rank)


@pytest.mark.ranks
def test_after_the_hang(rank):
    total(rank)


@pytest.mark.ranks
def test_dies(rank):
    print("output of", rank.index)
    total(rank)  # all have printed
    if rank.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total(rank)


@pytest.mark.ranks
def test_after_the_death(rank):
    total(rank)
"""
)


@pytest.fixture(scope="module")
def green_and_red(torchrun: Torchrun) -> Run:
    homes = ({"HOME_OF_AGENT": "first"}, {"HOME_OF_AGENT": "second"})
    launch = torchrun(GREEN_AND_RED, "-rA", nodes=homes)
    return launch.wait()


RED = {"test_raises", "test_hangs", "test_dies"}


def test_all_but_the_planted_failures_pass(green_and_red: Run):
    verdicts = green_and_red.verdicts
    assert {name for name, verdict in verdicts.items() if verdict != "passed"} == RED, green_and_red.output
    marked = {"test_marked[ranks=2-within]", "test_marked[ranks=2-across]", "test_marked[ranks=4]"}
    assert marked | {"test_in_one_process[host=0]", "test_in_one_process[host=1]"} <= verdicts.keys()


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("test_raises", [r"rank 2 of 4 on \S+ \(node 1\) raised ValueError: planted"]),
        (
            "test_hangs",
            [
                r"rank 3 of 4 on \S+ \(node 1\) did not finish test_hangs within 3 s",
                r"rank 3 is in test_hangs \(\S*test_it.py:\d+\)",
                r"ranks 0-2 are in all_reduce",
            ],
        ),
        ("test_dies", [r"rank 1 of 4 on \S+ \(node 0\) died: signal SIGKILL"]),
    ],
)
def test_a_failure_names_rank_and_host(green_and_red: Run, name: str, patterns: list[str]):
    text = green_and_red.texts[name]
    assert all(re.search(pattern, text) for pattern in patterns), text


def test_tests_that_failed_are_the_exit_code_of_both(green_and_red: Run):
    assert green_and_red.codes == [1, 1]
    assert "pytest has ended with exit code 1" in green_and_red.output
    assert "output of 3" in green_and_red.output, "from before the death"


LOST = (
    ORDER
    + """
@pytest.mark.ranks
def test_agent_is_killed(rank):
    if rank.index == rank.size - 1:
        os.kill(agent(rank), signal.SIGKILL)
    time.sleep(60)


def test_after(ranks):
    assert ranks.run(total) == [3.0] * 2
"""
)


@pytest.mark.slow
def test_a_killed_agent_is_named_and_replaced(torchrun: Torchrun):
    run = torchrun(LOST, restarts=1, ranks=2).wait()
    assert run.verdicts == {"test_agent_is_killed": "failed", "test_after": "passed"}, run.output
    text = run.texts["test_agent_is_killed"]
    assert re.search(r"rank 1 of 2 on \S+ \(node 1\) died: the agent of rank 1 on \S+ \(node 1\) was lost", text), text
    # One report, though torchrun starts everything anew for as long as something fails.
    assert run.output.count("test session starts") == 1
    assert run.codes == [1, 1]


@pytest.mark.slow
def test_an_agent_that_nothing_replaces_ends_the_run(torchrun: Torchrun):
    run = torchrun(LOST, ranks=2).wait()
    assert run.verdicts == {"test_agent_is_killed": "failed"}, run.output
    assert re.search(r"the agent of rank 1 on \S+ \(node 1\) was lost, and torchrun does not restart it", run.output)
    assert run.codes == [1, 1]


LONG = (
    ORDER
    + """
@pytest.mark.ranks
def test_long(rank):
    dist.barrier()
    if rank.index == 0:
        open("begun", "w").close()
    time.sleep(600)
"""
)


def wait_until_begun(launch: Launch) -> None:
    while not (launch.directory / "begun").exists():
        assert all(process.poll() is None for process in launch.processes), launch.wait().output
        time.sleep(0.05)


@pytest.mark.slow  # test_hub.py interrupts a driver each day
def test_ctrl_c_ends_everything(torchrun: Torchrun):
    launch = torchrun(LONG, "--rank-timeout=600", ranks=2)
    wait_until_begun(launch)
    os.kill(launch.processes[0].pid, signal.SIGINT)
    run = launch.wait()
    assert "KeyboardInterrupt" in run.output
    assert all(run.codes)


@pytest.mark.slow
def test_a_killed_torchrun_ends_everything(torchrun: Torchrun):
    launch = torchrun(LONG, "--rank-timeout=600", ranks=2, cold=True)
    wait_until_begun(launch)
    launch.processes[0].kill()
    run = launch.wait()
    assert run.verdicts == {"test_long": "failed"}, run.output
    assert run.codes == [-signal.SIGKILL, 1]
