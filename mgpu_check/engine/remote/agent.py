"""An agent: a launched process that connects to the driver, starts ranks as its children and serves the driver.

The agent of rank 0 starts the driver, and the other agents find its announcement in the store.
"""

from __future__ import annotations

import base64
import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from mgpu_check.engine.launcher import LocalLauncher
from mgpu_check.engine.process import Process, describe_exit
from mgpu_check.engine.remote import launched_process
from mgpu_check.engine.remote.connections import Lines, line, shut, tune
from mgpu_check.engine.remote.credentials import REMEDY, Key, Stranger, UnusableKey, WrongKey, present
from mgpu_check.engine.remote.driver import start_driver, versions
from mgpu_check.engine.remote.launched_process import LaunchedProcess
from mgpu_check.engine.remote.meeting import Announced, End, Meeting, listener_for, rendezvous_of, words_of_parent
from mgpu_check.errors import StartupFailure
from mgpu_check.processes import child_processes
from mgpu_check.processes.machine import boot_id

_CONNECT_TIMEOUT = 10.0
_PROOF_TIMEOUT = 60.0
_RETRY = 0.1  # seconds between two reads of the store
_GONE_TIMEOUT = 60.0  # seconds for the next attempt to announce its driver
_KNOCK_TIMEOUT = 5.0  # seconds: this process ends with an error anyway


class Refused(Exception):
    """The announced driver belongs to another user or run. The text says what to do."""


def connect(driver: Announced, attempts: int = 1) -> socket.socket:
    """Connect to `driver`, and authenticate both sides.
    Raises `OSError`: the driver is gone. Raises `Stranger`: another process has its address."""
    connection = socket.create_connection((driver.address, driver.port), _CONNECT_TIMEOUT)
    try:
        present(connection, driver.key, _PROOF_TIMEOUT)
    except ConnectionResetError:
        connection.close()
        if attempts == 1:
            raise
        return connect(driver, attempts - 1)
    except BaseException:
        connection.close()
        raise
    return connection


