"""Defects that telemetry reports: growing counters, different settings, links that are down, a driver that hangs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mgpu_check.acceptance.faults import HardwareFault, gpu, hardware_fault, host, link, made_by
from mgpu_check.devices.observations import Part
from mgpu_check.devices.telemetry.simulated import Override
from mgpu_check.simulated.defects.parameters import Parameters, Value

__all__: list[str] = []

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
}
"""Counters that a fault increments, and the increment per query."""

_WRONG: dict[str, tuple[str, str, Value, tuple[str, ...]]] = {
    "remap-pending": ("a row of memory waits for its remapping", "remap_pending", True, ("health",)),
    "remap-failed": ("a row of memory could not be remapped", "remap_failed", True, ("health",)),
    "retired-pages-pending": ("a page of memory waits for its retirement", "retired_pending", True, ("health",)),
    "sram-threshold": ("SRAM has had too many uncorrectable errors", "sram_threshold", True, ("health",)),
    "recovery-required": ("the driver asks for a reset of the GPU", "recovery_action", "reset the GPU", ("health",)),
    "ecc-off": ("ECC is off on one GPU", "ecc", "off", ("inventory",)),
    "power-limit": ("one GPU has a lower power limit", "power_limit", 500, ("inventory",)),
    "vbios-differs": ("one GPU has a different VBIOS", "vbios", "00.00.00.00.01", ("inventory",)),
    "model-differs": ("one GPU is of a different model", "name", "SIMULATED-2", ("inventory",)),
    "clock-limit": ("one GPU has a lower maximum clock", "sm_clock_max", 1410, ("inventory",)),
    "mig-on": ("MIG mode is on, on one GPU", "mig", "on", ("inventory",)),
    "repair-pending": ("a memory channel waits for its repair", "repair_pending", True, ("health",)),
    "memory-unrepairable": ("memory cannot be repaired", "unrepairable_memory", True, ("health",)),
    "fabric-incomplete": ("one GPU has not joined the NVLink fabric", "fabric", "in progress", ("health",)),
    "ecc-pending": ("ECC will be off after a restart", "ecc_pending", "off", ("health",)),
    "pages-retired": ("more pages are retired than a GPU may have", "retired_pages", 63, ("health",)),
    "ecc-uncorrected-before": ("memory errors from before the run", "ecc_uncorrected", 3, ("health",)),
    "nvlinks-fewer": ("one GPU has fewer NVLinks", "nvlinks", 12, ("inventory",)),
    "nvlink-slow": ("an NVLink of one GPU runs at half its speed", "nvlink_speed", 13281, ("inventory",)),
    "driver-differs": ("one GPU reports another driver", "driver", "000.01", ("inventory",)),
    "inforom-differs": ("one GPU has a different InfoROM", "inforom", "G000.0000.00.01", ("inventory",)),
    "compute-mode": ("one GPU serves a single process only", "compute_mode", "exclusive process", ("inventory",)),
    "virtualized": ("one GPU is virtual", "virtualization", "vgpu", ("inventory",)),
    "memory-clock-limit": ("one GPU has a lower maximum memory clock", "memory_clock_max", 1593, ("inventory",)),
    "slot-generation": ("one slot is set to Gen3", "pcie_generation_max", 3, ("inventory",)),
    "slot-width": ("one slot has 8 lanes", "pcie_width_max", 8, ("inventory",)),
}
"""Faults that set one field of one GPU: summary, field, value, and the checks that must detect it."""


def _says(field: str, value: Value | None = None, *, error: str = "") -> Callable[[Parameters], Sequence[Override]]:
    def says(parameters: Parameters) -> Sequence[Override]:
        said = parameters.get("value", value)
        grows = float(parameters.get("grows", 0))
        after = float(parameters.get("after", 0))
        asked = str(parameters.get("field", field))
        return [Override(int(parameters["device"]), asked, said, grows, after, error)]

    return says


for _field, (_summary, _by) in _GROWING.items():
    hardware_fault(
        HardwareFault(
            f"{_field.replace('_', '-')}-grows",
            _summary,
            {"device": 1, "grows": _by, "after": 0.0},
            gpu,
            ("health",),
            telemetry=_says(_field, 0),
        )
    )

for _name, (_summary, _field, _value, _checks) in _WRONG.items():
    hardware_fault(HardwareFault(_name, _summary, {"device": 2}, gpu, _checks, telemetry=_says(_field, _value)))


def _says_all(*fields: tuple[str, Value]) -> Callable[[Parameters], Sequence[Override]]:
    def says(parameters: Parameters) -> Sequence[Override]:
        device, after = int(parameters["device"]), float(parameters.get("after", 0))
        return [Override(device, field, value, after=after) for field, value in fields]

    return says


_LIMITS: dict[str, tuple[str, tuple[tuple[str, Value], ...]]] = {
    "core-hot": ("a GPU is hotter than its own slowdown limit", (("temperature", 96),)),
    "memory-hot": ("the memory of a GPU is hotter than it may be", (("memory_temperature", 105),)),
    "no-margin": ("a GPU without a known limit has no margin of temperature", (("temperature_margin", 0),)),
    "clock-stuck": ("the SM clock of a GPU stays at its idle value under load", (("sm_clock", 345),)),
    "memory-clock-low": ("the memory clock of a GPU is low under load", (("memory_clock", 810),)),
    "power-over": ("a GPU draws more than its power limit", (("power", 805.0),)),
    "pcie-trains-down": ("the PCIe link of a GPU trains down after the inventory", (("pcie_generation", 1),)),
    "pcie-loses-lanes": ("the PCIe link of a GPU loses lanes under load", (("pcie_width", 8),)),
    "nvlink-flaps": ("an NVLink is down under load, and up at the end", (("nvlinks_up", 17),)),
    "clock-beside": ("the SM clock of a GPU is far below that of the others under load", (("sm_clock", 1200),)),
    "slowed-by-board": ("the board slows a GPU down under load", (("throttle", "hardware slowdown"),)),
    "slowed-by-driver": ("the driver slows a GPU down for heat", (("throttle", "thermal (software)"),)),
    "power-brake": ("the machine caps the power of a GPU", (("throttle", "power brake"),)),
    "unreliable": ("a GPU lowers its clocks to stay reliable", (("throttle", "reliability"),)),
    "no-spare-rows": ("banks of memory have no spare rows left", (("banks_without_spares", 2),)),
}
"""Faults that only limits show: summary, and the fields with their values."""

for _name, (_summary, _fields) in _LIMITS.items():
    hardware_fault(
        HardwareFault(_name, _summary, {"device": 1, "after": 0.0}, gpu, ("health",), telemetry=_says_all(*_fields))
    )

_CHANGES: dict[str, tuple[str, str, Value]] = {
    "power-limit-changes": ("the power limit of a GPU is lowered during the run", "power_limit", 400),
    "mode-changes": ("MIG is switched on during the run", "mig", "on"),
    "memory-shrinks": ("a GPU loses memory during the run", "memory", 12 << 20),
    "slot-changes": ("a slot trains to fewer lanes during the run", "pcie_width_max", 8),
}
"""Facts that change during the run: summary, field, and the later value."""

for _name, (_summary, _field, _value) in _CHANGES.items():
    hardware_fault(
        HardwareFault(_name, _summary, {"device": 1, "after": 0.1}, gpu, ("health",), telemetry=_says(_field, _value))
    )
hardware_fault(
    HardwareFault(
        "counter-falls",
        "a counter starts anew during the run, as after a reset of the GPU",
        {"device": 1, "grows": -1, "after": 0.0},
        gpu,
        ("health",),
        telemetry=_says("ecc_corrected", 1000),
    )
)
for _field in ("reliability_violation", "board_violation"):
    hardware_fault(
        HardwareFault(
            f"{_field.replace('_', '-')}-grows",
            "power or reliability holds the clocks of a GPU down",
            {"device": 1, "grows": 100_000_000, "after": 0.0},
            gpu,
            ("health",),
            telemetry=_says(_field, 0),
        )
    )

hardware_fault(
    HardwareFault(
        "nvlink-down",
        "an NVLink is down",
        {"device": 1},
        gpu,
        ("inventory",),
        telemetry=_says_all(("nvlinks", 17), ("nvlinks_down", "4")),
    )
)
hardware_fault(
    HardwareFault(
        "nvlink-goes-down",
        "an NVLink goes down during the run",
        {"device": 1, "after": 0.1},
        gpu,
        ("health",),
        telemetry=_says_all(("nvlinks", 17), ("nvlinks_down", "4")),
    )
)
hardware_fault(
    HardwareFault(
        "pcie-slow",
        "the PCIe link of a GPU is trained at Gen3 x8, under load too",
        {"device": 3},
        gpu,
        ("inventory",),
        telemetry=_says_all(("pcie_generation", 3), ("pcie_width", 8)),
    )
)
hardware_fault(
    HardwareFault(
        "thermal-throttle",
        "a GPU overheats under load, and its clocks drop",
        {"device": 1, "after": 0.0},
        gpu,
        ("health",),
        telemetry=_says_all(("throttle", "thermal (hardware)"), ("temperature", 94), ("sm_clock", 1095)),
    )
)


def _less_memory(parameters: Parameters) -> Sequence[Override]:
    return [Override(int(parameters["device"]), "memory", int(parameters["bytes"]))]


hardware_fault(
    HardwareFault(
        "memory-missing",
        "telemetry reports less memory on one GPU",
        {"device": 2, "bytes": 12 << 20},
        gpu,
        ("inventory",),
        telemetry=_less_memory,
    )
)


def _no_peer_access(parameters: Parameters) -> Sequence[Override]:
    return [Override(int(parameters["device"]), f"p2p_{parameters['peer']}", "chipset not supported")]


hardware_fault(
    HardwareFault(
        "peer-access-missing",
        "a GPU cannot reach the memory of a peer",
        {"device": 0, "peer": 2},
        link,
        ("inventory",),
        telemetry=_no_peer_access,
    )
)


def _one_serial(parameters: Parameters) -> Sequence[Override]:
    return [Override(int(parameters["device"]), "serial", f"SIMULATED-{parameters['peer']}")]


def _one_uuid(parameters: Parameters) -> Sequence[Override]:
    return [Override(int(parameters[name]), "uuid", "GPU-00000000") for name in ("device", "peer")]


def _other_slot(parameters: Parameters) -> Sequence[Override]:
    return [Override(int(parameters["device"]), "pci", "00000000:3F:00.0")]


def _slots_swapped(parameters: Parameters) -> Sequence[Override]:
    device, peer = int(parameters["device"]), int(parameters["peer"])
    return [Override(device, "pci", f"00000000:{peer:02X}:00.0"), Override(peer, "pci", f"00000000:{device:02X}:00.0")]


def _both(parameters: Parameters) -> tuple[Part, ...]:
    return tuple(Part("gpu", (int(parameters[name]),)) for name in ("device", "peer"))


for _name, _summary, _telemetry in (
    ("one-serial", "two GPUs report one serial number", _one_serial),
    ("one-uuid", "two GPUs report one UUID", _one_uuid),
):
    hardware_fault(HardwareFault(_name, _summary, {"device": 1, "peer": 2}, host, ("inventory",), telemetry=_telemetry))
hardware_fault(
    HardwareFault(
        "other-slot",
        "the driver's library reports another slot of a GPU than torch",
        {"device": 1},
        gpu,
        ("inventory",),
        telemetry=_other_slot,
    )
)
hardware_fault(
    HardwareFault(
        "slots-swapped",
        "the driver's library reports the slots of two GPUs the wrong way round",
        {"device": 1, "peer": 2},
        _both,
        ("inventory",),
        telemetry=_slots_swapped,
    )
)


def _falls_off_the_bus(parameters: Parameters) -> Sequence[Override]:
    device, after = int(parameters["device"]), float(parameters["after"])
    return [Override(device, "", after=after, error="lost"), Override(device, "xid", 79, after=after)]


hardware_fault(
    HardwareFault(
        "xid-79",
        "a GPU falls off the bus during the run, with Xid 79, and telemetry loses it",
        {"device": 3, "after": 0.1},
        gpu,
        ("health",),
        defect=made_by("speed", "Lost"),
        telemetry=_falls_off_the_bus,
    )
)
hardware_fault(
    HardwareFault(
        "xid",
        "the driver reports an error of a GPU by its number",
        {"device": 1, "value": 48, "after": 0.1},
        gpu,
        ("health",),
        telemetry=_says("xid"),
    )
)
hardware_fault(
    HardwareFault(
        "driver-hangs",
        "a query of the driver never returns",
        {"device": 2, "field": "power", "after": 0.0},
        gpu,
        ("health",),
        telemetry=_says("power", error="timeout"),
    )
)
hardware_fault(
    HardwareFault(
        "telemetry-errs",
        "a query of the driver fails",
        {"device": 2, "field": "ecc_uncorrected", "after": 0.0},
        gpu,
        ("health",),
        telemetry=_says("ecc_uncorrected", error="Unknown Error"),
    )
)
