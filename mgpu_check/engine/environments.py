"""The environment of a world's processes: the seeds for Python's hashes of strings, and variables that they have from
their start, whether or not the pytest process has them.

The seed decides the order of a set. An interpreter gets its seed at its start, so all ranks of a fork server share
one. Under torchrun each rank is its own interpreter with its own seed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from mgpu_check.processes.python_environment import with_this_package

VARIABLE = "PYTHONHASHSEED"

APART = {VARIABLE: "random"}  # variables of a world whose ranks have different seeds

FIRST, SECOND = "1", "2"
"""Seeds of fork servers. They are fixed, so that repeated runs of the same code give the same results."""


def given(environment: Mapping[str, str]) -> str:
    """Return the seed that the environment sets for all interpreters; empty if each draws its own."""
    seed = environment.get(VARIABLE, "")
    return "" if seed == "random" else seed


def apart(environment: Mapping[str, str]) -> bool:
    """Return whether a world's own environment asks for a different seed on every second rank."""
    return environment.get(VARIABLE) == "random"


def interpreter(program: str, seed: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of an interpreter with a hash seed.

    The program finds the user's value of the variable, not the seed. `program`: a module of the engine, whose `main`
    gets the arguments after the command. `seed`: "" for a random one. A seed in the environment goes first.
    """
    environment, undo, before = dict(os.environ), "", os.environ.get(VARIABLE)
    if seed and not given(environment):
        environment[VARIABLE] = seed
        undo = f"os.environ.pop({VARIABLE!r})" if before is None else f"os.environ[{VARIABLE!r}] = {before!r}"
        undo = f"import os; {undo}; "
    code = with_this_package(f"{undo}from mgpu_check.engine import {program} as p; p.main(sys.argv[1:])")
    return [sys.executable, "-P", "-c", code], environment


OwnEnvironment = tuple[tuple[str, str], ...]

_OF_THE_ENGINE = frozenset(
    [
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "NCCL_HOSTID",
    ]
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
