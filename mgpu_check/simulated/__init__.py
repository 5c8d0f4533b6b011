"""Simulate a node with N CUDA devices in software, on one backing device.

1. `activation.py` enters a `node.py`, and replaces what names a device: `factories.py`, `tensor_methods.py`, `cuda/`.
2. A tensor of a simulated device is a `tensor.py` around a tensor of the backing device.
3. `dispatch.py` runs each operator: it checks the devices as CUDA does, runs it (`operators/` where CUDA's differs),
   and tags the results. `transfer.py` moves tensors, `distributed/` runs collectives and data parallelism.
   `operators/arithmetic.py` and `distributed/ring_sums.py` change their values as a GPU would, if asked to.
4. `hardware.py` is below all of them: healthy, or with the defects of `defects/`.

The names are imported when they are used: processes without torch read the parameters of defects.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mgpu_check.simulated.activation import prepare as prepare
    from mgpu_check.simulated.activation import simulated_device_count as simulated_device_count
    from mgpu_check.simulated.activation import simulated_node as simulated_node
    from mgpu_check.simulated.tensor import is_simulated as is_simulated
    from mgpu_check.simulated.tensor import to_real as to_real

_HOMES = {
    "is_simulated": "mgpu_check.simulated.tensor",
    "prepare": "mgpu_check.simulated.activation",
    "simulated_device_count": "mgpu_check.simulated.activation",
    "simulated_node": "mgpu_check.simulated.activation",
    "to_real": "mgpu_check.simulated.tensor",
}

__all__ = sorted(_HOMES)  # sorted() of a literal dict's keys


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # First: in a process of `mgpu-check simulate`, the end of this import enters a node, and that needs this package.
    importlib.import_module("torch")
    return getattr(importlib.import_module(_HOMES[name]), name)
