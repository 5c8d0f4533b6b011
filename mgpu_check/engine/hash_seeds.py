"""Choose the seeds for Python's hashes of strings.

The seed decides the order of a set. An interpreter gets its seed at its start, so all ranks of a fork server share one.
Under torchrun each rank is its own interpreter with its own seed.
"""

from __future__ import annotations

from collections.abc import Mapping

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


def of_server(environment: Mapping[str, str], seed: str) -> tuple[dict[str, str], str]:
    """Return the environment of a fork server, and a statement that restores the user's value of the variable there."""
    if not seed or given(environment):
        return {**environment}, ""
    before = environment.get(VARIABLE)
    undo = f"os.environ.pop({VARIABLE!r})" if before is None else f"os.environ[{VARIABLE!r}] = {before!r}"
    return {**environment, VARIABLE: seed}, f"import os; {undo}; "
