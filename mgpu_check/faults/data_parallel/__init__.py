"""Planted faults of DataParallel: arguments and outputs of replicas, the replicas themselves, and training with them."""

from mgpu_check.faults.data_parallel import handing, hooking, replicating

__all__ = ["handing", "hooking", "replicating"]
