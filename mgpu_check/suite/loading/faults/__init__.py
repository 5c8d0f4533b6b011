"""Defects of samplers, loaders and their workers, and of splits of datasets."""

from __future__ import annotations

from mgpu_check.suite.loading.faults import datasets, samplers, workers

__all__ = ["datasets", "samplers", "workers"]
