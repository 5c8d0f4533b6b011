"""The fork server: a process that has imported torch, touches no device, and forks every rank.

The launcher runs it and talks to it over a socket. The byte `FORK`, sent with the file descriptors of the new process,
asks for a fork, and `END` ends the server. The server answers with lines of JSON.

`multiprocessing`'s fork server lacks four features that ranks need. Each rank leads its own process group, so that all
its children die with it. The output of each rank goes to its own file. The parent receives exit states at once. The
server ends with the parent, even if the parent is killed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import select
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mgpu_check.processes import child_processes
from mgpu_check.processes.child_processes import ENDING, children_but_managers, kill, remove_all_names, remove_names
from mgpu_check.processes.heap import importing
from mgpu_check.processes.scratch import LOOK, sweep, thin_out

FORK = b"F"
END = b"E"
OPTIONAL = "?"  # before the name of a module that only saves time, and may fail
FILES = 5  # stdout, stderr, log, stacks, record of collectives
_TO_END = 5.0  # seconds for killed descendants to exit
_END_OF_PARENT = 5.0  # seconds for the parent to exit after its socket has closed


class ForkServer:
    """The server's loop over requests and exits of its children.
    `run` makes one, and calls `serve` after the imports. It forks a rank for each request of the launcher, and reports
    each exit. It ends when the launcher asks or its end of the socket closes, and kills all descendants."""

    def __init__(self, control: socket.socket, directory: str) -> None:
        self.control, self.directory = control, directory
        self.children: set[int] = set()
        self.outputs: dict[int, list[int]] = {}
        self.handlers: dict[signal.Signals, Any] = {}
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self.wake_write, False)

    def tell(self, **message: object) -> None:
        # If the parent is gone, the end of its socket ends the loop.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.control.sendall(json.dumps(message).encode() + b"\n")

    def serve(self) -> bool:
        """Fork on request until the parent ends, and return whether the parent asked for the end."""
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Ctrl-C is for the parent, which then ends this server. So is a signal that asks a whole job to end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
        selector = selectors.DefaultSelector()
        selector.register(self.control, selectors.EVENT_READ)
        selector.register(self.wake_read, selectors.EVENT_READ)
        self.tell(event="ready")
        while True:
            for key, _ in selector.select(LOOK if self.outputs else None):
                if key.fileobj is self.control:
                    request, files, _, _ = socket.recv_fds(self.control, 1, 1 + FILES)
                    if request != FORK:
                        return request == END
                    self.fork(files)
                else:
                    os.read(self.wake_read, 4096)
            self.reap()
            for outputs in self.outputs.values():
                for output in outputs:
                    thin_out(output)

    def fork(self, files: list[int]) -> None:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            for file in files:
                os.close(file)
            self.tell(event="forked", pid=None, refused=f"{error}; {limits()}")
            return
        if pid == 0:
            _become_child(self, files, server)
        connection, stdout, stderr, log, *others = files
        for file in (connection, *others):
            os.close(file)
        self.children.add(pid)
        self.outputs[pid] = [stdout, stderr, log]
        self.tell(event="forked", pid=pid)

    def reap(self) -> None:
        """Report the ranks that have ended, and kill the processes that they left behind."""
        ended = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self.children:
                ended.append(pid)
                self.children.discard(pid)
                for output in self.outputs.pop(pid):
                    os.close(output)
                _kill_group(pid)
                self.tell(event="exit", pid=pid, code=os.waitstatus_to_exitcode(status))
        # A living rank adopts its orphans, so any other child of this process was left by a rank that has ended.
        kill(pid for pid in children_but_managers() if pid not in self.children)
        for pid in ended:
            remove_names(self.directory, pid)

    def end(self) -> None:
        """Kill every descendant: the ranks, and their processes, which this process inherits when a rank ends."""
        for pid in self.children:
            _kill_group(pid)
        deadline = time.monotonic() + _TO_END
        # torch's managers of shared memory end by themselves: 2 s after their last user they remove the memory and
        # exit.
        while (remaining := children_but_managers()) and time.monotonic() < deadline:
            kill(remaining)
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                select.select([self.wake_read], [], [], 0.1)
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_read, 4096)
        remove_all_names(self.directory)


def limits() -> str:
    """Describe the known limits on the number of processes and threads."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = ["of this user (ulimit -u) " + ("unlimited" if most == resource.RLIM_INFINITY else str(most))]
    with contextlib.suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()[-1].rpartition(":")[2]
        root = Path("/sys/fs/cgroup")
        for directory in (root / group.strip("/"), root, root / "pids"):
            if (file := directory / "pids.max").is_file():
                limits.append(f"of the control group ({file}) {file.read_text(encoding='ascii').strip()}")
                break
    return "limits of processes and threads: " + ", ".join(limits)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _become_child(server: ForkServer, files: list[int], parent: int) -> None:
    code = 70
    server.children.clear()  # siblings: this process must never signal them
    try:
        child_processes.end_with_parent()
        child_processes.adopt_orphans()  # so that the end of a test finds the processes that the test left
        if os.getppid() != parent:
            os._exit(code)
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, handler in server.handlers.items():
            signal.signal(number, handler)
        outputs = [output for outputs in server.outputs.values() for output in outputs]
        for file in (server.wake_read, server.wake_write, server.control.detach(), *outputs):
            os.close(file)
        connection, stdout, stderr, log, stacks, record = files
        for file in files:  # received descriptors are inheritable, and programs that a test starts would get them
            os.set_inheritable(file, False)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        from mgpu_check.engine.rank_side import worker

        code = worker.main(connection, log, stacks, record, server.directory)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):  # the test may have closed them, and os._exit must run
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def _ending_with_parent(control: socket.socket, parent: int, directory: str) -> Iterator[None]:
    """End this process if the parent ends during the imports, which take seconds and do not read the socket.
    A thread watches the socket, and ends before the first rank is forked. PDEATHSIG would not do: it fires when the
    thread of the parent that started this process ends."""
    read, write = os.pipe()

    def watch() -> None:
        poll = select.poll()
        poll.register(control, select.POLLRDHUP)
        poll.register(read, 0)  # POLLHUP needs no flag
        if any(fd == control.fileno() for fd, _ in poll.poll()):
            _tidy(parent, directory)
            os._exit(0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(write)
        thread.join()
        os.close(read)


def _tidy(parent: int, directory: str) -> None:
    """Remove the temporary directories of the parent, which was killed, and of other killed processes."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError, AttributeError):  # the parent is gone already, or this is not Linux
        ended = os.pidfd_open(parent)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.poll(_END_OF_PARENT * 1000)  # the socket may close before the parent's locks are released
    sweep(Path(directory).parent)


def import_all(modules: Iterable[str]) -> dict[str, str] | None:
    """Import modules, and call those of their functions that are named: "module:function"; see also `OPTIONAL`."""
    try:
        with importing():
            for name in modules:
                module, _, function = name.removeprefix(OPTIONAL).partition(":")
                try:
                    imported = importlib.import_module(module)
                except Exception:
                    if name.startswith(OPTIONAL):
                        continue
                    raise
                if function:
                    getattr(imported, function)()
    except BaseException as error:
        headline = f"{type(error).__name__}: {error}"
        return {"event": "failed", "headline": headline, "text": traceback.format_exc()}
    return None


def run(control: int, parent: int, directory: str, preload: Iterable[str]) -> None:
    """Import the modules that ranks need, then serve until the parent closes its end of the socket, and end."""
    child_processes.adopt_orphans()
    server = ForkServer(socket.socket(fileno=control), directory)
    with _ending_with_parent(server.control, parent, directory):
        failure = import_all(preload)
    if failure is not None:
        server.tell(**failure)
        return
    end_requested = False
    try:
        end_requested = server.serve()
    finally:
        server.end()
        if not end_requested:
            _tidy(parent, directory)
        os._exit(0)  # pytest waits for this process, and torch's own cleanup at exit is slow


def main(argv: list[str]) -> None:
    """Be a fork server; for the arguments, see `LocalLauncher.start`."""
    control, parent, directory, *preload = argv
    run(int(control), int(parent), directory, preload)


if __name__ == "__main__":
    main(sys.argv[1:])
