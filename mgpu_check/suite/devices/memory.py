"""Check the memory of devices: statistics, refused allocations, and tensors loaded onto them."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mgpu_check.oracles.agreement import WrongCase, difference, named_wrong
from mgpu_check.oracles.generated_data import ALL, anything
from mgpu_check.suite.devices.streams import require
from mgpu_check.torch_hooks.tensors import name_of

_BLOCK = (4 << 20) + 4096  # bytes: a multiple of 512, because torch rounds its statistics to that
_LARGE_BLOCK = (16 << 20) + 4096  # bytes: the allocator treats blocks above a few MiB in another way

_FIGURES: dict[str, Callable[[Any], object]] = {
    "memory_allocated": lambda device: torch.cuda.memory_allocated(device),
    "max_memory_allocated": lambda device: torch.cuda.max_memory_allocated(device),
    "max_memory_reserved": lambda device: torch.cuda.max_memory_reserved(device),
    "memory_reserved": lambda device: torch.cuda.memory_reserved(device),
    "mem_get_info": lambda device: torch.cuda.mem_get_info(device),
}
"""Statistics of a device, or of the current one for None.

Each call looks its function up, because `selftest` replaces it.
"""


def assert_memory_recovers(devices: Sequence[torch.device]) -> None:
    """Assert that each device counts current and peak memory, refuses what it cannot hold, and still works then."""
    for device in reversed(devices):
        _recovers(device)


def _require(device: torch.device, condition: bool, text: str) -> None:
    require(condition, f"{device}: {text}", device)


def _recovers(device: torch.device) -> None:
    free, total = torch.cuda.mem_get_info(device)
    specified_total = torch.cuda.get_device_properties(device).total_memory
    text = f"{free} bytes are free of {total}, and its properties say {specified_total}"
    _require(device, 0 <= free <= total and total <= specified_total, text)
    gc.collect()  # or cycles of earlier tests could be freed during the measurement
    # Cached memory could make the free memory of two devices equal, and so hide that one device's number is the
    # other's.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    block = torch.full((_LARGE_BLOCK,), 7, dtype=torch.uint8, device=device)
    _refuses(device, total + (1 << 20), total)
    _require(device, bool((block == 7).all()), "a failed allocation has changed the memory that was held before")
    after = torch.full((_LARGE_BLOCK,), 9, dtype=torch.uint8, device=device)
    distinct = bool((after == 9).all()) and bool((block == 7).all())
    _require(device, distinct, "two blocks are the same memory, after an allocation failed")
    _figures_follow_the_argument(device)
    now = torch.cuda.memory_allocated(device)
    text = f"{2 * _LARGE_BLOCK} bytes are held, and memory_allocated rose by {now - before}"
    _require(device, now - before >= 2 * _LARGE_BLOCK, text)
    del block, after
    peak = torch.cuda.max_memory_allocated(device)
    _require(device, peak >= now, f"max_memory_allocated is {peak}, and {now} bytes were allocated at one time")
    remaining = torch.cuda.memory_allocated(device)
    _peaks_begin_anew(device)
    _require(device, remaining <= before, f"all was freed, and {remaining - before} bytes still count as allocated")


def _refuses(device: torch.device, wanted: int, total: int) -> None:
    try:
        torch.empty(wanted, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        pass
    except RuntimeError as error:
        _require(device, False, f"an allocation beyond its memory raised {type(error).__name__}: {error}")
    else:
        _require(device, False, f"{wanted} bytes were allocated, of {total} that it has")


def _forms(device: torch.device) -> tuple[Any, ...]:
    return device, device.index, str(device)


def _figures_follow_the_argument(device: torch.device) -> None:
    """Require that each statistic is that of its device, for each form of the argument; None is the current device."""
    for form in (*_forms(device)[1:], None):
        for name, figure in _FIGURES.items():
            expected = figure(device)
            with torch.cuda.device(device if form is None else -1):  # -1 keeps the current device
                got = figure(form)
            # Others may allocate between two calls, so compare only if the number did not change meanwhile.
            text = f"{name}({form!r}) is {got}, but with a torch.device it is {expected}"
            _require(device, expected != figure(device) or got == expected, text)


def _peaks_begin_anew(device: torch.device) -> None:
    """Require that a reset peak equals the allocated memory, for every form of the argument."""
    for form in _forms(device):
        torch.full((_BLOCK,), 7, dtype=torch.uint8, device=device)
        torch.cuda.reset_peak_memory_stats(form)
        torch.cuda.reset_accumulated_memory_stats(form)
        counted = torch.cuda.memory_stats(device).get("allocated_bytes.all.allocated", 0)
        _require(device, counted == 0, f"reset_accumulated_memory_stats({form!r}) leaves {counted} allocated bytes")
        peak, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        text = f"max_memory_allocated is {peak} after reset_peak_memory_stats({form!r}), and {now} is allocated"
        _require(device, peak == now, text)


def assert_loads_arrive(devices: Sequence[torch.device], seed: int = 0) -> None:
    """Assert that `torch.load` puts tensors on the device that `map_location` selects.

    `map_location` is None, a text, a device, a dict that rotates devices, or a callable. Every bit of each dtype must
    arrive, and tensors that share memory must share it again.
    """
    state = {device.index: _kept(device, seed) for device in devices}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    turned = {str(device): str(devices[number - 1]) for number, device in enumerate(devices)}
    last, host = devices[-1], torch.device("cpu")
    forms: dict[str, tuple[Any, Callable[[torch.device], torch.device]]] = {
        "nothing": (None, lambda device: device),
        "'cpu'": ("cpu", lambda device: host),
        f"{str(last)!r}": (str(last), lambda device: last),
        f"torch.device({str(last)!r})": (last, lambda device: last),
        f"the dict {turned}": (turned, lambda device: torch.device(turned[str(device)])),
        "a callable that returns the storage on the CPU": (lambda storage, location: storage, lambda device: host),
        f"a callable that calls cuda({last.index})": (
            lambda storage, location: storage.cuda(last.index),
            lambda device: last,
        ),
    }
    errors: list[WrongCase] = []
    for name, (form, target_of) in forms.items():
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=form)
        for device in devices:
            if message := _found(loaded[device.index], target_of(device), seed + device.index):
                case = f"torch.load with {name} as map_location, of tensors saved on {device}"
                errors.append(WrongCase(device, case, message))
    if errors:
        raise named_wrong(errors, devices, len(forms), "the saved data")


def _kept(device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    state = {name_of(dtype): anything(40, dtype, seed + device.index).to(device) for dtype in ALL}
    # A view with gaps into the memory of another tensor.
    state["view"] = state["float32"].view(8, 5)[1:6, ::2]
    return state


def _found(state: dict[str, torch.Tensor], device: torch.device, seed: int) -> str | None:
    for name, tensor in state.items():
        if tensor.device != device:
            return f"{name} is on {tensor.device}, expected it on {device}"
        if name != "view" and (message := difference(tensor, anything(40, tensor.dtype, seed), "bits")):
            return message
    if message := difference(state["view"], state["float32"].view(8, 5)[1:6, ::2], "bits"):
        return f"a view: {message}"
    before = state["float32"].clone()
    state["view"].fill_(3.0)
    if torch.equal(before[5:10].nan_to_num(), state["float32"][5:10].nan_to_num()):
        return "two tensors that shared memory do not"
    return None
