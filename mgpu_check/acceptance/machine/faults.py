"""Defects of a host: a core, its memory, a NIC, a slot, a path of collectives."""

from __future__ import annotations

from typing import Any

from mgpu_check.acceptance.faults import HardwareFault, hardware_fault, host

_PORT = "sys/class/infiniband/mlx5_1/ports/1"
_NET = "sys/class/net/eth0"
_SLOT = "sys/devices/pci0000:00/0000:f0:21.0"


def _always(file: str, text: str) -> dict[str, dict[str, str]]:
    return {"before": {file: text}, "after": {file: text}}


_FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "core-wrong": ("a core of the host computes wrong results", {"core": 5}),
    "host-memory-bit": ("a bit of the memory of the host flips", {"word": 70_001}),
    "host-memory-uncorrected": (
        "a memory controller counts an uncorrected error",
        {"after": {"sys/devices/system/edac/mc/mc1/ue_count": "1"}},
    ),
    "nic-link-flaps": ("the link of a NIC goes down and comes back", {"after": {f"{_PORT}/counters/link_downed": "1"}}),
    "nic-link-down": ("the link of a NIC goes down in the run", {"after": {f"{_PORT}/state": "1: DOWN"}}),
    "nic-symbol-errors": ("symbol errors of a NIC grow", {"after": {f"{_PORT}/counters/symbol_error": "5000"}}),
    "nic-slow": ("the link of a NIC is trained at half the width", _always(f"{_PORT}/rate", "200 Gb/sec (2X NDR)")),
    "nic-pcie-slow": (
        "the PCIe link of a NIC is trained down",
        _always(f"{_SLOT}/0000:41:00.0/current_link_width", "8"),
    ),
    "ethernet-flaps": (
        "the link of an Ethernet interface goes down and comes back",
        {"after": {f"{_NET}/carrier_down_count": "2"}},
    ),
    "ethernet-frames": (
        "frames arrive with wrong checksums at an Ethernet interface",
        {"after": {f"{_NET}/statistics/rx_crc_errors": "5000"}},
    ),
    "ethernet-carrier": (
        "an Ethernet interface loses its carrier again and again",
        {"after": {f"{_NET}/statistics/tx_carrier_errors": "5000"}},
    ),
    "slot-fatal-errors": (
        "the slot of a NIC counts a fatal error of PCIe",
        {"after": {f"{_SLOT}/aer_dev_fatal": "TOTAL_ERR_FATAL 1"}},
    ),
    "slot-errors": (
        "the slot of a NIC counts an uncorrectable error of PCIe",
        {"after": {f"{_SLOT}/aer_dev_nonfatal": "TOTAL_ERR_NONFATAL 1"}},
    ),
    "transport-shm": (
        "NCCL copies through the memory of the host between GPUs with direct access",
        {"transport": "SHM/direct/direct"},
    ),
}
"""Faults of a simulated host: summary, and fields of `SimulatedHost`."""

for _name, (_summary, _fields) in _FAULTS.items():
    hardware_fault(HardwareFault(_name, _summary, {}, host, ("machine",), of_host=_fields))
