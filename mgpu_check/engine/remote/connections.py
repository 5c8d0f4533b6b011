"""The driver's side of all connections: a thread that accepts and authenticates them and receives from the agents."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from mgpu_check.engine.remote.credentials import Key
from mgpu_check.engine.remote.lines import line, shut, tune
from mgpu_check.engine.remote.listener import Listener
from mgpu_check.engine.remote.members import AgentGone, AgentProcess, Launch, RemoteAgent
from mgpu_check.errors import StartupFailure

_SEND_TIMEOUT = 10.0  # seconds: an agent that reads nothing for so long is lost
_TO_FINISH, _TO_UNWIND = 3.0, 7.0  # seconds for the main thread to finish by itself, and then after an interrupt
_MOST_WARNINGS = 16  # addresses, so that strangers cannot flood the terminal
_LEFT = "was ended by its launcher"


class Connections:
    """The agents that have joined, by rank.

    Attributes:
        patience: seconds that the run continues without any agent.
        over: why the run cannot continue; None while it can.
        host_names: rank of an agent -> name of its host in reports, if it differs from the host's own name.
        lost: number of agents lost since all had joined. The first loss is the cause of the others.
        refused: address of a process with another key -> number of its attempts to join.
        warn: receives a message, once for each address in `refused`.
    """

    def __init__(self, listener: socket.socket, key: Key, size: int, parent: int | None, patience: float) -> None:
        """Create the state without any agent."""
        self.size = size
        self.patience = patience
        self.agents: dict[int, RemoteAgent] = {}
        self.over: str | None = None
        self.lost = 0
        self.complete = False
        self.host_names: dict[int, str] = {}
        self.refused: Counter[str] = Counter()
        self.warn: Callable[[str], None] = lambda text: None
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
        for one in (self.ends_read, self._ends_write, self._wake_read):
            one.setblocking(False)

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
        """Ask the agent of `rank` to start a process."""
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
                self._unwind(now)

    def _close(self) -> None:
        agents = [agent.connection for agent in [*self.agents.values(), *self._left]]
        ends = [self.ends_read, self._ends_write, self._wake_read, self._wake_write]
        self._listener.close()
        self._selector.close()
        for one in [*agents, *ends]:
            one.close()

    def _unwind(self, now: float) -> None:
        """Interrupt the main thread; if it does not stop in time, exit, because no agent is left to report to."""
        assert self._over_since is not None
        if now - self._over_since > _TO_FINISH + _TO_UNWIND:
            os._exit(70)
        self.interrupt()

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
                self._take(agent, message)
        except BlockingIOError:
            return
        except (EOFError, OSError, ValueError, LookupError, TypeError):
            self._lose(agent, "was lost")

    def _take(self, agent: RemoteAgent, message: dict[str, Any]) -> None:
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
        if agent.told["final"] and not self._closing:
            self._end(f"{name}, and {agent.told['launcher']} does not restart it")
        if how == _LEFT:
            self._left.append(agent)  # rank 0 still waits for the exit code
        else:
            shut(agent.connection)
            agent.connection.close()
