"""The path of a Python that we start: for somebody else's program our ``sitecustomize`` comes first, for our own this package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["with_startup", "with_this_package"]

_STARTUP = str(Path(__file__).parents[1] / "startup")
_HOME = str(Path(__file__).parents[2])


def with_this_package(statement: str) -> str:
    """Return what ``python -P -c`` is to run for `statement` to find this package, in any directory, where this process has it.

    It need not be installed, and another version may be, which comes first on the path. What lies beside it shadows nothing.
    """
    return (
        f"import sys; sys.path.insert(0, {_HOME!r}); import mgpu_check; sys.path.append(sys.path.pop(0)); {statement}"
    )


def with_startup(environment: Mapping[str, str]) -> str:
    """Return the value of PYTHONPATH with which a Python runs ``startup/sitecustomize.py``; the entries of now come
    after.
    """
    inherited = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != _STARTUP]
    return os.pathsep.join([_STARTUP, *inherited])
