"""Defects of single devices: of what they compute, copy, draw, keep and order."""

from mgpu_check.faults.devices import choosing, computing, copying, keeping, moving, running, training

__all__ = ["choosing", "computing", "copying", "keeping", "moving", "running", "training"]
