"""The fork server of a run that shares its imports with later runs: where the keeper listens, and how a run attaches.

A *keeper* is a process that has done the imports of a fork server, and outlives the run that started it. Each run
asks it for a fork server of its own, which ends with the run as any other does. So runs share modules, and nothing
else.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mgpu_check.errors import StartupFailure
from mgpu_check.processes.child_processes import kill
from mgpu_check.version import torch_version, version

NUMBER = struct.Struct("q")  # the keeper's answers: the id of the new fork server, and later its exit code
PEER = struct.Struct("3i")  # process, user and group of the other end of a socket, as SO_PEERCRED gives them

_LOCK = "lock"
_AFTER_KILL = 5.0  # seconds for the keeper to report the end of a killed fork server
_VOLATILE = frozenset(
    [
        *("_", "OLDPWD", "PWD", "SHLVL"),
        *("COLUMNS", "LINES", "STY", "TERM_SESSION_ID", "TMUX", "TMUX_PANE", "WINDOW", "WINDOWID"),
        *("SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "XDG_SESSION_ID"),
        *("INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID"),
    ]
)
"""Variables that differ between two runs of a user, and that no import reads."""
_VOLATILE_PREFIXES = ("MGPU_CHECK_", "PYTEST_")
_OF_STATUS = ("CapEff", "NoNewPrivs", "Seccomp:", "SigBlk", "SigIgn", "Umask")
_MEASURING = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")


class NotKept(StartupFailure):
    """Imports cannot be kept safely."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"--gpu-keep-warm: {reason}")


def obstacle(environment: Mapping[str, str]) -> str | None:
    """Return why a run in this environment must not share its imports; None if it may."""
    return "coverage measures every process" if any(map(environment.get, _MEASURING)) else None


def keeps_imports() -> bool:
    """Return whether a keeper can listen on this machine."""
    try:
        KeeperSocket("").close()
    except NotKept:
        return False
    return True


def key_of(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a digest of everything that imports depend on, and of everything that forked processes inherit."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    facts = {
        "command": command,
        "versions": (sys.version, version(), torch_version()),
        "directory": (os.getcwd(), *os.stat(".")[1:3]),  # a new one may have the path of one that was removed
        "environment": {
            name: value
            for name, value in environment.items()
            if name not in _VOLATILE and not name.startswith(_VOLATILE_PREFIXES)
        },
        "user": (os.getresuid(), os.getresgid(), sorted(os.getgroups())),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT_" in name},
        "scheduling": (os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))),
        "status": [line for line in status.splitlines() if line.startswith(_OF_STATUS)],
        "group": Path("/proc/self/cgroup").read_text(encoding="utf-8"),
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode(errors="surrogateescape")).hexdigest()[:32]


class KeeperSocket:
    """The socket of the keeper of a key, in a directory that only this user can enter."""

    def __init__(self, key: str) -> None:
        base = os.environ.get("XDG_RUNTIME_DIR", "")
        self.directory = Path(base if os.path.isdir(base) else tempfile.gettempdir(), f"mgpu-check-{os.geteuid()}")
        self.key = key
        self.path = self.directory / key
        self._opened = _opened(self.directory)

    def close(self) -> None:
        os.close(self._opened)

    def connected(self) -> socket.socket | None:
        """Return a connection to the keeper; None without a keeper."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._address)
        except OSError:
            connection.close()
            return None
        return connection

    def listening(self) -> socket.socket:
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._address)
        return listener

    @property
    def _address(self) -> str:
        # Addresses are short, and the directory stays the checked one.
        return f"/proc/self/fd/{self._opened}/{self.key}"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of the directory of a socket, under which sockets appear, disappear, and are connected to."""
    with _creating(lock := path.with_name(_LOCK)):
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


@contextlib.contextmanager
def _creating(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotKept(
            f"{path} cannot be created: {error.strerror}; set XDG_RUNTIME_DIR to a directory that you may write to, "
            "or omit the option"
        ) from None


def _opened(directory: Path) -> int:
    with _creating(directory), contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    try:
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise NotKept(f"{directory} is not a directory of this user: {error.strerror}; remove it") from None
    status = os.fstat(opened)
    problem = None
    if status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}, and this is user {os.geteuid()}; set XDG_RUNTIME_DIR to your own"
    elif mode := stat.S_IMODE(status.st_mode) & 0o077:
        problem = f"is open to other users (mode {mode:03o}); chmod 700 it, or remove it"
    if problem is not None:
        os.close(opened)
        raise NotKept(f"the directory {directory} {problem}")
    return opened


def peer(connection: socket.socket) -> tuple[int, int]:
    process, user, _ = PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    return process, user


