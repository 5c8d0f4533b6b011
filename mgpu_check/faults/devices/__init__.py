"""Defects of single devices: of what they compute, copy, draw, keep and order."""

from mgpu_check.faults.devices import autocasting, choosing, computing, copying, keeping, moving, running, training

__all__ = ["autocasting", "choosing", "computing", "copying", "keeping", "moving", "running", "training"]
