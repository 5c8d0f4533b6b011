"""Planted faults of parallelism."""

from __future__ import annotations

from mgpu_check.faults.parallelism import devices, ranks, schedules, styles

__all__ = ["devices", "ranks", "schedules", "styles"]
