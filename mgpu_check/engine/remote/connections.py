"""The driver's connections to the agents of a run: a thread that accepts connections, admits only processes that
prove that they have the key, and receives from the agents.

Messages are lines of JSON, never pickles, which could run code.

An agent first sends ``{"agent": {…}}``, then ``launched``, ``failed``, ``exit``, ``answer``, ``interrupt`` and
``leaving``. The driver sends ``launch``, ``call`` and ``end``. Each further connection of an agent sends
``{"launch": id}``, and belongs to the new rank from then on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import signal
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mgpu_check.engine.remote.credentials import Key, Stranger, WrongKey, endpoint, verify
from mgpu_check.errors import StartupFailure

LONGEST = 4 << 20  # Maximum bytes of a line. The stacks and the kept output of a rank are shorter.
# Without delay; a lost host is detected after 15 s and 4 probes, one every 5 s.
_TCP_OPTIONS = {socket.TCP_NODELAY: 1, socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
_UNANSWERED_MS = 35_000  # the same time for unacknowledged data


def tune(connection: socket.socket, control: bool) -> None:
    """Disable send delays, and detect when the other host has disappeared without closing the connection.
    `control`: whether the peer reads at once, so that unacknowledged data means a lost host, too. A rank may be stopped
    for longer than that timeout."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _TCP_OPTIONS.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    if control:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Lines:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > LONGEST and b"\n" not in self._data:
            raise ValueError(f"a line of more than {LONGEST} bytes")

    def next(self) -> dict[str, Any] | None:
        end = self._data.find(b"\n")
        if end < 0:
            return None
        try:
            message = json.loads(self._data[:end])
        except RecursionError:
            raise ValueError("a line with too deeply nested brackets") from None
        del self._data[: end + 1]
        if not isinstance(message, dict):
            raise ValueError("a line that is not a JSON object")
        return message


def shut(connection: socket.socket) -> None:
    """Shut down a connection in both directions, even if other processes hold it, too."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class AgentGone(Exception):
    """The agent that should have answered is lost."""


AgentProcess = tuple[int, socket.socket]  # a new process of an agent: its id on that host, and the connection to it


@dataclass
class Launch:
    """A pending process: it is complete once the agent has reported its pid and the process has connected."""

    future: Future[AgentProcess] = field(default_factory=Future)
    pid: int | None = None
    connection: socket.socket | None = None

    def complete(self) -> None:
        if self.pid is not None and self.connection is not None and not self.future.done():
            self.future.set_result((self.pid, self.connection))

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            if self.connection is not None:
                self.connection.close()


class RemoteAgent:
    """An agent that has joined: `Connections` makes one when it admits the agent, and forgets it when it is lost."""

    def __init__(self, connection: socket.socket, greeting: dict[str, Any]) -> None:
        self.connection, self.greeting = connection, greeting  # greeting: its description of itself
        self.rank = int(greeting["rank"])
        self.host = str(greeting["host"])
        self.boot = str(greeting.get("boot", ""))  # distinguishes hosts of one name
        self.gone: str | None = None  # the cause of death of its processes if the agent is lost
        self.lines = Lines()
        # Pending requests, by number.
        self.answers: dict[int, Future[Any]] = {}
        self.launches: dict[int, Launch] = {}
        # Process number -> function to call with the exit code, or with None if the agent is lost.
        self.processes: dict[int, Callable[[int | None], None]] = {}
        self.exits: dict[int, int | None] = {}  # of processes without a watcher
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send a message. If the agent is lost, the thread that reads from it notices."""
        with self._sending:
            try:
                if self.gone is None:
                    self.connection.sendall(line(message))
            except OSError:
                shut(self.connection)


_MOST = 64  # pending connections, so that strangers cannot use up the file descriptors
_TIMEOUT = 20.0  # seconds to authenticate
_TIMEOUT_IF_FULL = 2.0  # while others wait: an agent answers at once, and a stranger must not keep agents out


@dataclass
class _Guest:
    connection: socket.socket
    address: str
    proof: Generator[tuple[bytes, int], bytes, bytes] | None  # the pending authentication, None once it has succeeded
    wanted: int  # bytes of the peer's proof
    came: float  # when it was accepted
    data: bytes = b""  # the bytes received so far


