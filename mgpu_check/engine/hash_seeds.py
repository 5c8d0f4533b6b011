"""The seeds by which Python hashes texts: of an interpreter, from its start, so of a fork server and all ranks of it.

The order of a set follows them. torchrun starts an interpreter for each rank, with a seed of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["APART", "FIRST", "SECOND", "VARIABLE", "apart", "given", "of_server"]

VARIABLE = "PYTHONHASHSEED"

APART = {VARIABLE: "random"}
"""Variables of a world whose ranks have different seeds."""

FIRST, SECOND = "1", "2"
"""Seeds of fork servers: fixed, so that a run says the same of the same code each time."""


def given(environment: Mapping[str, str]) -> str:
    """Return the seed that all interpreters of these variables have; empty where each draws its own."""
    seed = environment.get(VARIABLE, "")
    return "" if seed == "random" else seed


def apart(environment: Mapping[str, str]) -> bool:
    """Return whether ranks with these variables of their own are to have different seeds."""
    return environment.get(VARIABLE) == "random"


def of_server(environment: Mapping[str, str], seed: str) -> tuple[dict[str, str], str]:
    """Return the variables of a fork server, and a statement that takes back what is none of the user's."""
    if not seed or given(environment):
        return {**environment}, ""
    before = environment.get(VARIABLE)
    undo = f"os.environ.pop({VARIABLE!r})" if before is None else f"os.environ[{VARIABLE!r}] = {before!r}"
    return {**environment, VARIABLE: seed}, f"import os; {undo}; "
