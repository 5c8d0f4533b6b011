"""The launcher of a run on several hosts, which asks agents to start the processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from mgpu_check.devices.placement import Slot
from mgpu_check.engine.process import Process
from mgpu_check.engine.remote.connections import Connections
from mgpu_check.engine.remote.keyfile import REMEDY
from mgpu_check.engine.remote.members import AgentGone, AgentProcess, RemoteAgent
from mgpu_check.engine.remote.process import RemoteProcess
from mgpu_check.errors import StartupFailure
from mgpu_check.processes.channel import Channel
from mgpu_check.processes.machine import distinct_names
from mgpu_check.processes.protocol import CallContext
from mgpu_check.processes.rank_lists import grouped, intervals

_START_TIMEOUT = 300.0  # the agent's fork server imports torch first, which may take minutes from a network disk


class WrongLaunch(Exception):
    """Launched processes are missing, or do not fit together."""


@dataclasses.dataclass(frozen=True)
class RemoteHost:
    """A host of the run.

    Attributes:
        name: its own name; if another host has the same name, with its boot id or its index.
        ranks: launched ranks there, in the order of their slots.
    """

    name: str
    ranks: tuple[int, ...]


def _machine(agent: RemoteAgent) -> tuple[str, str]:
    return agent.host, agent.boot


def _node(agent: RemoteAgent) -> object:
    node = agent.told["node"]
    return _machine(agent) if node is None else node


class AgentLauncher:
    """Starts processes through agents, and reports how they end."""

    def __init__(
        self, connections: Connections, run: str, versions: Mapping[str, str], environment: Mapping[str, str]
    ) -> None:
        """Create the launcher without waiting for agents.

        Args:
            run: prefix of this run's keys in the store.
            versions: name -> version on this host, for the software that must be the same on all hosts.
        """
        self.hosts: list[RemoteHost] = []
        self.connections = connections
        self._store = ""
        self._run = run
        self._versions = versions
        self._environment = environment
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
        self._store = f"tcp://{beyond.told['address']}:{beyond.told['port']}"
        by_node = dict(grouped((_node(agent), agent) for agent in agents))
        nodes = sorted(by_node.values(), key=lambda here: here[0].rank)
        names = distinct_names([_machine(here[0]) for here in nodes])
        self.hosts = []
        for index, here in enumerate(nodes):
            here.sort(key=lambda agent: (agent.told["local_rank"] or 0, agent.rank))
            name = names[index]
            self.hosts.append(RemoteHost(name, tuple(agent.rank for agent in here)))
            connections.host_names |= {agent.rank: name for agent in here}
        return self.place(1)

    def place(self, each: int) -> list[Slot]:
        """Give each agent a number of slots, and return all slots in the order of hosts.

        Neighbours are in different agents of their host, so that they have different hash seeds.
        """
        self._rank_at = {
            Slot(index, device): host.ranks[device % len(host.ranks)]
            for index, host in enumerate(self.hosts)
            for device in range(each * len(host.ranks))
        }
        return list(self._rank_at)

    def _missing(self, missing: list[int]) -> str:
        connections = self.connections
        there = sorted(connections.agents.values(), key=lambda agent: agent.rank)
        known = ", ".join(f"{agent.rank} on {agent.host}" for agent in there) or "none"
        nodes = {agent.told["node"] for agent in there} - {None}
        sizes = {agent.told["local_size"] for agent in there} - {None}
        guess = ""
        if nodes and len(sizes) == 1 and (absent := {rank // min(sizes) for rank in missing} - nodes):
            guess = f", all of node {intervals(sorted(absent))}"
        return (
            f"{connections.size} ranks were launched, but the agents of ranks {intervals(missing)}{guess} have not "
            f"come within {connections.patience:g} s; those that have: {known}{self._refused()}"
        )

    def _refused(self) -> str:
        with self.connections.changed:
            refused = sorted(self.connections.refused)
        if not refused:
            return ""
        return f"; refused, because they have another key than this run: processes at {', '.join(refused)}; {REMEDY}"

    def _compare(self, agents: Sequence[RemoteAgent]) -> None:
        for agent in agents:
            for what, here in self._versions.items():
                there = agent.told["versions"].get(what)
                if there != here:
                    raise WrongLaunch(
                        f"rank {agent.rank} on {agent.host} has {what} {there}, but pytest runs with {what} {here}; "
                        "all hosts need the same"
                    )

    def visible_on(self, host: int) -> int:
        """Return the number of real devices that the first agent of a host sees."""
        return int(self.connections.agents[self.hosts[host].ranks[0]].told["devices"])

    def start(self) -> None:
        """Do nothing, because the agents start their fork servers themselves."""

    def launch(self, slots: Sequence[Slot], seeds_apart: bool = False) -> list[Process]:
        # `seeds_apart` needs nothing here: each agent's fork server has its own seed.
        connections = self.connections
        wanted = [self._rank_at[slot] for slot in slots]
        self._await(wanted)
        asked: list[tuple[RemoteAgent, int, Future[AgentProcess]]] = []
        launched: list[Process] = []
        try:
            try:
                for rank in wanted:
                    asked.append(connections.launch(rank))
                for agent, number, future in asked:
                    made = future.result(_START_TIMEOUT)
                    launched.append(RemoteProcess(connections, agent, number, made.pid, Channel(made.connection)))
            except AgentGone as gone:
                raise StartupFailure(f"{gone}, while it started a rank") from None
            except TimeoutError:
                raise StartupFailure(f"an agent did not start a rank within {_START_TIMEOUT:g} s") from None
            finally:
                for agent, number, _ in asked:
                    agent.launches.pop(number, None)
        except BaseException:
            for process in launched:
                process.kill()
                process.close()
            for agent, number, _ in asked[len(launched) :]:
                connections.ask(agent, number, "close")
            raise
        return launched

    def _await(self, ranks: Sequence[int]) -> None:
        """Wait until lost agents are back."""
        connections = self.connections
        patience = 0.0 if self.lost_for_good() else connections.patience
        missing = connections.await_agents(sorted(set(ranks)), patience)
        if missing:
            hosts = sorted({connections.host_names[rank] for rank in missing})
            text = f"the agents of ranks {intervals(missing)} on {', '.join(hosts)} are lost"
            why = self.lost_for_good() or f"have not come back within {connections.patience:g} s"
            raise StartupFailure(f"{text}, and {why}")

    def lost_for_good(self) -> str | None:
        """Return why lost agents cannot come back; None if they can."""
        connections = self.connections
        if connections.over is not None:
            return f"the run is over: {connections.over}"
        return None

    def call_context(self, here: CallContext) -> CallContext:
        """Return `here` with only those variables that changed since this process started.

        A rank has the other variables from its agent.
        """
        changed = {name: value for name, value in here.environment.items() if self._environment.get(name) != value}
        removed = frozenset(self._environment.keys() - here.environment.keys())
        return dataclasses.replace(here, environment=changed, removed=removed)

    def losses(self) -> list[str]:
        self.collect()
        return self.connections.untold()

    def binding(self, slot: Slot, here: Sequence[Slot]) -> tuple[int, int]:
        if self.visible_on(slot.host) == 1 < len(here):
            return 0, 1  # the launcher gave each of its processes one visible device
        return here.index(slot), len(here)

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
