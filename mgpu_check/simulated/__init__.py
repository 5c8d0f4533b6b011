"""Simulate a node with N CUDA devices in software, on one backing device."""

from __future__ import annotations

# First: in a process of `mgpu-check simulate`, the end of this import enters a node, and that needs this package.
import torch  # noqa: F401

from mgpu_check.simulated.activation import prepare, simulated_device_count, simulated_node
from mgpu_check.simulated.tensor import is_simulated, to_real

__all__ = ["is_simulated", "prepare", "simulated_device_count", "simulated_node", "to_real"]