class Listener:
    """Accepts and authenticates connections, and hands over the authenticated ones with their first line.
    Nothing here blocks. From an unauthenticated peer it reads no more bytes than a proof has."""

    def __init__(
        self,
        listener: socket.socket,
        key: Key,
        selector: selectors.BaseSelector,
        admit: Callable[[socket.socket, dict[str, Any]], None],
        refuse: Callable[[str], None],
    ) -> None:
        """Register with `selector`, whose owner must call the data of each ready key.
        `admit`: takes over a connection and its first message; raises `LookupError`, `TypeError` or `ValueError` if the
        message is invalid. `refuse`: receives the address of a peer with another key."""
        listener.setblocking(False)
        self._listener, self._key, self._selector, self._admit = listener, key, selector, admit
        self._refuse = refuse
        self._guests: list[_Guest] = []
        self._accepting = False
        self._accept_or_wait()

    def _accept_or_wait(self) -> None:
        """Let further peers wait in the queue of the socket while as many as there may be are examined."""
        if self._accepting != (len(self._guests) < _MOST):
            self._accepting = not self._accepting
            if self._accepting:
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            else:
                self._selector.unregister(self._listener)

    def send_away_the_late(self) -> None:
        latest = time.monotonic() - (_TIMEOUT if self._accepting else _TIMEOUT_IF_FULL)
        for guest in [candidate for candidate in self._guests if candidate.came < latest]:
            self._send_away(guest)

    def close(self) -> None:
        for guest in list(self._guests):
            self._send_away(guest)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        proof = verify(self._key, endpoint(connection.getsockname()))
        greeting, wanted = next(proof)
        guest = _Guest(connection, str(peer[0]), proof, wanted, time.monotonic())
        self._guests.append(guest)
        self._accept_or_wait()
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._examine(guest))
        with contextlib.suppress(OSError):
            connection.send(greeting)

    def _release(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.connection)
        self._accept_or_wait()

    def _send_away(self, guest: _Guest) -> None:
        self._release(guest)
        guest.connection.close()

    def _examine(self, guest: _Guest) -> None:
        """Read from a guest: exactly its proof, then one line."""
        if guest not in self._guests:
            return  # an earlier event of the same round has closed it
        try:
            data = guest.connection.recv(guest.wanted - len(guest.data) if guest.proof else LONGEST)
            if not data:
                raise Stranger("it has closed the connection")
            guest.data += data
            if guest.proof is None:
                lines = Lines()
                lines.feed(guest.data)
                message = lines.next()
            elif len(guest.data) == guest.wanted:
                try:
                    guest.proof.send(guest.data)
                except StopIteration as proven:
                    guest.connection.send(proven.value)
                guest.proof, guest.data, message = None, b"", None
            else:
                return
        except BlockingIOError:
            return
        except (Stranger, OSError, ValueError) as error:
            if isinstance(error, WrongKey):
                self._refuse(guest.address)
            self._send_away(guest)
            return
        if message is not None:
            self._release(guest)
            try:
                self._admit(guest.connection, message)
            except (LookupError, TypeError, ValueError):
                guest.connection.close()


_SEND_TIMEOUT = 10.0  # seconds: an agent that reads nothing for so long is lost
_TO_FINISH, _TO_UNWIND = 3.0, 7.0  # seconds for the main thread to finish by itself, and then after an interrupt
_MOST_WARNINGS = 16  # addresses, so that strangers cannot flood the terminal
_LEFT = "was ended by its launcher"


