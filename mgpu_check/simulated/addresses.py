"""Assign addresses to the storages of a simulated device whose hardware is simulated too."""

from __future__ import annotations

import bisect


class Addresses:
    """The memory of one device, as offsets from 0. The caller must hold the lock of `memory`."""

    def __init__(self, total: int) -> None:
        self._free: list[tuple[int, int]] = [(0, total)]  # start and end of each gap, in order

    def place(self, nbytes: int) -> int | None:
        """Take the lowest gap of at least ``nbytes`` bytes, and return its address; None if no gap is large enough."""
        for position, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                if end - start == nbytes:
                    del self._free[position]
                else:
                    self._free[position] = (start + nbytes, end)
                return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        end = start + nbytes
        position = bisect.bisect(self._free, (start, end))
        if position < len(self._free) and self._free[position][0] == end:
            end = self._free.pop(position)[1]
        if position and self._free[position - 1][1] == start:
            position -= 1
            start = self._free.pop(position)[0]
        self._free.insert(position, (start, end))
