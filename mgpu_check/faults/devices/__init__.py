"""Defects of single devices: of what they compute, copy, draw, keep and order."""

from mgpu_check.faults.devices import computing, copying, keeping, running

__all__ = ["computing", "copying", "keeping", "running"]
