"""Planted faults of DataParallel: of what it hands to replicas and brings back, and of the training with it."""

from mgpu_check.faults.data_parallel import handing, hooking, replicating

__all__ = ["handing", "hooking", "replicating"]
