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
    """One telemetry field.

    Attributes:
        unit: the unit of a number; "" if there is no unit.
        text: the description, as a phrase for a sentence.
    """

    name: str
    kind: Kind
    unit: str
    text: str


FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        Field("uuid", "identity", "", "UUID"),
        Field("serial", "identity", "", "serial number of the board"),
        Field("pci", "identity", "", "PCI bus id"),
        Field("name", "fact", "", "model"),
        Field("part_number", "fact", "", "part number of the board"),
        Field("memory", "fact", "bytes", "memory"),
        Field("driver", "fact", "", "driver version"),
        Field("cuda", "fact", "", "CUDA version of the driver"),
        Field("vbios", "fact", "", "VBIOS version"),
        Field("inforom", "fact", "", "InfoROM image version"),
        Field("ecc", "fact", "", "ECC mode"),
        Field("mig", "fact", "", "MIG mode"),
        Field("virtualization", "fact", "", "virtualization mode"),
        Field("compute_mode", "fact", "", "compute mode"),
        Field("persistence", "fact", "", "persistence mode"),
        Field("power_limit", "fact", "W", "power limit"),
        Field("sm_clock_max", "fact", "MHz", "highest SM clock"),
        Field("memory_clock_max", "fact", "MHz", "highest memory clock"),
        Field("pcie_generation_max", "fact", "", "PCIe generation that the GPU and its slot can do"),
        Field("pcie_width_max", "fact", "lanes", "PCIe width that the GPU and its slot can do"),
        Field("nvlinks", "fact", "", "number of active NVLinks"),
        Field("nvlink_speed", "fact", "MB/s", "speed of the slowest active NVLink"),
        Field("p2p", "pair", "", "peer-to-peer capability"),
        Field("topology", "pair", "", "closest common part of the path to a peer"),
        Field("multi_gpu_board", "limit", "", "whether its board has several GPUs"),
        Field("temperature_slowdown", "limit", "degrees Celsius", "temperature at which it slows itself down"),
        Field("memory_temperature_max", "limit", "degrees Celsius", "highest temperature of the memory"),
        Field("power_limit_default", "limit", "W", "default power limit of the board"),
        Field("banks_without_spares", "state", "banks", "banks of memory without spare rows"),
        Field("banks_low_on_spares", "state", "banks", "banks of memory with few spare rows"),
        Field("nvlinks_down", "state", "", "NVLinks that are there and not active"),
        Field("ecc_pending", "state", "", "ECC mode after the next restart"),
        Field("remap_pending", "state", "", "a row of memory waits for its remapping"),
        Field("remap_failed", "state", "", "a row of memory could not be remapped"),
        Field("retired_pending", "state", "", "a page of memory waits for its retirement"),
        Field("repair_pending", "state", "", "a memory channel or a TPC waits for its repair"),
        Field("sram_threshold", "state", "", "more uncorrectable errors in SRAM than a GPU may have"),
        Field("unrepairable_memory", "state", "", "memory that cannot be repaired"),
        Field("recovery_action", "state", "", "recovery action that the driver requests"),
        Field("fabric", "state", "", "state of the NVLink fabric"),
        Field("temperature", "gauge", "degrees Celsius", "temperature"),
        Field("memory_temperature", "gauge", "degrees Celsius", "temperature of the memory"),
        Field("temperature_margin", "gauge", "degrees Celsius", "margin to the temperature of slowdown"),
        Field("power", "gauge", "W", "power"),
        Field("utilization", "gauge", "%", "share of time with a kernel running"),
        Field("sm_clock", "gauge", "MHz", "SM clock"),
        Field("memory_clock", "gauge", "MHz", "memory clock"),
        Field("throttle", "gauge", "", "reasons why clocks are below their maximum"),
        Field("pcie_generation", "gauge", "", "PCIe generation"),
        Field("pcie_width", "gauge", "lanes", "PCIe width"),
        Field("nvlinks_up", "gauge", "", "number of active NVLinks"),
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

    Raises:
        KeyError: an unknown field.
    """
    return FIELDS[name if peer_of(name) is None else name.rpartition("_")[0]]


def names(*kinds: Kind) -> tuple[str, ...]:
    """Return the names of the fields of these kinds, in the order of the table."""
    return tuple(field.name for field in FIELDS.values() if field.kind in kinds)


def asked(kinds: Iterable[Kind], gpu: int, gpus: Sequence[int]) -> tuple[str, ...]:
    """Return the fields of these kinds to query on `gpu`; a pair field once for each peer in `gpus`."""
    wanted = set(kinds)
    field_names: list[str] = []
    for field in FIELDS.values():
        if field.kind not in wanted:
            continue
        if field.kind == "pair":
            field_names += [pair_field(field.name, peer) for peer in gpus if peer != gpu]
        else:
            field_names.append(field.name)
    return tuple(field_names)
