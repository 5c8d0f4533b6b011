"""Planted faults of what torch divides among ranks."""

from __future__ import annotations

from mgpu_check.faults.sharded import dtensors, flat, modules, options, precision, states

__all__ = ["dtensors", "flat", "modules", "options", "precision", "states"]
