"""Set the import path of a new Python: with this package for our own code, with our ``sitecustomize`` for a user's
program."""

from __future__ import annotations

import os
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
