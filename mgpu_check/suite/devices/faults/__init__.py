"""Defects of single devices: copies, random numbers, state and synchronization."""

from mgpu_check.suite.devices.faults import copies as copying
from mgpu_check.suite.devices.faults import state as keeping
from mgpu_check.suite.devices.faults import streams as running

__all__ = ["copying", "keeping", "running"]
