"""Defects that telemetry reports: growing counters, different settings, links that are down, a driver that hangs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mgpu_check.acceptance.faults import HardwareFault, gpu, hardware_fault, host, link, made_by
from mgpu_check.devices.observations import Part
from mgpu_check.devices.telemetry.sources import Override
from mgpu_check.simulated.defects.parameters import Parameters, Value

if TYPE_CHECKING:
    from mgpu_check.simulated.hardware import Defect

_DOWN: dict[str, Value] = {"nvlinks": 17, "nvlinks_down": "4"}

_GROWING = {
    "ecc_corrected": ("the counter of corrected memory errors grows", 20),
    "ecc_uncorrected": ("the counter of uncorrected memory errors grows", 1),
    "remapped_uncorrected": ("rows of memory are remapped during the run", 1),
    "pcie_replays": ("PCIe replays exceed the allowed bit error rate", 50),
    "pcie_fatal": ("the counter of fatal PCIe errors grows", 1),
    "nvlink_crc": ("the counter of NVLink CRC errors grows fast", 10_000),
    "nvlink_replay": ("NVLinks replay", 1),
    "nvlink_recovery": ("NVLinks recover", 1),
    "nvlink_packets": ("NVLinks lose packets", 1),
    "pcie_nonfatal": ("the counter of PCIe errors that are not fatal grows", 1),
    "remapped_corrected": ("rows of memory are remapped after corrected errors", 1),
    "retired_pages": ("pages of memory are retired during the run", 1),
    "thermal_violation": ("heat holds the clocks of a GPU down, and no sample shows it", 100_000_000),
    **dict.fromkeys(
        ("reliability_violation", "board_violation"),
        ("power or reliability holds the clocks of a GPU down", 100_000_000),
    ),
}
"""Counters that a fault increments: summary, and the increment per query."""

_WRONG: dict[str, tuple[str, str, Value, str]] = {
    "remap-pending": ("a row of memory waits for its remapping", "remap_pending", True, "health"),
    "remap-failed": ("a row of memory could not be remapped", "remap_failed", True, "health"),
    "retired-pages-pending": ("a page of memory waits for its retirement", "retired_pending", True, "health"),
    "sram-threshold": ("SRAM has had too many uncorrectable errors", "sram_threshold", True, "health"),
    "recovery-required": ("the driver asks for a reset of the GPU", "recovery_action", "reset the GPU", "health"),
    "ecc-off": ("ECC is off on one GPU", "ecc", "off", "inventory"),
    "power-limit": ("one GPU has a lower power limit", "power_limit", 500, "inventory"),
    "vbios-differs": ("one GPU has a different VBIOS", "vbios", "00.00.00.00.01", "inventory"),
    "model-differs": ("one GPU is of a different model", "name", "SIMULATED-2", "inventory"),
    "clock-limit": ("one GPU has a lower maximum clock", "sm_clock_max", 1410, "inventory"),
    "mig-on": ("MIG mode is on, on one GPU", "mig", "on", "inventory"),
    "repair-pending": ("a memory channel waits for its repair", "repair_pending", True, "health"),
    "memory-unrepairable": ("memory cannot be repaired", "unrepairable_memory", True, "health"),
    "fabric-incomplete": ("one GPU has not joined the NVLink fabric", "fabric", "in progress", "health"),
    "ecc-pending": ("ECC will be off after a restart", "ecc_pending", "off", "health"),
    "pages-retired": ("more pages are retired than a GPU may have", "retired_pages", 63, "health"),
    "ecc-uncorrected-before": ("memory errors from before the run", "ecc_uncorrected", 3, "health"),
    "nvlinks-fewer": ("one GPU has fewer NVLinks", "nvlinks", 12, "inventory"),
    "nvlink-slow": ("an NVLink of one GPU runs at half its speed", "nvlink_speed", 13281, "inventory"),
    "driver-differs": ("one GPU reports another driver", "driver", "000.01", "inventory"),
    "inforom-differs": ("one GPU has a different InfoROM", "inforom", "G000.0000.00.01", "inventory"),
    "compute-mode": ("one GPU serves a single process only", "compute_mode", "exclusive process", "inventory"),
    "virtualized": ("one GPU is virtual", "virtualization", "vgpu", "inventory"),
    "memory-clock-limit": ("one GPU has a lower maximum memory clock", "memory_clock_max", 1593, "inventory"),
    "slot-generation": ("one slot is set to Gen3", "pcie_generation_max", 3, "inventory"),
    "slot-width": ("one slot has 8 lanes", "pcie_width_max", 8, "inventory"),
}
"""Faults that set one field of one GPU: summary, field, value, and the check that must detect it."""

_LIMITS: dict[str, tuple[str, dict[str, Value]]] = {
    "core-hot": ("a GPU is hotter than its own slowdown limit", {"temperature": 96}),
    "memory-hot": ("the memory of a GPU is hotter than it may be", {"memory_temperature": 105}),
    "no-margin": ("a GPU without a known limit has no margin of temperature", {"temperature_margin": 0}),
    "clock-stuck": ("the SM clock of a GPU stays at its idle value under load", {"sm_clock": 345}),
    "memory-clock-low": ("the memory clock of a GPU is low under load", {"memory_clock": 810}),
    "power-over": ("a GPU draws more than its power limit", {"power": 805.0}),
    "pcie-trains-down": ("the PCIe link of a GPU trains down after the inventory", {"pcie_generation": 1}),
    "pcie-loses-lanes": ("the PCIe link of a GPU loses lanes under load", {"pcie_width": 8}),
    "nvlink-flaps": ("an NVLink is down under load, and up at the end", {"nvlinks_up": 17}),
    "clock-beside": ("the SM clock of a GPU is far below that of the others under load", {"sm_clock": 1200}),
    "slowed-by-board": ("the board slows a GPU down under load", {"throttle": "hardware slowdown"}),
    "slowed-by-driver": ("the driver slows a GPU down for heat", {"throttle": "thermal (software)"}),
    "power-brake": ("the machine caps the power of a GPU", {"throttle": "power brake"}),
    "unreliable": ("a GPU lowers its clocks to stay reliable", {"throttle": "reliability"}),
    "no-spare-rows": ("banks of memory have no spare rows left", {"banks_without_spares": 2}),
    "thermal-throttle": (
        "a GPU overheats under load, and its clocks drop",
        {"throttle": "thermal (hardware)", "temperature": 94, "sm_clock": 1095},
    ),
}
"""Faults that only load shows: summary, and the fields with their values."""

_CHANGES: dict[str, tuple[str, dict[str, Value]]] = {
    "power-limit-changes": ("the power limit of a GPU is lowered during the run", {"power_limit": 400}),
    "mode-changes": ("MIG is switched on during the run", {"mig": "on"}),
    "memory-shrinks": ("a GPU loses memory during the run", {"memory": 12 << 20}),
    "slot-changes": ("a slot trains to fewer lanes during the run", {"pcie_width_max": 8}),
    "nvlink-goes-down": ("an NVLink goes down during the run", _DOWN),
}
"""Facts that change during the run: summary, and the later values."""


def _says(fields: Mapping[str, Value | None], error: str = "") -> Callable[[Parameters], Sequence[Override]]:
    """Return a function that makes the overrides of a GPU. The parameters "field" and "value" replace those given."""

    def says(parameters: Parameters) -> Sequence[Override]:
        device, grows, after = (parameters.get(name, 0) for name in ("device", "grows", "after"))
        return [
            Override(
                int(device),
                str(parameters.get("field", field)),
                parameters.get("value", value),
                float(grows),
                float(after),
                error,
            )
            for field, value in fields.items()
        ]

    return says


def _fault(
    name: str,
    summary: str,
    defaults: Parameters,
    telemetry: Callable[[Parameters], Sequence[Override]],
    by: str = "health",
    accused: Callable[[Parameters], tuple[Part, ...]] = gpu,
    defect: Callable[[Parameters], Defect] | None = None,
) -> None:
    hardware_fault(HardwareFault(name, summary, defaults, accused, (by,), defect=defect, telemetry=telemetry))


def _both(parameters: Parameters) -> tuple[Part, ...]:
    return gpu(parameters) + gpu({"device": parameters["peer"]})


def _slot(number: Value) -> str:
    return f"00000000:{int(number):02X}:00.0"


for _field, (_summary, _by) in _GROWING.items():
    _name = f"{_field.replace('_', '-')}-grows"
    _fault(_name, _summary, {"device": 1, "grows": _by, "after": 0.0}, _says({_field: 0}))
for _name, (_summary, _field, _value, _check) in _WRONG.items():
    _fault(_name, _summary, {"device": 2}, _says({_field: _value}), _check)
for _after, _table in ((0.0, _LIMITS), (0.1, _CHANGES)):
    for _name, (_summary, _fields) in _table.items():
        _fault(_name, _summary, {"device": 1, "after": _after}, _says(_fields))
_fault(
    "counter-falls",
    "a counter starts anew during the run, as after a reset of the GPU",
    {"device": 1, "grows": -1, "after": 0.0},
    _says({"ecc_corrected": 1000}),
)
_fault("nvlink-down", "an NVLink is down", {"device": 1}, _says(_DOWN), "inventory")
_fault(
    "pcie-slow",
    "the PCIe link of a GPU is trained at Gen3 x8, under load too",
    {"device": 3},
    _says({"pcie_generation": 3, "pcie_width": 8}),
    "inventory",
)
_fault(
    "memory-missing",
    "telemetry reports less memory on one GPU",
    {"device": 2, "bytes": 12 << 20},
    lambda parameters: [Override(int(parameters["device"]), "memory", int(parameters["bytes"]))],
    "inventory",
)
_fault(
    "peer-access-missing",
    "a GPU cannot reach the memory of a peer",
    {"device": 0, "peer": 2},
    lambda parameters: [Override(int(parameters["device"]), f"p2p_{parameters['peer']}", "chipset not supported")],
    "inventory",
    link,
)
_fault(
    "one-serial",
    "two GPUs report one serial number",
    {"device": 1, "peer": 2},
    lambda parameters: [Override(int(parameters["device"]), "serial", f"SIMULATED-{parameters['peer']}")],
    "inventory",
    host,
)
_fault(
    "one-uuid",
    "two GPUs report one UUID",
    {"device": 1, "peer": 2},
    lambda parameters: [Override(int(parameters[name]), "uuid", "GPU-00000000") for name in ("device", "peer")],
    "inventory",
    host,
)
_fault(
    "other-slot",
    "the driver's library reports another slot of a GPU than torch",
    {"device": 1},
    _says({"pci": _slot(0x3F)}),
    "inventory",
)
_fault(
    "slots-swapped",
    "the driver's library reports the slots of two GPUs the wrong way round",
    {"device": 1, "peer": 2},
    lambda parameters: [
        Override(int(parameters[source]), "pci", _slot(parameters[target]))
        for source, target in (("device", "peer"), ("peer", "device"))
    ],
    "inventory",
    _both,
)
_fault(
    "xid-79",
    "a GPU falls off the bus during the run, with Xid 79, and telemetry loses it",
    {"device": 3, "after": 0.1},
    lambda parameters: [*_says({"": None}, "lost")(parameters), *_says({"xid": 79})(parameters)],
    defect=made_by("Lost"),
)
_fault(
    "xid",
    "the driver reports an error of a GPU by its number",
    {"device": 1, "value": 48, "after": 0.1},
    _says({"xid": None}),
)
_fault(
    "driver-hangs",
    "a query of the driver never returns",
    {"device": 2, "field": "power", "after": 0.0},
    _says({"power": None}, "timeout"),
)
_fault(
    "telemetry-errs",
    "a query of the driver fails",
    {"device": 2, "field": "ecc_uncorrected", "after": 0.0},
    _says({"ecc_uncorrected": None}, "Unknown Error"),
)
