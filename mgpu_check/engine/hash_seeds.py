"""Choose the seeds for Python's hashes of strings.

The seed decides the order of a set. An interpreter gets its seed at its start, so all ranks of a fork server share one.
Under torchrun each rank is its own interpreter with its own seed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from mgpu_check.processes.python_path import with_this_package

VARIABLE = "PYTHONHASHSEED"

APART = {VARIABLE: "random"}
"""Variables of a world whose ranks have different seeds."""

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

    The program finds the user's value of the variable, not the seed.

    Args:
        program: a module of the engine, whose `main` gets the arguments after the command.
        seed: "" for a random one. A seed in the environment goes first.
    """
    environment, undo, before = dict(os.environ), "", os.environ.get(VARIABLE)
    if seed and not given(environment):
        environment[VARIABLE] = seed
        undo = f"os.environ.pop({VARIABLE!r})" if before is None else f"os.environ[{VARIABLE!r}] = {before!r}"
        undo = f"import os; {undo}; "
    code = with_this_package(f"{undo}from mgpu_check.engine import {program} as p; p.main(sys.argv[1:])")
    return [sys.executable, "-P", "-c", code], environment
