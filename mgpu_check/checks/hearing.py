"""Hand what a check meets to whoever hears it in this process: the plugin, or a rank that tells it to the plugin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["Channel"]

T = TypeVar("T")


class Channel(Generic[T]):
    """From checks to at most one hearer: the one that was entered last."""

    def __init__(self) -> None:
        self._hear: Callable[[T], None] | None = None

    @property
    def heard(self) -> bool:
        """Whether anybody hears it."""
        return self._hear is not None

    @contextlib.contextmanager
    def heard_by(self, hear: Callable[[T], None]) -> Iterator[None]:
        """Have `hear` called with all that is told, for the time of the context."""
        before, self._hear = self._hear, hear
        try:
            yield
        finally:
            self._hear = before

    def tell(self, what: T) -> None:
        """Tell it; nothing where nobody hears it."""
        if self._hear is not None:
            self._hear(what)
