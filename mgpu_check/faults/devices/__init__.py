"""Defects of single devices: computation, copies, random numbers, state and synchronization."""

from mgpu_check.faults.devices import autocasting, choosing, computing, copying, keeping, moving, running, training

__all__ = ["autocasting", "choosing", "computing", "copying", "keeping", "moving", "running", "training"]
