"""Defects of scatter and gather, and of batches split by hand."""

from __future__ import annotations

from mgpu_check.suite.scatter.faults import conditional, gathering, shards

__all__ = ["conditional", "gathering", "shards"]
