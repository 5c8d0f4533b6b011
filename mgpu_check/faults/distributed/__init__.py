"""Planted faults of DistributedDataParallel: of its reducer and its options, of state, and of the loops around it."""

from mgpu_check.faults.distributed import accumulating, given, hooks, reducing, restoring, state

__all__ = ["accumulating", "given", "hooks", "reducing", "restoring", "state"]
