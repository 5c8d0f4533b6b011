"""A handle in the pytest process for a process on another host: see `mgpu_check.engine.process.Process`."""

from __future__ import annotations

import base64
import contextlib
from concurrent.futures import Future
from typing import Any

from mgpu_check.engine.process import STACKS_TIMEOUT, Process
from mgpu_check.engine.remote.connections import Connections
from mgpu_check.engine.remote.members import AgentGone, RemoteAgent
from mgpu_check.processes.channel import Channel
from mgpu_check.processes.record import Record, parse

_ANSWER_TIMEOUT = 5.0  # seconds: the agent answers from local files
_NOBODY_KNOWS = 75  # stands for the unknown exit code of a process whose agent was lost


class RemoteProcess(Process):
    """A process of another host. Its agent answers the requests that `Process` answers from local files."""

    on_this_host = False

    def __init__(
        self, connections: Connections, agent: RemoteAgent, number: int, pid: int, connection: Channel
    ) -> None:
        self.pid = pid
        self.connection = connection
        self.exit_code: int | None = None
        self._connections = connections
        self._agent = agent
        self._number = number
        self._stacks_asked: Future[Any] | None = None
        self._marked: Future[Any] | None = None
        self._closed = False
        connections.watch(agent, number, self._ended)

    def _ended(self, code: int | None) -> None:
        self.exit_code = code
        if code is None:
            self.exit_code, self.lost = _NOBODY_KNOWS, self._agent.gone

    def _ask(self, method: str, *arguments: Any, timeout: float = _ANSWER_TIMEOUT, default: Any = "") -> Any:
        try:
            return self._connections.ask(self._agent, self._number, method, *arguments).result(timeout)
        except (AgentGone, TimeoutError):
            return default

    def cause(self) -> str:
        if self.lost is None:
            return super().cause()
        self._connections.untold()  # the caller's failure reports it
        return self.lost

    def mark_output(self) -> None:
        self._marked = self._connections.ask(self._agent, self._number, "mark_output")

    def await_mark(self) -> None:
        assert self._marked is not None
        with contextlib.suppress(AgentGone, TimeoutError):
            self._marked.result(_ANSWER_TIMEOUT)

    def output(self, name: str) -> str:
        return str(self._ask("output", name))

    def ask_for_stacks(self, signal_number: int) -> None:
        self._connections.ask(self._agent, self._number, "ask_for_stacks", signal_number)
        self._stacks_asked = self._connections.ask(self._agent, self._number, "stacks")

    def stacks(self, timeout: float = STACKS_TIMEOUT) -> str:
        assert self._stacks_asked is not None
        try:
            return str(self._stacks_asked.result(timeout + _ANSWER_TIMEOUT))
        except (AgentGone, TimeoutError):
            return ""

    def last_words(self) -> str:
        return str(self._ask("last_words"))

    def record(self) -> Record:
        return parse(base64.b64decode(self._ask("record_bytes")))

    def replaced_by(self) -> str:
        return str(self._ask("replaced_by"))

    def runnable(self) -> bool:
        return bool(self._ask("runnable", default=False))

    def halted(self) -> bool:
        return False  # checked for idle processes between tests, which is not worth a message to another host

    def kill(self) -> None:
        if self.exit_code is None and not self._closed:
            self._connections.ask(self._agent, self._number, "kill")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.connection.close()
            self._connections.ask(self._agent, self._number, "close")
