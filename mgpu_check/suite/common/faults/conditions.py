"""Conditions of planted faults: the rank and the call that they affect."""

from __future__ import annotations

from mgpu_check.engine.rank_side.rank import current_rank

__all__ = ["Count", "is_last", "ranks_here"]


def is_last() -> bool:
    """Return whether this process is the last of several ranks."""
    rank = current_rank()
    return rank is not None and rank.size > 1 and rank.index == rank.size - 1


def ranks_here() -> int:
    """Return the world size of this rank; 0 in the node process."""
    rank = current_rank()
    return 0 if rank is None else rank.size


class Count:
    """Counts calls, to select those that a fault affects."""

    def __init__(self) -> None:
        self.calls = 0

    def every(self, period: int) -> bool:
        """Count a call; return True for every `period`-th call."""
        self.calls += 1
        return self.calls % period == 0

    def later(self, than: int = 1) -> bool:
        """Count a call; return True after `than` calls."""
        self.calls += 1
        return self.calls > than
