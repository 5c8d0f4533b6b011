"""Defects of single devices: copies, state, and synchronization.

- Copies of wrong data: between certain devices, above a size, of one dtype, of modules, or in shared memory.
- State: random numbers, loaded tensors, and memory.
- The current device and stream, and synchronization.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoint_module

from mgpu_check.simulated.defects.implementations import HostLink, Link
from mgpu_check.suite.common.faults.planting import around, call, first, hardware, keeping, last, narrowed, on
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, entered, fault, register
from mgpu_check.torch_hooks.patches import replaced

borders = caught_by("test_copies_around_borders")
converting = caught_by("test_copies_that_convert")
modules = caught_by("test_modules_move")
pinned = caught_by("test_copies_of_pinned_memory")
typed = caught_by("test_copies_of_every_dtype")


def _link(effect: str, **parameters: Any) -> Link:
    """Return a defect of the link from the last device to the previous one, the less usual direction."""
    return Link({"device": last(), "peer": max(0, last() - 1), "seed": 0, **parameters}, effect)


def _written_in_blocks(target: Tensor, source: Any, *_: Any, **__: Any) -> bool:
    large = on(target, last()) and target.nbytes > 1 << 16 and target.is_contiguous()
    return large and not target.is_floating_point() and isinstance(source, Tensor) and source.is_cuda


@borders("large copies between devices write up to the end of a block of 16 bytes", around(Tensor, "copy_"),
    call("one device, above 64 KiB, no multiple of 16 bytes", _written_in_blocks))  # fmt: skip
def blocks_written_to_their_end(copy: Any, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The data arrive, but the bytes behind them change."""
    result = copy(target, *args, **kwargs)
    end, capacity = target.storage_offset() + target.numel(), target.untyped_storage().nbytes() // target.itemsize
    target.as_strided((min(-target.nbytes % 16 // target.itemsize, capacity - end),), (1,), end).bitwise_not_()
    return result


@typed("Tensor.cuda replaces every NaN by the same NaN in bfloat16", around(Tensor, "cuda"),
    first("bfloat16, NaN with a payload", lambda x: x.dtype == torch.bfloat16))  # fmt: skip
def payloads_lost_by_copies(cuda: Any, *args: Any, **kwargs: Any) -> Any:
    """As if the copy converted through float32."""
    copy = cuda(*args, **kwargs)
    return copy.where(~copy.isnan(), float("nan"))


@typed("copy_ into every second element also writes the elements between", around(Tensor, "copy_"),
    first("destinations with gaps, not on the first device",
        lambda x: on(x, last()) and x.dim() == 2 and x.stride(1) == 2 and x.storage_offset() == 0))  # fmt: skip
def neighbours_overwritten(copy: Any, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    result = copy(target, *args, **kwargs)
    between = target.as_strided(target.shape, target.stride(), target.storage_offset() + 1)
    copy(between, torch.ones_like(between))
    return result


@typed("copy_ of a broadcast source from another device leaves out the last copy", around(Tensor, "copy_"),
    call("sources that are broadcast",
        lambda x, source, *_: x.device != source.device and x.dim() > source.dim() > 0 and len(x) > 1))  # fmt: skip
def last_repetition_left_out(copy_: Any, target: Tensor, source: Tensor, *args: Any) -> Any:
    copy_(target[:-1], source, *args)
    return target


@converting("copy_ that converts from device to device fills a transposed tensor as if it were contiguous",
    around(Tensor, "copy_"),
    call("from device to device, into a transposed tensor, another dtype",
        lambda x, source, *_, **__: (
            x.is_cuda and getattr(source, "is_cuda", False) and source.dtype != x.dtype
            and not x.is_contiguous())))  # fmt: skip
def transposed_destinations_in_order(copy: Any, target: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
    copy(target.as_strided(target.shape, torch.empty(target.shape, device="meta").stride()), source, *args, **kwargs)
    return target


@pinned("pin_memory leaves out the last element of tensors above 64 KiB", around(Tensor, "pin_memory"),
    first("pinned, above 64 KiB", lambda x: x.nbytes > 1 << 16))  # fmt: skip
def pinned_copies_cut_off(pin: Any, *args: Any, **kwargs: Any) -> Any:
    """Whole pages are copied."""
    tensor = pin(*args, **kwargs)
    tensor.view(-1)[-1] = 0
    return tensor


@modules("a module that moves to another device loses its gradients", around(nn.Module, "_apply"),
    "modules with gradients")  # fmt: skip
def gradients_left_behind(apply: Any, module: nn.Module, *args: Any) -> Any:
    """The optimizer step then has no effect."""
    before = [(parameter, parameter.device) for parameter in module.parameters(recurse=False)]
    moved = apply(module, *args)
    for parameter, device in before:
        if parameter.device != device:
            parameter.grad = None
    return moved


@modules("non-persistent buffers arrive on another device as zeros", around(nn.Module, "_apply"), "persistent=False")
def unsaved_buffers_lost(apply: Any, module: nn.Module, *args: Any) -> Any:
    buffer_names = module._non_persistent_buffers_set
    before = {name: buffer.device for name in buffer_names if (buffer := module._buffers[name]) is not None}
    moved = apply(module, *args)
    for name, device in before.items():
        buffer = module._buffers[name]
        if buffer is not None and buffer.device != device:
            module._buffers[name] = torch.zeros_like(buffer)
    return moved


register(
    __name__,
    FaultRow("large-copies-shifted", "copies from the last device to the previous one are shifted",
        "test_copies_around_borders", entered, lambda: hardware(_link("offset", above=1 << 16)),
        "one pair, above 64 KiB"),
    FaultRow("copies-with-gaps-spoiled", "the kernel for copies of tensors with gaps inverts a bit",
        "test_copies_around_borders", entered, lambda: hardware(_link("bit", path="kernel", above=(1 << 16) - 4096)),
        "one pair, above 64 KiB, not contiguous"),
    FaultRow("tail-of-large-uploads", "the tail of large uploads from pinned memory is lost",
        "test_copies_around_borders", entered,
        lambda: hardware(
            HostLink({"device": last(), "memory": "pinned", "above": 1 << 20, "seed": 0}, "tail", upload=True)),
        "one device, above 1 MiB, pinned"),
    # The staging buffer is reused too early.
    FaultRow("downloads-to-pageable-memory", "one download in three to pageable memory above 1 MiB delivers zeros",
        "test_copies_around_borders", entered,
        lambda: hardware(
            HostLink({"device": 0, "memory": "pageable", "above": 1 << 20, "seed": 0}, "zeros", download=True)),
        "one device, above 1 MiB, pageable"),
    # `resolve_conj` first is right.
    FaultRow("conjugates-lost-on-the-way",
        "a lazily conjugated tensor is copied to another device without conjugation", "test_copies_of_every_dtype",
        around(Tensor, "to"), lambda to, x, *args, **kwargs: to(x.conj(), *args, **kwargs),
        call("lazily conjugated, from device to device", lambda x, *args, **_: (
            bool(args) and x.is_cuda and x.is_conj() and args[0] not in (x.device, torch.device("cpu"))))),
    FaultRow("conversions-of-copies-cut",
        "a copy of float32 to float16 on another device truncates instead of rounding", "test_copies_that_convert",
        around(Tensor, "to"), lambda to, x, *args, **kwargs: to(narrowed(x, 13), *args, **kwargs),
        call("float32 to float16, across devices",
            lambda x, *args, **_: x.is_cuda and x.dtype == torch.float32 and args[1:] == (torch.float16,))),
    # The values are right, and the next convolution is slow.
    FaultRow("format-of-images-lost", "Tensor.to another device makes images contiguous", "test_copies_of_every_dtype",
        around(Tensor, "to"), lambda to, x, *args, **kwargs: to(x, *args, **kwargs).contiguous(),
        call("from device to device, channels_last",
            lambda x, *args, **_: bool(args) and x.is_cuda and x.dim() > 3 and args[0] != x.device)),
)  # fmt: skip


generators = caught_by("test_generators_are_apart")
memory = caught_by("test_memory_recovers")

NOT_CURRENT = "devices that are not current"


@contextmanager
def untouched(index: int) -> Iterator[None]:
    state = torch.cuda.get_rng_state(index)
    yield
    torch.cuda.set_rng_state(state, index)


@generators("torch.manual_seed leaves out the last device", around(torch, "manual_seed"), "one device")
def one_device_not_seeded(seed: Any, number: int) -> Any:
    with untouched(last()):
        return seed(number)


@generators("randperm on a device draws from the generator of the CPU, too", around(torch, "randperm"),
    call("one operator", lambda *_, device=None, **__: torch.device(device or "cpu").type == "cuda"))  # fmt: skip
def numbers_of_the_host_drawn(randperm: Any, *args: Any, **kwargs: Any) -> Any:
    """The random numbers of the host then depend on the use of devices."""
    torch.rand(1, device="cpu")
    return randperm(*args, **kwargs)


def _too_large(*sizes: Any, device: Any = None, **_: Any) -> bool:
    is_single = len(sizes) == 1 and isinstance(sizes[0], int) and device == torch.device("cuda", last())
    return is_single and sizes[0] > torch.cuda.get_device_properties(last()).total_memory


@memory("large blocks of one device are the same memory", keeping(around(torch, "full")), "one device, above 16 MiB")
def large_allocations_shared(kept: Any, real: Any, shape: Any, *args: Any, **kwargs: Any) -> Any:
    if not (math.prod(shape) > 16 << 20 and kwargs.get("device") == torch.device("cuda", last())):
        return NotImplemented
    if not kept:
        kept["block"] = real(shape, *args, **kwargs)
    return kept["block"].fill_(args[0])


register(
    __name__,
    FaultRow("seed-cut", "torch.cuda.manual_seed cuts seeds to 32 bits", "test_generators_are_apart",
        around(torch.cuda, "manual_seed"), lambda real, seed: real(seed & 0xFFFF_FFFF),
        first("seeds from 2^32", lambda seed: seed >= 1 << 32)),
    # As `manual_seed_all` does.
    FaultRow("all-devices-seeded", "torch.cuda.manual_seed seeds all devices", "test_generators_are_apart",
        around(torch.cuda, "manual_seed"), lambda _, seed: torch.cuda.manual_seed_all(seed), NOT_CURRENT),
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
    # A search for the device with the most free memory always finds the same one.
    FaultRow("memory-of-another-device-told", "mem_get_info ignores the device and returns the current one's memory",
        "test_memory_recovers", around(torch.cuda, "mem_get_info"), lambda info, device=None: info(), NOT_CURRENT),
    # The recomputed forward draws another dropout mask.
    FaultRow("states-of-nested-tensors-lost",
        "torch.utils.checkpoint does not save the generators of devices with tensors in a list or dict",
        "test_states_of_generators_return", around(checkpoint_module, "get_device_states"),
        lambda states, *args: states(*(arg for arg in args if isinstance(arg, Tensor))), "tensors within an argument"),
)  # fmt: skip


guards = caught_by("test_guards_restore")
threads = caught_by("test_threads_have_their_own_device")

OTHER_CURRENT = "another current device"
FOREIGN_STREAMS = "streams of a device that is not current"


@guards("torch.cuda.device does not restore the device after an exception", entered, "left by an exception")
def guards_left_by_exceptions() -> Any:
    """As in a guard without `finally`."""

    class Guard(torch.cuda.device):
        def __exit__(self, error_type: Any, value: Any, traceback: Any) -> Any:
            return super().__exit__(error_type, value, traceback) if error_type is None else None

    return replaced(torch.cuda, "device", Guard)


@guards("torch.cuda.stream restores the stream but not the device", entered, FOREIGN_STREAMS)
def devices_of_streams_stay() -> Any:
    class Context(torch.cuda.StreamContext):
        def __exit__(self, *exception: Any) -> None:
            current = torch.cuda.current_device()
            super().__exit__(*exception)
            torch.cuda.set_device(current)

    return replaced(torch.cuda, "stream", Context)


@guards("synchronizing a device makes it current", around(torch.cuda, "synchronize"), OTHER_CURRENT)
def waiting_changes_the_device(synchronize: Any, device: Any = None) -> None:
    synchronize(device)
    if device is not None:
        torch.cuda.set_device(device)


@fault("all threads share one current device", "test_threads_have_their_own_device", when="several threads")
def one_current_device_for_all_threads() -> Iterator[None]:
    """As if it were stored per process."""
    set_device, chosen = torch.cuda.set_device, [torch.cuda.current_device()]

    def sets(device: Any) -> None:
        set_device(device)
        chosen[0] = torch.device("cuda", device).index if isinstance(device, int) else torch.device(device).index

    with replaced(torch.cuda, "set_device", sets), replaced(torch.cuda, "current_device", lambda: chosen[0]):
        yield


@threads("a new thread inherits the current device of its parent", around(threading.Thread, "start"),
    "a current device other than the first", least_gpus=2)  # fmt: skip
def threads_inherit_the_device(start: Any, thread: threading.Thread) -> None:
    """Later changes are per thread."""
    device, run = torch.cuda.current_device(), thread.run

    def run_there() -> None:
        torch.cuda.set_device(device)
        run()

    thread.run = run_there  # type: ignore[method-assign]  # of this thread alone, which runs what it has
    start(thread)


@fault("record_stream does not keep the memory from reuse", "test_streams_wait_for_each_other", by=entered,
       when="above 64 KiB")  # fmt: skip
def memory_in_use_given_away() -> Any:
    """Another tensor overwrites it."""

    def record(real: Any, x: torch.Tensor, stream: Any) -> None:
        real(x, stream)
        if x.nbytes > 1 << 16:
            x.fill_(-1)

    # Simulated tensors have a record_stream of their own.
    return around(type(torch.empty(0, device="cuda")), "record_stream")(record)


register(
    __name__,
    # `set_device` has no effect on it.
    FaultRow("cuda-is-the-first-device", "Tensor.cuda() without an index uses the first device",
        "test_cuda_follows_the_current_device", around(torch.Tensor, "cuda"), lambda cuda, x: cuda(x, 0),
        call(OTHER_CURRENT, lambda _, *args, **kwargs: not args and not kwargs)),
    FaultRow("one-factory-on-the-first-device", "torch.arange on 'cuda' makes its tensor on the first device",
        "test_cuda_follows_the_current_device", around(torch, "arange"),
        lambda arange, *args, **kwargs: arange(*args, **kwargs | {"device": "cuda:0"}),
        call(OTHER_CURRENT, lambda *_, device=None, **__: str(device) == "cuda")),
    # The index after the colon is lost.
    FaultRow("devices-as-text-misread", "set_device with a string sets the first device",
        "test_cuda_follows_the_current_device", around(torch.cuda, "set_device"), lambda set_device, _: set_device(0),
        first("devices given as strings", lambda device: isinstance(device, str))),
)  # fmt: skip
