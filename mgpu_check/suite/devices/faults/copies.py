"""Copies that deliver wrong data, most of them between certain devices, above a size, or of one dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mgpu_check.simulated.defects.copies import HostLink, Link
from mgpu_check.suite.common.faults.operators import altered, hardware, last, narrowed, on
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced


def _link(what: str, **parameters: Any) -> Link:
    """Return a defect of the link from the last device to the previous one, the less usual direction."""
    return Link({"device": last(), "peer": max(0, last() - 1), "seed": 0, **parameters}, what)


@fault(
    "copies from the last device to the previous one are shifted",
    "test_copies_around_borders",
    condition="one pair, above 64 KiB",
)
def large_copies_shifted() -> Iterator[None]:
    """Copies that fit into one block of the engine are right."""
    with hardware(_link("offset", above=1 << 16)):
        yield


@fault(
    "the kernel for copies of tensors with gaps inverts a bit",
    "test_copies_around_borders",
    condition="one pair, above 64 KiB, not contiguous",
)
def copies_with_gaps_spoiled() -> Iterator[None]:
    """Copy engines are right."""
    with hardware(_link("bit", path="kernel", above=(1 << 16) - 4096)):
        yield


@fault(
    "the tail of large uploads from pinned memory is lost",
    "test_copies_around_borders",
    condition="one device, above 1 MiB, pinned",
)
def tail_of_large_uploads() -> Iterator[None]:
    """Copies from pageable memory are right."""
    parameters: dict[str, int | float | str] = {"device": last(), "memory": "pinned", "above": 1 << 20, "seed": 0}
    with hardware(HostLink(parameters, "tail", upload=True)):
        yield


@fault(
    "one download in three to pageable memory above 1 MiB delivers zeros",
    "test_copies_around_borders",
    condition="one device, above 1 MiB, pageable",
)
def downloads_to_pageable_memory() -> Iterator[None]:
    """The staging buffer is reused too early."""
    parameters: dict[str, int | float | str] = {"device": 0, "memory": "pageable", "above": 1 << 20, "seed": 0}
    with hardware(HostLink(parameters, "zeros", download=True)):
        yield


@fault(
    "large copies between devices write up to the end of a block of 16 bytes",
    "test_copies_around_borders",
    condition="one device, above 64 KiB, no multiple of 16 bytes",
)
def blocks_written_to_their_end() -> Iterator[None]:
    """The data arrive, but the bytes behind them change."""

    def instead(copy: Any, target: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = copy(target, source, *args, **kwargs)
        end, whole = target.storage_offset() + target.numel(), target.untyped_storage().nbytes() // target.itemsize
        target.as_strided((min(-target.nbytes % 16 // target.itemsize, whole - end),), (1,), end).bitwise_not_()
        return result

    def concerns(target: torch.Tensor, source: Any, *_: Any, **__: Any) -> bool:
        large = on(target, last()) and target.nbytes > 1 << 16 and target.is_contiguous()
        return large and not target.is_floating_point() and isinstance(source, torch.Tensor) and source.is_cuda

    with altered(torch.Tensor, "copy_", concerns, instead):
        yield


@fault(
    "Tensor.cuda replaces every NaN by the same NaN in bfloat16",
    "test_copies_of_every_dtype",
    condition="bfloat16, NaN with a payload",
)
def payloads_lost_by_copies() -> Iterator[None]:
    """As if the copy converted through float32."""

    def instead(cuda: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        copy = cuda(x, *args, **kwargs)
        return copy.where(~copy.isnan(), float("nan"))

    with altered(torch.Tensor, "cuda", lambda x, *_, **__: x.dtype == torch.bfloat16, instead):
        yield


@fault(
    "copy_ into every second element also writes the elements between",
    "test_copies_of_every_dtype",
    condition="destinations with gaps, not on the first device",
)
def neighbours_overwritten() -> Iterator[None]:
    """A whole row is written."""

    def instead(copy: Any, target: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = copy(target, source, *args, **kwargs)
        between = target.as_strided(target.shape, target.stride(), target.storage_offset() + 1)
        copy(between, torch.ones_like(between))
        return result

    def concerns(target: torch.Tensor, source: torch.Tensor, *_: Any, **__: Any) -> bool:
        return on(target, last()) and target.dim() == 2 and target.stride(1) == 2 and target.storage_offset() == 0

    with altered(torch.Tensor, "copy_", concerns, instead):
        yield


@fault(
    "copies of int64 between devices without waiting keep 32 bits",
    "test_copies_of_every_dtype",
    condition="int64, non_blocking",
)
def half_of_int64() -> Iterator[None]:
    """Indices of small tables come out right."""

    def instead(to: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return to(x.int().long(), *args, **kwargs)

    def concerns(x: torch.Tensor, *_: Any, **kwargs: Any) -> bool:
        return x.is_cuda and x.dtype == torch.int64 and bool(kwargs.get("non_blocking"))

    with altered(torch.Tensor, "to", concerns, instead):
        yield


@fault(
    "copies of transposed tensors ignore the strides", "test_copies_of_every_dtype", condition="one device, transposed"
)
def layout_lost_by_copies() -> Iterator[None]:
    """The copy has the strides of a contiguous tensor."""

    def instead(to: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return to(x.t().contiguous().view(x.shape), *args, **kwargs)

    def concerns(x: torch.Tensor, *args: Any, **__: Any) -> bool:
        return on(x, last()) and bool(args) and x.dim() == 2 and x.stride(0) == 1 and x.shape[0] > 1

    with altered(torch.Tensor, "to", concerns, instead):
        yield


@fault(
    "a copy of float32 to float16 on another device truncates instead of rounding",
    "test_copies_that_convert",
    condition="float32 to float16, across devices",
)
def conversions_of_copies_cut() -> Iterator[None]:
    """On one device it is rounded."""

    def instead(to: Any, x: torch.Tensor, device: torch.device, dtype: torch.dtype) -> Any:
        return to(narrowed(x, 13), device, dtype)

    def concerns(x: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        return len(args) == 2 and x.is_cuda and x.dtype == torch.float32 and args[1] == torch.float16

    with altered(torch.Tensor, "to", concerns, instead):
        yield


@fault(
    "copy_ of float16 into float64 converts through bfloat16 on one device",
    "test_copies_that_convert",
    condition="one device, float16 to float64",
)
def conversions_through_bfloat16() -> Iterator[None]:
    """Of 11 bits 8 are left."""

    def instead(copy: Any, target: torch.Tensor, source: torch.Tensor, *args: Any) -> Any:
        return copy(target, source.bfloat16(), *args)

    def concerns(target: torch.Tensor, source: Any, *_: Any, **__: Any) -> bool:
        return on(target, last(), torch.float64) and isinstance(source, torch.Tensor) and source.dtype == torch.float16

    with altered(torch.Tensor, "copy_", concerns, instead):
        yield


@fault(
    "pin_memory leaves out the last element of tensors above 64 KiB",
    "test_copies_of_pinned_memory",
    condition="pinned, above 64 KiB",
)
def pinned_copies_cut_off() -> Iterator[None]:
    """Whole pages are copied."""
    pin = torch.Tensor.pin_memory

    def pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        pinned = pin(self, *args, **kwargs)
        if pinned.nbytes > 1 << 16:
            pinned.view(-1)[-1] = 0
        return pinned

    with replaced(torch.Tensor, "pin_memory", pin_memory):
        yield


@fault(
    "a lazily conjugated tensor is copied to another device without conjugation",
    "test_copies_of_every_dtype",
    condition="lazily conjugated, from device to device",
)
def conjugates_lost_on_the_way() -> Iterator[None]:
    """`resolve_conj` first is right."""

    def instead(to: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return to(x.conj(), *args, **kwargs)

    def concerns(x: torch.Tensor, *args: Any, **_: Any) -> bool:
        return x.is_cuda and x.is_conj() and bool(args) and args[0] not in (x.device, torch.device("cpu"))

    with altered(torch.Tensor, "to", concerns, instead):
        yield


@fault(
    "copy_ of a broadcast source from another device leaves out the last copy",
    "test_copies_of_every_dtype",
    condition="sources that are broadcast",
)
def last_repetition_left_out() -> Iterator[None]:
    """Copies between equal shapes are right."""

    def instead(copy_: Any, target: torch.Tensor, source: torch.Tensor, *args: Any) -> Any:
        copy_(target[:-1], source, *args)
        return target

    def concerns(target: torch.Tensor, source: torch.Tensor, *_: Any) -> bool:
        return target.device != source.device and target.dim() > source.dim() > 0 and len(target) > 1

    with altered(torch.Tensor, "copy_", concerns, instead):
        yield
