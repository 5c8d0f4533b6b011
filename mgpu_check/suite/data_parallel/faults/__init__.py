"""Planted faults of DataParallel: arguments and outputs of replicas, the replicas themselves, and training with them."""

from mgpu_check.suite.data_parallel.faults import hooks as hooking
from mgpu_check.suite.data_parallel.faults import passing as handing
from mgpu_check.suite.data_parallel.faults import replicas as replicating

__all__ = ["handing", "hooking", "replicating"]
