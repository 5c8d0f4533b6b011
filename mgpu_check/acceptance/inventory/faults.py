"""Defects that all GPUs of a node have alike, so that comparing the GPUs with each other finds none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mgpu_check.acceptance.faults import HardwareFault, hardware_fault, host
from mgpu_check.devices.telemetry.sources import Override
from mgpu_check.simulated.defects.parameters import Parameters, Value

_MOST = 16  # GPUs of a node

_EVERYWHERE: dict[str, tuple[str, dict[str, Value]]] = {
    "nvlinks-missing-everywhere": ("each GPU has lost the NVLinks to one of several switches", {"nvlinks": 12}),
    "nvlinks-slow-everywhere": ("all NVLinks run at half their speed", {"nvlink_speed": 13281}),
    "ecc-off-everywhere": ("ECC is off on all GPUs", {"ecc": "off", "ecc_pending": "off"}),
    "pcie-width-everywhere": ("all slots have 8 lanes", {"pcie_width_max": 8}),
    "pcie-generation-everywhere": ("all slots are set to Gen3", {"pcie_generation_max": 3}),
}
"""Faults that set fields of all GPUs: summary, field -> value."""


def _all_say(fields: dict[str, Value]) -> Callable[[Parameters], Sequence[Override]]:
    return lambda _: [Override(gpu, field, value) for gpu in range(_MOST) for field, value in fields.items()]


for _name, (_summary, _fields) in _EVERYWHERE.items():
    hardware_fault(HardwareFault(_name, _summary, {}, host, ("inventory",), telemetry=_all_say(_fields)))