class Connections:
    """The agents that have joined, by rank.
    `driver.take_over` makes one and starts its thread, which admits agents and receives from them until the run ends.
    `AgentLauncher` and `RemoteProcess` send through it from the main thread. `Driver` calls `finish` at the end."""

    def __init__(self, listener: socket.socket, key: Key, size: int, parent: int | None, patience: float) -> None:
        self.size = size
        self.patience = patience  # seconds that the run continues without any agent
        self.agents: dict[int, RemoteAgent] = {}
        self.over: str | None = None  # why the run cannot continue; None while it can
        self.lost = 0  # number of agents lost since all had joined. The first loss is the cause of the others.
        self.complete = False
        # rank of an agent -> name of its host in reports, if it differs from the host's own name
        self.host_names: dict[int, str] = {}
        # address of a process with another key -> number of its attempts to join
        self.refused: Counter[str] = Counter()
        self.warn: Callable[[str], None] = lambda text: None  # receives a message, once for each address in `refused`
        self.changed = threading.Condition()
        self.ends_read, self._ends_write = socket.socketpair()
        self._wake_read, self._wake_write = socket.socketpair()
        self._ended: list[tuple[Callable[[int | None], None], int | None]] = []
        self._numbers = itertools.count(1)
        self.port: int = listener.getsockname()[1]
        self._parent = parent
        self.interrupted_by_leaving = False
        self._left: list[RemoteAgent] = []
        self._untold: list[str] = []
        self._first = ""
        self._selector = selectors.DefaultSelector()
        self._listener = Listener(listener, key, self._selector, self._admit, self._refuse)
        self._interrupted = False
        self._closing = False
        self._stopped = False
        self._alone_since = time.monotonic()
        self._over_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="mgpu-check agents", daemon=True)
        for descriptor in (self.ends_read, self._ends_write, self._wake_read):
            descriptor.setblocking(False)

    def start(self) -> None:
        """Start the thread that accepts and serves agents, and return at once."""
        self._selector.register(self._wake_read, selectors.EVENT_READ, lambda: self._wake_read.recv(4096))
        if self._parent is not None:
            self._selector.register(self._parent, selectors.EVENT_READ, self._parent_ended)
        self._thread.start()

    # Methods for the main thread.

    def await_agents(self, ranks: Iterable[int], timeout: float) -> list[int]:
        wanted = list(ranks)

        def missing() -> list[int]:
            return [rank for rank in wanted if rank not in self.agents]

        with self.changed:
            self.changed.wait_for(lambda: not missing() or self.over is not None, timeout)
            return missing()

    def launch(self, rank: int) -> tuple[RemoteAgent, int, Future[AgentProcess]]:
        with self.changed:
            agent = self.agents.get(rank)
            if agent is None:
                raise AgentGone
            number = next(self._numbers)
            launch = agent.launches[number] = Launch()
        agent.send(do="launch", id=number)
        return agent, number, launch.future

    def ask(self, agent: RemoteAgent, process: int, method: str, *arguments: Any) -> Future[Any]:
        """Ask an agent to call a method of its `Process`, and return the future result."""
        number = next(self._numbers)
        future: Future[Any] = Future()
        with self.changed:
            if agent.gone is not None:
                future.set_exception(AgentGone(agent.gone))
                return future
            agent.answers[number] = future
        agent.send(do="call", id=process, method=method, arguments=arguments, request=number)
        return future

    def watch(self, agent: RemoteAgent, process: int, ended: Callable[[int | None], None]) -> None:
        """Register `ended`, which `collect` calls with the exit code of a process; None if its agent is lost first."""
        with self.changed:
            agent.processes[process] = ended
            if process in agent.exits:
                self._note_end(agent, process, agent.exits.pop(process))
            elif agent.gone is not None:
                self._note_end(agent, process, None)

    def collect(self) -> None:
        """Call the functions registered by `watch` for the processes that have ended."""
        with contextlib.suppress(BlockingIOError):
            while self.ends_read.recv(4096):
                pass
        with self.changed:
            ended, self._ended = self._ended, []
        for call, code in ended:
            call(code)

    def untold(self) -> list[str]:
        """Return the losses that no failure has reported yet; of a series of losses, only the first."""
        with self.changed:
            untold, self._untold = self._untold, []
        return untold

    def finish(self, code: int) -> None:
        """Send all agents the exit code of the run, and wait until they have disconnected."""
        with self.changed:
            if self._closing:
                return
            self._closing = True
            agents = list(self.agents.values())
        for agent in agents:
            agent.send(do="end", code=code)
        with self.changed:
            self.changed.wait_for(lambda: not self.agents, _TO_UNWIND)
        for agent in self._left:
            with contextlib.suppress(OSError):
                agent.connection.sendall(line({"do": "end", "code": code}))
            shut(agent.connection)
        self._stopped = True
        with contextlib.suppress(OSError):  # the thread may have stopped and closed the socket already
            self._wake_write.send(b"\0")
        self._thread.join()

    # Methods that run in the thread.

    def _run(self) -> None:
        try:
            self._loop()
            self._close()
        except BaseException:
            traceback.print_exc()
            os._exit(70)  # the main thread would wait forever

    def _loop(self) -> None:
        while not self._stopped:
            for key, _ in self._selector.select(1.0):
                key.data()
            now = time.monotonic()
            self._listener.send_away_the_late()
            if not self.agents and not self._closing and now - self._alone_since > self.patience:
                self._end(f"no agent has been connected for {self.patience:g} s")
            if self._over_since is not None and not self._closing and now - self._over_since > _TO_FINISH:
                # Interrupt the main thread; if it does not stop in time, exit, because no agent is left to report to.
                if now - self._over_since > _TO_FINISH + _TO_UNWIND:
                    os._exit(70)
                self.interrupt()

    def _close(self) -> None:
        agents = [agent.connection for agent in [*self.agents.values(), *self._left]]
        ends = [self.ends_read, self._ends_write, self._wake_read, self._wake_write]
        self._listener.close()
        self._selector.close()
        for resource in [*agents, *ends]:
            resource.close()

    def interrupt(self) -> None:
        if not self._interrupted:
            self._interrupted = True
            os.kill(os.getpid(), signal.SIGINT)

    def _end(self, reason: str) -> None:
        with self.changed:
            if self.over is None:
                self.over, self._over_since = reason, time.monotonic()
            self.changed.notify_all()

    def _parent_ended(self) -> None:
        assert self._parent is not None
        self._selector.unregister(self._parent)
        self._end("torchrun has ended on the host of rank 0")

    def _admit(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Take over an authenticated connection, of a launched process or of a new agent."""
        if "launch" in message:
            with self.changed:
                launch = self.agents[message["rank"]].launches[message["launch"]]  # no agent or launch: it is too late
            tune(connection, control=False)
            launch.connection = connection
            launch.complete()
            return
        agent = RemoteAgent(connection, message["agent"])
        if not 0 <= agent.rank < self.size:
            raise ValueError("a rank outside this run")
        tune(connection, control=True)
        connection.settimeout(_SEND_TIMEOUT)
        if (before := self.agents.get(agent.rank)) is not None:
            self._lose(before, "was replaced by another agent")
        self._selector.register(agent.connection, selectors.EVENT_READ, lambda: self._listen(agent))
        with self.changed:
            self.agents[agent.rank] = agent
            if len(self.agents) == self.size:
                self.lost, self.complete = 0, True
            self.changed.notify_all()
        if self._closing:
            agent.send(do="end", code=70)

    def _refuse(self, address: str) -> None:
        if address not in self.refused and len(self.refused) < _MOST_WARNINGS:
            self.warn(
                f"refused a process at {address} that wanted to join with another key than this run has: either it is "
                "not yours, or the hosts do not share the key file (--agent-key-file)"
            )
        if address in self.refused or len(self.refused) < _MOST_WARNINGS:
            self.refused[address] += 1

    def _listen(self, agent: RemoteAgent) -> None:
        if agent.gone is not None:
            return
        try:
            data = agent.connection.recv(1 << 16, socket.MSG_DONTWAIT)
            if not data:
                raise EOFError
            agent.lines.feed(data)
            while agent.gone is None and (message := agent.lines.next()) is not None:
                event = message["event"]
                if event == "launched":
                    launch = agent.launches[message["id"]]
                    launch.pid = int(message["pid"])
                    launch.complete()
                elif event == "failed":
                    agent.launches[message["id"]].fail(StartupFailure(str(message["text"])))
                elif event == "exit":
                    with self.changed:
                        self._note_end(agent, message["id"], message["code"])
                elif event == "answer":
                    future = agent.answers.pop(message["request"], None)
                    if future is not None:
                        future.set_result(message["value"])
                elif event == "interrupt":
                    self.interrupt()
                elif event == "leaving":
                    if self.interrupted_by_leaving and not self.lost:
                        self.interrupt()  # before its ranks are lost, which would look like a failure of their hardware
                    self._lose(agent, _LEFT)
        except BlockingIOError:
            return
        except (EOFError, OSError, ValueError, LookupError, TypeError):
            self._lose(agent, "was lost")

    def name(self, agent: RemoteAgent) -> str:
        return self.host_names.get(agent.rank, agent.host)

    def _note_end(self, agent: RemoteAgent, process: int, code: int | None) -> None:
        call = agent.processes.pop(process, None)
        if call is None:
            agent.exits[process] = code  # it died before `watch` was called
        else:
            self._ended.append((call, code))
            with contextlib.suppress(BlockingIOError):
                self._ends_write.send(b"\0")

    def _lose(self, agent: RemoteAgent, how: str) -> None:
        self._selector.unregister(agent.connection)
        with self.changed:
            if self.agents.get(agent.rank) is agent:
                del self.agents[agent.rank]
            self.lost += 1
            name = f"the agent of rank {agent.rank} on {self.name(agent)} {how}"
            if self.lost == 1:
                self._first = name
                if not self._closing:
                    self._untold.append(name)
            agent.gone = name if self.lost == 1 else f"with its agent, after {self._first}"
            if not self.agents:
                self._alone_since = time.monotonic()
            for future in agent.answers.values():
                future.set_exception(AgentGone(name))
            for launch in agent.launches.values():
                launch.fail(AgentGone(name))
            for process in list(agent.processes):
                self._note_end(agent, process, None)
            self.changed.notify_all()
        if agent.greeting["final"] and not self._closing:
            self._end(f"{name}, and {agent.greeting['launcher']} does not restart it")
        if how == _LEFT:
            self._left.append(agent)  # rank 0 still waits for the exit code
        else:
            shut(agent.connection)
            agent.connection.close()
