"""The entries of the launcher's store, which everybody can write; and the address of the driver."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from mgpu_check.engine.remote.agent import JoinedRun, Refused, connect
from mgpu_check.engine.remote.connections import Connections
from mgpu_check.engine.remote.credentials import Key, Stranger, WrongKey, endpoint, new_secret
from mgpu_check.engine.remote.launched_process import LaunchedProcess
from mgpu_check.engine.remote.meeting import (
    Announced,
    End,
    Meeting,
    is_loopback,
    listener_for,
    rendezvous_of,
)
from tests.remote.conftest import KEY, free_port

USER = Key(new_secret(), "/home/user/key")


def launched(rank: int, port: int, **more: Any) -> LaunchedProcess:
    return LaunchedProcess("variables", rank, 2, None, None, None, "127.0.0.1", port, **more)


@pytest.fixture
def meeting() -> Meeting:
    return Meeting(launched(0, free_port()), 30.0, USER)


def put(meeting: Meeting, name: str, value: object) -> None:
    meeting._store.set(name, value if isinstance(value, str) else json.dumps(value))


def get(meeting: Meeting, name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(meeting._store.get(name))
    return value


def test_the_driver_is_found_and_its_key_does_not_stand_there(meeting: Meeting):
    announced = meeting.announce("127.0.0.1", 4711)
    assert meeting.driver() == announced
    text = meeting._store.get("driver").decode()
    for secret in (USER.secret, announced.key.secret):
        assert secret.hex() not in text


def test_the_store_is_at_the_loopback_where_all_meet_there(meeting: Meeting):
    port = meeting._store.underlying_store.port  # type: ignore[attr-defined]
    with open("/proc/net/tcp") as v4, open("/proc/net/tcp6") as v6:
        listening = [line.split()[1] for line in [*v4, *v6] if line.split()[3] == "0A"]
    assert [entry for entry in listening if entry.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


def test_what_others_write_is_not_believed(meeting: Meeting):
    put(meeting, "end", {"said": json.dumps({"name": "x", "code": 0}), "proof": "00" * 32})  # before there is a driver
    announced = meeting.announce("127.0.0.1", 4711)
    true = get(meeting, "driver")
    said = json.loads(true["said"])
    rogue = Key(new_secret(), "elsewhere")

    elsewhere = json.dumps({**said, "address": "10.0.0.66"})
    forged: dict[str, tuple[object, type[Exception]]] = {
        "another address": ({**true, "said": elsewhere}, WrongKey),
        "another key": ({"said": elsewhere, "proof": rogue.proof(b"driver", elsewhere.encode()).hex()}, WrongKey),
        "a key in the entry": ({**true, "key": rogue.secret.hex()}, Stranger),
        "what is said of an end": (get_end(meeting, announced), WrongKey),
        "no proof": ({"said": elsewhere}, Stranger),
        "no text": ([1, 2], Stranger),
        "noise": ("\0\1\2", Stranger),
        "brackets": ("[" * 50_000, Stranger),
        "much": ("x" * 1_000_000, Stranger),
    }
    for name, (value, kind) in forged.items():
        put(meeting, "driver", value)
        with pytest.raises(kind):
            meeting.driver()
            pytest.fail(name)
    put(meeting, "driver", true)
    assert meeting.driver() == announced


def get_end(meeting: Meeting, announced: Announced) -> dict[str, Any]:
    meeting.end(announced, 0)
    return get(meeting, "end")


def test_an_end_is_believed_of_that_driver_only(meeting: Meeting):
    first = meeting.announce("127.0.0.1", 4711)
    assert meeting.ended(first) is None
    meeting.end(first, 3)
    assert meeting.ended(first) == End(3)
    old = get(meeting, "end")
    second = meeting.announce("127.0.0.1", 4712)
    assert meeting.ended(second) is None
    meeting.end(second, None)
    assert meeting.ended(second) == End(None)
    # Refuse entries of another driver, and entries without a proof.
    green = json.dumps({"name": second.name, "code": 0})
    values: list[object] = [
        old,
        {**old, "said": green},
        {"said": green},
        "noise",
        [],
        {**get(meeting, "driver"), "code": 0},
    ]
    for value in values:
        put(meeting, "end", value)
        assert meeting.ended(second) is None


def test_a_trusted_network_has_the_key_in_the_store():
    port = free_port()
    trusting = Meeting(launched(0, port), 30.0, None)
    announced = trusting.announce("127.0.0.1", 4711)
    assert Meeting(launched(1, port), 30.0, None).driver() == announced
    with pytest.raises(Stranger, match="was started with --trust-network, and this process without it"):
        Meeting(launched(1, port), 30.0, USER).driver()
    Meeting(launched(1, port), 30.0, USER).announce("127.0.0.1", 4711)
    with pytest.raises(Stranger, match="was started without --trust-network, and this process with it"):
        trusting.driver()


def test_a_process_with_another_key_is_refused_and_seen_by_the_driver(connections: Connections):
    """Hosts that do not share the file: both sides say so, the driver long before its agents are given up."""
    port = free_port()
    meeting = Meeting(launched(0, port), 30.0, USER)
    meeting.announce("127.0.0.1", connections.port)
    warned: list[str] = []
    seen = threading.Event()

    def warn(text: str) -> None:
        warned.append(text)
        seen.set()

    connections.warn = warn
    other = JoinedRun(launched(1, port), Key(new_secret(), "/home/other/key"), [], 5.0)
    with pytest.raises(
        Refused, match=r"another key than the one in /home/other/key.*--agent-key-file.*--trust-network"
    ):
        other.join()
    assert seen.wait(10.0)
    assert "refused a process at 127.0.0.1" in warned[0] and connections.refused == {"127.0.0.1": 1}


def test_who_hands_on_what_both_say_is_no_further(connections: Connections):
    """A rogue that agents take for the driver, and that connects to the driver itself: each proof holds for one
    address."""
    with socket.create_server(("127.0.0.1", 0)) as rogue:
        port = rogue.getsockname()[1]

        def hand_on() -> None:
            to_agent, _ = rogue.accept()
            rogue.close()
            with to_agent, socket.create_connection(("127.0.0.1", connections.port)) as to_driver:
                for source, target in ((to_driver, to_agent), (to_agent, to_driver), (to_driver, to_agent)):
                    target.sendall(source.recv(1000))

        relay = threading.Thread(target=hand_on)
        relay.start()
        with pytest.raises((Stranger, OSError)):
            connect(Announced("127.0.0.1", port, "x", KEY))
        relay.join()
    assert connections.agents == {} and connections.refused == {"127.0.0.1": 1}
    connect(Announced("127.0.0.1", connections.port, "x", KEY)).close()


def test_what_was_shown_to_one_run_is_nothing_to_another_of_the_same_user(connections: Connections):
    with pytest.raises((Stranger, OSError)):
        connect(Announced("127.0.0.1", connections.port, "x", KEY.of_run("another")))
    assert connections.refused == {"127.0.0.1": 1}


def test_one_address_has_one_spelling():
    assert endpoint(("::ffff:10.0.0.1", 5, 0, 0)) == endpoint(("10.0.0.1", 5)) == b"10.0.0.1 5"
    assert endpoint(("fe80::1%eth0", 5, 0, 2)) == endpoint(("fe80:0::1%ib1", 5, 0, 7)) == b"fe80::1 5"


class Ended:
    """A driver process that has ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code


