"""Defects of scatter and gather, and of the ways in which batches are split by hand."""

from __future__ import annotations

from mgpu_check.faults.scatter import conditional, gathering, shards

__all__ = ["conditional", "gathering", "shards"]
