"""Conditions of planted faults as values that run, and print as the words of the report."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class When:
    """A condition on the arguments of a call. Join two by ``&``.

    Attributes:
        text: the condition in words, such as "float16" or "above 64 Ki elements".
        holds: whether a call with these arguments meets it.
        fresh: makes a new `holds` for each planting, if `holds` counts calls.
    """

    text: str
    holds: Callable[..., bool]
    fresh: Callable[[], Callable[..., bool]] | None = None

    def __and__(self, other: When) -> When:
        def fresh() -> Callable[..., bool]:
            first, second = self.test(), other.test()
            return lambda *args, **kwargs: first(*args, **kwargs) and second(*args, **kwargs)

        return When(f"{self.text}, {other.text}", fresh(), fresh)

    def __invert__(self) -> When:
        def fresh() -> Callable[..., bool]:
            holds = self.test()
            return lambda *args, **kwargs: not holds(*args, **kwargs)

        return When(f"not {self.text}", fresh(), fresh)

    def __str__(self) -> str:
        return self.text

    def test(self) -> Callable[..., bool]:
        """Return `holds` for one planting: a count starts at 0."""
        return self.fresh() if self.fresh else self.holds

    def guards(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` for calls that meet the condition. For others it returns NotImplemented."""
        holds = self.test()

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if holds(*args, **kwargs) else NotImplemented

        return guarded
