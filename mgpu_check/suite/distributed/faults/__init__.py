"""Planted faults of DistributedDataParallel: its reducer, its options, its state, and training loops that use it."""

from mgpu_check.suite.distributed.faults import accumulation, hooks, inputs, reducer, state

__all__ = ["accumulation", "hooks", "inputs", "reducer", "state"]
