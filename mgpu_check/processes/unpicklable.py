"""Find a value that cannot be pickled, for an error message."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mgpu_check.processes import pickling


def culprit_of(function: Callable[..., Any]) -> str | None:
    """Describe the first variable of `function` that cannot be pickled; None if there is no such variable."""
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
