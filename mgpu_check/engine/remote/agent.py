"""An agent: a launched process that starts ranks as its children and serves the driver."""

from __future__ import annotations

import base64
import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mgpu_check.engine.launcher import LocalLauncher
from mgpu_check.engine.process import Process, describe_exit
from mgpu_check.engine.remote import exit_codes
from mgpu_check.engine.remote.credentials import Key, Stranger
from mgpu_check.engine.remote.joining import JoinedRun, Refused, connect
from mgpu_check.engine.remote.keyfile import UnusableKey
from mgpu_check.engine.remote.lines import Lines, line, shut, tune
from mgpu_check.engine.remote.meeting import Announced, End
from mgpu_check.engine.remote.variables import LaunchedProcess
from mgpu_check.engine.remote.versions import versions
from mgpu_check.errors import StartupFailure
from mgpu_check.processes import prctl
from mgpu_check.processes.machine import boot_id

NO_DRIVER = 70
"""Exit code of an agent whose driver is missing, or ended without a result."""

MISUSE = 4
"""Exit code of an agent that must not join. pytest uses the same code for a wrong command line."""

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

    Args:
        arguments: command line of the driver, which the agent of rank 0 starts.
        timeout: seconds to wait for a driver.
        key: returns the user's key, None with --trust-network; raises `UnusableKey`.
    """
    if launched.launcher == "torchrun" and not _bound_to_parent():
        return NO_DRIVER
    # Until the agent has a driver, Ctrl-C ends it at once, even while it waits for the store. Its fork server follows.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = exit_codes.of_earlier_attempt(os.environ)
    if code is not None:
        exit_codes.leave(code, launched, os.environ)
        return exit_codes.share_of(code, launched)
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
    exit_codes.leave(code, launched, os.environ)
    return exit_codes.share_of(code, launched)


def _leave_early(launched: LaunchedProcess, why: str, code: int) -> int:
    print(f"mgpu-check: rank {launched.rank} on {socket.gethostname()}: {why}", file=sys.stderr)
    return code


def _bound_to_parent() -> bool:
    """Make this process end with its parent, and return False if the parent has ended already."""
    parent = os.getppid()
    prctl.end_with_parent()
    return os.getppid() == parent


def _end_of(driver: subprocess.Popen[bytes] | None) -> str:
    if driver is None or driver.poll() is None:
        return "the driver is gone without a result"
    return f"the driver ended without a result, by {describe_exit(driver.returncode)}"


class _Left(Exception):
    """The launcher has asked this process to end."""


class Agent:
    """Runs the processes of this host for the driver that it has joined."""

    def __init__(
        self, connection: socket.socket, launcher: LocalLauncher, launched: LaunchedProcess, driver: Announced
    ) -> None:
        self.connection = connection
        self.launcher = launcher
        self.launched = launched
        self.driver = driver
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

        launched = self.launched
        return {
            "rank": launched.rank,
            "local_rank": launched.local_rank,
            "local_size": launched.local_size,
            "node": launched.node,
            "host": socket.gethostname(),
            "boot": boot_id(),
            "launcher": launched.launcher,
            "final": launched.final,
            "address": launched.address,
            "port": launched.port,
            "devices": torch.cuda.device_count(),
            "versions": versions(),
        }

    def say(self, **message: Any) -> None:
        self.connection.sendall(line(message))

    def step(self, wake: socket.socket) -> int | None:
        """Wait for the next event and handle it; return the exit code if it ended the run, else None."""
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
        """End because the launcher asked for it; rank 0 of a final attempt waits for the driver's result first.

        Returns:
            The exit code of the run, None if the driver ended without a result. Other agents raise `SystemExit`.
        """
        with contextlib.suppress(OSError):
            self.say(event="leaving")
        self.launcher.close()
        if self.launched.rank != 0 or not self.launched.final:
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
        """Fork a process that has its own connection to the driver, and report to the driver whether it started."""
        try:
            connection = connect(self.driver, attempts=3)
            try:
                tune(connection, control=False)
                connection.sendall(line({"launch": number, "rank": self.launched.rank}))
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
