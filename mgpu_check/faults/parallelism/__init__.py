"""Planted faults of parallelism."""

from __future__ import annotations

from mgpu_check.faults.parallelism import devices, ranks, schedules

__all__ = ["devices", "ranks", "schedules"]
