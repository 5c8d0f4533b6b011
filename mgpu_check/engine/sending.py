"""Prepare what is sent to ranks: pickled functions and arguments, and the call context of this process."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mgpu_check.engine.world import Function
from mgpu_check.processes import pickling, protocol


class NotPicklable(TypeError):
    """A function or an argument of a call cannot be pickled."""


def pickled_function(function: Callable[..., Any], wrapped: Callable[..., Any], key: str, reused: bool) -> Function:
    """Pickle a function for another process, by value if that process cannot import it.

    Args:
        function: the user's function, for its name and for errors.
        wrapped: the function to send in its place.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        return Function(key, pickling.dumps(wrapped), name, reused)
    except Exception as error:
        raise NotPicklable(
            f"{name} cannot run in another process: it refers to {culprit_of(function) or error}; "
            "make files, locks, processes and the like inside of it"
        ) from error


def pickled_arguments(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    try:
        return pickling.dumps((args, dict(kwargs)))
    except Exception as error:
        raise NotPicklable(
            f"{name} cannot be called in another process: argument {culprit(args, kwargs) or error}"
        ) from error


def call_context(simulate: str | None) -> protocol.CallContext:
    """Return the current call context of this process, for its ranks to adopt."""
    environment = dict(os.environ)
    environment.pop("PYTEST_CURRENT_TEST", None)  # changes per test and phase, and describes this process only
    if simulate == "cpu":
        # It restricts the real devices, often to none, and must not restrict the simulated ones.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        directory = os.sep
    return protocol.CallContext(tuple(sys.path), directory, environment)


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
