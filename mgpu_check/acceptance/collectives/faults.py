"""Defects of collectives."""

from __future__ import annotations

from mgpu_check.acceptance.faults import HardwareFault, gpu, hardware_fault, made_by
from mgpu_check.simulated.defects.parameters import Parameters


def _fault(name: str, summary: str, defaults: Parameters, level: str = "quick", pattern: str = "bits") -> None:
    parameters = {"device": 2, "operation": "any", "seed": 0, **defaults}
    defect = made_by("WrongCollective", pattern=pattern)
    hardware_fault(HardwareFault(name, summary, parameters, gpu, ("collectives",), level, defect))


_fault("collective-wrong", "the result of each collective is wrong on one GPU", {})
_fault(
    "all-reduce-dtype", "all_reduce of one dtype is wrong on one GPU", {"operation": "all_reduce", "dtype": "bfloat16"}
)
_fault("all-gather-swapped", "all_gather swaps elements on one GPU", {"operation": "all_gather"}, pattern="swap")
_fault(
    "reduce-scatter-lanes",
    "reduce_scatter is wrong in each 32nd element on one GPU",
    {"operation": "reduce_scatter"},
    pattern="lane",
)
_fault("broadcast-nan", "broadcast leaves a NaN on one GPU", {"operation": "broadcast"}, pattern="nan")
_fault("all-to-all-wrong", "all_to_all is wrong on one GPU", {"operation": "all_to_all"})
_fault("collective-of-three", "collectives of three GPUs or more are wrong on one GPU", {"ranks": 3})
_fault(
    "all-reduce-seldom",
    "all_reduce of 1 MiB is wrong one time in 50 on one GPU",
    {"operation": "all_reduce", "bytes": 1 << 20, "every": 50},
)
_fault(
    "all-gather-seldom",
    "one all_gather in 60 is wrong on one GPU",
    {"operation": "all_gather", "every": 60},
    level="standard",
)
_fault(
    "all-reduce-rare",
    "all_reduce of 1 MiB is wrong one time in 300 on one GPU",
    {"operation": "all_reduce", "bytes": 1 << 20, "every": 300},
    level="long",
)
