"""Find the real devices of this machine, and the reason if they cannot be used."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


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
        devices.append(
            Device(
                index=index,
                name=properties.name,
                memory=properties.total_memory,
                capability=(properties.major, properties.minor),
                uuid=str(getattr(properties, "uuid", "")),
                mask=_mask(),
                pci=_pci(properties),
            )
        )
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
    trouble: str = ""  # why the GPUs cannot be used, and the remedy, in lines; "" if nothing is wrong
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
        what = f"the accelerator that torch {torch.__version__} has here is {accelerator.type!r}"
        return Inventory((), f"{what}: mgpu-check runs on GPUs by CUDA or ROCm, and in software")
    # Without NVML, torch reports a driver that fails to initialize as no GPU at all.
    sick = torch.version.cuda is not None and _driver_code() not in (None, *_NO_DEVICE)
    return Inventory((), _trouble("torch finds no GPU") if sick else "", mask)


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
