"""Defects of single devices: computation, copies, random numbers, state and synchronization."""

from mgpu_check.suite.devices.faults import autocasting, computing, training
from mgpu_check.suite.devices.faults import copies as copying
from mgpu_check.suite.devices.faults import modules as moving
from mgpu_check.suite.devices.faults import options as choosing
from mgpu_check.suite.devices.faults import state as keeping
from mgpu_check.suite.devices.faults import streams as running

__all__ = ["autocasting", "choosing", "computing", "copying", "keeping", "moving", "running", "training"]
