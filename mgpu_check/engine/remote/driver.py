"""The driver, the pytest process of a run that a launcher started; its launcher, which asks agents on several hosts
to start the processes; and its handles for them.

An agent starts it, and it connects to all agents.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from mgpu_check.devices.inventory import Slot
from mgpu_check.engine.launcher import Launcher
from mgpu_check.engine.process import STACKS_TIMEOUT, Process
from mgpu_check.engine.remote.connections import AgentGone, AgentProcess, Connections, RemoteAgent
from mgpu_check.engine.remote.credentials import REMEDY, Key
from mgpu_check.engine.remote.launched_process import LaunchedProcess, become
from mgpu_check.engine.remote.meeting import words_of_parent
from mgpu_check.errors import StartupFailure
from mgpu_check.processes.channel import CallContext, Channel
from mgpu_check.processes.collective_records import Record, parse
from mgpu_check.processes.environments import OF_LAUNCHERS
from mgpu_check.processes.machine import distinct_names
from mgpu_check.processes.rank_lists import grouped, intervals
from mgpu_check.version import __version__


def versions() -> dict[str, str]:
    return {
        "Python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "mgpu-check": __version__,
    }


_ANSWER_TIMEOUT = 5.0  # seconds: the agent answers from local files
_NOBODY_KNOWS = 75  # stands for the unknown exit code of a process whose agent was lost


class RemoteProcess(Process):
    """A process of another host. Its agent answers the requests that `Process` answers from local files."""

    on_this_host = False

    def __init__(
        self, connections: Connections, agent: RemoteAgent, number: int, pid: int, connection: Channel
    ) -> None:
        self.pid, self.connection = pid, connection
        self.exit_code: int | None = None
        self._connections, self._agent, self._number = connections, agent, number
        self._stacks_asked: Future[Any] | None = None
        self._marked: Future[Any] | None = None
        self._closed = False
        connections.watch(agent, number, self._ended)

    def _ended(self, code: int | None) -> None:
        self.exit_code = code
        if code is None:
            self.exit_code, self.lost = _NOBODY_KNOWS, self._agent.gone

    def _ask(self, method: str, *arguments: Any, default: Any = "") -> Any:
        try:
            return self._connections.ask(self._agent, self._number, method, *arguments).result(_ANSWER_TIMEOUT)
        except (AgentGone, TimeoutError):
            return default

    def cause(self) -> str:
        if self.lost is None:
            return super().cause()
        self._connections.untold()  # the caller's failure reports it
        return self.lost

    def mark_output(self) -> None:
        self._marked = self._connections.ask(self._agent, self._number, "mark_output")

    def await_mark(self) -> None:
        assert self._marked is not None
        with contextlib.suppress(AgentGone, TimeoutError):
            self._marked.result(_ANSWER_TIMEOUT)

    def output(self, name: str) -> str:
        return str(self._ask("output", name))

    def ask_for_stacks(self, signal_number: int) -> None:
        self._connections.ask(self._agent, self._number, "ask_for_stacks", signal_number)
        self._stacks_asked = self._connections.ask(self._agent, self._number, "stacks")

    def stacks(self, timeout: float = STACKS_TIMEOUT) -> str:
        assert self._stacks_asked is not None
        try:
            return str(self._stacks_asked.result(timeout + _ANSWER_TIMEOUT))
        except (AgentGone, TimeoutError):
            return ""

    def last_words(self) -> str:
        return str(self._ask("last_words"))

    def record(self) -> Record:
        return parse(base64.b64decode(self._ask("record_bytes")))

    def replaced_by(self) -> str | None:
        return self._ask("replaced_by", default=None)

    def runnable(self) -> bool:
        return bool(self._ask("runnable", default=False))

    def halted(self) -> bool:
        return False  # checked for idle processes between tests, which is not worth a message to another host

    def kill(self) -> None:
        if self.exit_code is None and not self._closed:
            self._connections.ask(self._agent, self._number, "kill")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.connection.close()
            self._connections.ask(self._agent, self._number, "close")


_START_TIMEOUT = 300.0  # the agent's fork server imports torch first, which may take minutes from a network disk


class WrongLaunch(Exception):
    """Launched processes are missing, or do not fit together."""


@dataclasses.dataclass(frozen=True)
class RemoteHost:
    """A host of the run."""

    name: str  # its own name; if another host has the same name, with its boot id or its index
    ranks: tuple[int, ...]  # launched ranks there, in the order of their slots


def _machine(agent: RemoteAgent) -> tuple[str, str]:
    return agent.host, agent.boot


def _node(agent: RemoteAgent) -> object:
    node = agent.greeting["node"]
    return _machine(agent) if node is None else node


class AgentLauncher(Launcher):
    """Starts processes through agents, and reports how they end."""

    def __init__(
        self, connections: Connections, run: str, versions: Mapping[str, str], environment: Mapping[str, str]
    ) -> None:
        """Create the launcher without waiting for agents.
        `run`: prefix of this run's keys in the store. `versions`: name -> version on this host, for the software that
        must be the same on all hosts."""
        self.hosts: list[RemoteHost] = []
        self.connections = connections
        self._store = ""
        self._run, self._versions, self._environment = run, versions, environment
        self._rank_at: dict[Slot, int] = {}

    def gather(self) -> list[Slot]:
        """Wait for all agents, and return their slots in the order of hosts."""
        connections = self.connections
        missing = connections.await_agents(range(connections.size), connections.patience)
        if connections.over is not None:
            raise WrongLaunch(connections.over)
        if missing:
            raise WrongLaunch(self._missing(missing))
        agents = [connections.agents[rank] for rank in range(connections.size)]
        self._compare(agents)
        # Rank 0 may know the store's host as "localhost", so take the address from an agent on another host.
        beyond = next((agent for agent in agents if _machine(agent) != _machine(agents[0])), agents[0])
        self._store = f"tcp://{beyond.greeting['address']}:{beyond.greeting['port']}"
        by_node = dict(grouped((_node(agent), agent) for agent in agents))
        nodes = sorted(by_node.values(), key=lambda agents: agents[0].rank)
        host_names = distinct_names([_machine(local_agents[0]) for local_agents in nodes])
        self.hosts = []
        for index, local_agents in enumerate(nodes):
            local_agents.sort(key=lambda agent: (agent.greeting["local_rank"] or 0, agent.rank))
            name = host_names[index]
            self.hosts.append(RemoteHost(name, tuple(agent.rank for agent in local_agents)))
            connections.host_names |= {agent.rank: name for agent in local_agents}
        return self.place(1)

    def place(self, each: int) -> list[Slot]:
        """Give each agent a number of slots, and return all slots in the order of hosts.
        Neighbours are in different agents of their host, so that they have different hash seeds."""
        self._rank_at = {
            Slot(index, device): host.ranks[device % len(host.ranks)]
            for index, host in enumerate(self.hosts)
            for device in range(each * len(host.ranks))
        }
        return list(self._rank_at)

    def _missing(self, missing: list[int]) -> str:
        connections = self.connections
        present = sorted(connections.agents.values(), key=lambda agent: agent.rank)
        listed = ", ".join(f"{agent.rank} on {agent.host}" for agent in present) or "none"
        nodes = {agent.greeting["node"] for agent in present} - {None}
        sizes = {agent.greeting["local_size"] for agent in present} - {None}
        guess = ""
        if nodes and len(sizes) == 1 and (absent := {rank // min(sizes) for rank in missing} - nodes):
            guess = f", all of node {intervals(sorted(absent))}"
        return (
            f"{connections.size} ranks were launched, but the agents of ranks {intervals(missing)}{guess} have not "
            f"come within {connections.patience:g} s; those that have: {listed}{self._refused()}"
        )

    def _refused(self) -> str:
        with self.connections.changed:
            refused = sorted(self.connections.refused)
        if not refused:
            return ""
        return f"; refused, because they have another key than this run: processes at {', '.join(refused)}; {REMEDY}"

    def _compare(self, agents: Sequence[RemoteAgent]) -> None:
        for agent in agents:
            for software, version in self._versions.items():
                agent_version = agent.greeting["versions"].get(software)
                if agent_version != version:
                    raise WrongLaunch(
                        f"rank {agent.rank} on {agent.host} has {software} {agent_version}, but pytest runs with "
                        f"{software} {version}; all hosts need the same"
                    )

    def visible_on(self, host: int) -> int:
        """Return the number of real devices that the first agent of a host sees."""
        return int(self.connections.agents[self.hosts[host].ranks[0]].greeting["devices"])

    def start(self) -> None:
        """Do nothing, because the agents start their fork servers themselves."""

    def launch(self, slots: Sequence[Slot], seeds_apart: bool = False) -> list[Process]:
        # `seeds_apart` needs nothing here: each agent's fork server has its own seed.
        connections = self.connections
        wanted = [self._rank_at[slot] for slot in slots]
        self._await(wanted)
        requests: list[tuple[RemoteAgent, int, Future[AgentProcess]]] = []
        launched: list[Process] = []
        try:
            try:
                for rank in wanted:
                    requests.append(connections.launch(rank))
                for agent, number, future in requests:
                    pid, connection = future.result(_START_TIMEOUT)
                    launched.append(RemoteProcess(connections, agent, number, pid, Channel(connection)))
            except AgentGone as gone:
                raise StartupFailure(f"{gone}, while it started a rank") from None
            except TimeoutError:
                raise StartupFailure(f"an agent did not start a rank within {_START_TIMEOUT:g} s") from None
            finally:
                for agent, number, _ in requests:
                    agent.launches.pop(number, None)
        except BaseException:
            for process in launched:
                process.kill()
                process.close()
            for agent, number, _ in requests[len(launched) :]:
                connections.ask(agent, number, "close")
            raise
        return launched

    def _await(self, ranks: Sequence[int]) -> None:
        connections = self.connections
        patience = 0.0 if self.lost_for_good() else connections.patience
        missing = connections.await_agents(sorted(set(ranks)), patience)
        if missing:
            hosts = sorted({connections.host_names[rank] for rank in missing})
            text = f"the agents of ranks {intervals(missing)} on {', '.join(hosts)} are lost"
            reason = self.lost_for_good() or f"have not come back within {connections.patience:g} s"
            raise StartupFailure(f"{text}, and {reason}")

    def lost_for_good(self) -> str | None:
        """Return why lost agents cannot come back; None if they can."""
        over = self.connections.over
        return None if over is None else f"the run is over: {over}"

    def call_context(self, context: CallContext) -> CallContext:
        """Return `context` with only the variables that have changed: a rank has the others from its agent."""
        changed = {name: value for name, value in context.environment.items() if self._environment.get(name) != value}
        removed = frozenset(self._environment.keys() - context.environment.keys())
        return dataclasses.replace(context, environment=changed, removed=removed)

    def losses(self) -> list[str]:
        self.collect()
        return self.connections.untold()

    def binding(self, slot: Slot, local_slots: Sequence[Slot]) -> tuple[int, int]:
        if self.visible_on(slot.host) == 1 < len(local_slots):
            return 0, 1  # the launcher gave each of its processes one visible device
        return local_slots.index(slot), len(local_slots)

    def store(self, name: str) -> str:
        return f"{self._store}/{self._run}/{name}"

    def host_name(self, host: int) -> str:
        return self.hosts[host].name if len(self.hosts) > 1 else ""

    def waitables(self) -> list[int]:
        return [self.connections.ends_read.fileno()]

    def collect(self) -> None:
        self.connections.collect()

    def ending(self) -> list[int]:
        return []  # no other run uses the devices until this one ends

    def close(self) -> None:
        """Collect the last exits. The agents keep their fork servers, and end their processes when the run ends."""
        with contextlib.suppress(AgentGone):
            self.collect()


_VARIABLE = "_MGPU_CHECK_DRIVER"
_OTHER_FILES = 1000  # besides the connections of agents and ranks
_PATIENCE = 300.0  # seconds without agents, until `Driver.launcher` sets the value of the options


def start_driver(
    launched: LaunchedProcess, listener: socket.socket, key: Key, trusting: str | None, arguments: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start the driver in its own session, so that it survives when torchrun kills this process's group.
    See torch/distributed/elastic/multiprocessing/subprocess_handler/subprocess_handler.py, close, torch 2.13."""
    read, write = os.pipe()
    # The driver watches torchrun and not this process, because torchrun may restart this process.
    parent = os.pidfd_open(os.getppid()) if launched.launcher == "torchrun" else None
    passed = [read, listener.fileno(), *([] if parent is None else [parent])]
    settings: dict[str, Any] = {"listener": listener.fileno(), "size": launched.size, "parent": parent}
    settings |= {"key": key.secret.hex(), "trusting": trusting, "command": _command_of(launched)}
    with os.fdopen(write, "w") as pipe:
        json.dump(settings, pipe)
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
    `take_over` makes one, in the process that the agent of rank 0 has started. The run asks it for a launcher. At the
    end of its context it sends the exit code to all agents."""

    size: int  # number of launched ranks
    connections: Connections
    environment: Mapping[str, str]  # of this process at its start
    command: tuple[str, ...]  # the command line that launches such a run on each host
    trusting: str | None = None  # address of the store that shows the key to everybody; None if the key is secret
    exit_code: int = 70  # of the run, once it is known

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
        settings = json.load(file)
    # SIGINT is ignored in a process that a shell script started in its background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    key = Key(bytes.fromhex(settings["key"]), "the agent of rank 0")
    connections = Connections(
        socket.socket(fileno=settings["listener"]), key, settings["size"], settings["parent"], _PATIENCE
    )
    terminal = os.dup(2)  # pytest redirects descriptor 2 when it captures output
    connections.warn = lambda text: _print(terminal, text)
    connections.over = too_few_files(settings["size"])
    connections.start()
    driver = Driver(settings["size"], connections, dict(os.environ), tuple(settings["command"]), settings["trusting"])
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
