"""When a planted fault strikes: on which rank, and in which call."""

from __future__ import annotations

from mgpu_check.rank_side.rank import current_rank

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
    """Counts calls, and says which are struck."""

    def __init__(self) -> None:
        self.calls = 0

    def every(self, period: int) -> bool:
        """Count a call; return whether it is the last of `period`."""
        self.calls += 1
        return self.calls % period == 0

    def later(self, than: int = 1) -> bool:
        """Count a call; return whether there were `than` before."""
        self.calls += 1
        return self.calls > than
