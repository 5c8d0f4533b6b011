"""Call a function on ranks by its name: the pytest process does not import its module, which may import torch."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

from mgpu_check.engine.rank_side.rank import current_rank

__all__ = ["NamedFunction"]

_FORM = re.compile(r"[\w.]+:\w+")


class NamedFunction:
    """Stands for the function ``module:name``, which each rank imports when it is called.

    If it has a parameter ``rank``, it receives the `Rank`.

    Raises:
        ValueError: the text has another form.
    """

    def __init__(self, text: str) -> None:
        if not _FORM.fullmatch(text):
            raise ValueError(
                f"fn={text!r} is no function; give a function, or its name such as 'package.module:function'"
            )
        self.__qualname__ = text
        self.__name__ = text.rpartition(":")[2]
        self._module = text.rpartition(":")[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = getattr(importlib.import_module(self._module), self.__name__)
        parameters = list(inspect.signature(function).parameters.values())
        names = [parameter.name for parameter in parameters]
        if "rank" in names and "rank" not in kwargs:
            position = names.index("rank")
            if parameters[position].kind is inspect.Parameter.KEYWORD_ONLY or position > len(args):
                kwargs["rank"] = current_rank()
            else:
                args = (*args[:position], current_rank(), *args[position:])
        return function(*args, **kwargs)
