"""Start processes of the pool: a `Launcher`, and the one for this machine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import IO, Any, Protocol

from mgpu_check.devices.placement import Slot
from mgpu_check.engine import hash_seeds
from mgpu_check.engine.forkserver import END, FILES, FORK
from mgpu_check.engine.process import Process, halted
from mgpu_check.errors import StartupFailure
from mgpu_check.processes.channel import Channel
from mgpu_check.processes.clock import Clock
from mgpu_check.processes.leftovers import MARK, clear
from mgpu_check.processes.protocol import CallContext
from mgpu_check.processes.python_path import with_this_package
from mgpu_check.processes.record import SIZE
from mgpu_check.processes.scratch import Scratch
from mgpu_check.processes.stacks import HALTED

__all__ = ["PRELOAD", "Launcher", "LocalLauncher"]

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # DistributedDataParallel imports it when it is first built, for more than a second
    "mgpu_check.torch_hooks.collectives:install",  # before anyone takes the functions by name
    "mgpu_check.rank_side.worker",
)

SIMULATION = ("mgpu_check.simulated.collectives:record", "mgpu_check.simulated")
PREPARED = ("mgpu_check.simulated:prepare",)  # on a node that hides the real devices

_GLANCE = 0.5  # seconds after which one who does not answer is looked at
_START_TIMEOUT = 300.0  # importing torch from a cold network disk takes minutes


_started: weakref.WeakSet[LocalLauncher] = weakref.WeakSet()


@contextlib.contextmanager
def _making_files() -> Iterator[None]:
    """Say what to do where temporary files cannot be made."""
    try:
        yield
    except OSError as error:
        raise StartupFailure(
            f"the temporary files of ranks cannot be made in {tempfile.gettempdir()}: {os.strerror(error.errno or 0)}. "
            "Make room there, or name another directory by the environment variable TMPDIR."
        ) from error


def _release_all() -> None:
    for launcher in _started:
        launcher._release()


os.register_at_fork(after_in_child=_release_all)


class Launcher(Protocol):
    """Starts processes that run `mgpu_check.rank_side.worker.main`, and tells how they end."""

    def start(self) -> None:
        """Begin to come up, without waiting for it."""

    def launch(self, slots: Sequence[Slot], seeds_apart: bool = False) -> list[Process]:
        """Launch a new process, connected, for each of `slots`; with different hash seeds where `seeds_apart`."""

    def store(self, name: str) -> str:
        """Return the address of a rendezvous that has not been used yet, for a world called `name`: see
        `RankSpec.store`.
        """

    def host_name(self, host: int) -> str:
        """Return the name of a host in reports; empty where there is one only."""

    def call_context(self, here: CallContext) -> CallContext:
        """Return what ranks are told of the context of calls in this process."""

    def losses(self) -> list[str]:
        """Return what became of agents that are lost, where no failure has told it yet; nothing on one machine."""

    def binding(self, slot: Slot, here: Sequence[Slot]) -> tuple[int, int]:
        """Return the index of a slot's real device as its process sees it, and how many it sees, if those of `here` are
        meant.
        """

    def waitables(self) -> list[int]:
        """Return file descriptors that are readable when a process has ended; then call `collect`."""

    def collect(self) -> None:
        """Record the exit codes that have arrived in their `Process`."""

    def ending(self) -> list[int]:
        """Return the processes that were killed, and are not gone yet, as far as others wait for their devices."""

    def close(self) -> None:
        """End every process, and what they started."""


class LocalLauncher:
    """Launcher of this machine: forks processes from a fork server that has imported torch."""

    def __init__(self, preload: Sequence[str] = (), simulate: str | None = None, hash_seed: str = "") -> None:
        """Begin without a fork server.

        Args:
            preload: modules that the fork server imports besides torch.
            simulate: the device that computes for the simulated node that the processes will enter, of which the fork
                server does what they can share; None where they use real devices.
            hash_seed: of the fork server, unless the user gives one to all; empty where it draws its own.
        """
        shared = (*(SIMULATION if simulate is not None else ()), *(PREPARED if simulate == "cpu" else ()))
        self._preload = (*PRELOAD, *shared, *preload)
        self._asked, self._simulate, self._hash_seed = preload, simulate, hash_seed
        self._second: LocalLauncher | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._log: IO[bytes] | None = None
        self._lines = b""
        self._ready = False
        self._processes: dict[int, Process] = {}
        self._directory: Scratch | None = None

    def start(self) -> None:
        if self._server is not None:
            return
        with contextlib.ExitStack() as undo, _making_files():
            undo.callback(self._forget)
            self._log = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as the server
            self._directory = Scratch.new("ranks")  # the server removes it if this process cannot
            undo.pop_all()
        ours, theirs = socket.socketpair()
        environment, restore = hash_seeds.of_server(os.environ, self._hash_seed)
        code = with_this_package(f"{restore}from mgpu_check.engine import forkserver as f; f.main(sys.argv[1:])")
        with theirs:
            self._server = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-c", code),
                    *(str(theirs.fileno()), str(os.getpid()), str(self._directory.path)),
                    *self._preload,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**environment, MARK: str(self._directory.path)},
                start_new_session=True,  # the terminal's Ctrl-C is for pytest, which then ends the server
            )
        self._control = ours
        _started.add(self)

    def store(self, name: str) -> str:
        self.start()
        assert self._directory is not None
        return (self._directory.path / name).as_uri()

    def host_name(self, host: int) -> str:
        return ""

    def call_context(self, here: CallContext) -> CallContext:
        return here

    def losses(self) -> list[str]:
        return []

    def binding(self, slot: Slot, here: Sequence[Slot]) -> tuple[int, int]:
        return here.index(slot), len(here)

    def launch(self, slots: Sequence[Slot], seeds_apart: bool = False) -> list[Process]:
        launched: list[Process] = []
        try:
            for number, _ in enumerate(slots):
                server = self._with_second_seed() if seeds_apart and number % 2 else self
                launched.append(server.fork(*socket.socketpair()))
        except BaseException:
            for process in launched:
                process.kill()
                process.close()
            raise
        return launched

    def _with_second_seed(self) -> LocalLauncher:
        """Return the launcher of another fork server, with another hash seed: the ranks of one server have one."""
        if self._second is None:
            self._second = LocalLauncher(self._asked, self._simulate, hash_seeds.SECOND)
            self._second.start()
        return self._second

    def fork(self, ours: socket.socket, theirs: socket.socket) -> Process:
        """Fork a new process that is connected by `theirs`, and held here by `ours`."""
        with contextlib.ExitStack() as undo, theirs:
            undo.enter_context(ours)
            self.start()
            self._await_ready()
            assert self._control is not None
            with _making_files():
                files = [undo.enter_context(tempfile.TemporaryFile(buffering=0)) for _ in range(FILES)]
                os.posix_fallocate(files[-1].fileno(), 0, SIZE)  # ranks map it: a full disk would be SIGBUS there
            for file in files:
                # Several processes may write, and `Process.mark_output` truncates.
                fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
            try:
                socket.send_fds(self._control, [FORK], [theirs.fileno(), *(file.fileno() for file in files)])
            except OSError:
                raise self._lost() from None
            try:
                message = self._next_message(_START_TIMEOUT, wanted="forked")
            except BaseException:
                if self._server is not None:
                    self._lost()  # its answer may still come, and would be taken for that to the next request
                raise
            if message["pid"] is None:
                raise StartupFailure(
                    f"a process for a rank was refused by the operating system: {message['refused']}. Raise the limit "
                    "that is reached, end other processes, or use fewer ranks."
                )
            undo.pop_all()
        process = Process(message["pid"], Channel(ours), *files)
        self._processes[process.pid] = process
        return process

    def waitables(self) -> list[int]:
        # What it says before it is ready is for `fork`, which waits for that.
        own = [self._control.fileno()] if self._ready and self._control is not None else []
        return own + (self._second.waitables() if self._second is not None else [])

    def collect(self) -> None:
        try:
            while self._ready and self._control is not None and select.select([self._control], [], [], 0)[0]:
                self._receive()
        except StartupFailure:
            pass  # the server is gone, and the ranks with it: their connections tell; the next launch starts a new one
        if self._second is not None:
            self._second.collect()

    def ending(self) -> list[int]:
        own = [process.pid for process in self._processes.values() if process.killed]
        return own + (self._second.ending() if self._second is not None else [])

    def close(self) -> None:
        if self._second is not None:
            self._second.close()
        if self._server is None or self._control is None:
            return
        for process in self._processes.values():
            process.kill()
        # Not closed only: a process that was forked from this one may hold it, too.
        with contextlib.suppress(OSError):
            self._control.send(END)
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._server.wait(5.0 if self._ready and not halted(self._server.pid) else 0.0)
        except subprocess.TimeoutExpired:
            # It still imports, and has no children yet; or it is stuck, and its children die with it.
            self._server.kill()
            self._server.wait()
        if self._server.returncode != 0:
            self._clear()
        self._forget()

    def _clear(self) -> None:
        """Clear up in place of the server."""
        if self._directory is not None:
            clear(str(self._directory.path))

    def _forget(self) -> None:
        self._processes.clear()
        if self._directory is not None:
            self._directory.remove()
            self._directory = None
        if self._log is not None:
            self._log.close()
        self._server = self._control = self._log = None
        self._ready = False
        self._lines = b""

    def _lost(self) -> StartupFailure:
        """Let the next launch start another server: this one has ended. Return what to raise meanwhile."""
        how = f"the fork server ended: {self._end_of_server()}"
        failure = StartupFailure(f"{how}\n{self._log_text()}")
        for process in self._processes.values():  # they end with it, and what they started does not
            process.kill()
            process.exit_code, process.server_end = -signal.SIGKILL, how
        if self._control is not None:
            self._control.close()
        if self._server is not None and self._server.poll() is None:
            self._server.kill()
            self._server.wait()
        self._clear()
        self._forget()
        return failure

    def _release(self) -> None:
        """Hold nothing, in a process that was forked from this one, by which the server knows that this one lives."""
        if self._control is not None:
            self._control.close()
        for process in self._processes.values():
            process.connection.close()

    def _await_ready(self) -> None:
        if not self._ready:
            self._next_message(_START_TIMEOUT, wanted="ready")
            self._ready = True

    def _next_message(self, timeout: float, wanted: str) -> dict[str, Any]:
        """Wait for the message `wanted`; take exits that come before it into account."""
        deadline = Clock.now() + timeout
        while True:
            message = self._pop()
            if message is None:
                assert self._control is not None and self._server is not None
                if select.select([self._control], [], [], min(_GLANCE, Clock.until(deadline)))[0]:
                    self._receive(take=False)
                elif halted(self._server.pid):
                    raise StartupFailure(f"the fork server does not run: it was {HALTED}\n{self._log_text()}")
                elif Clock.now() > deadline:
                    raise StartupFailure(f"the fork server did not answer within {timeout:.0f} s:\n{self._log_text()}")
            elif message["event"] == wanted:
                return message
            elif message["event"] == "failed":
                raise StartupFailure(
                    f"the fork server could not import torch: {message['headline']}\n{message['text']}"
                )
            else:
                self._note(message)

    def _receive(self, take: bool = True) -> None:
        assert self._control is not None
        data = self._control.recv(65536)
        if not data:
            raise self._lost()
        self._lines += data
        while take and (message := self._pop()) is not None:
            self._note(message)

    def _pop(self) -> dict[str, Any] | None:
        line, newline, rest = self._lines.partition(b"\n")
        if not newline:
            return None
        self._lines = rest
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        if message["event"] == "exit":
            process = self._processes.pop(message["pid"], None)
            if process is not None:
                process.exit_code = message["code"]

    def _end_of_server(self) -> str:
        assert self._server is not None
        try:
            code = self._server.wait(1.0)
        except subprocess.TimeoutExpired:
            return "its socket closed"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _log_text(self) -> str:
        assert self._log is not None
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 20_000, max(0, size - 20_000)).decode(errors="replace")
