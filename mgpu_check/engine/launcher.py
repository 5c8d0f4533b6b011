"""Start the processes of the pool: the protocol `Launcher`, its implementation for this machine, and the files that
it opens for ranks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import resource
import select
import signal
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import IO, Any, Protocol

from mgpu_check.devices.inventory import Slot
from mgpu_check.engine.forkserver import END, FILES, FORK
from mgpu_check.engine.keeper_socket import KeptServer, attach
from mgpu_check.engine.process import Process, halted
from mgpu_check.errors import NO_IMPORT, StartupFailure
from mgpu_check.processes import environments
from mgpu_check.processes.channel import CallContext, Channel, Clock
from mgpu_check.processes.child_processes import MARK, clear
from mgpu_check.processes.collective_records import SIZE
from mgpu_check.processes.scratch import Scratch
from mgpu_check.processes.tracebacks import HALTED

_OF_TEMPORARY_FILES = "Make room in {directory}, or name another directory by the environment variable TMPDIR."
_REMEDIES = {
    errno.EMFILE: "Raise this limit of the shell, which is {soft} now: ulimit -n {more}.",
    errno.ENFILE: "Close files of other processes, or raise the limit of the machine: sysctl fs.file-max.",
    errno.EAGAIN: "End other processes, or raise their limit: ulimit -u.",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT), _OF_TEMPORARY_FILES),
}


@contextlib.contextmanager
def opening_files() -> Iterator[None]:
    """Raise a `StartupFailure` with the remedy for an error of the operating system."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        remedy = _REMEDIES[error.errno].format(soft=soft, more=2 * soft, directory=tempfile.gettempdir())
        raise StartupFailure(f"the files of ranks cannot be opened: {os.strerror(error.errno)}. {remedy}") from error


PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # the first DistributedDataParallel imports it, which takes more than a second
    "mgpu_check.torch_hooks.collectives:install",  # before any module imports the functions by name
    "mgpu_check.engine.rank_side.worker",
)

SIMULATION = ("mgpu_check.simulated.distributed.collectives:record", "mgpu_check.simulated")
PREPARED = ("mgpu_check.simulated:prepare",)  # on a node that hides the real devices
_GLANCE = 0.5  # seconds between checks whether a silent fork server was halted
_START_TIMEOUT = 300.0  # importing torch from a cold network disk takes minutes


_started: weakref.WeakSet[LocalLauncher] = weakref.WeakSet()


def _release_all() -> None:
    for launcher in _started:
        launcher._release()


os.register_at_fork(after_in_child=_release_all)


class Launcher(Protocol):
    """Starts processes that run `mgpu_check.engine.rank_side.worker.main`, and reports how they end."""

    def start(self) -> None:
        """Begin to start up in the background."""

    def launch(self, slots: Sequence[Slot], seeds_apart: bool = False) -> list[Process]:
        """Launch a new, connected process for each of `slots`."""

    def store(self, name: str) -> str:
        """Return the address of an unused rendezvous for a world called `name`: see `RankSpec.store`."""

    def host_name(self, host: int) -> str:
        """Return the name of a host in reports; empty on a single host."""
        return ""

    def call_context(self, context: CallContext) -> CallContext:
        """Return the call context to send to ranks, given that of this process."""
        return context

    def losses(self) -> list[str]:
        """Describe the lost agents that no failure has reported yet; empty on one machine."""
        return []

    def binding(self, slot: Slot, local_slots: Sequence[Slot]) -> tuple[int, int]:
        """Return the index of a slot's real device in its process, which sees `local_slots`, and their number."""

    def waitables(self) -> list[int]:
        """Return file descriptors that become readable when a process has ended; then call `collect`."""

    def collect(self) -> None:
        """Record the exit codes that have arrived in their `Process`."""

    def ending(self) -> list[int]:
        """Return the killed processes that have not ended yet and so may still hold their devices."""

    def close(self) -> None:
        """End every process, and the processes that they started."""


