"""Conditions of planted faults as values that run, and print as the words of the report."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["When"]


@dataclass(frozen=True)
class When:
    """A condition on the arguments of a call. Join two by ``&``.

    Attributes:
        text: the condition in words, such as "float16" or "above 64 Ki elements".
        holds: whether a call with these arguments meets it.
    """

    text: str
    holds: Callable[..., bool]

    def __and__(self, other: When) -> When:
        return When(
            f"{self.text}, {other.text}",
            lambda *args, **kwargs: self.holds(*args, **kwargs) and other.holds(*args, **kwargs),
        )

    def __invert__(self) -> When:
        return When(f"not {self.text}", lambda *args, **kwargs: not self.holds(*args, **kwargs))

    def __str__(self) -> str:
        return self.text

    def guards(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` for calls that meet the condition. For others it returns NotImplemented: the original goes on."""

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.holds(*args, **kwargs) else NotImplemented

        return guarded
