"""Call a function on ranks by its name: the pytest process does not import its module, which may import torch."""

from __future__ import annotations

import pkgutil
import re
from typing import Any

from mgpu_check.engine.rank_argument import with_rank
from mgpu_check.engine.rank_side.rank import current_rank

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
