"""Defects of the state of a device: random numbers, loaded tensors, and memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import checkpoint as checkpoint_module

from mgpu_check.suite.common.faults.breaking import replaced_method
from mgpu_check.suite.common.faults.operators import altered, last, on
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced


@contextmanager
def _untouched(index: int) -> Iterator[None]:
    """Restore the generator of one device on exit."""
    state = torch.cuda.get_rng_state(index)
    yield
    torch.cuda.set_rng_state(state, index)


@fault("torch.manual_seed leaves out the last device", "test_generators_are_apart", condition="one device")
def one_device_not_seeded() -> Iterator[None]:
    """Its random numbers continue from the old state."""
    seed = torch.manual_seed

    def manual_seed(number: int) -> torch.Generator:
        with _untouched(last()):
            return seed(number)

    with replaced(torch, "manual_seed", manual_seed):
        yield


@fault(
    "torch.cuda.manual_seed seeds all devices", "test_generators_are_apart", condition="devices that are not current"
)
def all_devices_seeded() -> Iterator[None]:
    """As `manual_seed_all` does."""
    with replaced(torch.cuda, "manual_seed", torch.cuda.manual_seed_all):
        yield


@fault(
    "multinomial without replacement draws an element twice",
    "test_functions_and_drawing",
    condition="one device, one row in 64",
)
def drawn_twice() -> Iterator[None]:
    """The last element drawn is the first again."""

    def instead(multinomial: Any, weights: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        drawn = multinomial(weights, *args, **kwargs)
        struck = drawn.view(-1, drawn.shape[-1])[::64]
        struck[:, -1] = struck[:, 0]
        return drawn

    def concerns(weights: Any, *_: Any, replacement: bool = False, **__: Any) -> bool:
        return on(weights, last()) and not replacement

    with altered(torch, "multinomial", concerns, instead):
        yield


@fault(
    "multinomial draws all elements with a weight above 0 equally often",
    "test_functions_and_drawing",
    condition="one device, float64",
)
def weights_alike() -> Iterator[None]:
    """Weights are converted to booleans."""

    def instead(multinomial: Any, weights: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return multinomial((weights > 0).to(weights.dtype), *args, **kwargs)

    with altered(torch, "multinomial", lambda x, *_, **__: on(x, last(), torch.float64), instead):
        yield


@fault(
    "randperm on a device draws from the generator of the CPU, too",
    "test_generators_are_apart",
    condition="one operator",
)
def numbers_of_the_host_drawn() -> Iterator[None]:
    """The random numbers of the host then depend on the use of devices."""

    def instead(randperm: Any, *args: Any, **kwargs: Any) -> Any:
        torch.rand(1, device="cpu")
        return randperm(*args, **kwargs)

    with altered(torch, "randperm", lambda *_, **kw: torch.device(kw.get("device") or "cpu").type == "cuda", instead):
        yield


@fault(
    "set_rng_state ignores the device and sets the first",
    "test_states_of_generators_return",
    condition="devices other than the first",
)
def states_set_elsewhere() -> Iterator[None]:
    """The argument is lost."""
    set_state = torch.cuda.set_rng_state
    with replaced(torch.cuda, "set_rng_state", lambda state, device="cuda": set_state(state, 0)):
        yield


@fault(
    "fork_rng restores the CPU's state only", "test_states_of_generators_return", condition="after draws in fork_rng"
)
def forks_leave_devices_changed() -> Iterator[None]:
    """Devices continue from the state at the end of the block."""
    fork = torch.random.fork_rng

    @contextmanager
    def fork_rng(devices: Any = None, **kwargs: Any) -> Iterator[None]:
        with fork(devices=[], **kwargs):
            yield

    with replaced(torch.random, "fork_rng", fork_rng):
        yield


@fault("dropout of bfloat16 does not scale the kept elements", "test_dropout", condition="bfloat16")
def dropout_without_scale() -> Iterator[None]:
    """Activations are smaller while training."""

    def instead(dropout: Any, x: torch.Tensor, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:
        return dropout(x, p, *args, **kwargs) * (1 - p)

    with altered(F, "dropout", lambda x, *_, **__: x.is_cuda and x.dtype == torch.bfloat16, instead):
        yield


@fault("dropout drops the same elements each time on one device", "test_dropout", condition="one device")
def dropout_repeats() -> Iterator[None]:
    """Its generator is not advanced."""

    def instead(dropout: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with _untouched(last()):
            return dropout(x, *args, **kwargs)

    with altered(F, "dropout", lambda x, *_, **__: on(x, last()), instead):
        yield


@fault("the gradient of dropout uses a new mask on one device", "test_dropout", condition="one device, gradients")
def another_mask_backward() -> Iterator[None]:
    """Backward draws the mask again, from the next numbers of the generator."""

    def instead(dropout: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out, drawn_anew = dropout(x.detach(), *args, **kwargs), dropout(x, *args, **kwargs)
        return drawn_anew + (out - drawn_anew).detach()

    with altered(F, "dropout", lambda x, *_, **__: on(x, last()) and x.requires_grad, instead):
        yield


@fault("torch.manual_seed adds the rank to the seed", "test_ranks_draw_as_seeded", condition="ranks other than 0")
def seeds_differ_by_rank() -> Iterator[None]:
    """Replicas that are initialized with one seed differ."""
    seed, rank = torch.manual_seed, int(os.environ.get("RANK", "0"))
    with replaced(torch, "manual_seed", lambda number: seed(int(number) + rank)):
        yield


@fault("torch.load ignores a dict as map_location", "test_map_location", condition="map_location is a dict")
def dict_of_places_ignored() -> Iterator[None]:
    """Other forms work."""

    def instead(load: Any, *args: Any, **kwargs: Any) -> Any:
        return load(*args, **{**kwargs, "map_location": None})

    with altered(torch, "load", lambda *_, **kw: isinstance(kw.get("map_location"), dict), instead):
        yield


@fault(
    "torch.load without map_location puts all tensors on the first device",
    "test_map_location",
    condition="without map_location, other devices",
)
def all_loaded_onto_the_first() -> Iterator[None]:
    """Eight processes fill one device."""

    def instead(load: Any, *args: Any, **kwargs: Any) -> Any:
        return load(*args, **{**kwargs, "map_location": "cuda:0"})

    with altered(torch, "load", lambda *_, **kw: kw.get("map_location") is None, instead):
        yield


@fault(
    "one device returns a smaller allocation if it has too little memory",
    "test_memory_recovers",
    condition="one device, more than it has",
)
def less_memory_than_asked_for() -> Iterator[None]:
    """Nothing is raised."""

    def instead(empty: Any, size: int, **kwargs: Any) -> Any:
        return empty(1 << 20, **kwargs)

    def concerns(*sizes: Any, **kwargs: Any) -> bool:
        return (
            len(sizes) == 1
            and isinstance(sizes[0], int)
            and sizes[0] > torch.cuda.get_device_properties(last()).total_memory
            and kwargs.get("device") == torch.device("cuda", last())
        )

    with altered(torch, "empty", concerns, instead):
        yield


@fault(
    "max_memory_allocated returns the current allocation", "test_memory_recovers", condition="after memory was freed"
)
def peaks_forgotten() -> Iterator[None]:
    """An earlier peak is lost."""
    with replaced(torch.cuda, "max_memory_allocated", torch.cuda.memory_allocated):
        yield


@fault(
    "fork_rng restores only the first of the given devices",
    "test_states_of_generators_return",
    condition="several devices",
)
def one_device_of_a_fork() -> Iterator[None]:
    """A single device is restored."""
    fork = torch.random.fork_rng

    def fork_rng(devices: Any = None, **kwargs: Any) -> Any:
        return fork(devices=None if devices is None else list(devices)[:1], **kwargs)

    with replaced(torch.random, "fork_rng", fork_rng):
        yield


@fault(
    "torch.utils.checkpoint does not save the generators of devices with tensors in a list or dict",
    "test_dropout",
    condition="tensors within an argument",
)
def states_of_nested_tensors_lost() -> Iterator[None]:
    """The recomputed forward draws another dropout mask."""

    def states(real: Any, *args: Any) -> Any:
        return real(*(one for one in args if isinstance(one, torch.Tensor)))

    with replaced_method(checkpoint_module, "get_device_states", states):
        yield


@fault(
    "reset_peak_memory_stats ignores the device and resets the current one",
    "test_memory_recovers",
    condition="devices that are not current",
)
def peaks_of_another_device_reset() -> Iterator[None]:
    """The peak of a step is then reported too high."""
    reset = torch.cuda.reset_peak_memory_stats
    with replaced(torch.cuda, "reset_peak_memory_stats", lambda device=None: reset()):
        yield


@fault(
    "mem_get_info of a device given as a string returns the current device's memory",
    "test_memory_recovers",
    condition="devices given as strings",
)
def memory_of_the_current_device_told() -> Iterator[None]:
    """The index after the colon is lost."""
    info = torch.cuda.mem_get_info
    with replaced(torch.cuda, "mem_get_info", lambda device=None: info(None if isinstance(device, str) else device)):
        yield


@fault(
    "mem_get_info ignores the device and returns the current one's memory",
    "test_memory_recovers",
    condition="devices that are not current",
)
def memory_of_another_device_told() -> Iterator[None]:
    """A search for the device with the most free memory always finds the same one."""
    info = torch.cuda.mem_get_info
    with replaced(torch.cuda, "mem_get_info", lambda device=None: info()):
        yield
