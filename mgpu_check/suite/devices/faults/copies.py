"""Copies of wrong data: between certain devices, above a size, of one dtype, of modules, or in shared memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from mgpu_check.simulated.defects.copies import HostLink, Link
from mgpu_check.suite.common.faults.breaking import around
from mgpu_check.suite.common.faults.operators import call, first, hardware, last, narrowed, on
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, entered, register

borders = caught_by("test_copies_around_borders")
converting = caught_by("test_copies_that_convert")
modules = caught_by("test_modules_move")
pinned = caught_by("test_copies_of_pinned_memory")
typed = caught_by("test_copies_of_every_dtype")


def _link(what: str, **parameters: Any) -> Link:
    """Return a defect of the link from the last device to the previous one, the less usual direction."""
    return Link({"device": last(), "peer": max(0, last() - 1), "seed": 0, **parameters}, what)


@borders("the tail of large uploads from pinned memory is lost", entered, "one device, above 1 MiB, pinned")
def tail_of_large_uploads() -> Any:
    return hardware(HostLink({"device": last(), "memory": "pinned", "above": 1 << 20, "seed": 0}, "tail", upload=True))


@borders("one download in three to pageable memory above 1 MiB delivers zeros", entered,
    "one device, above 1 MiB, pageable")  # fmt: skip
def downloads_to_pageable_memory() -> Any:
    """The staging buffer is reused too early."""
    return hardware(HostLink({"device": 0, "memory": "pageable", "above": 1 << 20, "seed": 0}, "zeros", download=True))


def _written_in_blocks(target: Tensor, source: Any, *_: Any, **__: Any) -> bool:
    large = on(target, last()) and target.nbytes > 1 << 16 and target.is_contiguous()
    return large and not target.is_floating_point() and isinstance(source, Tensor) and source.is_cuda


@borders("large copies between devices write up to the end of a block of 16 bytes", around(Tensor, "copy_"),
    call("one device, above 64 KiB, no multiple of 16 bytes", _written_in_blocks))  # fmt: skip
def blocks_written_to_their_end(copy: Any, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The data arrive, but the bytes behind them change."""
    result = copy(target, *args, **kwargs)
    end, whole = target.storage_offset() + target.numel(), target.untyped_storage().nbytes() // target.itemsize
    target.as_strided((min(-target.nbytes % 16 // target.itemsize, whole - end),), (1,), end).bitwise_not_()
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


@typed(
    "copies of transposed tensors ignore the strides",
    around(Tensor, "to"),
    call(
        "one device, transposed",
        lambda x, *args, **_: bool(args) and on(x, last()) and x.dim() == 2 and x.stride(0) == 1 and x.shape[0] > 1,
    ),
)
def layout_lost_by_copies(to: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return to(x.t().contiguous().view(x.shape), *args, **kwargs)


@typed(
    "a lazily conjugated tensor is copied to another device without conjugation",
    around(Tensor, "to"),
    call(
        "lazily conjugated, from device to device",
        lambda x, *args, **_: (
            bool(args) and x.is_cuda and x.is_conj() and args[0] not in (x.device, torch.device("cpu"))
        ),
    ),
)
def conjugates_lost_on_the_way(to: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`resolve_conj` first is right."""
    return to(x.conj(), *args, **kwargs)


@typed("copy_ of a broadcast source from another device leaves out the last copy", around(Tensor, "copy_"),
    call("sources that are broadcast",
        lambda x, source, *_: x.device != source.device and x.dim() > source.dim() > 0 and len(x) > 1))  # fmt: skip
def last_repetition_left_out(copy_: Any, target: Tensor, source: Tensor, *args: Any) -> Any:
    copy_(target[:-1], source, *args)
    return target


@converting(
    "copy_ that converts reads a transposed matrix as it lies in memory",
    around(Tensor, "copy_"),
    call(
        "from device to device, transposed, another dtype",
        lambda x, source, *_, **__: (
            x.is_cuda
            and getattr(source, "is_cuda", False)
            and (source.dtype, source.stride()) != (x.dtype, x.stride())
            and source.dim() == 2
            and source.stride(0) == 1
        ),
    ),
)
def transposed_conversions_as_they_lie(copy: Any, target: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
    return copy(target, source.t().reshape(source.shape), *args, **kwargs)


@converting(
    "copy_ that converts from device to device fills a transposed tensor as if it were contiguous",
    around(Tensor, "copy_"),
    call(
        "from device to device, into a transposed tensor, another dtype",
        lambda x, source, *_, **__: (
            x.is_cuda and getattr(source, "is_cuda", False) and source.dtype != x.dtype and not x.is_contiguous()
        ),
    ),
)
def transposed_destinations_in_order(copy: Any, target: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
    copy(target.as_strided(target.shape, torch.empty(target.shape, device="meta").stride()), source, *args, **kwargs)
    return target


@pinned("pin_memory leaves out the last element of tensors above 64 KiB", around(Tensor, "pin_memory"),
    first("pinned, above 64 KiB", lambda x: x.nbytes > 1 << 16))  # fmt: skip
def pinned_copies_cut_off(pin: Any, *args: Any, **kwargs: Any) -> Any:
    """Whole pages are copied."""
    made = pin(*args, **kwargs)
    made.view(-1)[-1] = 0
    return made


@modules("a packed sequence on another device is unsorted with the sorting permutation", around(PackedSequence, "to"),
    "enforce_sorted=False, an order that sorting twice does not restore")  # fmt: skip
def packed_sequence_not_unsorted(to: Any, packed: PackedSequence, *args: Any, **kwargs: Any) -> PackedSequence:
    """Final states belong to other samples."""
    moved: PackedSequence = to(packed, *args, **kwargs)
    if moved is packed or moved.sorted_indices is None:
        return moved
    return PackedSequence(moved.data, moved.batch_sizes, moved.sorted_indices, moved.sorted_indices)


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
    names = module._non_persistent_buffers_set
    before = {name: held.device for name in names if (held := module._buffers[name]) is not None}
    moved = apply(module, *args)
    for name, device in before.items():
        held = module._buffers[name]
        if held is not None and held.device != device:
            module._buffers[name] = torch.zeros_like(held)
    return moved


register(
    __name__,
    FaultRow("large-copies-shifted", "copies from the last device to the previous one are shifted",
        "test_copies_around_borders", entered, lambda: hardware(_link("offset", above=1 << 16)),
        "one pair, above 64 KiB"),
    FaultRow("copies-with-gaps-spoiled", "the kernel for copies of tensors with gaps inverts a bit",
        "test_copies_around_borders", entered, lambda: hardware(_link("bit", path="kernel", above=(1 << 16) - 4096)),
        "one pair, above 64 KiB, not contiguous"),
    # A snapshot of one step changes with the next.
    FaultRow("copies-that-are-none", "to(copy=True) returns the tensor itself if dtype and device match",
        "test_copies_have_memory_of_their_own", around(Tensor, "to"),
        lambda to, *args, copy, **kwargs: to(*args, **kwargs),
        call("copies on the same device", lambda x, *_, copy=False, **__: x.is_cuda and copy)),
    # Writes to the result do not reach the source.
    FaultRow("views-that-are-copies", "flatten copies contiguous tensors instead of returning a view",
        "test_copies_have_memory_of_their_own", around(Tensor, "flatten"),
        lambda flatten, *args: flatten(*args).clone(), first("contiguous tensors on a device", lambda x: x.is_cuda)),
    # Indices of small tables come out right.
    FaultRow("half-of-int64", "copies of int64 between devices without waiting keep 32 bits",
        "test_copies_of_every_dtype", around(Tensor, "to"),
        lambda to, x, *args, **kwargs: to(x.int().long(), *args, **kwargs),
        call("int64, non_blocking",
            lambda x, *_, non_blocking=False, **__: x.is_cuda and x.dtype == torch.int64 and non_blocking)),
    FaultRow("conversions-of-copies-cut",
        "a copy of float32 to float16 on another device truncates instead of rounding", "test_copies_that_convert",
        around(Tensor, "to"), lambda to, x, *args, **kwargs: to(narrowed(x, 13), *args, **kwargs),
        call("float32 to float16, across devices",
            lambda x, *args, **_: x.is_cuda and x.dtype == torch.float32 and args[1:] == (torch.float16,))),
    FaultRow("conversions-through-bfloat16", "copy_ of float16 into float64 converts through bfloat16 on one device",
        "test_copies_that_convert", around(Tensor, "copy_"),
        lambda copy, target, source, *args, **kwargs: copy(target, source.bfloat16(), *args, **kwargs),
        call("one device, float16 to float64",
            lambda x, source, *_, **__: on(x, last(), torch.float64) and getattr(source, "dtype", 0) == torch.float16)),
    # The values are right, and the next convolution is slow.
    FaultRow("format-of-images-lost", "Tensor.to another device makes images contiguous", "test_copies_of_every_dtype",
        around(Tensor, "to"), lambda to, x, *args, **kwargs: to(x, *args, **kwargs).contiguous(),
        call("from device to device, channels_last",
            lambda x, *args, **_: bool(args) and x.is_cuda and x.dim() > 3 and args[0] != x.device)),
)  # fmt: skip
