"""A clock that tests cannot stop.

freezegun and time-machine replace functions such as `time.monotonic` in every module that holds them. This clock is
held by a class, and reads CLOCK_MONOTONIC through `time.clock_gettime`, which these tools do not replace for that
clock.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence

_LONGEST = 1e6  # seconds: poll takes its milliseconds as a 32-bit integer


class Clock:
    _get: Callable[[int], float] = staticmethod(time.clock_gettime)
    _sleep: Callable[[float], None] = staticmethod(time.sleep)
    _which = time.CLOCK_MONOTONIC

    @classmethod
    def now(cls) -> float:
        return cls._get(cls._which)

    @classmethod
    def until(cls, deadline: float) -> float:
        """Return the seconds until `deadline`, a time of `now`; 0 if it has passed.

        The result is at most 1e6, because `poll` takes its milliseconds as a 32-bit integer.
        """
        return min(_LONGEST, max(0.0, deadline - cls.now()))

    @classmethod
    def sleep(cls, seconds: float) -> None:
        cls._sleep(seconds)


def ready(files: Sequence[int], deadline: float) -> list[int]:
    """Wait until `deadline` for a file that is readable or closed at its other end, and return all such files."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(Clock.until(deadline) * 1000)]
