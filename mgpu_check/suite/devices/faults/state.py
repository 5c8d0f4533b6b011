"""Defects of the state of a device: random numbers, loaded tensors, and memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import checkpoint as checkpoint_module

from mgpu_check.suite.common.faults.breaking import around
from mgpu_check.suite.common.faults.operators import call, dtype, first, last, one_device
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, entered, register
from mgpu_check.torch_hooks.patches import replaced

dropping = caught_by("test_dropout")
generators = caught_by("test_generators_are_apart")
memory = caught_by("test_memory_recovers")

NOT_CURRENT = "devices that are not current"


@contextmanager
def untouched(index: int) -> Iterator[None]:
    """Restore the generator of one device on exit."""
    state = torch.cuda.get_rng_state(index)
    yield
    torch.cuda.set_rng_state(state, index)


@generators("torch.manual_seed leaves out the last device", around(torch, "manual_seed"), "one device")
def one_device_not_seeded(seed: Any, number: int) -> Any:
    with untouched(last()):
        return seed(number)


@generators("torch.cuda.manual_seed seeds all devices", around(torch.cuda, "manual_seed"), NOT_CURRENT)
def all_devices_seeded(_: Any, seed: int) -> None:
    """As `manual_seed_all` does."""
    torch.cuda.manual_seed_all(seed)


@generators("randperm on a device draws from the generator of the CPU, too", around(torch, "randperm"),
    call("one operator", lambda *_, device=None, **__: torch.device(device or "cpu").type == "cuda"))  # fmt: skip
def numbers_of_the_host_drawn(randperm: Any, *args: Any, **kwargs: Any) -> Any:
    """The random numbers of the host then depend on the use of devices."""
    torch.rand(1, device="cpu")
    return randperm(*args, **kwargs)


@dropping("dropout drops the same elements each time on one device", around(F, "dropout"), one_device())
def dropout_repeats(dropout: Any, *args: Any, **kwargs: Any) -> Any:
    with untouched(last()):
        return dropout(*args, **kwargs)


@dropping("the gradient of dropout uses a new mask on one device", around(F, "dropout"),
    one_device() & first("gradients", lambda x: x.requires_grad))  # fmt: skip
def another_mask_backward(dropout: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Backward draws the mask again, from the next numbers of the generator."""
    out, drawn_anew = dropout(x.detach(), *args, **kwargs), dropout(x, *args, **kwargs)
    return drawn_anew + (out - drawn_anew).detach()


def _too_large(*sizes: Any, device: Any = None, **_: Any) -> bool:
    one = len(sizes) == 1 and isinstance(sizes[0], int) and device == torch.device("cuda", last())
    return one and sizes[0] > torch.cuda.get_device_properties(last()).total_memory


def _is_large(shape: Any, *_: Any, device: Any = None, **__: Any) -> bool:
    return bool(math.prod(shape) > 16 << 20 and device == torch.device("cuda", last()))


