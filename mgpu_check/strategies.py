"""Hypothesis strategies: tensors, batches, operators over devices, and numbers of devices.

They draw specs, frozen dataclasses of plain values, which are re-exported here.
"""

from __future__ import annotations

from mgpu_check.oracles.devices.mixed_operands import OperatorTable
from mgpu_check.oracles.strategies import (
    all_devices,
    batch_sizes,
    batches,
    device_counts,
    device_orders,
    device_pairs,
    dtypes,
    large_worlds,
    layouts,
    operator_tables,
    places,
    seeds,
    shapes,
    splits,
    tensors,
    world_pairs,
    world_sizes,
)
from mgpu_check.oracles.tensors import BatchSpec, Leaf, Nested, Sample, Split, TensorSpec

__all__ = [
    "BatchSpec",
    "Leaf",
    "Nested",
    "OperatorTable",
    "Sample",
    "Split",
    "TensorSpec",
    "all_devices",
    "batch_sizes",
    "batches",
    "device_counts",
    "device_orders",
    "device_pairs",
    "dtypes",
    "large_worlds",
    "layouts",
    "operator_tables",
    "places",
    "seeds",
    "shapes",
    "splits",
    "tensors",
    "world_pairs",
    "world_sizes",
]
