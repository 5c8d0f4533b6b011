"""Defects of devices, and of helpers that enumerate them."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from mgpu_check.devices import inventory
from mgpu_check.faults.devices.planting import altered, last, on, unit
from mgpu_check.faults.registry import fault
from mgpu_check.recipes import devices
from mgpu_check.torch_hooks.patches import replaced

VISIBILITY = "mgpu_check.checks.visibility"


@fault(
    "fixtures",
    "cuda:0 and cuda:1 are the same device, with one UUID",
    caught_by=("test_gpus_are_those_asked_for",),
    condition="the second device",
    least_gpus=2,
)
def two_names_for_one_device() -> Iterator[None]:
    """As if one physical device were listed twice, in every process that enumerates devices."""
    first, second = (device.uuid for device in inventory.visible_devices()[:2])
    names = (1, "cuda:1", torch.device("cuda", 1))
    properties = torch.cuda.get_device_properties
    with (
        replaced(torch.cuda, "get_device_properties", lambda device=None: properties(0 if device in names else device)),
        _looking(f"look_doubly({first!r}, {second!r})"),
    ):
        yield


def look_doubly(first: str, second: str) -> None:
    """Run the child program of `two_names_for_one_device`, where the device with UUID `second` reports UUID `first`."""
    real = inventory.visible_devices

    def visible_devices() -> list[inventory.Device]:
        return [replace(device, uuid=first) if device.uuid == second else device for device in real()]

    with replaced(inventory, "visible_devices", visible_devices):
        runpy.run_module(VISIBILITY, run_name="__main__")


@fault(
    "fixtures",
    "the last device is missing from torch.cuda",
    caught_by=("test_gpus_are_those_asked_for", "test_try_gpu", "test_try_all_gpus"),
)
def one_device_missing() -> Iterator[None]:
    """The number of devices is one too low."""
    count = torch.cuda.device_count
    with replaced(torch.cuda, "device_count", lambda: count() - 1):
        yield


@fault(
    "fixtures",
    "devices are numbered in a different order than in other processes",
    caught_by=("test_visible_devices_are_honoured",),
)
def devices_out_of_order() -> Iterator[None]:
    """The properties of the first device and of the last one are exchanged, as by another `CUDA_DEVICE_ORDER`."""
    properties = torch.cuda.get_device_properties
    with replaced(
        torch.cuda, "get_device_properties", lambda device=0: properties(last() - torch.device(device).index)
    ):
        yield


@fault(
    "fixtures",
    "two devices share memory: writes to one change the other",
    caught_by=("test_memories_are_separate",),
)
def shared_memory() -> Iterator[None]:
    """A copy to a device other than the first also overwrites the last tensor copied to the first."""
    with _sharing_with_the_first(lambda tensor: tensor.is_cuda):
        yield


@contextmanager
def _sharing_with_the_first(strikes: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Make copies to tensors that `strikes` accepts also overwrite the last tensor of equal shape copied to the first device."""
    copy = torch.Tensor.copy_
    written: dict[tuple[int, ...], weakref.ref[torch.Tensor]] = {}

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if on(self, 0):
            written[tuple(self.shape)] = weakref.ref(self)
        elif tuple(self.shape) in written and strikes(self):
            other = written[tuple(self.shape)]()
            if other is not None and other.dtype == self.dtype:
                copy(other, source, non_blocking)
        return copy(self, source, non_blocking)

    with replaced(torch.Tensor, "copy_", copy_):
        yield


@fault(
    "fixtures",
    "memory_allocated returns the value of cuda:0 for every device",
    caught_by=("test_memory_is_counted_where_it_is",),
)
def memory_of_the_first_device() -> Iterator[None]:
    """The device argument is lost."""
    allocated = torch.cuda.memory_allocated
    with replaced(torch.cuda, "memory_allocated", lambda device=None: allocated(0)):
        yield


@fault("fixtures", "tensors sent to the last device land on the first", caught_by=("test_every_gpu_computes",))
def sent_to_another_device() -> Iterator[None]:
    """`Tensor.to` takes the last device for the first."""
    to = torch.Tensor.to

    def misled(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], (str, torch.device)) and torch.device(args[0]) == torch.device("cuda", last()):
            # With a single device, the only wrong target is the CPU.
            args = (torch.device("cuda", 0) if last() else torch.device("cpu"), *args[1:])
        return to(self, *args, **kwargs)

    with replaced(torch.Tensor, "to", misled):
        yield


