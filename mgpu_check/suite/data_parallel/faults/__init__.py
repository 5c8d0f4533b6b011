"""Planted faults of DataParallel: arguments and outputs of replicas, the replicas themselves, and their training."""

from mgpu_check.suite.data_parallel.faults import passing, replicas

__all__ = ["passing", "replicas"]
