"""The engine: warm processes, one per rank, that run functions in lockstep and heal."""

from mgpu_check.ranks.rank import Rank, current_rank

__all__ = ["Rank", "current_rank"]