@memory("large blocks of one device are the same memory", when="one device, above 16 MiB")
def large_allocations_shared() -> Iterator[None]:
    kept: list[torch.Tensor] = []

    def full(real: Any, shape: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_large(shape, **kwargs):
            return NotImplemented
        if not kept:
            kept.append(real(shape, *args, **kwargs))
        return kept[0].fill_(args[0])

    with around(torch, "full")(full):
        yield


register(
    __name__,
    FaultRow("seed-cut", "torch.cuda.manual_seed cuts seeds to 32 bits", "test_generators_are_apart",
        around(torch.cuda, "manual_seed"), lambda real, seed: real(seed & 0xFFFF_FFFF),
        first("seeds from 2^32", lambda seed: seed >= 1 << 32)),
    # All devices keep the seed that they share.
    FaultRow("no-device-seeded-anew", "torch.cuda.seed_all does nothing", "test_generators_are_apart",
        around(torch.cuda, "seed_all"), lambda seed_all: None),
    # Replicas that are initialized with one seed differ.
    FaultRow("seeds-differ-by-rank", "torch.manual_seed adds the rank to the seed", "test_ranks_draw_as_seeded",
        around(torch, "manual_seed"), lambda seed, number: seed(int(number) + int(os.environ.get("RANK", "0"))),
        "ranks other than 0"),
    FaultRow("states-set-elsewhere", "set_rng_state ignores the device and sets the first",
        "test_states_of_generators_return", around(torch.cuda, "set_rng_state"),
        lambda set_state, state, device="cuda": set_state(state, 0), "devices other than the first"),
    FaultRow("forks-leave-devices-changed", "fork_rng restores the CPU's state only",
        "test_states_of_generators_return", around(torch.random, "fork_rng"),
        lambda fork, devices=None, **kwargs: fork(devices=[], **kwargs), "after draws in fork_rng"),
    FaultRow("one-device-of-a-fork", "fork_rng restores only the first of the given devices",
        "test_states_of_generators_return", around(torch.random, "fork_rng"),
        lambda fork, devices, **kwargs: fork(devices=list(devices)[:1], **kwargs),
        call("several devices", lambda devices=None, **_: devices is not None)),
    FaultRow("dict-of-places-ignored", "torch.load ignores a dict as map_location", "test_map_location",
        around(torch, "load"), lambda load, *args, map_location, **kwargs: load(*args, **kwargs),
        call("map_location is a dict", lambda *_, map_location=None, **__: isinstance(map_location, dict))),
    # Eight processes fill one device.
    FaultRow("all-loaded-onto-the-first", "torch.load without map_location puts all tensors on the first device",
        "test_map_location", around(torch, "load"),
        lambda load, *args, **kwargs: load(*args, **kwargs | {"map_location": "cuda:0"}),
        call("without map_location, other devices", lambda *_, map_location=None, **__: map_location is None)),
    FaultRow("less-memory-than-asked-for", "one device returns a smaller allocation if it has too little memory",
        "test_memory_recovers", around(torch, "empty"), lambda empty, size, **kwargs: empty(1 << 20, **kwargs),
        call("one device, more than it has", _too_large)),
    FaultRow("peaks-forgotten", "max_memory_allocated returns the current allocation", "test_memory_recovers", entered,
        lambda: replaced(torch.cuda, "max_memory_allocated", torch.cuda.memory_allocated), "after memory was freed"),
    # The peak of a step is then reported too high.
    FaultRow("peaks-of-another-device-reset", "reset_peak_memory_stats ignores the device and resets the current one",
        "test_memory_recovers", around(torch.cuda, "reset_peak_memory_stats"), lambda reset, device=None: reset(),
        NOT_CURRENT),
    # The index after the colon is lost.
    FaultRow("memory-of-the-current-device-told",
        "mem_get_info of a device given as a string returns the current device's memory", "test_memory_recovers",
        around(torch.cuda, "mem_get_info"), lambda info, device=None: info(),
        first("devices given as strings", lambda device: isinstance(device, str))),
    # A search for the device with the most free memory always finds the same one.
    FaultRow("memory-of-another-device-told", "mem_get_info ignores the device and returns the current one's memory",
        "test_memory_recovers", around(torch.cuda, "mem_get_info"), lambda info, device=None: info(), NOT_CURRENT),
    FaultRow("dropout-without-scale", "dropout of bfloat16 does not scale the kept elements", "test_dropout",
        around(F, "dropout"), lambda dropout, x, p=0.5, *args, **kwargs: dropout(x, p, *args, **kwargs) * (1 - p),
        dtype(torch.bfloat16)),
    FaultRow("dropout-in-place-without-scale", "dropout in place on one device does not scale the kept elements",
        "test_dropout", around(F, "dropout"),
        lambda dropout, x, p=0.5, *args, **kwargs: dropout(x, p, *args, **kwargs).mul_(1 - p),
        one_device() & call("in place", lambda x, p=0.5, training=True, inplace=False: inplace)),
    # The recomputed forward draws another dropout mask.
    FaultRow("states-of-nested-tensors-lost",
        "torch.utils.checkpoint does not save the generators of devices with tensors in a list or dict", "test_dropout",
        around(checkpoint_module, "get_device_states"),
        lambda states, *args: states(*(one for one in args if isinstance(one, Tensor))), "tensors within an argument"),
)  # fmt: skip
