"""Hypothesis strategies: tensors, batches, operators over devices, and numbers of devices.

They draw specs, frozen dataclasses of plain values, which are re-exported here.
"""

from __future__ import annotations

from mgpu_check.suite.common.strategies import (
    all_devices,
    device_counts,
    device_orders,
    device_pairs,
    dtypes,
    large_worlds,
    layouts,
    places,
    seeds,
    shapes,
    tensors,
    world_pairs,
    world_sizes,
)
from mgpu_check.suite.common.tensors import TensorSpec
from mgpu_check.suite.mismatch.operators import OperatorTable
from mgpu_check.suite.mismatch.strategies import operator_tables
from mgpu_check.suite.scatter.cases import BatchSpec, Leaf, Nested, Sample, Split
from mgpu_check.suite.scatter.strategies import batch_sizes, batches, splits

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
