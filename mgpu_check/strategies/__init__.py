"""Hypothesis strategies: tensors, batches, operators over devices, and numbers of devices.

They draw specs (see `mgpu_check.specs`), which are re-exported here.
"""

from __future__ import annotations

from mgpu_check.specs.batches import BatchSpec, Leaf, Nested, Sample, Split
from mgpu_check.specs.operators import OperatorTable
from mgpu_check.specs.tensors import TensorSpec
from mgpu_check.strategies.batches import batch_sizes, batches, splits
from mgpu_check.strategies.operators import operator_tables
from mgpu_check.strategies.tensors import dtypes, layouts, seeds, shapes, tensors
from mgpu_check.strategies.worlds import (
    all_devices,
    device_counts,
    device_orders,
    device_pairs,
    large_worlds,
    places,
    world_pairs,
    world_sizes,
)

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
