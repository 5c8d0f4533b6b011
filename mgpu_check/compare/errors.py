"""Handle errors in the script's process: those of the recorder, and those of the steps that it records."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_HERE = str(Path(__file__).parents[1])


def with_methods_of_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function during which tensors of the user's classes have the methods of torch."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return call


class Guard:
    """Keeps errors of the recorder out of the script, and overridden methods of tensors out of the recorder.

    Args:
        broken: called with the error and its place; it does not return.
    """

    def __init__(self, broken: Callable[[str, str], None]) -> None:
        self._broken = broken

    def __call__(self, record: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `record`, and ends the recording if that raises an error."""

        @functools.wraps(record)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    return record(*args, **kwargs)
            except Exception as error:
                last = next(f for f in reversed(traceback.extract_tb(error.__traceback__)) if _HERE in f.filename)
                return self._broken(f"{type(error).__name__}: {error}", f"{last.filename}:{last.lineno}")

        return guarded


def watching_errors(hooked: Callable[..., Any], raised: Callable[[Any], None]) -> Callable[..., Any]:
    """Wrap `hooked`, which adds the hooks around a step, to call `raised` with the optimizer if the step raises."""

    @functools.wraps(hooked)
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        step = hooked(func)

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            except BaseException:  # torch calls no hook after the step then
                raised(args[0])
                raise

        return watched

    return profile_hook_step
