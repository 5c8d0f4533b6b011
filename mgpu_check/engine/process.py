"""A handle in the pytest process for one process of the pool."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from typing import IO

from mgpu_check.processes.channel import Channel, Clock
from mgpu_check.processes.child_processes import CONNECTION_LOST, held_back, name_and_state
from mgpu_check.processes.collective_records import SIZE, Record, parse
from mgpu_check.processes.scratch import kept
from mgpu_check.processes.tracebacks import HALTED, clean

STREAMS = ("stdout", "stderr", "log")
STACKS_TIMEOUT = 1.0  # seconds: a running process writes its stacks in milliseconds


class Process:
    """A process that runs `mgpu_check.engine.rank_side.worker.main`.
    A launcher makes one for each fork, and sets `exit_code` when it hears of the exit. The world that has it sends and
    receives through `connection`, reads its files, and ends it by `kill` and `close`."""

    on_this_host = True  # whether its files can be read without asking an agent
    # how the agent that held the process was lost; None if it was not, and always None on one machine
    lost: str | None = None
    server_end: str | None = None  # how the fork server ended, if the process ended with it
    killed: bool = False  # whether `kill` was called. The process may take a while to end.

    def __init__(self, pid: int, connection: Channel, *files: IO[bytes]) -> None:
        self.pid, self.connection = pid, connection
        # as in `subprocess`: None while no exit is known, and the negative signal number if a signal ended it
        self.exit_code: int | None = None
        *streams, self._stacks, self._record = files
        self._streams = dict(zip(STREAMS, streams, strict=True))
        self._command = _command(pid)

    def mark_output(self) -> None:
        """Let `output` start from here, and delete earlier output, because a run may be long."""
        for stream in self._streams.values():
            os.ftruncate(stream.fileno(), 0)  # the process appends, so it continues at the new end

    def await_mark(self) -> None:
        """Wait until `mark_output` has taken effect, if another machine does it: the next call may print."""

    def output(self, name: str) -> str:
        """Return the output to one of `STREAMS` since `mark_output`; of long output, the beginning and the end."""
        return kept(self._streams[name].fileno())

    def ask_for_stacks(self, signal_number: int) -> None:
        """Ask the process to write the stacks of its threads, which `stacks` returns."""
        self._stacks_start = os.fstat(self._stacks.fileno()).st_size
        self._stacks_signal = signal_number
        self._held_back = held_back(self.pid, signal_number)
        self._signal(signal_number)

    def stacks(self, timeout: float = STACKS_TIMEOUT) -> str:
        """Return the requested stacks once they are written; `HALTED` for a stopped process, "" for a silent one."""
        if self.halted():
            return HALTED
        deadline = Clock.now() + timeout
        size = self._stacks_start
        while True:
            Clock.sleep(0.005)
            now = os.fstat(self._stacks.fileno()).st_size
            written = now == size and now > self._stacks_start
            # A busy machine may take the processor from the process while it writes.
            if (written and held_back(self.pid, self._stacks_signal) <= self._held_back) or Clock.now() > deadline:
                break
            size = now
        return self._stacks_since(self._stacks_start)

    def last_words(self) -> str:
        return self._stacks_since(0)

    def _stacks_since(self, start: int) -> str:
        size = os.fstat(self._stacks.fileno()).st_size
        return clean(os.pread(self._stacks.fileno(), size - start, start).decode(errors="replace"))

    def record(self) -> Record:
        return parse(self.record_bytes())

    def record_bytes(self) -> bytes:
        return os.pread(self._record.fileno(), SIZE, 0)

    def cause(self) -> str:
        return self.server_end or describe_exit(self.exit_code)

    def replaced_by(self) -> str | None:
        """Return the command of the program that replaced this process by `exec`; None if it was not replaced."""
        command = _command(self.pid)
        return None if command == self._command else command

    def runnable(self) -> bool:
        return name_and_state(self.pid)[1] == "R"

    def halted(self) -> bool:
        return halted(self.pid)

    def kill(self) -> None:
        self.killed = True
        if self.exit_code is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                # The process does not lead a group yet, or has ended.
                self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def close(self) -> None:
        self.connection.close()
        self._stacks.close()
        self._record.close()
        for stream in self._streams.values():
            stream.close()


def describe_exit(code: int | None) -> str:
    """Describe an exit code in words: "exit code 3", "signal SIGSEGV"."""
    if code is None:
        return "unknown cause"
    if code == CONNECTION_LOST:
        return "its connection to the pytest process was closed"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def halted(pid: int) -> bool:
    return name_and_state(pid)[1] in ("T", "t")


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            return shlex.join(file.read().rstrip("\0").split("\0"))
    except OSError:
        return ""