@fault(
    "fixtures",
    "one bit of copies from a device to the CPU is flipped",
    caught_by=("test_every_gpu_computes",),
)
def bit_flipped_on_the_way_back() -> Iterator[None]:
    """The lowest bit of the first element's first byte changes in copies from a device to the CPU."""
    to = torch.Tensor.to

    def flipped(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = to(self, *args, **kwargs)
        if self.device.type == "cuda" and result.device.type == "cpu" and result.numel():
            result = result.detach().clone(memory_format=torch.contiguous_format)
            result.reshape(-1).view(torch.uint8)[0] ^= 1
        return result

    with replaced(torch.Tensor, "to", flipped):
        yield


@fault(
    "fixtures",
    "one device adds up booleans modulo 2",
    caught_by=("test_every_gpu_computes",),
    condition="one device, bool",
)
def booleans_of_one_device() -> Iterator[None]:
    """True plus True gives False."""
    with altered(torch.Tensor, "__add__", lambda x, _: on(x, last(), torch.bool), lambda _, x, y: x ^ y):
        yield


@fault(
    "fixtures",
    "products of bfloat16 are off by the last bit on one device",
    caught_by=("test_every_gpu_computes",),
    condition="one device, bfloat16",
)
def bfloat16_products_off_by_a_bit() -> Iterator[None]:
    """One element of each product is wrong."""
    with unit(("mm",), device=last(), dtype="bfloat16", pattern="low-bit"):
        yield


@fault(
    "fixtures",
    "large tensors of the last device and of the first share memory",
    caught_by=("test_memories_are_separate",),
    condition="one pair, above 1 MiB",
)
def large_blocks_shared() -> Iterator[None]:
    """Writes to the last device also change the first."""
    with _sharing_with_the_first(lambda tensor: tensor.nbytes > 1 << 20 and on(tensor, last())):
        yield


@fault(
    "fixtures",
    "memory_allocated leaves out blocks above 1 MiB on one device",
    caught_by=("test_memory_is_counted_where_it_is",),
    condition="one device, above 1 MiB",
)
def large_blocks_not_counted() -> Iterator[None]:
    """As if one of the two pools were not counted."""

    def instead(allocated: Any, device: Any = None) -> int:
        return int(torch.cuda.memory_stats(device)["allocated_bytes.small_pool.current"])

    with altered(torch.cuda, "memory_allocated", lambda device=None: device == torch.device("cuda", last()), instead):
        yield


@fault("fixtures", "try_gpu(i) counts from 1, so the last device is the CPU", caught_by=("test_try_gpu",))
def try_gpu_off_by_one() -> Iterator[None]:
    """The comparison with the number of devices is strict."""

    def try_gpu(i: int = 0) -> torch.device:
        return torch.device("cuda", i) if i + 1 < torch.cuda.device_count() else torch.device("cpu")

    with replaced(devices, "try_gpu", try_gpu):
        yield


@fault("fixtures", "try_gpu(i) gives the last device, not the CPU, past the end", caught_by=("test_try_gpu",))
def try_gpu_never_the_cpu() -> Iterator[None]:
    """There is no fall-back."""
    with replaced(devices, "try_gpu", lambda i=0: torch.device("cuda", min(i, torch.cuda.device_count() - 1))):
        yield


@fault(
    "fixtures", "try_all_gpus() lists the first device twice and leaves out the last", caught_by=("test_try_all_gpus",)
)
def try_all_gpus_repeats_the_first() -> Iterator[None]:
    """Indices are shifted by one, from the second on."""

    def try_all_gpus() -> list[torch.device]:
        listed = [torch.device("cuda", max(0, i - 1)) for i in range(torch.cuda.device_count())]
        # With a single device, the list would become empty.
        return listed if len(listed) > 1 else [torch.device("cpu")]

    with replaced(devices, "try_all_gpus", try_all_gpus):
        yield


@fault(
    "fixtures",
    "child processes ignore CUDA_VISIBLE_DEVICES",
    caught_by=("test_visible_devices_are_honoured",),
)
def visible_devices_ignored() -> Iterator[None]:
    """The variable is lost on the way to a new process."""
    with _looking("look_blindly()"):
        yield


@contextmanager
def _looking(call: str) -> Iterator[None]:
    """Start the processes that report their visible devices through `call`, a call of a function of this module."""
    run = subprocess.run

    def run_otherwise(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if VISIBILITY in command:
            command = [sys.executable, "-c", f"import {__name__} as faults; faults.{call}"]
        return run(command, **options)

    with replaced(subprocess, "run", run_otherwise):
        yield


def look_blindly() -> None:
    """Run the child program of `visible_devices_ignored` without effect of the variable."""
    environment = type(os.environ)
    set_item = environment.__setitem__

    def __setitem__(self: os._Environ[str], name: str, value: str) -> None:
        if name != "CUDA_VISIBLE_DEVICES":
            set_item(self, name, value)

    with replaced(environment, "__setitem__", __setitem__):
        runpy.run_module(VISIBILITY, run_name="__main__")
