"""Messages on a machine whose accelerators cannot be used, and how its driver learns which ones are visible."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mgpu_check.devices import inventory
from mgpu_check.devices.inventory import Device, Slot
from mgpu_check.plugin.device_leases import Leasing
from mgpu_check.settings import Settings


@pytest.fixture
def nothing_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize("kind", ["xpu", "mps", "hpu"])
def test_other_accelerators_are_refused_by_name(
    nothing_visible: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    found = SimpleNamespace(type=kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    taken = inventory.take_inventory()
    assert taken.devices == ()
    assert f"has here is {kind!r}: mgpu-check runs on GPUs by CUDA or ROCm" in taken.trouble


def test_a_machine_without_accelerators_has_no_trouble(nothing_visible: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr(ctypes, "CDLL", _missing)
    assert inventory.take_inventory() == inventory.Inventory(())


def _missing(name: str) -> None:
    raise OSError(name)


@pytest.mark.parametrize(
    ("code", "remedy"), [(802, "nvidia-fabricmanager"), (803, "restart"), (701, "look at nvidia-smi")]
)
def test_a_driver_that_fails_is_told_with_its_code_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    def fail() -> list[Device]:
        raise RuntimeError("Unexpected error\nand more lines")

    monkeypatch.setattr(inventory, "visible_devices", fail)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuInit=lambda flags: code))
    first, second = inventory.take_inventory().trouble.splitlines()
    assert first == f"the GPUs of this machine cannot be used: RuntimeError: Unexpected error (code {code})"
    assert remedy in second


def test_a_driver_that_torch_takes_for_none(nothing_visible: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuInit=lambda flags: 999))
    assert "torch finds no GPU (code 999)" in inventory.take_inventory().trouble


CUDA = [Device(i, "a GPU", 80 << 30, (9, 0), f"uuid-{i}") for i in range(3)]
ROCM = [replace(device, mask="HIP_VISIBLE_DEVICES") for device in CUDA]


@pytest.mark.parametrize(
    ("devices", "outer", "masks"),
    [
        (CUDA, {}, {"CUDA_VISIBLE_DEVICES": "0,2"}),
        (CUDA, {"CUDA_VISIBLE_DEVICES": "5,6,7"}, {"CUDA_VISIBLE_DEVICES": "5,7"}),
        (CUDA, {"HIP_VISIBLE_DEVICES": "5,6,7"}, {"CUDA_VISIBLE_DEVICES": "0,2"}),
        (ROCM, {}, {"CUDA_VISIBLE_DEVICES": "0,2", "HIP_VISIBLE_DEVICES": "0,2"}),
        (ROCM, {"HIP_VISIBLE_DEVICES": "5,6,7"}, {"CUDA_VISIBLE_DEVICES": "5,7", "HIP_VISIBLE_DEVICES": "5,7"}),
        (ROCM, {"CUDA_VISIBLE_DEVICES": "5,6,7"}, {"CUDA_VISIBLE_DEVICES": "5,7", "HIP_VISIBLE_DEVICES": "5,7"}),
        (
            ROCM,
            {"HIP_VISIBLE_DEVICES": "5,6,7", "CUDA_VISIBLE_DEVICES": "0,1,2"},
            {"CUDA_VISIBLE_DEVICES": "5,7", "HIP_VISIBLE_DEVICES": "5,7"},
        ),
    ],
)
def test_a_rank_is_told_its_devices_by_the_variable_that_its_driver_honours(
    monkeypatch: pytest.MonkeyPatch, devices: list[Device], outer: dict[str, str], masks: dict[str, str]
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    settings = Settings(gpus=3, simulate=None, rank_timeout=60.0, strict_gpus=False, origins={})
    leasing = Leasing(settings, devices, launched=False, waits=[], on_wait=lambda line: None)
    mask = leasing.mask([Slot(0, 0), Slot(0, 2)])
    assert (mask.environment, mask.uuids) == (masks, ("uuid-0", "uuid-2"))


def test_the_slot_is_written_as_the_library_of_the_driver_writes_it():
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    assert inventory._pci(properties) == "00000000:1B:00.0"
    assert inventory._pci(SimpleNamespace()) == ""  # an older torch
