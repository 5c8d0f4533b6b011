"""Implementations of the hardware faults in a simulated node.

These modules import torch; the registering ones do not.
"""