class LocalLauncher(Launcher):
    """Launches processes on this machine, by a fork server that has imported torch.
    `GpuSession` makes one for its pool, an agent one for itself, and `Adapting` one for test harnesses. The fork server
    starts with `start`, or with the first process; if it dies, the next launch starts another. `close` ends it."""

    def __init__(
        self,
        preload: Sequence[str] = (),
        simulate: str | None = None,
        hash_seed: str = "",
        *,
        keep: float | None = None,
        unshared: Sequence[str] = (),
    ) -> None:
        """Create the launcher. The fork server starts with `start`.

        `simulate`: backing device of the simulated node, which the fork server prepares as far as processes can share
        it; None on real devices. `hash_seed`: of the fork server, unless the user's environment sets one; empty to let
        the server draw its own. `keep`: seconds that a keeper holds the imports for later runs; None for no keeper. See
        `keeper_socket`. `unshared`: further modules that the fork server imports. A keeper does not import them,
        because they differ between runs.
        """
        shared = (*(SIMULATION if simulate is not None else ()), *(PREPARED if simulate == "cpu" else ()))
        self._preload, self._more = (*PRELOAD, *shared, *preload), tuple(unshared)
        self._another = functools.partial(LocalLauncher, preload, simulate, keep=keep, unshared=unshared)
        self._hash_seed, self._keep, self._simulated = hash_seed, keep, simulate is not None
        self._second: LocalLauncher | None = None
        self._server: subprocess.Popen[bytes] | KeptServer | None = None
        self._control: socket.socket | None = None
        self._log: IO[bytes] | None = None
        self._lines = b""
        self._ready = False
        self._processes: dict[int, Process] = {}
        self._directory: Scratch | None = None

    def start(self) -> None:
        if self._server is not None:
            return
        with opening_files(), contextlib.ExitStack() as undo:
            undo.callback(self._forget)
            self._log = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the server runs
            self._directory = Scratch.new("ranks")  # the server removes it if this process cannot
            self._control, theirs = socket.socketpair()
            with theirs:
                self._server = self._new_server(theirs.fileno(), self._log, str(self._directory.path))
            undo.pop_all()
        _started.add(self)

    def _new_server(self, control: int, log: IO[bytes], directory: str) -> subprocess.Popen[bytes] | KeptServer:
        if self._keep is not None:
            files = control, log.fileno()
            return attach(*self.keeper(), files, keep=self._keep, directory=directory, preload=self._more)
        interpreter, environment = self._interpreter("forkserver")
        return subprocess.Popen(
            [*interpreter, str(control), str(os.getpid()), directory, *self._preload, *self._more],
            pass_fds=[control],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environment, MARK: directory},
            start_new_session=True,  # Ctrl-C must reach only pytest, which then ends the server
        )

    def keeper(self) -> tuple[list[str], Sequence[str], dict[str, str]]:
        interpreter, environment = self._interpreter("keeper")
        return interpreter, self._preload, environment

    def _interpreter(self, program: str) -> tuple[list[str], dict[str, str]]:
        interpreter, environment = environments.interpreter(program, self._hash_seed)
        if self._simulated:
            # OpenMP reads this when torch is imported; ranks do not see it. Spinning threads would slow other ranks.
            environment.setdefault("OMP_WAIT_POLICY", "passive")
        return interpreter, environment

    def store(self, name: str) -> str:
        self.start()
        assert self._directory is not None
        return (self._directory.path / name).as_uri()

    def binding(self, slot: Slot, local_slots: Sequence[Slot]) -> tuple[int, int]:
        return local_slots.index(slot), len(local_slots)

    def launch(self, slots: Sequence[Slot], seeds_apart: bool = False) -> list[Process]:
        launched: list[Process] = []
        try:
            for number, _ in enumerate(slots):
                server = self._with_second_seed() if seeds_apart and number % 2 else self
                with opening_files():
                    pair = socket.socketpair()
                launched.append(server.fork(*pair))
        except BaseException:
            for process in launched:
                process.kill()
                process.close()
            raise
        return launched

    def _with_second_seed(self) -> LocalLauncher:
        if self._second is None:
            self._second = self._another(hash_seed=environments.SECOND)
            self._second.start()
        return self._second

    def fork(self, ours: socket.socket, theirs: socket.socket) -> Process:
        """Fork a new process that gets the socket `theirs` and is reached through `ours`."""
        with contextlib.ExitStack() as undo, theirs:
            undo.enter_context(ours)
            self.start()
            if not self._ready:
                self._next_message(_START_TIMEOUT, wanted="ready")
                self._ready = True
            assert self._control is not None
            with opening_files():
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
                    self._lost()  # a late answer would be mistaken for the answer to the next request
                raise
            if message["pid"] is None:
                raise StartupFailure(
                    f"the operating system refused a process for a rank: {message['refused']}. Raise the limit that "
                    "was reached, end other processes, or use fewer ranks."
                )
            undo.pop_all()
        process = Process(message["pid"], Channel(ours), *files)
        self._processes[process.pid] = process
        return process

    def waitables(self) -> list[int]:
        # Until the server is ready, `fork` reads its messages.
        own = [self._control.fileno()] if self._ready and self._control is not None else []
        return own + (self._second.waitables() if self._second is not None else [])

    def collect(self) -> None:
        try:
            while self._ready and self._control is not None and select.select([self._control], [], [], 0)[0]:
                self._receive()
        except StartupFailure:
            # The server and its ranks are gone: their connections have closed, and the next launch starts a server.
            pass
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
        # Closing is not enough: a process forked from this one may hold the socket, too.
        with contextlib.suppress(OSError):
            self._control.send(END)
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._server.wait(5.0 if self._ready and not halted(self._server.pid) else 0.0)
        except subprocess.TimeoutExpired:
            # The server still imports and has no children yet, or it is stuck and its children die with it.
            self._server.kill()
            self._server.wait()
        if self._server.returncode != 0:
            self._clear()
        self._forget()

    def _clear(self) -> None:
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
        """Reset after the fork server has ended, so that the next launch starts another; return the error to raise."""
        how = f"the fork server ended: {self._end_of_server()}"
        failure = StartupFailure(f"{how}\n{self._log_text()}")
        for process in self._processes.values():  # ranks end with the server, but their children do not
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
        """Close the connections in a forked copy of this process: the server and ranks must notice its end."""
        if self._control is not None:
            self._control.close()
        for process in self._processes.values():
            process.connection.close()

    def _next_message(self, timeout: float, wanted: str) -> dict[str, Any]:
        """Wait for the message `wanted`, and record the exits that arrive before it."""
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
                failure = StartupFailure(f"ranks cannot import a module: {message['headline']}\n{message['text']}")
                failure.cause = NO_IMPORT
                raise failure
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
        return json.loads(line)

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
        if isinstance(self._server, KeptServer) and self._server.end_of_keeper is not None:
            return self._server.end_of_keeper
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _log_text(self) -> str:
        assert self._log is not None
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 20_000, max(0, size - 20_000)).decode(errors="replace")
