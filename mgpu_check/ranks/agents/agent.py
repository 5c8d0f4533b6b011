"""An agent: a launched process that has ranks as its children, on behalf of the driver."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from mgpu_check.errors import StartupFailure
from mgpu_check.ranks.agents import verdict
from mgpu_check.ranks.agents.credentials import Stranger, new_key, present
from mgpu_check.ranks.agents.driver import start_driver
from mgpu_check.ranks.agents.lines import Lines, line, shut, tune
from mgpu_check.ranks.agents.meeting import Meeting, listener_for
from mgpu_check.ranks.agents.variables import Place
from mgpu_check.ranks.agents.versions import versions
from mgpu_check.ranks.launcher import LocalLauncher
from mgpu_check.ranks.process import Process, describe_exit

__all__ = ["NO_DRIVER", "main"]

NO_DRIVER = 70
"""Exit code of an agent of which the driver is gone without a word."""

_MEETING_TIMEOUT = 600.0
_CONNECT_TIMEOUT = 10.0
_PROOF_TIMEOUT = 60.0
_END_TIMEOUT = 15.0
_RETRY = 0.1
_PR_SET_PDEATHSIG = 1
_METHODS = frozenset(
    {"mark_output", "output", "ask_for_stacks", "stacks", "last_words", "record_bytes", "runnable", "kill", "close"}
)


def main(place: Place, arguments: Sequence[str], preload: Sequence[str], simulated: bool) -> int:
    """Be the agent at `place` until the run is over; its exit code.

    Args:
        arguments: of the driver, which the agent of rank 0 starts.
        preload, simulated: as for `LocalLauncher`.
    """
    if place.launcher == "torchrun" and not _bound_to_parent():
        return NO_DRIVER
    # Until there is a driver to tell, the agent just ends, even while it waits in the store; its fork server follows.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = verdict.of_earlier_attempt(os.environ)
    if code is not None:
        verdict.leave(code, place, os.environ)
        return verdict.share_of(code, place)
    launcher = LocalLauncher(preload, simulated=simulated)
    launcher.start()  # it imports torch while this process does
    process: subprocess.Popen[bytes] | None = None
    try:
        meeting = Meeting(place, _MEETING_TIMEOUT)
        if place.rank == 0 and (code := meeting.ended()) is None and not _lives(place, meeting):
            listener, key = listener_for(place.address), new_key()
            port = listener.getsockname()[1]
            process = start_driver(place, listener, key, arguments)
            meeting.announce(port, key)
        agent = _join(place, meeting, launcher)
        code = meeting.ended() if agent is None else agent.serve()
        if place.rank == 0 and code is not None:
            meeting.end(code)
    finally:
        launcher.close()
    if process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT)
    if code is None:
        print(f"mgpu-check: rank {place.rank}: {_end_of(process)}", file=sys.stderr)
        return NO_DRIVER
    verdict.leave(code, place, os.environ)
    return verdict.share_of(code, place)


def _bound_to_parent() -> bool:
    """Have this process end with the one that launched it; false if that has ended already."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


def _end_of(driver: subprocess.Popen[bytes] | None) -> str:
    if driver is None or driver.poll() is None:
        return "the driver is gone without a word"
    return f"the driver has ended without a word, by {describe_exit(driver.returncode)}"


def _lives(place: Place, meeting: Meeting) -> bool:
    """Whether a driver that an earlier process has started is still there."""
    announced = meeting.driver()
    if announced is None:
        return False
    try:
        _connect(place, *announced, _PROOF_TIMEOUT).close()
    except (OSError, Stranger):
        return False
    return True


def _connect(place: Place, port: int, key: bytes, timeout: float) -> socket.socket:
    """A connection to the driver, proven on both sides.

    Raises:
        OSError, Stranger: there is no driver, or another's.
    """
    connection = socket.create_connection((place.address, port), _CONNECT_TIMEOUT)
    try:
        present(connection, key, timeout)
    except BaseException:
        connection.close()
        raise
    return connection


def _join(place: Place, meeting: Meeting, launcher: LocalLauncher) -> Agent | None:
    """Join the driver as soon as there is one; None if the run is over.

    Raises:
        StartupFailure: there is none in time.
    """
    deadline = time.monotonic() + _MEETING_TIMEOUT
    reason = "none was announced"
    while time.monotonic() < deadline:
        if meeting.ended() is not None:
            return None
        if (announced := meeting.driver()) is not None:
            try:
                return Agent(_connect(place, *announced, _PROOF_TIMEOUT), launcher, place, *announced)
            except (OSError, Stranger) as error:
                reason = str(error)
        time.sleep(_RETRY)
    raise StartupFailure(f"no driver at {place.address} within {_MEETING_TIMEOUT:g} s: {reason}")


