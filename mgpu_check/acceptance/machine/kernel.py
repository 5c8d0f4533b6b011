"""Read what the kernel says of the NICs, PCIe slots and memory controllers of a host. Needs no root."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_PORT = ("state", "rate", "link_layer")
PORT_COUNTERS = (
    *("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors"),
    *("local_link_integrity_errors", "excessive_buffer_overrun_errors"),
)
_NET = ("operstate", "speed", "carrier_down_count", "statistics/rx_crc_errors", "statistics/tx_carrier_errors")
_PCI = (
    *("current_link_speed", "current_link_width", "max_link_speed", "max_link_width", "numa_node"),
    *("aer_dev_correctable", "aer_dev_nonfatal", "aer_dev_fatal"),
)
_ACTIVE = "4: ACTIVE"
_SLOT = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_VENDORS = ("0x10de", "0x1002")
"""Makers of GPUs."""
_ETHERNET = 1
"""``ARPHRD_ETHER``: the type of an interface that is no InfiniBand and no tunnel."""
_ACS = 0x0D
"""PCI Express Base Specification: the id of the capability Access Control Services."""
_REDIRECTS = 0b11100
"""Bits of its control register that send traffic between peers up to the root: request and completion redirect, and
upstream forwarding."""


@dataclass(frozen=True)
class Component:
    """One component of a host.

    Attributes:
        kind: "infiniband", "ethernet", "pci" or "memory"; "host" for the host itself.
        model: components of one kind and model are alike.
        slots: PCI addresses from the root port to the device.
        values: content of its files; without files that are absent or cannot be read.
    """

    kind: str
    name: str
    model: str = ""
    slots: tuple[str, ...] = ()
    values: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def is_up(self) -> bool:
        return self.values.get("state") == _ACTIVE or self.values.get("operstate") == "up"


KernelFacts = Mapping[str, Component]
"""Components by name."""


def read_kernel(root: Path = Path("/"), allowed: Collection[int] | None = None) -> dict[str, Component]:
    """Return the components of this host.

    Args:
        root: the directory that has ``sys`` and ``proc``.
        allowed: cores that this process may use; default from the kernel.
    """
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    system = root / "sys"
    found = []
    for port in sorted(system.glob("class/infiniband/*/ports/*")):
        card = port.parents[1]
        values = _values(port, _PORT) | _values(port / "counters", PORT_COUNTERS)
        model = f"{_value(card / 'hca_type')} {values.get('link_layer', '')}"
        found.append(Component("infiniband", f"{card.name} port {port.name}", model, _slots(card / "device"), values))
    for net in sorted(system.glob("class/net/*")):
        if (net / "device").exists() and _value(net / "type") == _ETHERNET:
            model = f"{_value(net / 'device' / 'vendor')} {_value(net / 'device' / 'device')}"
            found.append(Component("ethernet", net.name, model, _slots(net / "device"), _values(net, _NET)))
    for controller in sorted(system.glob("devices/system/edac/mc/mc*")):
        found.append(Component("memory", controller.name, "", (), _values(controller, ("ce_count", "ue_count"))))
    nics = {one.slots[-1] for one in found if one.slots}
    devices = {device.name: device for device in sorted(system.glob("bus/pci/devices/*"))}
    gpus = {slot for slot, device in devices.items() if _is_gpu(device)}
    wanted = {slot for name in nics | gpus for slot in _slots(devices.get(name, Path("/none")))}
    for slot in sorted(wanted & devices.keys()):
        model = "gpu" if slot in gpus else "nic" if slot in nics else "bridge"
        values = _of_device(root, devices[slot], model, allowed)
        found.append(Component("pci", slot, model, _slots(devices[slot]), values))
    nodes = len(list(system.glob("devices/system/node/node[0-9]*")))
    found.append(Component("host", "host", values={"nodes": nodes}))
    return {one.name: one for one in found}


def _is_gpu(device: Path) -> bool:
    return str(_value(device / "class")).startswith("0x03") and _value(device / "vendor") in _VENDORS


def _of_device(root: Path, device: Path, model: str, allowed: Collection[int]) -> dict[str, str | int]:
    values = _values(device, _PCI)
    if model == "bridge":
        return values | _acs(device / "config")
    if model == "gpu":
        cores = {core for part in str(_value(device / "local_cpulist") or "").split(",") for core in _range(part)}
        if cores:
            values["near"] = len(cores & set(allowed))
        group = device / "iommu_group"
        kind = _value(root / "sys/kernel/iommu_groups" / group.resolve().name / "type") if group.exists() else None
        if kind is not None:
            values["iommu"] = kind
        text = _text(root / "proc/driver/nvidia/gpus" / device.name / "information") or ""
        if match := re.search(r"GPU Firmware:\s*(\S+)", text):
            values["gsp"] = match[1]
    return values


def _range(part: str) -> range:
    first, _, last = part.strip().partition("-")
    return range(int(first), int(last or first) + 1) if first.isdigit() else range(0)


def _acs(config: Path) -> dict[str, str | int]:
    """Return the redirects of a bridge; nothing without redirects, or if only root may read its capabilities."""
    try:
        content = config.read_bytes()
    except OSError:
        return {}
    at = 0x100
    while 0x100 <= at <= len(content) - 8:
        head = int.from_bytes(content[at : at + 4], "little")
        if head & 0xFFFF == _ACS:
            return {"acs": int.from_bytes(content[at + 6 : at + 8], "little") & _REDIRECTS}
        if head >> 20 <= at:  # the capabilities are in order, so that a loop ends here
            break
        at = head >> 20
    return {}


def _slots(device: Path) -> tuple[str, ...]:
    return tuple(part for part in device.resolve().parts if _SLOT.fullmatch(part))


def _values(directory: Path, names: Collection[str]) -> dict[str, str | int]:
    return {name: value for name in names if (value := _value(directory / name)) is not None}


def _value(path: Path) -> str | int | None:
    """Return a file as a number or a text; of the counters of AER, which are a table, the total."""
    text = _text(path)
    if text is None:
        return None
    if path.name.startswith("aer_dev_"):
        text = next((line.split()[-1] for line in text.splitlines() if line.startswith("TOTAL")), "")
    return int(text) if re.fullmatch(r"-?\d+", text) else text or None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
