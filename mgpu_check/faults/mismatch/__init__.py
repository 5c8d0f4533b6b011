"""Defects of how operands on different devices are refused, or let through."""

from __future__ import annotations

from mgpu_check.faults.mismatch import conditional, refusing

__all__ = ["conditional", "refusing"]
