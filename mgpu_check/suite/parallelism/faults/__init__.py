"""Planted faults of parallelism."""

from __future__ import annotations

from mgpu_check.suite.parallelism.faults import devices, ranks, schedules, styles

__all__ = ["devices", "ranks", "schedules", "styles"]
