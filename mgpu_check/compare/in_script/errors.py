"""Handle errors in the script's process: those of the recorder, and those of the steps that it records."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_HERE = str(Path(__file__).parents[2])


Guard = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps a function of the recorder: its errors stay out of the script, and methods of the user's tensors out of it."""


def guard_with(broken: Callable[[str, str], None]) -> Guard:
    """Return a guard, which calls `broken` with an error and its place."""

    def guard(record: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(record)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    return record(*args, **kwargs)
            except Exception as error:
                last = next(f for f in reversed(traceback.extract_tb(error.__traceback__)) if _HERE in f.filename)
                return broken(f"{type(error).__name__}: {error}", f"{last.filename}:{last.lineno}")

        return guarded

    return guard


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
