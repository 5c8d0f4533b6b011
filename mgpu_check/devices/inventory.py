"""The real devices of this machine, or the reason if they cannot be used; and the devices of a world's ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """A visible GPU."""

    index: int  # as in ``cuda:<index>``, after ``CUDA_VISIBLE_DEVICES``
    name: str
    memory: int  # total, in bytes
    capability: tuple[int, int]  # compute capability, such as (9, 0)
    uuid: str  # identifies the GPU independently of its index; "" if torch does not report it
    mask: str = "CUDA_VISIBLE_DEVICES"  # the environment variable that selects the visible GPUs for this driver
    pci: str = ""  # PCI bus id, as NVIDIA's management library writes it; "" if torch does not report it


def visible_devices() -> list[Device]:
    """Return the GPUs that torch sees in this process, in the order of their indices. Initializes the driver."""
    import torch  # here, because the pytest process uses `Device` without importing torch

    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid, capability = str(getattr(properties, "uuid", "")), (properties.major, properties.minor)
        memory: int = properties.total_memory
        devices.append(Device(index, properties.name, memory, capability, uuid, _mask(), _pci(properties)))
    return devices


def _pci(properties: object) -> str:
    domain, bus, device = (getattr(properties, f"pci_{field}_id", None) for field in ("domain", "bus", "device"))
    if None in (domain, bus, device):
        return ""
    return f"{domain:08X}:{bus:02X}:{device:02X}.0"


def _mask() -> str:
    import torch

    return "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Inventory:
    """The devices of a machine, and the state of its driver."""

    devices: tuple[Device, ...]  # the visible GPUs; empty if there is trouble
    trouble: str | None = None  # why the GPUs cannot be used, and the remedy, in lines; None if nothing is wrong
    # the environment variable that selects the visible GPUs for this machine's driver
    mask: str = "CUDA_VISIBLE_DEVICES"


def take_inventory() -> Inventory:
    """Return the devices that this process sees, or what is wrong with their driver. Initializes the driver."""
    import torch

    mask = _mask()
    try:
        devices = tuple(visible_devices())
    except Exception as error:
        lines = str(error).strip().splitlines()
        return Inventory((), _trouble(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__), mask)
    if devices:
        return Inventory(devices, mask=mask)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type != "cuda":
        accelerator_text = f"the accelerator that torch {torch.__version__} has here is {accelerator.type!r}"
        return Inventory((), f"{accelerator_text}: mgpu-check runs on GPUs by CUDA or ROCm, and in software")
    # Without NVML, torch reports a driver that fails to initialize as no GPU at all (torch/cuda/__init__.py,
    # device_count, torch 2.13).
    sick = torch.version.cuda is not None and _driver_code() not in (None, *_NO_DEVICE)
    return Inventory((), _trouble("torch finds no GPU") if sick else None, mask)


_NO_DEVICE = (0, 100)

_REMEDIES = {
    3: "the driver could not be initialized, as after an update without a restart, or in a container without "
    "/dev/nvidia-uvm: look at nvidia-smi, load the module (nvidia-modprobe -u -c 0), or restart the machine",
    34: "the driver is a stub library, made for linking only: take its directory out of LD_LIBRARY_PATH",
    802: "the GPUs are connected by NVSwitches, and their fabric manager is not running, or not ready: look at "
    "systemctl status nvidia-fabricmanager; its version must be that of the driver",
    803: "the driver in the kernel and its library are of different versions, as after an update: restart the machine",
    804: "the library of the driver is a compatibility package that these GPUs do not support: take it out of "
    "LD_LIBRARY_PATH",
    999: "the driver has met an unknown error, often after an Xid or a suspended machine: look at dmesg (grep for "
    "Xid), reload nvidia_uvm, or restart the machine",
}
"""Cause and remedy of each error code of the driver's initialization (`cuInit`)."""

_REMEDY = "look at nvidia-smi, and at dmesg"


def _driver_code() -> int | None:
    """Initialize NVIDIA's driver and return its result code; None if no such driver is installed."""
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0))
    except (OSError, AttributeError):
        return None


