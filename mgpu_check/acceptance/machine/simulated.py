"""Write the kernel's files and the log of NCCL of a healthy host, with planted faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mgpu_check.acceptance.machine.checks import PORT_COUNTERS

_CARDS = 4
_GPUS = 4
_AER = {"correctable": "COR", "nonfatal": "NONFATAL", "fatal": "FATAL"}


@dataclass(frozen=True)
class SimulatedHost:
    """A simulated host."""

    cores: int = 8
    core: int = -1  # the core that computes wrong results; -1 for none
    word: int = -1  # the word of memory that loses a bit; -1 for none
    transport: str = "P2P/CUMEM/read"  # the path between any two of its GPUs, in NCCL's words
    # before, after: content of files below the root, where it differs from that of a healthy host, before and after the
    # run; None for a file that is absent
    before: Mapping[str, str | None] = field(default_factory=dict)
    after: Mapping[str, str | None] = field(default_factory=dict)


def log_of_nccl(ranks: int, path: str) -> Iterator[str]:
    """Yield the lines of NCCL about a ring of ranks that use `path`."""
    for rank in range(ranks):
        peer = (rank + 1) % ranks
        yield f"simulated:1:1 [0] NCCL INFO Channel 00/0 : {rank}[{rank}] -> {peer}[{peer}] via {path}"


def write_tree(root: Path, changes: Mapping[str, str | None]) -> None:
    """Write the files of a healthy host below `root`, with changes."""
    for name, text in {**_healthy(), **changes}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None and text.startswith("-> "):
            path.symlink_to(text.removeprefix("-> "))
        elif text is not None:
            path.write_text(text)


def _healthy() -> dict[str, str]:
    tree = {"sys/devices/system/node/node0/cpulist": "0-3", "sys/devices/system/node/node1/cpulist": "4-7"}
    for number in range(2):
        tree |= {f"sys/devices/system/edac/mc/mc{number}/{count}_count": "0" for count in ("ce", "ue")}
    for number in range(_GPUS):
        tree |= _device(f"0000:{number:02x}:00.0", number, {"class": "0x030200", "vendor": "0x10de"})
        tree[f"sys/devices/pci0000:00/0000:f0:{number:02x}.0/0000:{number:02x}:00.0/local_cpulist"] = "0-7"
        tree[f"proc/driver/nvidia/gpus/0000:{number:02x}:00.0/information"] = "GPU Firmware: \t 580.95.05"
    for number in range(_CARDS):
        slot = f"0000:{0x40 + number:02x}:00.0"
        tree |= _device(slot, 0x20 + number, {"class": "0x020700", "vendor": "0x15b3", "device": "0x1021"})
        card = f"sys/class/infiniband/mlx5_{number}"
        port = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
        tree |= {f"{card}/ports/1/{name}": text for name, text in port.items()}
        tree |= {f"{card}/ports/1/counters/{name}": "0" for name in PORT_COUNTERS}
        tree |= {f"{card}/hca_type": "MT4129", f"{card}/device": f"-> ../../../bus/pci/devices/{slot}"}
    slot = "0000:50:00.0"
    tree |= _device(slot, 0x30, {"class": "0x020000", "vendor": "0x8086", "device": "0x1592"})
    net = {"type": "1", "operstate": "up", "speed": "100000", "carrier_down_count": "1"}
    net |= {"statistics/rx_crc_errors": "0", "statistics/tx_carrier_errors": "0"}
    tree |= {f"sys/class/net/eth0/{name}": text for name, text in net.items()}
    tree["sys/class/net/eth0/device"] = f"-> ../../../bus/pci/devices/{slot}"
    return tree


def _device(slot: str, port: int, files: Mapping[str, str]) -> dict[str, str]:
    bridge = f"0000:f0:{port:02x}.0"
    above = f"sys/devices/pci0000:00/{bridge}"
    link = {"current_link_speed": "32.0 GT/s PCIe", "current_link_width": "16"}
    link |= {"max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16", "numa_node": "0"}
    link |= {f"aer_dev_{name}": f"RxErr 0\nTOTAL_ERR_{total} 0" for name, total in _AER.items()}
    tree = {f"{above}/{name}": text for name, text in link.items()}
    tree |= {f"{above}/{slot}/{name}": text for name, text in {**link, **files}.items()}
    for name, location in ((bridge, bridge), (slot, f"{bridge}/{slot}")):
        tree[f"sys/bus/pci/devices/{name}"] = f"-> ../../../devices/pci0000:00/{location}"
    return tree
