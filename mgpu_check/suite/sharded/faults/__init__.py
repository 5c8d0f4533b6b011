"""Planted faults of sharding by torch: device meshes, DTensors, FSDP, optimizers and checkpoints."""

from mgpu_check.suite.sharded.faults import dtensors, fsdp, optimizers, states

__all__ = ["dtensors", "fsdp", "optimizers", "states"]
