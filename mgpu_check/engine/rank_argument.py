"""Give a function its argument ``rank``, if it has such a parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mgpu_check.processes import protocol


def with_rank(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rank: object = protocol.Placeholder("rank"),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, with `rank` added if `fn` has a parameter ``rank`` that `kwargs` do not give."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return args, kwargs
    if "rank" not in parameters or "rank" in kwargs:
        return args, kwargs
    position = list(parameters).index("rank")
    if parameters["rank"].kind is inspect.Parameter.KEYWORD_ONLY or position > len(args):
        return args, {**kwargs, "rank": rank}
    return (*args[:position], rank, *args[position:]), kwargs