class JoinedRun:
    """The run from the view of one agent.
    `main` makes one, which connects to the launcher's store. Rank 0 also starts the driver, unless the driver of an
    earlier attempt still runs. `join` finds the driver, and `note_end` writes the result for late agents."""

    def __init__(self, launched: LaunchedProcess, key: Key | None, arguments: Sequence[str], timeout: float) -> None:
        self.process: subprocess.Popen[bytes] | None = None  # the driver's, if this agent has started it
        self._launched, self._timeout = launched, timeout
        self._meeting = Meeting(launched, timeout, key)
        self._own = key
        self._driver: Announced | None = None
        if launched.rank == 0:
            self._driver = self._left() or self._start(arguments)

    @property
    def driver(self) -> Announced:
        """The driver of the run; valid only after `join` has returned a connection."""
        assert self._driver is not None
        return self._driver

    def _left(self) -> Announced | None:
        try:
            announced = self._meeting.driver()
            if announced is not None:
                connect(announced).close()
            return announced
        except (OSError, Stranger):
            return None

    def _start(self, arguments: Sequence[str]) -> Announced:
        rendezvous = ""
        if self._launched.launcher == "torchrun":
            rendezvous = rendezvous_of(words_of_parent(), os.environ.get("PET_RDZV_ENDPOINT", ""))
        listener, address = listener_for(self._launched, rendezvous)
        with listener:
            announced = self._meeting.announce(address, listener.getsockname()[1])
            trusting = None if self._own else f"{self._launched.address}:{self._launched.port}"
            self.process = start_driver(self._launched, listener, announced.key, trusting, arguments)
        return announced

    def join(self) -> socket.socket | End:
        """Wait for the driver and connect to it; return the connection, or how the run has ended."""
        deadline = time.monotonic() + self._timeout
        reason = "none was announced"
        gone: str | None = None  # name of a driver that has ended without a result
        while time.monotonic() < deadline:
            if self.process is not None and (code := self.process.poll()) is not None:
                return End(code if code >= 0 else None)
            if self._launched.rank != 0:
                self._driver = self._announced()
            if self._driver is not None:
                end = self._meeting.ended(self._driver)
                if end is not None and (end.code is not None or self._launched.final):
                    return end
                if end is not None and gone != self._driver.name:
                    # It may belong to an earlier attempt, and the next driver may be announced soon.
                    gone = self._driver.name
                    deadline = min(deadline, time.monotonic() + _GONE_TIMEOUT)
                connected = self._connect(self._driver)
                if not isinstance(connected, str):
                    return connected
                reason = connected if end is None else "the announced driver ended without a result"
            time.sleep(_RETRY)
        if gone is not None:
            return End(None)
        at = "" if self._driver is None else f" at {self._driver.address} port {self._driver.port}"
        raise StartupFailure(f"no driver was found{at} within {self._timeout:g} s: {reason}")

    def _connect(self, driver: Announced) -> socket.socket | End | str:
        """Connect to the driver; return the connection, or how the run has ended, or why there is no connection yet."""
        try:
            return connect(driver)
        except ConnectionRefusedError as error:
            if self._launched.rank == 0 and self.process is None:
                return End(None)  # it ran a moment ago, and only this agent could start another
            return str(error)
        except (OSError, Stranger) as error:
            return str(error)

    def _announced(self) -> Announced | None:
        try:
            return self._meeting.driver()
        except WrongKey as error:
            # Make the driver warn about the other key, because its user may see only the terminal of rank 0.
            claimed = self._meeting.claimed()
            if claimed is not None and self._own is not None:
                try:
                    with socket.create_connection(claimed, _KNOCK_TIMEOUT) as connection:
                        present(connection, self._own, _KNOCK_TIMEOUT)
                except (OSError, OverflowError, ValueError, Stranger):
                    pass  # there is no driver at the announced address
            raise Refused(
                f"the driver {error} than the one in {self._own.source if self._own else 'the store'}: the hosts do "
                f"not share that file, or somebody else has written to the launcher's store; {REMEDY}"
            ) from None
        except Stranger as error:
            raise Refused(f"the driver {error}: start all processes of a run with the same options") from None

    def note_end(self, code: int | None) -> None:
        """Note in the store, for late agents, how the run ended; `code` is None if the driver ended without one."""
        if self._launched.rank == 0 and self._driver is not None:
            with contextlib.suppress(RuntimeError):  # if the launcher has closed its store
                self._meeting.end(self._driver, code)


NO_DRIVER = 70  # exit code of an agent whose driver is missing, or ended without a result
MISUSE = 4  # Exit code of an agent that must not join. pytest uses the same code for a wrong command line.
_LEAST_TIMEOUT = 60.0  # a lower limit, because the agents of a run may start a minute apart
_SEND_TIMEOUT = 10.0  # seconds: a driver that reads nothing for so long is lost
_END_TIMEOUT = 15.0  # seconds for the driver to finish its report
_METHODS = frozenset(
    {"mark_output", "output", "ask_for_stacks", "stacks", "last_words", "record_bytes"}
    | {"replaced_by", "runnable", "kill", "close"}
)


def main(
    launched: LaunchedProcess,
    arguments: Sequence[str],
    preload: Sequence[str],
    simulate: str | None,
    timeout: float,
    key: Callable[[], Key | None],
) -> int:
    """Run the agent of the process `launched` until the run is over, and return its exit code.
    `arguments`: command line of the driver, which the agent of rank 0 starts. `timeout`: seconds to wait for a driver.
    `key`: returns the user's key, None with --trust-network; raises `UnusableKey`."""
    parent = os.getppid()
    if launched.launcher == "torchrun":
        child_processes.end_with_parent()
        if os.getppid() != parent:  # it has ended already
            return NO_DRIVER
    # Until the agent has a driver, Ctrl-C ends it at once, even while it waits for the store. Its fork server follows.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = launched_process.of_earlier_attempt(os.environ)
    if code is not None:
        launched_process.leave(code, launched, os.environ)
        return launched_process.share_of(code, launched)
    launcher = LocalLauncher(preload, simulate)
    launcher.start()  # imports torch in parallel with this process
    run: JoinedRun | None = None
    try:
        try:
            run = JoinedRun(launched, key(), arguments, max(timeout, _LEAST_TIMEOUT))
            joined = run.join()
        except (UnusableKey, Refused) as refusal:
            return _leave_early(launched, str(refusal), MISUSE)
        except (StartupFailure, RuntimeError, OSError) as failure:  # RuntimeError: torch's store
            return _leave_early(launched, str(failure), NO_DRIVER)
        code = joined.code if isinstance(joined, End) else Agent(joined, launcher, launched, run.driver).serve()
        run.note_end(code)
    finally:
        launcher.close()
    if run.process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(_END_TIMEOUT)
    if code is None:
        return _leave_early(launched, _end_of(run.process), NO_DRIVER)
    launched_process.leave(code, launched, os.environ)
    return launched_process.share_of(code, launched)


