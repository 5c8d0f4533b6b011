"""The keeper: a process that has done the imports of a fork server, and forks one for each run that asks.

`keeper_socket` has what the processes of a run and the keeper say to each other.

It shares imports of torch and of this package only, never a module of the user, and touches no device. Before each fork
it compares the files of its modules with the disk. If a file has changed, it starts over: in the same process, or in a
new one while it has runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import site
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from mgpu_check.engine import forkserver
from mgpu_check.engine.keeper_socket import NUMBER, locked, peer
from mgpu_check.processes import child_processes
from mgpu_check.processes.child_processes import MARK, children_but_managers, kill

_PATIENCE = 5.0  # seconds for a run to send its request after it has connected

Stamp = tuple[int, int, int]


class ImportKeeper:
    """The loop over requests and ends of runs.
    `main` makes one in a process of its own, when a run with ``--gpu-keep-warm`` finds none. It forks a fork server for
    each run that connects. It ends when no run has been there for the time that the last one asked for."""

    def __init__(self, listener: socket.socket, path: Path, failure: dict[str, str] | None, began: int) -> None:
        self.listener, self.path, self.failure = listener, path, failure
        self.runs: dict[int, socket.socket] = {}
        self.heir = 0
        self.keep = 0.0
        self.end = time.monotonic() + _PATIENCE  # the run that has started this process is connecting
        self.stamps = {
            # Saved during the imports: which content was imported is unknown. A time in the future proves nothing.
            file: (0, 0, 0) if began <= stamp[0] <= time.time_ns() else stamp
            for file, stamp in _stamps().items()
        }
        self.own = _stamps([str(path)])
        self.wake_read, self.wake_write = os.pipe()
        for end in (self.wake_read, self.wake_write):
            os.set_blocking(end, False)

    def serve(self) -> None:
        """Fork on request, until no run has been there for the time that the last one asked for."""
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self.listener, selectors.EVENT_READ)
        selector.register(self.wake_read, selectors.EVENT_READ)
        while self.runs or (not self.heir and (time.monotonic() < self.end or not self.left())):
            for key, _ in selector.select(None if self.runs else min(3600.0, max(0.0, self.end - time.monotonic()))):
                if key.fileobj is self.listener:
                    self.accept()
                    if self.heir:
                        selector.unregister(self.listener)
                        self.listener.close()
                else:
                    os.read(self.wake_read, 4096)
            self.reap()

    def left(self) -> bool:
        """Remove the socket, unless a run has just connected, and return whether it is removed."""
        with locked(self.path):
            if select.select([self.listener], [], [], 0)[0]:
                return False
            if _stamps([str(self.path)]) == self.own:  # else it was removed, and another keeper may listen there
                self.path.unlink(missing_ok=True)
                self.path.with_suffix(".log").unlink(missing_ok=True)
            self.listener.close()
            return True

    def accept(self) -> None:
        if _stamps(self.stamps) != self.stamps:
            self.start_over()  # the run waits in the queue of the socket
            return
        connection, _ = self.listener.accept()
        connection.settimeout(_PATIENCE)
        files: list[int] = []
        with contextlib.suppress(OSError):
            if peer(connection)[1] == os.geteuid():
                _, files, _, _ = socket.recv_fds(connection, 1, 3)
        if len(files) != 3:  # it only looked whether there is a keeper
            connection.close()
            return
        connection.settimeout(None)
        with open(files[0], "rb") as request:
            request.seek(0)
            run_request = json.load(request)
        self.keep = float(run_request["keep"])
        with socket.socket(fileno=files[1]) as control, open(files[2], "wb") as log:
            if (failure := self.failure or self.fork(run_request, connection, control, log.fileno())) is not None:
                forkserver.ForkServer(control, run_request["run"]).tell(**failure)
                connection.close()
                self.end = time.monotonic()

    def fork(
        self, run_request: dict[str, Any], connection: socket.socket, control: socket.socket, log: int
    ) -> dict[str, str] | None:
        """Fork a fork server, and return the message that says why not; None if it is forked."""
        gate, tell = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            return {"event": "failed", "headline": str(error), "text": forkserver.limits()}
        else:
            if pid == 0:
                os.close(tell)
                os.read(gate, 1)  # until the run knows its process id
                os.close(gate)
                self.become_server(run_request, connection, control.detach(), log)
            self.runs[pid] = connection
            _tell(connection, pid)
            return None
        finally:
            os.close(gate)
            os.close(tell)

    def become_server(self, run_request: dict[str, Any], connection: socket.socket, control: int, log: int) -> NoReturn:
        """Be the fork server of a run, as if an interpreter had been started for it."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            for opened in (self.listener, connection, *self.runs.values()):
                opened.close()
            for end in (self.wake_read, self.wake_write):
                os.close(end)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            initial_environment = _environment()
            by_imports = {name: value for name, value in os.environ.items() if name not in initial_environment}
            os.environ.clear()
            os.environ.update({**by_imports, **run_request["environment"], MARK: run_request["run"]})
            forkserver.run(control, run_request["parent"], run_request["run"], run_request["preload"])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)

    def reap(self) -> None:
        """Report the fork servers that have ended, and kill what a killed one has left behind."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                connection = self.runs.pop(ended[0], None)
                if connection is not None:
                    _tell(connection, os.waitstatus_to_exitcode(ended[1]))
                    connection.close()
                    self.end = time.monotonic() + self.keep
        kill(pid for pid in children_but_managers() if pid not in self.runs and pid != self.heir)

    def start_over(self) -> None:
        """Run this program again, with the modules that are on the disk now; in a new process if runs need this one."""
        if self.runs and (heir := os.fork()):
            self.heir = heir
            return
        try:
            self.listener.set_inheritable(True)
            command = [*sys.orig_argv]
            command[-len(sys.argv) + 3] = "again"
            os.execve(sys.executable, command, _environment())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(NUMBER.pack(number))


def _environment() -> dict[str, str]:
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def _stamps(paths: Iterable[str] | None = None) -> dict[str, Stamp]:
    """Return what changes if a file is written or replaced, for the files of all modules, or for those given.
    A directory of packages changes when one is installed or removed."""
    if paths is None:
        modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
        files = [vars(module).get("__file__") for module in modules]
        own = [file for file in files if isinstance(file, str)]
        paths = [*own, *site.getsitepackages(), site.getusersitepackages()]
    stamps = {}
    for file in paths:
        with contextlib.suppress(OSError):
            status = os.stat(file)
            stamps[file] = status.st_mtime_ns, status.st_size, status.st_ino
    return stamps


def main(argv: Sequence[str]) -> None:
    """Leave the process that has started this one, import modules, and serve."""
    number, path, restarted, *modules = argv
    began = time.time_ns()
    listener = socket.socket(fileno=int(number))
    listener.set_inheritable(False)
    ready, done = os.pipe()
    if not restarted and os.fork():
        os.close(done)
        os.read(ready, 1)
        os._exit(0)
    listener.listen()  # here, so that runs see the id of this process
    os.close(ready)
    os.close(done)
    child_processes.adopt_orphans()
    ImportKeeper(listener, Path(path), forkserver.import_all(modules), began).serve()
    os._exit(0)  # the cleanup of torch at exit is slow
