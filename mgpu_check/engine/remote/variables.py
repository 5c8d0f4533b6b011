"""Read the variables of a launcher: which of how many processes this one is, and where they can meet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["LaunchedProcess", "first_host", "launched_process_of"]

# Below the ports that Linux gives to outgoing connections, and above those of most services.
_FIRST_PORT, _PORTS = 15_000, 16_000


@dataclass(frozen=True)
class LaunchedProcess:
    """One of the processes that were launched together, as the variables describe it.

    Attributes:
        rank: of this process; `size`: how many there are.
        local_rank: rank on its host, None where nothing says it.
        node: index of its host, None where nothing says it.
        address, port: where all of them meet.
        local_size: ranks on its host, None where nothing says it.
        has_store: the launcher has a store at `address` and `port`; else rank 0 is to have it there.
        final: the launcher will not start a lost process anew.
        alone: all of the processes are on this machine.
        run: what the launcher calls the run, empty where it has no name for it.
    """

    launcher: Literal["torchrun", "srun", "variables"]
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node: int | None
    address: str
    port: int
    has_store: bool = False
    final: bool = False
    alone: bool = False
    run: str = ""

    @property
    def identity(self) -> str:
        """Name of this run that tells it from others of a user, known to all its processes without asking anybody."""
        return f"{self.launcher} {self.run} {self.port} {self.size}"


def launched_process_of(environment: Mapping[str, str]) -> LaunchedProcess | None:
    """Return the launched process that `environment` describes; None for a process that is alone.

    Raises:
        ValueError: a variable is missing, or is no number.
    """
    variables = _Variables(environment)
    if "TORCHELASTIC_RUN_ID" in environment:
        launched = _of_torchrun(variables)
    elif environment.get("SLURM_STEP_ID", "").isdecimal() and "SLURM_PROCID" in environment:
        launched = _of_srun(variables)
    elif {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        launched = _of_classic_variables(variables)
    else:
        return None
    if not 0 <= launched.rank < launched.size:
        raise ValueError(f"rank {launched.rank} of {launched.size}: {launched.launcher} has set a rank that cannot be")
    return launched if launched.size > 1 else None


class _Variables:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment

    def number(self, *names: str) -> int:
        """Return the number in the first of `names` that is set."""
        found = self.perhaps(*names)
        if found is None:
            raise ValueError(f"environment variable {names[0]} is not set")
        return found

    def perhaps(self, *names: str) -> int | None:
        for name in names:
            text = self.environment.get(name)
            if text is not None:
                if not text.isdecimal():
                    raise ValueError(f"environment variable {name}: {text!r} is no whole number")
                return int(text)
        return None


def _of_torchrun(variables: _Variables) -> LaunchedProcess:
    return LaunchedProcess(
        "torchrun",
        rank=variables.number("RANK"),
        size=variables.number("WORLD_SIZE"),
        local_rank=variables.number("LOCAL_RANK"),
        local_size=variables.perhaps("LOCAL_WORLD_SIZE"),
        node=variables.number("GROUP_RANK"),
        address=variables.environment["MASTER_ADDR"],
        port=variables.number("MASTER_PORT"),
        has_store=variables.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        final=variables.perhaps("TORCHELASTIC_MAX_RESTARTS") == 0,
        alone=variables.perhaps("LOCAL_WORLD_SIZE") == variables.number("WORLD_SIZE"),
        run=variables.environment["TORCHELASTIC_RUN_ID"],
    )


def _of_srun(variables: _Variables) -> LaunchedProcess:
    environment = variables.environment
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST") or ""
    alone = (variables.perhaps("SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 1) == 1
    job = variables.perhaps("SLURM_JOB_ID", "SLURM_JOBID") or 0
    return LaunchedProcess(
        "srun",
        rank=variables.number("SLURM_PROCID"),
        size=variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=variables.perhaps("SLURM_LOCALID"),
        local_size=None,
        node=variables.perhaps("SLURM_NODEID"),
        # Not SLURM_LAUNCH_NODE_IPADDR: that is where srun was called, often a login node.
        address=environment.get("MASTER_ADDR") or ("127.0.0.1" if alone or not nodes else first_host(nodes)),
        port=variables.perhaps("MASTER_PORT") or _FIRST_PORT + (31 * job + int(environment["SLURM_STEP_ID"])) % _PORTS,
        final=True,
        alone=alone,
        run=f"{job}.{environment['SLURM_STEP_ID']}",
    )


def _of_classic_variables(variables: _Variables) -> LaunchedProcess:
    return LaunchedProcess(
        "variables",
        rank=variables.number("RANK"),
        size=variables.number("WORLD_SIZE"),
        local_rank=variables.perhaps("LOCAL_RANK"),
        local_size=variables.perhaps("LOCAL_WORLD_SIZE"),
        node=variables.perhaps("NODE_RANK", "GROUP_RANK"),
        address=variables.environment["MASTER_ADDR"],
        port=variables.number("MASTER_PORT"),
    )


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it: "node[03-07,9],login2" is node03, …"""
    head = re.match(r"([^,\[]*)(?:\[([^\]]*)\])?([^,\[]*)", nodes)
    assert head is not None  # every part of the pattern may be empty
    prefix, numbers, suffix = head.groups()
    first = re.split(r"[,-]", numbers)[0] if numbers else ""
    return f"{prefix}{first}{suffix}"
