"""Planted faults of parallelism: in hand-written recipes, in model parallelism, and in modules of torch."""

from __future__ import annotations

from mgpu_check.suite.parallelism.faults import mechanisms, modules, recipes

__all__ = ["mechanisms", "modules", "recipes"]
