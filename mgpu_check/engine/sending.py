"""What is sent to ranks: functions, their arguments, and what of this process they are to have."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mgpu_check.engine.world import Function
from mgpu_check.processes import pickling, protocol
from mgpu_check.processes.unpicklable import culprit, culprit_of

__all__ = ["NotPicklable", "call_context", "pickled_arguments", "pickled_function", "with_rank"]


class NotPicklable(TypeError):
    """A function, or an argument of a call, cannot be pickled."""


def pickled_function(function: Callable[..., Any], wrapped: Callable[..., Any], key: str, reused: bool) -> Function:
    """Pickle a function as it is sent, by value where it cannot be imported elsewhere.

    Args:
        function: the user's own, for its name and for errors.
        wrapped: what is sent for it.
        key, reused: see `Function`.

    Raises:
        NotPicklable: it, or something that it refers to, cannot be pickled.
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
    """Pickle the arguments of the function of this name.

    Raises:
        NotPicklable: one of them cannot be pickled.
    """
    try:
        return pickling.dumps((args, dict(kwargs)))
    except Exception as error:
        raise NotPicklable(
            f"{name} cannot be called in another process: argument {culprit(args, kwargs) or error}"
        ) from error


def call_context(simulate: str | None) -> protocol.CallContext:
    """Return the call context of this process now, as its ranks are to have it."""
    environment = dict(os.environ)
    environment.pop("PYTEST_CURRENT_TEST", None)  # it differs for each test and phase, and means this process
    if simulate == "cpu":
        # It says which real devices may be used, often none; of the simulated ones there are as many as asked for.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        directory = os.sep
    return protocol.CallContext(tuple(sys.path), directory, environment)


def with_rank(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, with the rank's placeholder where `fn` has a parameter of that name."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return args, kwargs
    if "rank" not in parameters or "rank" in kwargs:
        return args, kwargs
    placeholder = protocol.Placeholder("rank")
    position = list(parameters).index("rank")
    if parameters["rank"].kind is inspect.Parameter.KEYWORD_ONLY or position > len(args):
        return args, {**kwargs, "rank": placeholder}
    return (*args[:position], placeholder, *args[position:]), kwargs