def keeper_of(interpreter: Sequence[str], modules: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """Return the process id of the keeper that `attach` would ask; None without a keeper."""
    with contextlib.closing(KeeperSocket(key_of([*interpreter, *modules], environment))) as keeper:
        connection = keeper.connected()
        if connection is None:
            return None
        with connection:
            return peer(connection)[0]


class KeptServer:
    """A fork server that the keeper has forked: the part of `subprocess.Popen` that the launcher uses.
    `attach` makes one for `LocalLauncher`, which waits for it or kills it at the end of the run. The keeper reports its
    process id and its exit code over the connection."""

    def __init__(self, connection: socket.socket, log: Path) -> None:
        self._connection, self._log = connection, log  # to the keeper; its output
        self._pid = peer(connection)[0]
        self._forked = self._killed = False
        self.returncode: int | None = None
        # says that the keeper has ended before it forked, and what it has printed; None if it has forked
        self.end_of_keeper: str | None = None

    @property
    def pid(self) -> int:
        """Its process id; that of the keeper before the keeper has forked it."""
        self.poll()
        return self._pid

    def wait(self, timeout: float | None = None) -> int:
        limit = _AFTER_KILL if timeout is None and self._killed else timeout
        deadline = None if limit is None else time.monotonic() + limit
        while self.returncode is None:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._connection], [], [], remaining)[0]:
                if timeout is None:  # the keeper was stopped, and reports no end
                    self._end(-signal.SIGKILL)
                    break
                raise subprocess.TimeoutExpired("the fork server", timeout)
            try:
                data = self._connection.recv(NUMBER.size, socket.MSG_WAITALL)
            except ConnectionResetError:
                data = b""
            if len(data) < NUMBER.size:  # the keeper was killed and the exit code is lost, so expect the worst
                if self._forked:
                    kill([self._pid])
                else:
                    self.end_of_keeper = _end_with(self._log)
                self._end(-signal.SIGKILL)
            elif self._forked:
                self._end(NUMBER.unpack(data)[0])
            else:
                self._forked, self._pid = True, NUMBER.unpack(data)[0]
        assert self.returncode is not None
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def kill(self) -> None:
        if self.poll() is None and self._forked:
            kill([self._pid])
            self._killed = True
        elif self.returncode is None:  # the keeper still imports: the fork server will find its socket closed, and end
            self._end(-signal.SIGKILL)

    def _end(self, code: int) -> None:
        self.returncode = code
        self._connection.close()


def _end_with(log: Path) -> str:
    output = ""
    with contextlib.suppress(OSError):
        output = log.read_text(encoding="utf-8", errors="replace")[-20_000:]
    return f"the keeper ended during its imports. Its output:\n{output}"


def attach(
    interpreter: Sequence[str],
    modules: Sequence[str],
    environment: Mapping[str, str],
    files: tuple[int, int],
    *,
    keep: float,
    directory: str,
    preload: Sequence[str],
) -> KeptServer:
    """Ask the keeper of this environment for a fork server, and start a keeper if it is missing.
    `files`: the control socket and the log of the fork server. `keep`: seconds that the keeper stays without a run.
    `preload`: modules that the fork server imports, and the keeper does not."""
    run_request = {
        "keep": keep,
        "parent": os.getpid(),
        "run": directory,
        "preload": list(preload),
        "environment": dict(os.environ),
    }
    with (
        contextlib.closing(KeeperSocket(key_of([*interpreter, *modules], environment))) as keeper,
        open(os.memfd_create("request"), "wb", buffering=0) as request,
    ):
        request.write(json.dumps(run_request).encode())
        for _ in range(2):
            with locked(keeper.path):
                connection = keeper.connected() or _started(keeper, interpreter, modules, environment)
            if peer(connection)[1] != os.geteuid():
                connection.close()
                raise NotKept(f"another user listens at {keeper.path}; remove it, or omit the option")
            try:
                socket.send_fds(connection, [b"A"], [request.fileno(), *files])
            except OSError:
                connection.close()  # the keeper was killed meanwhile
            else:
                return KeptServer(connection, keeper.path.with_suffix(".log"))
    raise NotKept(f"omit the option, because {_end_with(keeper.path.with_suffix('.log'))}")


def _started(
    keeper: KeeperSocket, interpreter: Sequence[str], modules: Sequence[str], environment: Mapping[str, str]
) -> socket.socket:
    """Start a keeper, and return a connection to it, which it accepts when it has done its imports."""
    with contextlib.ExitStack() as opened:
        with _creating(keeper.path):
            listener = opened.enter_context(keeper.listening())
            log = opened.enter_context(open(keeper.path.with_suffix(".log"), "w+b"))
        starter = subprocess.run(
            [*interpreter, str(listener.fileno()), str(keeper.path), "", *modules],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(environment),
            start_new_session=True,
        )  # returns when the keeper listens, which is not its child
        connection = keeper.connected()
        if starter.returncode or connection is None:
            log.seek(0)
            raise NotKept(f"a keeper did not start; omit the option. Its output: {log.read().decode(errors='replace')}")
    return connection
