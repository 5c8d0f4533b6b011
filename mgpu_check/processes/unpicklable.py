"""Find the value that cannot be sent to another process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mgpu_check.processes import pickling

__all__ = ["culprit", "culprit_of"]


def culprit_of(function: Callable[..., Any]) -> str | None:
    """Find the variable that `function` refers to and that cannot be pickled."""
    try:
        variables = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        return None
    return culprit((), {**variables.globals, **variables.nonlocals})


def culprit(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    for name, value in (*enumerate(args), *kwargs.items()):
        try:
            pickling.dumps(value)
        except Exception as error:
            return f"{name!r}, of type {type(value).__name__}, cannot be pickled: {error}"
    return None
