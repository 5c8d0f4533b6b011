"""One question to the driver at a time, so that the one that hangs is known; and who hangs is passed by."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = ["PATIENCE", "Query", "Turnstile", "watch"]

PATIENCE = 3
"""Deadlines that a call has which is about no GPU: to initialize the driver's library may wake all of them."""

_TICKS = 20


@dataclass(eq=False)
class Query:
    """One call of the driver.

    Attributes:
        gpu: number in the run; None of a call that is about none, such as the initialization.
        ticks: how often the watch has found it under way.
        hung: it has not returned within the deadline.
    """

    gpu: int | None
    field: str
    ticks: int = 0
    hung: bool = False


class Turnstile:
    """Lets one query pass at a time, and the next one when it has returned or hangs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: Query | None = None
        self._hanging: set[Query] = set()

    def enter(self, query: Query) -> None:
        """Wait until no other query is under way, but those that hang."""
        with self._changed:
            while self._holder is not None and not self._holder.hung:
                self._changed.wait()
            self._holder = query

    def leave(self, query: Query) -> None:
        """Let the next one pass."""
        with self._changed:
            self._hanging.discard(query)
            if self._holder is query:
                self._holder = None
            self._changed.notify_all()

    def tick(self) -> tuple[Query, Literal["hang", "blocked"]] | None:
        """Count that the query is still under way; return it when it hangs from now on, and whether others hang already."""
        with self._changed:
            query = self._holder
            if query is None or query.hung:
                return None
            query.ticks += 1
            if query.ticks < (_TICKS if query.gpu is not None else PATIENCE * _TICKS):
                return None
            query.hung = True
            kind: Literal["hang", "blocked"] = "blocked" if self._hanging else "hang"
            self._hanging.add(query)
            self._changed.notify_all()
            return query, kind


def watch(
    turnstile: Turnstile, deadline: float, report: Callable[[Query, Literal["hang", "blocked"]], None]
) -> threading.Thread:
    """Watch the queries in a thread: report those that take longer than `deadline` seconds.

    Time is counted in turns of this thread. A machine so busy that the process does not run stops them, too, and no query
    counts as hanging for that.
    """
    pause = threading.Event()

    def go() -> None:
        while True:
            pause.wait(deadline / _TICKS)
            found = turnstile.tick()
            if found is not None:
                report(*found)

    thread = threading.Thread(target=go, name="watch", daemon=True)
    thread.start()
    return thread
