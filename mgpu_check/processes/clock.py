"""A clock that tests cannot stop.

What replaces the clocks of Python, as freezegun and time-machine do, replaces `time.monotonic` in every module that has
it. This one is held by a class, and asks the system by a function that none of them replaces for this clock.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence

__all__ = ["Clock", "ready"]

_LONGEST = 1e6  # milliseconds are passed to the system as 32 bits


class Clock:
    """The time of the engine, in seconds since some moment."""

    _get: Callable[[int], float] = staticmethod(time.clock_gettime)
    _sleep: Callable[[float], None] = staticmethod(time.sleep)
    _which = time.CLOCK_MONOTONIC

    @classmethod
    def now(cls) -> float:
        """Return the time in seconds."""
        return cls._get(cls._which)

    @classmethod
    def until(cls, deadline: float) -> float:
        """Return the seconds until `deadline`, 0 if it has passed; as many as can be waited for at once."""
        return min(_LONGEST, max(0.0, deadline - cls.now()))

    @classmethod
    def sleep(cls, seconds: float) -> None:
        """Wait."""
        cls._sleep(seconds)


def ready(files: Sequence[int], deadline: float) -> list[int]:
    """Return those of `files` that can be read from, or have ended; wait for one until `deadline` at most."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(Clock.until(deadline) * 1000)]
