"""This process of a launched run: rank, size and rendezvous from the launcher's variables, its exit code, and its
driver.

Every pytest run imports this module, so it must not import the driver's modules.

Exit codes follow from the result of the run. Under torchrun one process per host exits with the code of the run;
elsewhere only rank 0 does. All other processes exit with 0, so that a launcher reports one failure and not one per
rank.

torchrun restarts all processes after a failure, up to ``--max-restarts`` times. A restarted process finds the exit
code in torchrun's error file, and exits at once with it.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mgpu_check.engine.remote.driver import Driver


# A range below Linux's ephemeral ports and above the ports of most services.
_FIRST_PORT, _PORTS = 15_000, 16_000


@dataclass(frozen=True)
class LaunchedProcess:
    """One process of a launched run, described by environment variables."""

    # the launcher; "variables" if only RANK, WORLD_SIZE and MASTER_ADDR identify it
    launcher: Literal["torchrun", "srun", "variables"]
    rank: int
    size: int
    local_rank: int | None  # rank on its host, None if unknown
    local_size: int | None  # number of processes on its host, None if unknown
    node: int | None  # index of its host, None if unknown
    # address, port: of the rendezvous
    address: str
    port: int
    # whether the launcher has a store at `address` and `port`; otherwise rank 0 makes one there
    has_store: bool = False
    final: bool = False  # whether the launcher will not restart a lost process
    alone: bool = False  # whether all processes are on this machine
    run: str = ""  # the launcher's name for the run, empty if it has no name

    @property
    def identity(self) -> str:
        """The name of this run: launcher, the launcher's name for the run, port and size.
        It distinguishes the run from other runs of the user. All processes derive the same name locally."""
        return f"{self.launcher} {self.run} {self.port} {self.size}"


def launched_process_of(environment: Mapping[str, str]) -> LaunchedProcess | None:
    """Return the launched process of `environment`; None without a launcher, or for a run of one process."""
    variables = _Variables(environment)
    if "TORCHELASTIC_RUN_ID" in environment:
        launched = _of_classic_variables(variables, torchrun=True)
    elif environment.get("SLURM_STEP_ID", "").isdecimal() and "SLURM_PROCID" in environment:
        launched = _of_srun(variables)
    elif {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        launched = _of_classic_variables(variables)
    else:
        return None
    if not 0 <= launched.rank < launched.size:
        raise ValueError(f"rank {launched.rank} of {launched.size}: {launched.launcher} has set an impossible rank")
    return launched if launched.size > 1 else None


class _Variables:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment

    def number(self, *variables: str) -> int:
        number = self.perhaps(*variables)
        if number is None:
            raise ValueError(f"environment variable {variables[0]} is not set")
        return number

    def perhaps(self, *variables: str) -> int | None:
        for name in variables:
            text = self.environment.get(name)
            if text is not None:
                if not text.isdecimal():
                    raise ValueError(f"environment variable {name}: {text!r} is not a whole number")
                return int(text)
        return None


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
        # SLURM_LAUNCH_NODE_IPADDR is no substitute: srun was called there, often on a login node.
        address=environment.get("MASTER_ADDR") or ("127.0.0.1" if alone or not nodes else first_host(nodes)),
        port=variables.perhaps("MASTER_PORT") or _FIRST_PORT + (31 * job + int(environment["SLURM_STEP_ID"])) % _PORTS,
        final=True,
        alone=alone,
        run=f"{job}.{environment['SLURM_STEP_ID']}",
    )


def _of_classic_variables(variables: _Variables, torchrun: bool = False) -> LaunchedProcess:
    rank, size = variables.number("RANK"), variables.number("WORLD_SIZE")
    local_size = variables.perhaps("LOCAL_WORLD_SIZE")
    address, port = variables.environment["MASTER_ADDR"], variables.number("MASTER_PORT")
    if not torchrun:
        local_rank, node = variables.perhaps("LOCAL_RANK"), variables.perhaps("NODE_RANK", "GROUP_RANK")
        return LaunchedProcess("variables", rank, size, local_rank, local_size, node, address, port)
    return LaunchedProcess(
        "torchrun",
        rank=rank,
        size=size,
        local_rank=variables.number("LOCAL_RANK"),
        local_size=local_size,
        node=variables.number("GROUP_RANK"),
        address=address,
        port=port,
        has_store=variables.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        final=variables.perhaps("TORCHELASTIC_MAX_RESTARTS") == 0,
        alone=local_size == size,
        run=variables.environment["TORCHELASTIC_RUN_ID"],
    )


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm host list: "node03" for "node[03-07,9],login2"."""
    head = re.match(r"([^,\[]*)(?:\[([^\]]*)\])?([^,\[]*)", nodes)
    assert head is not None  # every part of the pattern may be empty
    prefix, numbers, suffix = head.groups()
    lowest = re.split(r"[,-]", numbers)[0] if numbers else ""
    return f"{prefix}{lowest}{suffix}"


# …/attempt_0/2/error.json: of the first attempt, for local rank 2 (torch/distributed/elastic/multiprocessing/api.py,
# torch 2.13).
_VARIABLE = "TORCHELASTIC_ERROR_FILE"

_KEY = "mgpu_check_exit_code"


def share_of(code: int, launched: LaunchedProcess) -> int:
    """Return the exit code of the process `launched`, in a run that ends with `code`."""
    return code if _leads(launched) else 0


def _leads(launched: LaunchedProcess) -> bool:
    return launched.local_rank == 0 if launched.launcher == "torchrun" else launched.rank == 0


def leave(code: int, launched: LaunchedProcess, environment: Mapping[str, str]) -> None:
    """Write the exit code to torchrun's error file, for torchrun's report and for restarted processes. The form is that
    of torch/distributed/elastic/multiprocessing/errors/error_handler.py, record_exception, torch 2.13."""
    name = environment.get(_VARIABLE)
    if name is None or not _leads(launched):
        return
    text = f"mgpu-check: pytest has ended with exit code {code}; its report is in the output of rank 0"
    extra = {"py_callstack": text, "timestamp": str(int(time.time())), _KEY: code}
    with contextlib.suppress(OSError):  # torchrun then reports the exit code only
        Path(name).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def of_earlier_attempt(environment: Mapping[str, str]) -> int | None:
    """Return the exit code of an earlier attempt of this run, None if no attempt has ended."""
    name = environment.get(_VARIABLE)
    if name is None or len(Path(name).parents) < 3:
        return None
    for path in Path(name).parents[2].glob("attempt_*/*/error.json"):
        try:
            return int(json.loads(path.read_text())["message"]["extraInfo"][_KEY])
        except (OSError, ValueError, LookupError, TypeError):
            pass  # another program's error file
    return None


_driver: Driver | None = None


def become(driver: Driver) -> None:
    global _driver
    _driver = driver


def driver() -> Driver | None:
    """Return the driver of this process; None in a run without a launcher."""
    return _driver
