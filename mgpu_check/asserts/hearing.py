"""Pass facts from checks to a listener in the same process: the plugin, or a rank that forwards them to the plugin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Hearing(Generic[T]):
    """A channel from checks to at most one listener, the one whose context was entered last."""

    def __init__(self) -> None:
        self._hear: Callable[[T], None] | None = None

    @property
    def heard(self) -> bool:
        """Whether the channel has a listener."""
        return self._hear is not None

    @contextlib.contextmanager
    def heard_by(self, hear: Callable[[T], None]) -> Iterator[None]:
        """Call `hear` with each fact that is passed to `tell`, for the time of the context."""
        before, self._hear = self._hear, hear
        try:
            yield
        finally:
            self._hear = before

    def tell(self, what: T) -> None:
        """Pass a fact to the listener, if there is one."""
        if self._hear is not None:
            self._hear(what)
