"""The environments of new processes: the import path, for a user's script no variables of a launcher, and simulated
GPUs; for a world, the seeds of Python's hashes of strings, and variables that its processes have from their start.

The seed decides the order of a set. An interpreter gets its seed at its start, so all ranks of a fork server share
one. Under torchrun each rank is its own interpreter with its own seed.
"""

from __future__ import annotations

import os
import re
import sys
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
SETTINGS = "_MGPU_CHECK_COMPARE"  # the variable with the settings of the recorder, as JSON
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


SIMULATE = "_MGPU_CHECK_SIMULATE"
"""The variable that makes a Python simulate GPUs: their number, and what backs them."""


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
    variables[SIMULATE] = f"{gpus},{backing}"
    return variables


VARIABLE = "PYTHONHASHSEED"

APART = {VARIABLE: "random"}  # variables of a world whose ranks have different seeds

FIRST, SECOND = "1", "2"
"""Seeds of fork servers. They are fixed, so that repeated runs of the same code give the same results."""


def fixed_seed(environment: Mapping[str, str]) -> str | None:
    """Return the seed that the environment sets for all interpreters; None if each draws its own."""
    seed = environment.get(VARIABLE)
    return None if seed in ("", "random") else seed


def apart(environment: Mapping[str, str]) -> bool:
    """Return whether a world's own environment asks for a different seed on every second rank."""
    return environment.get(VARIABLE) == "random"


def interpreter(program: str, seed: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of an interpreter with a hash seed.

    The program finds the user's value of the variable, not the seed. `program`: a module of the engine, whose `main`
    gets the arguments after the command. `seed`: "" for a random one. A seed in the environment goes first.
    """
    environment, undo, before = dict(os.environ), "", os.environ.get(VARIABLE)
    if seed and not fixed_seed(environment):
        environment[VARIABLE] = seed
        undo = f"os.environ.pop({VARIABLE!r})" if before is None else f"os.environ[{VARIABLE!r}] = {before!r}"
        undo = f"import os; {undo}; "
    code = with_this_package(f"{undo}from mgpu_check.engine import {program} as p; p.main(sys.argv[1:])")
    return [sys.executable, "-P", "-c", code], environment


OwnEnvironment = tuple[tuple[str, str], ...]

_OF_THE_ENGINE = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"}
    | {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "NCCL_HOSTID"}
)
"""The engine sets these for each rank: they define its place in the world and the devices that it sees."""


def own_environment(environment: Mapping[str, str] | None) -> OwnEnvironment:
    """Return environment variables, sorted by name, as part of the key of a world."""
    if environment is None:
        return ()
    if not isinstance(environment, Mapping):
        raise ValueError(f"environment={environment!r} is not a mapping; choose one from names to values, both str")
    for name, value in environment.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ValueError(f"environment: {name!r} is not a valid variable name; choose a non-empty str without '='")
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"environment: {name}={value!r} is not a valid value; choose a str, such as '1'")
        if name in _OF_THE_ENGINE:
            raise ValueError(
                f"environment: {name} is set for each rank; choose other variables than "
                f"{', '.join(sorted(_OF_THE_ENGINE))}"
            )
    return tuple(sorted(environment.items()))
