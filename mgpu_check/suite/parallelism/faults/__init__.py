"""Planted faults of parallelism: in hand-written recipes, and in modules of torch."""

from __future__ import annotations

from mgpu_check.suite.parallelism.faults import modules, recipes

__all__ = ["modules", "recipes"]
