"""Define the telemetry fields of a GPU: one table of names, kinds and units for sources, checks and reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Value = str | int | float | bool

Kind = Literal["identity", "fact", "pair", "limit", "state", "gauge", "counter"]
"""Identity: differs between GPUs. Fact: usually equal on all GPUs of a node. Pair: a fact of a GPU and a peer. Limit:
what the device states of itself, and may differ between GPUs. State: shows whether something is wrong now. Gauge: rises
and falls. Counter: only grows, until the driver or a reset clears it.
"""


@dataclass(frozen=True)
class Field:
    """One telemetry field."""

    name: str
    kind: Kind
    unit: str  # the unit of a number; "" if there is no unit
    text: str  # the description, as a phrase for a sentence
    healthy: Value = 0  # the value of a healthy simulated GPU, unless it is an identity


FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        Field("uuid", "identity", "", "UUID"),
        Field("serial", "identity", "", "serial number of the board"),
        Field("pci", "identity", "", "PCI bus id"),
        Field("name", "fact", "", "model", "SIMULATED"),
        Field("part_number", "fact", "", "part number of the board", "000-00000-0000-000"),
        Field("memory", "fact", "bytes", "memory", 16 << 20),
        Field("driver", "fact", "", "driver version", "000.00"),
        Field("cuda", "fact", "", "CUDA version of the driver", "13.0"),
        Field("vbios", "fact", "", "VBIOS version", "00.00.00.00.00"),
        Field("inforom", "fact", "", "InfoROM image version", "G000.0000.00.00"),
        Field("ecc", "fact", "", "ECC mode", "on"),
        Field("mig", "fact", "", "MIG mode", "off"),
        Field("virtualization", "fact", "", "virtualization mode", "none"),
        Field("compute_mode", "fact", "", "compute mode", "default"),
        Field("persistence", "fact", "", "persistence mode", "on"),
        Field("power_limit", "fact", "W", "power limit", 700),
        Field("sm_clock_max", "fact", "MHz", "highest SM clock", 1980),
        Field("memory_clock_max", "fact", "MHz", "highest memory clock", 2619),
        Field("pcie_generation_max", "fact", "", "PCIe generation that the GPU and its slot can do", 5),
        Field("pcie_width_max", "fact", "lanes", "PCIe width that the GPU and its slot can do", 16),
        Field("nvlinks", "fact", "", "number of active NVLinks", 18),
        Field("nvlink_speed", "fact", "MB/s", "speed of the slowest active NVLink", 26562),
        Field("p2p", "pair", "", "peer-to-peer capability", "read+write+nvlink+atomics"),
        Field("topology", "pair", "", "closest common part of the path to a peer", "system"),
        Field("multi_gpu_board", "limit", "", "whether its board has several GPUs", False),
        Field("temperature_slowdown", "limit", "degrees Celsius", "temperature at which it slows itself down", 89),
        Field("memory_temperature_max", "limit", "degrees Celsius", "highest temperature of the memory", 95),
        Field("power_limit_default", "limit", "W", "default power limit of the board", 700),
        Field("banks_without_spares", "state", "banks", "banks of memory without spare rows", 0),
        Field("banks_low_on_spares", "state", "banks", "banks of memory with few spare rows", 0),
        Field("nvlinks_down", "state", "", "NVLinks that are there and not active", ""),
        Field("ecc_pending", "state", "", "ECC mode after the next restart", "on"),
        Field("remap_pending", "state", "", "a row of memory waits for its remapping", False),
        Field("remap_failed", "state", "", "a row of memory could not be remapped", False),
        Field("retired_pending", "state", "", "a page of memory waits for its retirement", False),
        Field("repair_pending", "state", "", "a memory channel or a TPC waits for its repair", False),
        Field("sram_threshold", "state", "", "more uncorrectable errors in SRAM than a GPU may have", False),
        Field("unrepairable_memory", "state", "", "memory that cannot be repaired", False),
        Field("recovery_action", "state", "", "recovery action that the driver requests", "none"),
        Field("fabric", "state", "", "state of the NVLink fabric", "completed"),
        Field("temperature", "gauge", "degrees Celsius", "temperature", 42),
        Field("memory_temperature", "gauge", "degrees Celsius", "temperature of the memory", 48),
        Field("temperature_margin", "gauge", "degrees Celsius", "margin to the temperature of slowdown", 47),
        Field("power", "gauge", "W", "power", 420.0),
        Field("utilization", "gauge", "%", "share of time with a kernel running", 100),
        Field("sm_clock", "gauge", "MHz", "SM clock", 1980),
        Field("memory_clock", "gauge", "MHz", "memory clock", 2619),
        Field("throttle", "gauge", "", "reasons why clocks are below their maximum", ""),
        Field("pcie_generation", "gauge", "", "PCIe generation", 5),
        Field("pcie_width", "gauge", "lanes", "PCIe width", 16),
        Field("nvlinks_up", "gauge", "", "number of active NVLinks", 18),
        Field("ecc_corrected", "counter", "errors", "corrected memory errors since the driver was loaded"),
        Field("ecc_uncorrected", "counter", "errors", "uncorrected memory errors since the driver was loaded"),
        Field("ecc_corrected_ever", "counter", "errors", "corrected memory errors of the GPU's life"),
        Field("ecc_uncorrected_ever", "counter", "errors", "uncorrected memory errors of the GPU's life"),
        Field("remapped_corrected", "counter", "rows", "rows remapped after corrected errors"),
        Field("remapped_uncorrected", "counter", "rows", "rows remapped after uncorrected errors"),
        Field("retired_pages", "counter", "pages", "retired pages"),
        Field("pcie_replays", "counter", "packets", "packets sent again over PCIe"),
        Field("pcie_nonfatal", "counter", "errors", "uncorrectable errors of PCIe that are not fatal"),
        Field("pcie_fatal", "counter", "errors", "fatal errors of PCIe"),
        Field("nvlink_crc", "counter", "errors", "CRC errors of NVLinks"),
        Field("nvlink_replay", "counter", "errors", "replays of NVLinks"),
        Field("nvlink_recovery", "counter", "errors", "recoveries of NVLinks"),
        Field("nvlink_packets", "counter", "errors", "malformed, dropped or discarded packets of NVLinks"),
        Field("thermal_violation", "counter", "ns", "time that heat has held clocks down"),
        Field("power_violation", "counter", "ns", "time that the power limit has held clocks down"),
        Field("reliability_violation", "counter", "ns", "time that reliability has held clocks down"),
        Field("board_violation", "counter", "ns", "time that the limit of the board has held clocks down"),
    )
}
"""Every field by name. A pair field is queried once per peer."""


def pair_field(name: str, peer: int) -> str:
    """Return the full name of a pair field: `name` and the peer's number in the run, such as ``p2p_3``."""
    return f"{name}_{peer}"


