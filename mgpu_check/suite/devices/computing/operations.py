"""Find the function that prepares each operation of the check of arithmetic."""

from __future__ import annotations

import importlib

from mgpu_check.suite.devices.computing.cases import COMPUTATIONS
from mgpu_check.suite.devices.computing.prepared import Prepare


def _found(place: str) -> Prepare:
    module, _, name = place.partition(":")
    found: Prepare = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return found


OPERATIONS: dict[str, Prepare] = {name: _found(row.prepare) for name, row in COMPUTATIONS.items()}
"""Name of an operation -> function that makes its operands."""
