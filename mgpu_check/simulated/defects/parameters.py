"""Parameters of defects: names and plain values. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["PATTERNS", "Parameters", "Value"]

PATTERNS = ("bit", "low-bit", "bits", "lane", "nan", "tile", "swap")
"""Patterns of wrong elements; see `mgpu_check.simulated.defects.chance`."""

Value = int | float | str
Parameters = Mapping[str, Value]
"""Values of the parameters of a defect by name, such as "device", "peer", "every" or "pattern"."""
