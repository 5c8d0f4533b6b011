"""The driver: the pytest process of a run that a launcher started.

An agent starts it, and it connects to all agents.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu_check.engine.remote.addresses import words_of_parent
from mgpu_check.engine.remote.connections import Connections
from mgpu_check.engine.remote.credentials import Key
from mgpu_check.engine.remote.current import become
from mgpu_check.engine.remote.launcher import AgentLauncher
from mgpu_check.engine.remote.variables import LaunchedProcess
from mgpu_check.engine.remote.versions import versions
from mgpu_check.processes.launched import OF_LAUNCHERS

_VARIABLE = "_MGPU_CHECK_DRIVER"
_OTHER_FILES = 1000  # besides the connections of agents and ranks
_PATIENCE = 300.0  # seconds without agents, until `Driver.launcher` sets the value of the options


def start_driver(
    launched: LaunchedProcess, listener: socket.socket, key: Key, trusting: str, arguments: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start the driver in its own session, so that it survives when torchrun kills this process's group."""
    read, write = os.pipe()
    # The driver watches torchrun and not this process, because torchrun may restart this process.
    parent = os.pidfd_open(os.getppid()) if launched.launcher == "torchrun" else None
    passed = [read, listener.fileno(), *([] if parent is None else [parent])]
    told: dict[str, Any] = {"listener": listener.fileno(), "size": launched.size, "parent": parent}
    told |= {"key": key.secret.hex(), "trusting": trusting, "command": _command_of(launched)}
    with os.fdopen(write, "w") as pipe:
        json.dump(told, pipe)
    gone = {name for name in os.environ if OF_LAUNCHERS.fullmatch(name)}
    environment = {name: value for name, value in os.environ.items() if name not in gone}
    environment[_VARIABLE] = str(read)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "mgpu_check", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=passed,
            start_new_session=True,
        )
    finally:
        for fd in passed:
            if fd != listener.fileno():
                os.close(fd)


def _command_of(launched: LaunchedProcess) -> list[str]:
    """Return the command line that launched this process, up to the name of this package."""
    plain = [sys.executable, "-m", "mgpu_check"]
    if launched.launcher == "srun":
        return ["srun", f"--ntasks={launched.size}", *plain]
    if launched.launcher == "torchrun":
        words = words_of_parent()
        ends = [i for i, word in enumerate(words) if os.path.basename(word) in ("mgpu_check", "mgpu-check")]
        if not ends:
            return plain
        end = ends[0] + 1
        start = 1 if os.path.basename(words[1]) == "torchrun" else 0  # words[0] is torchrun's interpreter
        return [os.path.basename(words[1]) if start else words[0], *words[start + 1 : end]]
    return plain


@dataclass
class Driver:
    """The pytest process as driver of a launched run.

    Attributes:
        size: number of launched ranks.
        environment: of this process at its start.
        command: the command line that launches such a run on each host.
        trusting: address of the store that shows the key of the run to everybody; empty if the key is secret.
        exit_code: of the run, once it is known.
    """

    size: int
    connections: Connections
    environment: Mapping[str, str]
    command: tuple[str, ...]
    trusting: str = ""
    exit_code: int = 70

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.connections.finish(self.exit_code)

    def launcher(self, patience: float) -> AgentLauncher:
        """Return the launcher of this run, which waits `patience` seconds for agents."""
        self.connections.patience = patience
        return AgentLauncher(self.connections, f"{secrets.token_hex(4)}", versions(), self.environment)


def is_driver() -> bool:
    return _VARIABLE in os.environ


def take_over() -> Driver:
    """Become the driver that this process was started as."""
    with os.fdopen(int(os.environ.pop(_VARIABLE))) as file:
        told = json.load(file)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # SIGINT is ignored in a process that a shell script started in its background
    key = Key(bytes.fromhex(told["key"]), "the agent of rank 0")
    connections = Connections(socket.socket(fileno=told["listener"]), key, told["size"], told["parent"], _PATIENCE)
    terminal = os.dup(2)  # pytest redirects descriptor 2 when it captures output
    connections.warn = lambda text: _print(terminal, text)
    connections.over = too_few_files(told["size"])
    connections.start()
    driver = Driver(told["size"], connections, dict(os.environ), tuple(told["command"]), told["trusting"])
    become(driver)
    return driver


def too_few_files(size: int) -> str | None:
    """Allow this process a connection for each agent and each rank, and return why it may not; None if it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * size + _OTHER_FILES
    if resource.RLIM_INFINITY != hard < needed:
        return (
            f"{size} agents and their ranks need {needed} open files in the process on the host of rank 0, and its "
            f"limit is {hard}: raise it there by `ulimit -Hn {needed}`, or by LimitNOFILE of the service that starts it"
        )
    if resource.RLIM_INFINITY != soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return None


def _print(fd: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(fd, f"mgpu-check: {text}\n".encode())
