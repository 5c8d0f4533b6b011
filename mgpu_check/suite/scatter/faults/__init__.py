"""Defects of scatter and gather, and of batches split by hand."""

from mgpu_check.suite.scatter.faults import gathering, shards

__all__ = ["gathering", "shards"]
