"""The driver's objects for the agents of a run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mgpu_check.engine.remote.lines import Lines, line, shut


class AgentGone(Exception):
    """The agent that should have answered is lost."""


@dataclass(frozen=True)
class AgentProcess:
    """A new process of an agent: its id on that host, and the connection to it."""

    pid: int
    connection: socket.socket


@dataclass
class Launch:
    """A pending process: it is complete once the agent has reported its pid and the process has connected."""

    future: Future[AgentProcess] = field(default_factory=Future)
    pid: int | None = None
    connection: socket.socket | None = None

    def complete(self) -> None:
        if self.pid is not None and self.connection is not None and not self.future.done():
            self.future.set_result(AgentProcess(self.pid, self.connection))

    def fail(self, error: Exception) -> None:
        """Fail the future, unless it is complete."""
        if not self.future.done():
            self.future.set_exception(error)
            if self.connection is not None:
                self.connection.close()


class RemoteAgent:
    """An agent that has joined.

    Attributes:
        boot: boot id of its host, which distinguishes hosts of one name; "" if unknown.
        told: the agent's description of itself.
        gone: the cause of death of its processes if the agent is lost; None while it is connected.
        answers, launches: pending requests, by number.
        processes: process number -> function to call with the exit code, or with None if the agent is lost.
        exits: exit codes of processes without a watcher.
    """

    def __init__(self, connection: socket.socket, told: dict[str, Any]) -> None:
        self.connection = connection
        self.told = told
        self.rank = int(told["rank"])
        self.host = str(told["host"])
        self.boot = str(told.get("boot", ""))
        self.gone: str | None = None
        self.lines = Lines()
        self.answers: dict[int, Future[Any]] = {}
        self.launches: dict[int, Launch] = {}
        self.processes: dict[int, Callable[[int | None], None]] = {}
        self.exits: dict[int, int | None] = {}
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send a message. If the agent is lost, the thread that reads from it notices."""
        with self._sending:
            try:
                if self.gone is None:
                    self.connection.sendall(line(message))
            except OSError:
                shut(self.connection)
