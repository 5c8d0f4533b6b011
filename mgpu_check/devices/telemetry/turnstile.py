"""Serialize the queries to the driver, so that a query that hangs is known; later queries bypass it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

PATIENCE = 3
"""Factor on the deadline of a call without a GPU: initializing the driver's library may wake all GPUs."""

_TICKS = 20  # per deadline: measures it to within 5 %


@dataclass(eq=False)
class Query:
    """One call of the driver.

    Attributes:
        gpu: number in the run; None for a call without a GPU, such as the initialization.
        ticks: number of times that the watch has found it in progress.
        hung: whether it has exceeded its deadline.
    """

    gpu: int | None
    field: str
    ticks: int = 0
    hung: bool = False


class Turnstile:
    """A lock that admits one query at a time: the next may enter when the current one has returned or hangs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: Query | None = None
        self._hanging: set[Query] = set()

    def enter(self, query: Query) -> None:
        """Wait until no other query is in progress, except for those that hang."""
        with self._changed:
            while self._holder is not None and not self._holder.hung:
                self._changed.wait()
            self._holder = query

    def leave(self, query: Query) -> None:
        """Admit the next query."""
        with self._changed:
            self._hanging.discard(query)
            if self._holder is query:
                self._holder = None
            self._changed.notify_all()

    def tick(self) -> tuple[Query, Literal["hang", "blocked"]] | None:
        """Count one more tick of the current query.

        Return it when it exceeds its deadline, with the kind of trouble.
        """
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
    """Start a thread that reports the queries that take longer than `deadline` seconds.

    The thread counts its own wake-ups as time. On a machine too busy to run this process, the count stops as well, so a
    busy machine does not make a query count as hanging.
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
