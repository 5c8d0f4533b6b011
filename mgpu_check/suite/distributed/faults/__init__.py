"""Planted faults of DistributedDataParallel: its reducer, its options, its state, and training loops that use it."""

from mgpu_check.suite.distributed.faults import accumulation as accumulating
from mgpu_check.suite.distributed.faults import hooks, state
from mgpu_check.suite.distributed.faults import inputs as given
from mgpu_check.suite.distributed.faults import optimizers as restoring
from mgpu_check.suite.distributed.faults import reducer as reducing

__all__ = ["accumulating", "given", "hooks", "reducing", "restoring", "state"]
