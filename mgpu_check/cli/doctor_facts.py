"""Read the facts about this machine that decide whether ranks can run on it."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mgpu_check.devices.inventory import Inventory, take_inventory
from mgpu_check.processes.limits import available_memory, limit_of_group

PACKAGES = ("mgpu-check", "torch", "pytest", "pytest-xdist", "hypothesis")
_PORT_OF_TORCHRUN = 29500


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs, as one process sees them.

    Attributes:
        inventory: the devices, and the state of their driver.
        nccl: version of NCCL; "" without it.
        cuda: version of CUDA, or of ROCm, that torch was built for; "" for a CPU build.
        driver: version of NVIDIA's driver; "" if it is unknown.
        apart: pairs of devices that cannot read each other's memory directly.
    """

    inventory: Inventory
    nccl: str = ""
    cuda: str = ""
    driver: str = ""
    apart: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class HostFacts:
    """The facts about a host.

    Attributes:
        versions: package -> version; "" if the package is missing.
        plugin: pytest loads the plugin by its entry point.
        cores: processors that this process may use.
        memory: available bytes of memory; None if unknown.
        shared_memory: free bytes of /dev/shm; None without it.
        temporary: directory for temporary files -> its free bytes; None if it cannot be written.
        open_files: the soft limit of open files per process; None if unlimited.
        processes: the limit of processes and threads; None if unlimited.
        address: the host's name resolves to this address; "" if it does not.
        interfaces: names of the network interfaces.
        port: where torchrun's ranks would meet, if another process listens there; None if it is free.
    """

    versions: Mapping[str, str]
    python: str
    plugin: bool
    cores: int
    memory: int | None
    shared_memory: int | None
    temporary: tuple[str, int | None]
    open_files: int | None
    processes: int | None
    host: str
    address: str
    interfaces: tuple[str, ...]
    port: int | None
    environment: Mapping[str, str] = field(repr=False)


def of_host() -> HostFacts:
    """Read the facts about this host. Does not import torch."""
    host = socket.gethostname()
    return HostFacts(
        versions={name: _version(name) for name in PACKAGES},
        python=platform.python_version(),
        plugin=any(
            point.value.startswith("mgpu_check.") for point in importlib.metadata.entry_points(group="pytest11")
        ),
        cores=len(os.sched_getaffinity(0)),
        memory=available_memory(),
        shared_memory=_free(Path("/dev/shm")),
        temporary=(tempfile.gettempdir(), _free(Path(tempfile.gettempdir()))),
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=min(filter(None, (_limit(resource.RLIMIT_NPROC), limit_of_group("pids.max"))), default=None),
        host=host,
        address=_address(host),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        port=_taken(os.environ.get("MASTER_PORT", "")),
        environment=dict(os.environ),
    )


def of_devices() -> GpuFacts:
    """Read the facts about the GPUs. Imports torch, and initializes the driver."""
    import torch

    inventory = take_inventory()
    count = len(inventory.devices)
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return GpuFacts(
        inventory,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if nccl else "",
        cuda=torch.version.cuda or torch.version.hip or "",
        driver=_driver(),
        apart=tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)),
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _free(directory: Path) -> int | None:
    """Return the free bytes of a directory; None if it cannot be written."""
    return shutil.disk_usage(directory).free if os.access(directory, os.W_OK) else None


def _driver() -> str:
    try:
        return version_of_driver(Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
    except OSError:
        return ""


def version_of_driver(text: str) -> str:
    """Return the version in the text of NVIDIA's kernel module, such as "580.159.04"; "" without one."""
    found = re.search(r"Module .*?\b(\d+\.\d[\d.]*)", text)
    return found[1] if found else ""


def _taken(given: str) -> int | None:
    """Return a port if another process listens there: `given`, or the default of torchrun."""
    port = int(given) if given.isdecimal() and 0 < int(given) < 1 << 16 else _PORT_OF_TORCHRUN
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return port if error.errno == errno.EADDRINUSE else None
    return None


def _address(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return ""
