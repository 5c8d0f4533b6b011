"""Hypothesis strategies: tensors, batches, operators over devices, and numbers of devices, all as specs.

A spec is a frozen dataclass of plain values: it is drawn in a process without torch, prints as one line, and builds its
data where it is used.
"""

from __future__ import annotations

from mgpu_check.strategies.batches import BatchSpec, Leaf, Nested, Sample, Split, batch_sizes, batches, splits
from mgpu_check.strategies.operators import OperatorCase, operator_cases
from mgpu_check.strategies.tensors import TensorSpec, dtypes, layouts, seeds, shapes, tensors
from mgpu_check.strategies.worlds import all_devices, device_counts, device_pairs, places, world_sizes

__all__ = [
    "BatchSpec",
    "Leaf",
    "Nested",
    "OperatorCase",
    "Sample",
    "Split",
    "TensorSpec",
    "all_devices",
    "batch_sizes",
    "batches",
    "device_counts",
    "device_pairs",
    "dtypes",
    "layouts",
    "operator_cases",
    "places",
    "seeds",
    "shapes",
    "splits",
    "tensors",
    "world_sizes",
]
