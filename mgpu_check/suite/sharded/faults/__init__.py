"""Planted faults of sharding by torch: device meshes, DTensors, FSDP, optimizers and checkpoints."""

from __future__ import annotations

from mgpu_check.suite.sharded.faults import dtensors, flat, modules, options, precision, states

__all__ = ["dtensors", "flat", "modules", "options", "precision", "states"]
