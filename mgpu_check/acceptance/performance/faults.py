"""Defects of speed."""

from __future__ import annotations

from collections.abc import Callable

from mgpu_check.acceptance.faults import HardwareFault, gpu, hardware_fault, host_link, link, made_by
from mgpu_check.devices.observations import Part
from mgpu_check.simulated.defects.parameters import Parameters

_SPEED = ("performance",)
_ALL = ("inventory", "memory", "compute", "links", "collectives", "training")


def _fault(
    name: str,
    summary: str,
    defaults: Parameters,
    cls: str,
    accused: Callable[[Parameters], tuple[Part, ...]] = gpu,
    caught_by: tuple[str, ...] = _SPEED,
) -> None:
    hardware_fault(HardwareFault(name, summary, defaults, accused, caught_by, defect=made_by(cls)))


_SLOW: Parameters = {"device": 1, "factor": 2.0}

_fault("slow-gpu", "a GPU computes slowly", _SLOW, "SlowDevice")
_fault("slow-unit", "a GPU runs one kind of kernels slowly", {**_SLOW, "factor": 4.0, "unit": "sorting"}, "SlowDevice")
_fault("slow-launches", "a GPU runs small kernels slowly", {**_SLOW, "below": 4096}, "SlowDevice")
_fault(
    "slow-when-hot",
    "a GPU that has been busy for some time slows down",
    {"device": 1, "factor": 1.6, "heat": 1e-3},
    "SlowDevice",
)
_fault(
    "slow-dtype", "a GPU computes slowly in one dtype", {"device": 1, "factor": 8.0, "dtype": "float16"}, "SlowDevice"
)
_fault("slow-link", "copies over a link are slow", {"device": 0, "peer": 2, "factor": 4.0}, "SlowLink", link)
_fault(
    "slow-host-link",
    "copies between the host and a GPU are slow",
    {"device": 1, "factor": 4.0},
    "SlowHostLink",
    host_link,
)
_fault(
    "slow-way",
    "copies from the host to a GPU are slow, but not those back",
    {**_SLOW, "way": "upload", "memory": "any"},
    "SlowHostLink",
    host_link,
)
_fault(
    "slow-pageable",
    "copies of pageable memory to a GPU and back are slow",
    {**_SLOW, "factor": 4.0, "memory": "pageable"},
    "SlowHostLink",
    host_link,
)
_fault(
    "slow-peer-kernel",
    "kernels that write to the memory of a peer are slow on a link",
    {"device": 0, "peer": 2, "factor": 4.0, "path": "kernel"},
    "SlowLink",
    link,
)
_fault(
    "slow-small-copies",
    "small copies over a link are slow",
    {"device": 0, "peer": 2, "factor": 4.0, "below": 4096},
    "SlowLink",
    link,
)
_fault("slow-port", "copies between a GPU and each other one are slow", _SLOW, "SlowPort")
_fault("slow-collective", "collectives with a GPU are slow", {**_SLOW, "operation": "all_reduce"}, "SlowCollective")
_fault(
    "slow-small-collectives",
    "small collectives with a GPU are slow",
    {**_SLOW, "operation": "any", "below": 4096},
    "SlowCollective",
)
_fault(
    "lost", "a GPU falls off the bus, `after` seconds into the run", {"device": 1, "after": 0.0}, "Lost", caught_by=_ALL
)
_fault(
    "hangs", "a call of the driver about a GPU never returns", {"device": 1, "after": 0.0}, "Hanging", caught_by=_ALL
)
