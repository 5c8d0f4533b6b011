"""The environment of a new Python: its import path, and for a user's script no variables of a launcher, and simulated
GPUs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_STARTUP = str(Path(__file__).parents[1] / "cli" / "startup")
_HOME = str(Path(__file__).parents[2])


def with_this_package(statement: str) -> str:
    """Return code for ``python -P -c`` that imports this process's copy of the package and then runs `statement`.

    It works in any directory, without an installed package, and even if another version is installed. Modules beside
    the package do not shadow others.
    """
    return (
        f"import sys; sys.path.insert(0, {_HOME!r}); import mgpu_check; sys.path.append(sys.path.pop(0)); {statement}"
    )


def with_startup(environment: Mapping[str, str]) -> str:
    """Return a PYTHONPATH that makes a Python run ``cli/startup/sitecustomize.py`` at its start."""
    inherited = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != _STARTUP]
    return os.pathsep.join([_STARTUP, *inherited])


OF_LAUNCHERS = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_(RANK|NAME|WORLD_SIZE)"
    r"|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|SLURM_(PROCID|LOCALID|NODEID)|OMPI_COMM_WORLD_\w+|PMI_(RANK|SIZE)"
    r"|MPI_LOCALN?RANK(ID|S)"
)
"""Variables that describe one launched process, and would be wrong in its children."""

FLOAT32 = "_MGPU_CHECK_FLOAT32"  # the variable of a script's processes that turns autocast off
PLACE = "_MGPU_CHECK_RANK"  # the variable with the rank of a script's process, and the world size: "1/2"

VARIABLES: Mapping[str, Mapping[str, str]] = {
    "torchrun": {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), "{rank}"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), "{world}"),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "mgpu-check",
    },
    "mpiexec": {  # of Open MPI, and of MPICH and its relatives
        **dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK"), "{rank}"),
        **dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "{world}"),
        "PMI_RANK": "{rank}",
        "PMI_SIZE": "{world}",
        "MPI_LOCALRANKID": "{rank}",
        "MPI_LOCALNRANKS": "{world}",
    },
    "srun": {
        **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID"), "{rank}"),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), "{world}"),
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_ID": "1",
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURMD_NODENAME"), "localhost"),
    },
}
"""The variables that a launcher sets for a rank of one host."""


def rank_and_world() -> tuple[int, int]:
    rank, _, world = os.environ[PLACE].partition("/")
    return int(rank), int(world)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not OF_LAUNCHERS.fullmatch(name)}


def simulating(environment: Mapping[str, str], gpus: int | None, backing: str = "cpu") -> dict[str, str]:
    """Return an environment whose Pythons simulate `gpus` GPUs on `backing`; an unchanged copy if `gpus` is None."""
    variables = dict(environment)
    if gpus is None:
        return variables
    if backing == "cpu":
        # It restricts real devices, often to none. If the program sets it for its children, it takes effect there.
        variables.pop("CUDA_VISIBLE_DEVICES", None)
    variables["PYTHONPATH"] = with_startup(variables)
    variables["_MGPU_CHECK_SIMULATE"] = f"{gpus},{backing}"
    return variables
