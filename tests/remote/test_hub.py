"""The driver's side of the connections, with agents that are sockets of this process, and with strangers."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import socket
import threading
import time
from typing import Any

import pytest

from mgpu_check.devices.inventory import Slot
from mgpu_check.engine.remote import connections as listener
from mgpu_check.engine.remote.connections import AgentGone, Connections, Lines, line
from mgpu_check.engine.remote.credentials import Key, Stranger, present
from mgpu_check.engine.remote.driver import AgentLauncher, RemoteProcess, WrongLaunch, too_few_files
from mgpu_check.processes.channel import Channel
from tests.remote.conftest import KEY

VERSIONS = {"torch": "2.13"}


def connect(connections: Connections, key: Key = KEY) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", connections.port))
    connection.settimeout(10.0)
    try:
        present(connection, key, 10.0)
    except BaseException:
        connection.close()
        raise
    return connection


def join(connections: Connections, rank: int, **told: Any) -> socket.socket:
    connection = connect(connections)
    place = {"rank": rank, "local_rank": rank, "local_size": 1, "node": rank, "host": f"host{rank}", "devices": 0}
    launch = {"launcher": "torchrun", "final": False, "address": "127.0.0.1", "port": 1, "versions": VERSIONS}
    connection.sendall(line({"agent": {**place, **launch, **told}}))
    return connection


def gather(connections: Connections) -> AgentLauncher:
    launcher = AgentLauncher(connections, "run", VERSIONS, {})
    launcher.gather()
    return launcher


def test_agents_join_and_are_told_the_end(connections: Connections):
    first, second = join(connections, 0), join(connections, 1)
    launcher = gather(connections)
    assert [host.name for host in launcher.hosts] == ["host0", "host1"]
    ending = threading.Thread(target=connections.finish, args=(3,))
    ending.start()
    for agent in (first, second):
        lines = Lines()
        lines.feed(agent.recv(1000))
        assert lines.next() == {"do": "end", "code": 3}
        agent.close()
    ending.join()


def opened(connections: Connections) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", connections.port))
    connection.settimeout(10.0)
    return connection


def test_more_agents_at_once_than_are_examined_wait_their_turn(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(listener, "_TIMEOUT_IF_FULL", 60.0)  # this machine may be busy
    with contextlib.ExitStack() as all_of_them:
        waiting = [all_of_them.enter_context(opened(connections)) for _ in range(4 * listener._MOST)]
        for agent in waiting:
            present(agent, KEY, 10.0)
            agent.sendall(line({"nothing": "known"}))
        join(connections, 0).close()


def test_strangers_who_fill_the_places_keep_no_agent_out(connections: Connections, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "_TIMEOUT_IF_FULL", 0.0)
    with contextlib.ExitStack() as all_of_them:
        for _ in range(2 * listener._MOST):
            all_of_them.enter_context(opened(connections))
        with join(connections, 0):
            assert connections.await_agents([0], 10.0) == []


@pytest.mark.parametrize(("limits", "size", "expected"), [((64, 4096), 1000, (3000, 4096)), ((64, 64), 1, None)])
def test_the_driver_may_open_a_file_for_each_agent_and_rank(
    limits: tuple[int, int], size: int, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
):
    made = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: made.append(new))
    said = too_few_files(size)
    assert made == ([expected] if expected else [])
    assert said is None if expected else "1 agents and their ranks need 1002 open files" in str(said)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"x",
        os.urandom(1 << 16),
        pickle.dumps(Bomb()) * 1000,
        line({"agent": {"rank": 0}}) * 100,
        b"\0" * 10_000_000,
    ],
    ids=["nothing", "a byte", "noise", "a pickle", "a line", "much"],
)
def test_strangers_are_not_heard(connections: Connections, said: bytes):
    with socket.create_connection(("127.0.0.1", connections.port)) as stranger:
        try:
            stranger.sendall(said)
        except ConnectionError:
            pass
        agents = [join(connections, 0), join(connections, 1)]  # while it is still there
        assert len(gather(connections).hosts) == 2
        for agent in agents:
            agent.close()


def test_an_agent_refuses_another_driver():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"HTTP/1.1 400 Bad Request\r\n" + b" " * 100)
        with pytest.raises(Stranger, match="not a driver"):
            present(ours, KEY, 10.0)


def test_nobody_can_send_an_answer_back(connections: Connections):
    """A stranger between two that listen gets from neither what the other wants to hear."""
    with socket.create_connection(("127.0.0.1", connections.port)) as one:
        greeting = one.recv(1000)
        with socket.create_connection(("127.0.0.1", connections.port)) as other:
            assert other.recv(1000)[:13] == greeting[:13]
            other.sendall(greeting[13:] * 2)
            one.sendall(greeting[13:] * 2)
            assert one.recv(1000) == b"" and other.recv(1000) == b""


def test_missing_agents_are_named(connections: Connections):
    connections.patience = 0.3
    with (
        join(connections, 0),
        pytest.raises(WrongLaunch, match=r"ranks 1, all of node 1 have not come within 0.3 s.*0 on host0"),
    ):
        connections.await_agents([0], 10.0)
        gather(connections)


def test_other_versions_are_named(connections: Connections):
    told = {"versions": {"torch": "2.11"}}
    with (
        join(connections, 0),
        join(connections, 1, **told),
        pytest.raises(WrongLaunch, match=r"rank 1 on host1 has torch 2.11, but"),
    ):
        gather(connections)


NOWHERE = {"node": None, "local_rank": None, "host": "same"}
BOOTS = {"boot": "1f0c9a3e-6c1d"}, {"boot": "77aa0b1c-0000"}


@pytest.mark.parametrize(
    ("places", "ranks", "names"),
    [
        (({"host": "same"}, {"host": "same"}), [(0,), (1,)], ["same (node 0)", "same (node 1)"]),
        ((NOWHERE, NOWHERE), [(0, 1)], [""]),  # one machine
        (
            ({**NOWHERE, **BOOTS[0]}, {**NOWHERE, **BOOTS[1]}),
            *([(0,), (1,)], ["same (boot 1f0c9a3e)", "same (boot 77aa0b1c)"]),
        ),
    ],
    ids=["by node", "one by name", "by boot"],
)
def test_hosts_of_one_name_are_told_apart(
    connections: Connections, places: tuple[dict[str, Any], ...], ranks: list[tuple[int, ...]], names: list[str]
):
    with join(connections, 0, **places[0]), join(connections, 1, **places[1]):
        launcher = gather(connections)
        assert [host.ranks for host in launcher.hosts] == ranks
        assert [launcher.host_name(host) for host in range(len(ranks))] == names


def test_an_agent_has_several_slots_and_neighbours_are_in_different_agents(connections: Connections):
    with join(connections, 0, node=0, host="one"), join(connections, 1, node=0, host="one"):
        launcher = gather(connections)
        assert launcher.place(2) == [Slot(0, device) for device in range(4)]
        assert [launcher._rank_at[Slot(0, device)] for device in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(("devices", "expected"), [(1, (0, 1)), (2, (1, 2)), (8, (1, 2))])
def test_a_task_that_is_bound_to_one_gpu_has_that(connections: Connections, devices: int, expected: tuple[int, int]):
    same = {"node": 0, "host": "one", "devices": devices}
    with join(connections, 0, **same), join(connections, 1, **same):
        assert gather(connections).binding(Slot(0, 1), [Slot(0, 0), Slot(0, 1)]) == expected


def test_an_agent_that_is_lost_is_named(connections: Connections):
    first = join(connections, 0)
    join_second = join(connections, 1)
    launcher = gather(connections)
    with first:
        agent, _, launched = connections.launch(1)
        join_second.close()
        with pytest.raises(AgentGone, match="the agent of rank 1 on host1 was lost"):
            launched.result(10.0)
        assert agent.gone == "the agent of rank 1 on host1 was lost"
        assert launcher.losses() == [agent.gone]
        assert launcher.losses() == []
        with join(connections, 1):
            assert connections.await_agents([0, 1], 10.0) == []


def test_a_line_without_an_end_is_cut_off(connections: Connections):
    with join(connections, 0) as agent:
        connections.await_agents([0], 10.0)
        with pytest.raises(OSError):  # which one depends on how far it comes
            for _ in range(100):
                agent.sendall(b" " * (1 << 20))
        with connections.changed:
            assert connections.changed.wait_for(lambda: 0 not in connections.agents, 10.0)


def test_a_line_of_brackets_ends_one_connection_and_not_the_run(connections: Connections):
    with join(connections, 0) as agent, join(connections, 1):
        connections.await_agents([0, 1], 10.0)
        agent.sendall(b'{"a":' * 100_000 + b"\n")
        with connections.changed:
            assert connections.changed.wait_for(lambda: 0 not in connections.agents, 10.0)
        assert 1 in connections.agents


def test_a_rank_that_ends_before_anybody_asks_has_its_exit_code(connections: Connections):
    """It dies while it starts: the agent says so at once, when the main thread may not know of the process yet."""
    with join(connections, 0) as connection, join(connections, 1):
        gather(connections)
        agent, number, launched = connections.launch(0)
        with connect(connections) as rank:
            rank.sendall(line({"launch": number, "rank": 0}))
            connection.sendall(line({"event": "launched", "id": number, "pid": 7}))
            connection.sendall(line({"event": "exit", "id": number, "code": -11}))
            pid, made = launched.result(10.0)
            assert pid == 7
            made.close()
            asked = connections.ask(agent, number, "runnable")
            lines = Lines()
            while (message := lines.next()) is None or message["do"] != "call":
                lines.feed(connection.recv(1 << 16) if message is None else b"")
            connection.sendall(line({"event": "answer", "request": message["request"], "value": False}))
            assert asked.result(10.0) is False  # what was said before has been heard, too
            ended: list[int | None] = []
            connections.watch(agent, number, ended.append)
            connections.collect()
            assert ended == [-11]


def test_no_call_is_sent_before_its_agent_has_marked_where_output_begins(connections: Connections):
    """The mark goes by the agent, and the call straight to the rank: what the rank prints would be cut off by a late
    mark."""
    with join(connections, 0) as connection, join(connections, 1):
        gather(connections)
        ours, theirs = socket.socketpair()
        with theirs:
            process = RemoteProcess(connections, connections.agents[0], 3, 7, Channel(ours))
            process.mark_output()
            waiting = threading.Thread(target=process.await_mark)
            waiting.start()
            lines = Lines()
            while (message := lines.next()) is None or message["do"] != "call":
                lines.feed(connection.recv(1 << 16) if message is None else b"")
            assert (message["method"], waiting.is_alive()) == ("mark_output", True)
            connection.sendall(line({"event": "answer", "request": message["request"], "value": None}))
            waiting.join(10.0)
            assert not waiting.is_alive()
            ours.close()


def test_a_run_without_agents_ends(connections: Connections):
    connections.interrupt = lambda: None  # type: ignore[method-assign]
    connections.patience = 0.0
    with connections.changed:
        assert connections.changed.wait_for(lambda: connections.over is not None, 10.0)
    assert "no agent has been connected" in str(connections.over)


def test_time_is_short_for_whoever_connects():
    ours, theirs = socket.socketpair()
    started = time.monotonic()
    with ours, theirs, pytest.raises(TimeoutError):
        present(ours, KEY, 0.05)
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize("wanted", [True, False])
def test_an_agent_that_its_launcher_ends_interrupts_a_run_that_wants_it_before_its_ranks_are_lost(
    connections: Connections, wanted: bool
):
    """An acceptance: ranks that are lost without an interrupt would look like failures of their hardware."""
    lost: list[int] = []
    connections.interrupt = lambda: lost.append(connections.lost)  # type: ignore[method-assign]
    connections.interrupted_by_leaving = wanted
    agents = [join(connections, 0), join(connections, 1)]
    gather(connections)
    for agent in agents:
        agent.sendall(line({"event": "leaving"}))
    with connections.changed:
        assert connections.changed.wait_for(lambda: connections.lost == 2, 30.0)
    assert lost[:1] == ([0] if wanted else [])
    for agent in agents:
        agent.close()
