"""Defects of operators with operands on different devices: missing or wrong errors, and wrong refusals."""

from __future__ import annotations

from mgpu_check.suite.mismatch.faults import conditional, refusing

__all__ = ["conditional", "refusing"]
