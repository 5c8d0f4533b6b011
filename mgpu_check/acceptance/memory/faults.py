"""Defects of memory."""

from __future__ import annotations

from mgpu_check.acceptance.faults import HardwareFault, gpu, hardware_fault, made_by
from mgpu_check.simulated.defects.parameters import Parameters

_ADDRESS = 5_000_003
"""Within the first third of the memory of a simulated GPU, and odd, so that it is aligned to nothing."""


def _fault(name: str, summary: str, defaults: Parameters, cls: str, level: str = "quick") -> None:
    parameters = {"device": 1, "address": _ADDRESS, **defaults}
    hardware_fault(HardwareFault(name, summary, parameters, gpu, ("memory",), level, made_by(cls)))


_fault("memory-stuck-at-zero", "a bit of the memory is always 0", {"bit": 3, "value": 0}, "StuckBit")
_fault("memory-stuck-at-one", "a bit of the memory is always 1", {"bit": 6, "value": 1}, "StuckBit")
_fault("memory-dead-row", "a row of the memory reads as zeros", {"length": 1024}, "DeadRow")
_fault(
    "memory-aliased",
    "two addresses are the same cell: a write to one changes both",
    {"length": 64, "distance": 4096},
    "Aliased",
)
_fault(
    "memory-aliased-pages",
    "two pages are the same memory: a write to one changes both",
    {"address": 5 << 20, "length": 65536, "distance": 1 << 20},
    "Aliased",
)
_fault("memory-coupled", "a bit that changes from 0 to 1 flips its neighbour", {"bit": 2}, "Coupled")
_fault("memory-weak", "a bit sometimes flips", {"bit": 5, "every": 7, "seed": 0}, "WeakBit")
_fault("memory-leaks", "a bit turns to 0 two seconds after it was written", {"bit": 4, "seconds": 2.0}, "LeakyBit")
