"""Planted faults of DistributedDataParallel: its reducer, its options, its state, and training loops that use it."""

from mgpu_check.faults.distributed import accumulating, given, hooks, reducing, restoring, state

__all__ = ["accumulating", "given", "hooks", "reducing", "restoring", "state"]