def peer_of(name: str) -> int | None:
    """Return the peer's number from the full name of a pair field; None for other fields."""
    base, _, peer = name.rpartition("_")
    return int(peer) if base in FIELDS and FIELDS[base].kind == "pair" and peer.isdigit() else None


def field_of(name: str) -> Field:
    """Return the table entry of `name`, which may be the full name of a pair field.
    Raises `KeyError`: an unknown field."""
    return FIELDS[name if peer_of(name) is None else name.rpartition("_")[0]]


def number_of(value: Value | None) -> float | None:
    """Return the value of a field as a number; None for a text, a switch, or a value that is not known."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def names(*kinds: Kind) -> tuple[str, ...]:
    """Return the names of the fields of these kinds, in the order of the table."""
    return tuple(field.name for field in FIELDS.values() if field.kind in kinds)


def asked(kinds: Iterable[Kind], gpu: int, gpus: Sequence[int]) -> tuple[str, ...]:
    """Return the fields of these kinds to query on `gpu`; a pair field once for each peer in `gpus`."""
    field_names: list[str] = []
    for name in names(*kinds):
        is_pair = FIELDS[name].kind == "pair"
        field_names += [pair_field(name, peer) for peer in gpus if peer != gpu] if is_pair else [name]
    return tuple(field_names)
