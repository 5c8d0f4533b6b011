"""Find the function or class behind a callable, and the line where it is defined. Imports no torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mgpu_check.processes.record import relative


def definition_of(step: Callable[..., Any]) -> str:
    inner = inspect.unwrap(innermost(step))
    code = getattr(inner, "__code__", None)
    if code is not None:
        return f"{relative(code.co_filename)}:{code.co_firstlineno}"
    kind = inner if isinstance(inner, type) else type(inner)
    try:
        return f"{relative(inspect.getsourcefile(kind) or '')}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):  # made without a file
        return ""


def innermost(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function or class that a partial wraps, or the callable itself."""
    while isinstance(step, functools.partial):
        step = step.func
    return step