def _trouble(message: str) -> str:
    code = _driver_code()
    which = f" (code {code})" if code else ""
    return f"the GPUs of this machine cannot be used: {message}{which}\n  {_REMEDIES.get(code or 0, _REMEDY)}"


@dataclass(frozen=True, order=True)
class Slot:
    """The place where one rank can run: a device of a host."""

    host: int  # index of the host, 0 on one machine
    index: int  # index of the device among those that the run uses on this host


class WorldSize(int):
    """An `int` world size that also holds the number of ranks per host.
    A plain number fills the first host, then the next."""

    per_host: tuple[int, ...]

    def __new__(cls, per_host: Sequence[int]) -> WorldSize:
        """Make the size of a world with ``per_host[h]`` ranks on host `h`."""
        size = super().__new__(cls, sum(per_host))
        size.per_host = tuple(per_host)
        return size

    def __repr__(self) -> str:
        return f"WorldSize({list(self.per_host)})"

    def __reduce__(self) -> tuple[object, ...]:
        return WorldSize, (self.per_host,)


def spread(size: int, per_host: Sequence[int]) -> WorldSize:
    """Spread `size` ranks over as many hosts as possible, as evenly as possible.
    `per_host`: number of devices of each host; their sum is at least `size`."""
    counts = [0] * len(per_host)
    for _ in range(size):
        free = [host for host, most in enumerate(per_host) if counts[host] < most]
        counts[min(free, key=lambda host: counts[host])] += 1
    return WorldSize(counts)


def slots_for(size: int | None, available: Sequence[Slot], devices: Sequence[int] | None = None) -> tuple[Slot, ...]:
    """Return the slots of the ranks of a world.

    `size`: number of ranks; None for one on each of `devices`, or on each slot. `devices`: numbers of devices, host by
    host, from 0: rank ``i`` is on ``devices[i]``. Raises `ValueError`: `size` exceeds the number of slots, or of those
    on a host of a `WorldSize`; or `devices` is invalid.
    """
    if devices is not None:
        return _slots_of(devices, size, available)
    if size is None:
        return tuple(sorted(available))
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= len(available):
        raise ValueError(f"size={size!r} is not a world size of this run; choose 1 to {len(available)}")
    if not isinstance(size, WorldSize):
        return tuple(sorted(available)[:size])
    slots: list[Slot] = []
    for host, count in enumerate(size.per_host):
        local_slots = sorted(slot for slot in available if slot.host == host)
        if count > len(local_slots):
            short = f"host {host} has {len(local_slots)} devices, too few for {count} ranks"
            raise ValueError(f"size={size!r}: {short}; choose fewer")
        slots += local_slots[:count]
    return tuple(slots)


def _slots_of(devices: Sequence[int], size: int | None, available: Sequence[Slot]) -> tuple[Slot, ...]:
    ordered, valid = sorted(available), f"choose different numbers of 0 to {len(available) - 1}"
    if not isinstance(devices, Sequence) or not devices:
        raise ValueError(f"devices={devices!r} is not a non-empty list of devices; {valid}")
    for device in devices:
        if not isinstance(device, int) or isinstance(device, bool) or not 0 <= device < len(ordered):
            raise ValueError(f"devices={devices!r}: {device!r} is not a device of this test; {valid}")
    if len(set(devices)) < len(devices):
        raise ValueError(f"devices={list(devices)!r}: each rank needs a device of its own; {valid}")
    if size not in (None, len(devices)):
        raise ValueError(f"size={size!r}, but devices={list(devices)!r}; leave the size out where devices are given")
    return tuple(ordered[device] for device in devices)


@dataclass(frozen=True)
class Mask:
    """The devices that are visible to a process."""

    environment: Mapping[str, str] = field(default_factory=dict)  # the variables that hide all other devices
    # UUIDs of the visible devices, in order, for the process to verify; empty if they are unknown
    uuids: tuple[str, ...] = ()


Masks = Callable[[Sequence[Slot]], Mask]
"""Return the mask that makes exactly these devices of a host visible to a process."""
