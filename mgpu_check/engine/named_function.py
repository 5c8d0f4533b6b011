"""Give a function its argument ``rank``, if it has such a parameter."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable
from typing import Any

from mgpu_check.engine.rank_side.rank import current_rank
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


_FORM = re.compile(r"[\w.]+:\w+")


class NamedFunction:
    """Stands for the function ``module:name``, which each rank imports when it is called.

    If it has a parameter ``rank``, it receives the `Rank`.
    """

    def __init__(self, text: str) -> None:
        if not _FORM.fullmatch(text):
            raise ValueError(
                f"fn={text!r} is no function; give a function, or its name such as 'package.module:function'"
            )
        self.__qualname__ = text
        self.__name__ = text.rpartition(":")[2]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = pkgutil.resolve_name(self.__qualname__)
        args, kwargs = with_rank(function, args, kwargs, current_rank())
        return function(*args, **kwargs)
