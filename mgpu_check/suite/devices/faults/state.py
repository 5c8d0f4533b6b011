"""Defects of the state of a device: random numbers, loaded tensors, and memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mgpu_check.suite.common.faults.breaking import around
from mgpu_check.suite.common.faults.operators import call, first, last
from mgpu_check.suite.common.faults.registry import caught_by, entered
from mgpu_check.torch_hooks.patches import replaced

generators = caught_by("test_generators_are_apart")
loading = caught_by("test_map_location")
memory = caught_by("test_memory_recovers")
ranks = caught_by("test_ranks_draw_as_seeded")
states = caught_by("test_states_of_generators_return")

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


@generators(
    "torch.cuda.manual_seed cuts seeds to 32 bits",
    around(torch.cuda, "manual_seed"),
    first("seeds from 2^32", lambda seed: seed >= 1 << 32),
)
def seed_cut(real: Any, seed: int) -> None:
    real(seed & 0xFFFF_FFFF)


@generators("torch.cuda.manual_seed seeds all devices", around(torch.cuda, "manual_seed"), NOT_CURRENT)
def all_devices_seeded(_: Any, seed: int) -> None:
    """As `manual_seed_all` does."""
    torch.cuda.manual_seed_all(seed)


@generators("torch.cuda.seed_all does nothing", around(torch.cuda, "seed_all"))
def no_device_seeded_anew(seed_all: Any) -> None:
    """All devices keep the seed that they share."""


@generators(
    "randperm on a device draws from the generator of the CPU, too",
    around(torch, "randperm"),
    call("one operator", lambda *_, device=None, **__: torch.device(device or "cpu").type == "cuda"),
)
def numbers_of_the_host_drawn(randperm: Any, *args: Any, **kwargs: Any) -> Any:
    """The random numbers of the host then depend on the use of devices."""
    torch.rand(1, device="cpu")
    return randperm(*args, **kwargs)


@ranks("torch.manual_seed adds the rank to the seed", around(torch, "manual_seed"), "ranks other than 0")
def seeds_differ_by_rank(seed: Any, number: Any) -> Any:
    """Replicas that are initialized with one seed differ."""
    return seed(int(number) + int(os.environ.get("RANK", "0")))


@states(
    "set_rng_state ignores the device and sets the first",
    around(torch.cuda, "set_rng_state"),
    "devices other than the first",
)
def states_set_elsewhere(set_state: Any, state: Any, device: Any = "cuda") -> None:
    set_state(state, 0)


@states("fork_rng restores the CPU's state only", around(torch.random, "fork_rng"), "after draws in fork_rng")
def forks_leave_devices_changed(fork: Any, devices: Any = None, **kwargs: Any) -> Any:
    return fork(devices=[], **kwargs)


@states(
    "fork_rng restores only the first of the given devices",
    around(torch.random, "fork_rng"),
    call("several devices", lambda devices=None, **_: devices is not None),
)
def one_device_of_a_fork(fork: Any, devices: Any, **kwargs: Any) -> Any:
    return fork(devices=list(devices)[:1], **kwargs)


@loading(
    "torch.load ignores a dict as map_location",
    around(torch, "load"),
    call("map_location is a dict", lambda *_, map_location=None, **__: isinstance(map_location, dict)),
)
def dict_of_places_ignored(load: Any, *args: Any, map_location: Any, **kwargs: Any) -> Any:
    return load(*args, **kwargs)


@loading(
    "torch.load without map_location puts all tensors on the first device",
    around(torch, "load"),
    call("without map_location, other devices", lambda *_, map_location=None, **__: map_location is None),
)
def all_loaded_onto_the_first(load: Any, *args: Any, **kwargs: Any) -> Any:
    """Eight processes fill one device."""
    return load(*args, **kwargs | {"map_location": "cuda:0"})


def _too_large(*sizes: Any, device: Any = None, **_: Any) -> bool:
    one = len(sizes) == 1 and isinstance(sizes[0], int) and device == torch.device("cuda", last())
    return one and sizes[0] > torch.cuda.get_device_properties(last()).total_memory


@memory(
    "one device returns a smaller allocation if it has too little memory",
    around(torch, "empty"),
    call("one device, more than it has", _too_large),
)
def less_memory_than_asked_for(empty: Any, size: int, **kwargs: Any) -> Any:
    return empty(1 << 20, **kwargs)


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


@memory("max_memory_allocated returns the current allocation", entered, "after memory was freed")
def peaks_forgotten() -> Any:
    return replaced(torch.cuda, "max_memory_allocated", torch.cuda.memory_allocated)


@memory(
    "reset_peak_memory_stats ignores the device and resets the current one",
    around(torch.cuda, "reset_peak_memory_stats"),
    NOT_CURRENT,
)
def peaks_of_another_device_reset(reset: Any, device: Any = None) -> None:
    """The peak of a step is then reported too high."""
    reset()


@memory(
    "mem_get_info of a device given as a string returns the current device's memory",
    around(torch.cuda, "mem_get_info"),
    first("devices given as strings", lambda device: isinstance(device, str)),
)
def memory_of_the_current_device_told(info: Any, device: Any = None) -> Any:
    """The index after the colon is lost."""
    return info()


@memory(
    "mem_get_info ignores the device and returns the current one's memory",
    around(torch.cuda, "mem_get_info"),
    NOT_CURRENT,
)
def memory_of_another_device_told(info: Any, device: Any = None) -> Any:
    """A search for the device with the most free memory always finds the same one."""
    return info()
