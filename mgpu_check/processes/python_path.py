"""The path of a Python that we start for somebody else's program: our ``sitecustomize`` comes first on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["with_startup"]

_STARTUP = str(Path(__file__).parents[1] / "startup")


def with_startup(environment: Mapping[str, str]) -> str:
    """Return the value of PYTHONPATH with which a Python runs ``startup/sitecustomize.py``; the entries of now come
    after.
    """
    inherited = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != _STARTUP]
    return os.pathsep.join([_STARTUP, *inherited])
