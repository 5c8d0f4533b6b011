"""The agents of a run, as its driver holds them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mgpu_check.engine.remote.lines import Lines, line, shut

__all__ = ["AgentGone", "Launch", "Launched", "RemoteAgent"]


class AgentGone(Exception):
    """The agent that should have answered is lost."""


@dataclass(frozen=True)
class Launched:
    """A new process of an agent: its number there, and the connection to it."""

    pid: int
    connection: socket.socket


@dataclass
class Launch:
    """A process that an agent is to start: it says so, and the process connects."""

    future: Future[Launched] = field(default_factory=Future)
    pid: int | None = None
    connection: socket.socket | None = None

    def complete(self) -> None:
        """Complete the future, if all is there."""
        if self.pid is not None and self.connection is not None and not self.future.done():
            self.future.set_result(Launched(self.pid, self.connection))

    def fail(self, error: Exception) -> None:
        """Fail the future, unless it is complete."""
        if not self.future.done():
            self.future.set_exception(error)
            if self.connection is not None:
                self.connection.close()


class RemoteAgent:
    """An agent that has joined, as the driver knows it.

    Attributes:
        host: name of its host.
        told: all that it said of itself.
        gone: what its processes died of, if it is lost; None as long as it is not.
        lines: what it says.
        answers, launches: what it was asked for, by number.
        processes: what to call, with an exit code, when one of its processes has ended; None if the agent is lost.
        exits: exit codes of processes that nobody watches yet.
    """

    def __init__(self, connection: socket.socket, told: dict[str, Any]) -> None:
        self.connection = connection
        self.told = told
        self.rank = int(told["rank"])
        self.host = str(told["host"])
        self.gone: str | None = None
        self.lines = Lines()
        self.answers: dict[int, Future[Any]] = {}
        self.launches: dict[int, Launch] = {}
        self.processes: dict[int, Callable[[int | None], None]] = {}
        self.exits: dict[int, int | None] = {}
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send a message. If the agent is lost, that shows where it is listened to."""
        with self._sending:
            try:
                if self.gone is None:
                    self.connection.sendall(line(message))
            except OSError:
                shut(self.connection)