@pytest.mark.parametrize(("code", "end"), [(-9, End(None)), (4, End(4))])
def test_a_driver_that_dies_before_anybody_joins_is_waited_for_by_nobody(code: int, end: End, monkeypatch):
    """Neither the agent that has started it, nor the others, which that one informs, wait for it."""
    port = free_port()
    monkeypatch.setattr("mgpu_check.engine.remote.agent.start_driver", lambda *_: Ended(code))
    first = JoinedRun(launched(0, port, final=True), USER, [], 600.0)
    found = first.join()
    assert found == end
    first.note_end(end.code)
    assert JoinedRun(launched(1, port, final=True), USER, [], 600.0).join() == end


def test_the_first_agent_leaves_if_a_driver_of_an_earlier_attempt_goes_meanwhile(connections: Connections, monkeypatch):
    port = free_port()
    meeting = Meeting(launched(0, port), 30.0, USER)
    announced = meeting.announce("127.0.0.1", free_port())  # nobody is there
    run = JoinedRun(launched(1, port), USER, [], 600.0)
    run._launched, run._driver = launched(0, port), announced
    assert run.join() == End(None)


@pytest.mark.parametrize(
    ("words", "endpoint", "host"),
    [
        (["torchrun", "--rdzv-endpoint=127.0.0.1:29400", "-m", "x"], "", "127.0.0.1"),
        (["torchrun", "--rdzv_endpoint", "[::1]:29400"], "10.0.0.1:5", "::1"),
        (["torchrun", "--rdzv-endpoint=alpha"], "", "alpha"),
        (["torchrun"], "localhost:0", "localhost"),
        (["torchrun", "--rdzv-endpoint"], "", ""),
        ([], "::1", "::1"),
        ([], "", ""),
    ],
)
def test_where_the_processes_of_torchrun_meet(words: list[str], endpoint: str, host: str):
    assert rendezvous_of(words, endpoint) == host


def own_address() -> str | None:
    """An address of this machine that others can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def test_the_driver_listens_no_wider_than_needed():
    def at(address: str, rendezvous: str = "", **more: Any) -> tuple[str, str]:
        one = LaunchedProcess("torchrun", 0, 4, 0, 2, 0, address, 29500, **more)
        listener, announced = listener_for(one, rendezvous)
        with listener:
            return listener.getsockname()[0], announced

    here = ("127.0.0.1", "127.0.0.1")
    assert at("127.0.0.1") == at("localhost") == here
    assert at("some-host", "127.0.0.1") == at("10.9.8.7", "localhost") == at("some-host", alone=True) == here
    assert at("127.0.0.2") == ("127.0.0.2", "127.0.0.2")
    own = own_address()
    if own is not None:
        assert at(own) == (own, own)
        assert at("203.0.113.1") == (own, own)  # of another host, from where the first agent has moved here
    for name in ("localhost", "LOCALHOST", "127.0.0.1", "127.9.9.9", "::1", "localhost.localdomain", "ip6.localhost"):
        assert is_loopback(name)
    for name in ("10.0.0.1", "alpha", "localhost.example.org", "::", "0.0.0.0", ""):
        assert not is_loopback(name)