def _leave_early(launched: LaunchedProcess, reason: str, code: int) -> int:
    print(f"mgpu-check: rank {launched.rank} on {socket.gethostname()}: {reason}", file=sys.stderr)
    return code


def _end_of(driver: subprocess.Popen[bytes] | None) -> str:
    if driver is None or driver.poll() is None:
        return "the driver is gone without a result"
    return f"the driver ended without a result, by {describe_exit(driver.returncode)}"


class _Left(Exception):
    """The launcher has asked this process to end."""


class Agent:
    """Runs the processes of this host for the driver that it has joined.
    `main` makes one in a launched process, once it has a connection to the driver. `serve` forks and kills ranks as the
    driver asks, and returns when the run is over, the driver is lost, or the launcher ends this process."""

    def __init__(
        self, connection: socket.socket, launcher: LocalLauncher, launched: LaunchedProcess, driver: Announced
    ) -> None:
        self.connection, self.launcher, self.launched, self.driver = connection, launcher, launched, driver
        self.lines = Lines()
        self.processes: dict[int, Process] = {}
        self.ended: set[int] = set()
        tune(connection, control=True)
        connection.settimeout(_SEND_TIMEOUT)

    def serve(self) -> int | None:
        """Serve the driver until the run is over, and return its exit code; None if the driver ended without one."""
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
        import torch

        of_launcher = ("rank", "local_rank", "local_size", "node", "launcher", "final", "address", "port")
        return {
            **{name: getattr(self.launched, name) for name in of_launcher},
            "host": socket.gethostname(),
            "boot": boot_id(),
            "devices": torch.cuda.device_count(),
            "versions": versions(),
        }

    def say(self, **message: Any) -> None:
        self.connection.sendall(line(message))

    def hear(self) -> None:
        data = self.connection.recv(1 << 16)
        if not data:
            raise EOFError
        self.lines.feed(data)

    def step(self, wake: socket.socket) -> int | None:
        """Wait for the next event and handle it; return the exit code if it ended the run, else None."""
        with selectors.PollSelector() as selector:
            for descriptor in (self.connection.fileno(), wake.fileno(), *self.launcher.waitables()):
                selector.register(descriptor, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select()}
        if wake.fileno() in ready:
            self.signals(wake.recv(4096))
        self.launcher.collect()
        if self.connection.fileno() in ready:
            self.hear()
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
        """End because the launcher asked for it; rank 0 of a final attempt waits for the driver's result first.
        Returns the exit code of the run, None if the driver ended without a result. Other agents raise `SystemExit`."""
        with contextlib.suppress(OSError):
            self.say(event="leaving")
        self.launcher.close()
        if self.launched.rank != 0 or not self.launched.final:
            raise SystemExit(128 + signal.SIGTERM)
        self.connection.settimeout(_END_TIMEOUT)
        with contextlib.suppress(OSError, EOFError, ValueError):
            while (message := self.lines.next()) is None or message["do"] != "end":
                if message is None:
                    self.hear()
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
        """Fork a process that has its own connection to the driver, and report to the driver whether it started."""
        try:
            connection = connect(self.driver, attempts=3)
            try:
                tune(connection, control=False)
                connection.sendall(line({"launch": number, "rank": self.launched.rank}))
                connection.settimeout(None)
                mine, unused_end = socket.socketpair()
                unused_end.close()
                self.processes[number] = self.launcher.fork(mine, connection)
            finally:
                connection.close()
        except (OSError, Stranger, StartupFailure) as error:
            self.say(event="failed", id=number, text=str(error))
        else:
            self.say(event="launched", id=number, pid=self.processes[number].pid)