class _Left(Exception):
    """The launcher has told this process to end."""


class Agent:
    """What has joined the driver."""

    def __init__(self, connection: socket.socket, launcher: LocalLauncher, place: Place, port: int, key: bytes) -> None:
        self.connection = connection
        self.launcher = launcher
        self.place = place
        self.port = port
        self.key = key
        self.lines = Lines()
        self.processes: dict[int, Process] = {}
        self.ended: set[int] = set()
        tune(connection, control=True)
        connection.settimeout(_CONNECT_TIMEOUT)

    def serve(self) -> int | None:
        """Do what the driver says until the run is over; its exit code, None if the driver is gone without a word."""
        wake, wake_write = socket.socketpair()
        for end in (wake, wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        try:
            self.say(agent=self.description())
            while True:
                code = self.step(wake)
                if code is not None:
                    return code
        except (OSError, EOFError, ValueError):
            return None
        except _Left:
            return self.left()
        finally:
            signal.set_wakeup_fd(-1)
            shut(self.connection)

    def description(self) -> dict[str, Any]:
        """What the driver is to know of this agent."""
        import torch

        place = self.place
        return {
            "rank": place.rank,
            "local_rank": place.local_rank,
            "local_size": place.local_size,
            "node": place.node,
            "host": socket.gethostname(),
            "launcher": place.launcher,
            "final": place.final,
            "address": place.address,
            "port": place.port,
            "devices": torch.cuda.device_count(),
            "versions": versions(),
        }

    def say(self, **message: Any) -> None:
        self.connection.sendall(line(message))

    def step(self, wake: socket.socket) -> int | None:
        """Wait for the next thing to do, and do it; the exit code of the run if that was its end."""
        with selectors.PollSelector() as selector:
            for one in (self.connection.fileno(), wake.fileno(), *self.launcher.waitables()):
                selector.register(one, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select()}
        if wake.fileno() in ready:
            self.signals(wake.recv(4096))
        self.launcher.collect()
        if self.connection.fileno() in ready:
            data = self.connection.recv(1 << 16)
            if not data:
                raise EOFError
            self.lines.feed(data)
            while (message := self.lines.next()) is not None:
                if message["do"] == "end":
                    return int(message["code"])
                self.obey(message)
        for number, process in self.processes.items():
            if process.exit_code is not None and number not in self.ended:
                self.ended.add(number)
                self.say(event="exit", id=number, code=process.exit_code)
        return None

    def signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers:
            raise _Left
        if signal.SIGINT in numbers:
            self.say(event="interrupt")

    def left(self) -> int | None:
        """End for the launcher; but rank 0, where no other will take its place, not before the driver has reported."""
        with contextlib.suppress(OSError):
            self.say(event="leaving")
        self.launcher.close()
        if self.place.rank != 0 or not self.place.final:
            raise SystemExit(128 + signal.SIGTERM)
        self.connection.settimeout(_END_TIMEOUT)
        with contextlib.suppress(OSError, EOFError, ValueError):
            while (message := self.lines.next()) is None or message["do"] != "end":
                if message is None:
                    data = self.connection.recv(1 << 16)
                    if not data:
                        raise EOFError
                    self.lines.feed(data)
            return int(message["code"])
        return None

    def obey(self, message: dict[str, Any]) -> None:
        if message["do"] == "launch":
            self.launch(message["id"])
        elif message["do"] == "call" and message["method"] in _METHODS:
            process = self.processes.get(message["id"])
            value: Any = ""
            if process is not None:
                if message["method"] == "close":
                    process.kill()
                value = getattr(process, message["method"])(*message["arguments"])
                if message["method"] == "close":
                    del self.processes[message["id"]]
                    self.ended.discard(message["id"])
            if isinstance(value, bytes):
                value = base64.b64encode(value).decode()
            self.say(event="answer", request=message["request"], value=value)

    def launch(self, number: int) -> None:
        """Have the fork server make a process, and give it a connection to the driver of its own."""
        try:
            connection = _connect(self.place, self.port, self.key, _PROOF_TIMEOUT)
            try:
                tune(connection, control=False)
                connection.sendall(line({"launch": number}))
                connection.settimeout(None)
                mine, other = socket.socketpair()
                other.close()
                self.processes[number] = self.launcher.fork(mine, connection)
            finally:
                connection.close()
        except (OSError, Stranger, StartupFailure) as error:
            self.say(event="failed", id=number, text=str(error))
        else:
            self.say(event="launched", id=number, pid=self.processes[number].pid)
