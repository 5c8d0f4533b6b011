"""Ranks that have little time for what is known to hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mgpu_check.gates.gate_arguments import RanksFixture


class OnTime:
    """Ranks that have `seconds` for each call at several ranks, and all the time of the run for one rank alone.

    A test of hanging ranks waits for the deadline, so that is short; but what ranks do before they hang must be done by
    then, also on a machine that is busy.
    """

    def __init__(self, ranks: RanksFixture, seconds: float) -> None:
        self._ranks, self._seconds = ranks, seconds

    @property
    def size(self) -> int:
        return self._ranks.size

    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        size: int | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        return self._ranks.run(fn, *args, size=size, timeout=None if size == 1 else self._seconds, **kwargs)
