"""Planted faults of collectives: copies, groups, messages, reductions, and other forms of calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed.nn import functional as differentiable

from mgpu_check.suite.collectives.planting import (
    DEVICE,
    GROUPS,
    LAST,
    LATE,
    NAN,
    SOME,
    Done,
    ObservedCall,
    above,
    after,
    before,
    dtype,
    flipped,
    instead,
    op,
    unchanged,
)
from mgpu_check.suite.common.faults.planting import around, given, is_last, keeping, returned
from mgpu_check.suite.common.faults.registry import FaultRow, When, fault, register
from mgpu_check.torch_hooks.patches import replaced

_COPIES, _SIZES, _LAYOUTS, _ASYNC, _PROGRAMS = (
    "test_copies_of_every_dtype", "test_sizes", "test_layouts", "test_asynchronous_collectives",
    "test_programs_of_collectives",
)  # fmt: skip
_NOT_IN_PLACE = (
    "all_gather", "all_gather_into_tensor", "scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
)  # fmt: skip
_STORE = "torch.distributed:Store"
_STRIDED = When("channels_last", lambda call: not call.first.is_contiguous())


def _in_place(call: ObservedCall) -> bool:
    output, source = call.args[:2]
    begin = source.storage_offset() - output.storage_offset()
    one_storage = output.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return bool(one_storage and 0 < begin <= output.numel() - source.numel())


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _behind(tensor: torch.Tensor) -> torch.Tensor:
    """Return the element behind a tensor in its storage, if there is one."""
    end = tensor.storage_offset() + tensor.numel()
    return _storage(tensor)[end : end + 1]


def _of_last_rank(call: ObservedCall) -> list[torch.Tensor]:
    return call.written[1:][-1:]


register(
    __name__,
    FaultRow("least-of-scalars", "a minimum of scalars is too large", "test_options_of_collectives",
        after("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
        lambda call: [tensor.add_(1) for tensor in call.written],
        op("MIN") & When("no dimensions", lambda call: call.first.dim() == 0)),
    FaultRow("integers-through-floats", "integers go through float64", _COPIES, after("all_gather_into_tensor"),
        lambda call: call.first.copy_(call.first.double().clamp(-(2.0**62), 2.0**62)), dtype("int64")),
    FaultRow("last-two-swapped", "all_gather swaps the tensors of the last two ranks", _COPIES, instead("all_gather"),
        lambda call: call.proceed([*call.written[:-2], call.written[-1], call.written[-2]]),
        When("3 ranks and more", lambda call: len(call.written) > 2)),
    FaultRow("gather-misses-the-last", "gather leaves out the tensor of the last rank", _COPIES, after("gather"),
        lambda call: [tensor.zero_() for tensor in _of_last_rank(call)], dtype("uint8")),
    FaultRow("imaginary-parts-lost-on-the-way", "imaginary parts are lost on the way", _COPIES,
        after("broadcast", "all_gather", "scatter"), lambda call: [tensor.imag.zero_() for tensor in call.written],
        When("complex tensors on the CPU, two ranks and more",
            lambda call: call.size > 1 and call.first.is_complex() and call.first.device.type == "cpu")),
    FaultRow("long-broadcast-cut", "a long broadcast loses its end on the last rank", _SIZES, after("broadcast"),
        lambda call: call.first.reshape(-1)[1 << 16 :].zero_(), above(1 << 16) & LAST),
    FaultRow("long-exchange-shifted", "all_to_all_single shifts long parts by an element", _SIZES,
        after("all_to_all_single"), lambda call: call.first.copy_(call.first.roll(1)), above(4096)),
    FaultRow("gathered-page-repeated", "gather repeats a page of long tensors", _SIZES, after("gather"),
        lambda call: [tensor[4096:].copy_(tensor[0]) for tensor in call.written], above(4096)),
    FaultRow("written-behind", "all_gather writes an element behind the last tensor of the list", _LAYOUTS,
        after("all_gather"), lambda call: _behind(call.written[-1]).zero_(), LAST),
    FaultRow("written-before", "broadcast clears the element before a tensor", (_LAYOUTS, _COPIES), after("broadcast"),
        lambda call: _storage(call.first)[call.first.storage_offset() - 1].zero_(),
        When("tensors with an offset in their storage",
             lambda call: bool(call.first.numel() and call.first.storage_offset()))),
    FaultRow("longest-part-cut", "reduce_scatter of unequal parts loses the end of parts that are not the first",
        _LAYOUTS, after("reduce_scatter"), lambda call: call.first[call.args[1][0].numel() :].zero_(),
        When("parts of different sizes", lambda call: len({tensor.numel() for tensor in call.args[1]}) > 1)),
    FaultRow("longest-tensor-cut", "all_gather of unequal tensors loses what is longer than the own one", _LAYOUTS,
        after("all_gather"), lambda call: [tensor[call.args[1].numel() :].zero_() for tensor in call.written],
        When("tensors of different sizes", lambda call: len({tensor.numel() for tensor in call.written}) > 1)),
    FaultRow("splits-reversed", "uneven splits are taken in the wrong order", _LAYOUTS, after("all_to_all_single"),
        lambda call: call.first.copy_(torch.cat([*(chunks := call.first.split(call.splits(2)))[1:], chunks[0]])),
        When("uneven splits", lambda call: len(call.splits(2)) > 1)),
    FaultRow("own-part-lost-in-place", "all_gather_into_tensor in place loses the rank's own part", _LAYOUTS,
        after("all_gather_into_tensor"), lambda call: call.args[1].zero_(), When("in place", _in_place)),
    FaultRow("late-copy-dropped", "an asynchronous all_reduce of a channels_last tensor reduces a copy and drops it",
        _LAYOUTS, instead("all_reduce"), lambda call: call.proceed(call.first.contiguous()), LATE & _STRIDED),
    FaultRow("reduced-gaps-dropped", "all_reduce of a view with gaps reduces a copy and drops it", _LAYOUTS,
        instead("all_reduce"), lambda call: call.proceed(call.first.contiguous()),
        When("views with gaps", lambda call: call.first.dim() == 1 and not call.first.is_contiguous())),
    FaultRow("late-up-to-a-page", "an asynchronous all_reduce adds up only the first 4,096 elements", _ASYNC,
        unchanged("all_reduce"), lambda call: call.first.view(-1)[4096:], LATE & above(4096)),
    FaultRow("late-end-of-long-parts", "an asynchronous scatter completes before the end of long parts has arrived",
        _ASYNC, unchanged("scatter"), lambda call: call.first.view(-1)[1 << 16 :], LATE & above(1 << 16)),
    FaultRow("late-part-is-zero", "an asynchronous all_gather returns zeros for the last rank", _ASYNC,
        after("all_gather"), lambda call: [tensor.zero_() for tensor in _of_last_rank(call)], LATE & DEVICE),
    FaultRow("one-call-in-four", "one call in four flips a bit of the first element", _PROGRAMS,
        after(*_NOT_IN_PLACE, "all_reduce", "broadcast"),
        lambda call: call.every(4) and call.first.is_contiguous() and flipped(call.first), "one call in 4"),
)  # fmt: skip


@fault("waiting for an asynchronous scatter does not wait", _ASYNC, by=instead("scatter"), when=LATE & DEVICE)
def not_waited_for(call: ObservedCall) -> Any:
    call.kept[len(call.kept)] = work = call.proceed()  # work that is dropped may be waited for
    return Done() if isinstance(work, dist.Work) else work


@fault("all_to_all_single returns the result of the previous call", _PROGRAMS, by=after("all_to_all_single"),
       when="from the second call of one size on")  # fmt: skip
def stale_exchange(call: ObservedCall) -> None:
    key, fresh = (call.first.numel(), call.first.dtype), call.first.clone()
    call.first.copy_(call.kept.get(key, fresh))
    call.kept[key] = fresh


_GROUPS = "test_groups"
_APART = "get_global_rank, groups of three ranks and more at different distances"


def _doubled(tensors: Any) -> Any:
    return [tensor + tensor for tensor in tensors] if isinstance(tensors, list) else tensors + tensors


register(
    __name__,
    FaultRow("group-ignores-the-root", "a broadcast in a group comes from its first member", _GROUPS,
        instead("broadcast"), lambda call: call.with_root(group_src=0), GROUPS),
    FaultRow("group-root-taken-for-global", "a root given by its group rank is taken for a rank of the world", _GROUPS,
        after("scatter", "broadcast"), lambda call: call.first.zero_(),
        GROUPS & When("group_src", lambda call: call.kwargs.get("group_src") not in (
            None, dist.get_global_rank(call.group, call.kwargs.get("group_src", 0))))),
    FaultRow("members-swapped", "all_gather in a group swaps its members", _GROUPS, instead("all_gather"),
        lambda call: call.proceed([*call.written[1::-1], *call.written[2:]]), GROUPS),
    FaultRow("group-mean-of-the-world", "a mean in a group is divided by the number of all ranks", _GROUPS,
        after("all_reduce", "reduce_scatter", "reduce_scatter_tensor"),
        lambda call: call.first.mul_(call.size / dist.get_world_size()), op("AVG") & SOME),
    FaultRow("exchange-off-by-one", "all_to_all gives each rank the data for the next rank", (_COPIES, "test_groups"),
        instead("all_to_all"), lambda call: call.proceed(call.args[0], [*call.args[1][1:], call.args[1][0]])
            if len({tensor.numel() for tensor in call.args[1]}) == 1 else NotImplemented),
    FaultRow("counted-twice-when-late", "an asynchronous all_reduce counts rank 0 twice", _ASYNC, before("all_reduce"),
        lambda call: call.rank == 0 and call.op in ("SUM", "PRODUCT") and call.first.add_(call.first), LATE),
)  # fmt: skip


@fault("all members of a group are assumed as far apart as the first two", _GROUPS, by=around(dist, "get_global_rank"),
       when=_APART, least_gpus=3)  # fmt: skip
def members_evenly_apart(real: Any, group: Any, group_rank: int) -> Any:
    if dist.get_world_size(group) < 3:
        return NotImplemented
    base, second = (real(group, number) for number in (0, 1))
    return base + group_rank * (second - base)


@dataclass
class _DelayedWork:
    work: dist.Work
    call: ObservedCall
    number: int

    def wait(self) -> object:
        done = self.work.wait()
        if any(group is not self.call.group for number, group in self.call.kept.items() if number > self.number):
            self.call.first.view(-1)[-1:].zero_()
        return done


@fault("a collective in flight loses an element when another group starts one", _PROGRAMS,
       by=instead("all_reduce", "broadcast", "all_to_all_single"),
       when="async, in two groups at once")  # fmt: skip
def lost_beside_another_group(call: ObservedCall) -> Any:
    work, number = call.proceed(), len(call.kept)
    if not isinstance(work, dist.Work):
        return work
    call.kept[number] = call.group
    return _DelayedWork(work, call, number)


@fault("a group created after another was destroyed uses the tensors of its first member only", _PROGRAMS,
       when="groups made after one was destroyed")  # fmt: skip
def group_after_another() -> Iterator[None]:
    destroyed: list[Any] = []
    later: list[Any] = []

    def make(group: Any, *_: Any, **__: Any) -> None:
        later.extend([group] if destroyed else [])

    def spoil(call: ObservedCall) -> None:
        if call.size > 1 and any(group is call.group for group in later):
            call.first.mul_(dist.get_rank(call.group) == 0)

    with (
        before("all_reduce")(spoil),
        returned(dist, "new_group")(make),
        given(dist, "destroy_process_group")(lambda group=None: destroyed.append(group)),
    ):
        yield


_MESSAGES, _ANY, _OBJECTS, _BARRIERS = (
    "test_messages", "test_messages_from_any_source", "test_object_collectives", "test_barriers",
)  # fmt: skip
_object_lists = partial(returned, dist)


def _filled(objects: list[Any], values: list[Any]) -> None:
    objects[:] = values


def _cut(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_cut, value))
    return value[:65536] if isinstance(value, bytes) else value


def _for_others(objects: list[Any]) -> list[Any]:
    half = len(objects) // 2
    return [*objects[: len(objects) - half], *objects[:half]]


def _closed(real: Any, *args: Any, **kwargs: Any) -> None:
    """Return at once."""


register(
    __name__,
    FaultRow("long-message-cut", "a long message loses its end", _MESSAGES, after("recv"),
        lambda call: call.first.view(torch.uint8)[-1:].bitwise_xor_(0x40), above(1 << 16)),
    FaultRow("sender-cleared", "sending clears the first element of the sent tensor", _MESSAGES, after("send"),
        lambda call: call.first.view(torch.uint8)[:8].fill_(0x11), above(4096)),
    FaultRow("one-message-in-five", "one message in five arrives with a bit flipped", _MESSAGES, after("recv"),
        lambda call: call.first.numel() and call.every(5) and flipped(call.first), "one message in 5"),
    FaultRow("wrong-sender", "recv from any rank names the wrong sender", _ANY, returned(dist, "recv"),
        lambda sender, *_, **__: (sender + 1) % dist.get_world_size(),
        When("any source", lambda sender, tensor, src=None, *_, **__: src is None)
        & When("3 ranks and more", lambda *_, **__: dist.get_world_size() > 2)),
    FaultRow("message-of-a-group-spoiled", "recv with group_src has a bit flipped", _MESSAGES, after("recv"),
        lambda call: call.first.numel() and flipped(call.first),
        GROUPS & When("group_src", lambda call: "group_src" in call.kwargs), 3),
    FaultRow("objects-rotated", "all_gather_object starts with the second rank", _OBJECTS,
        _object_lists("all_gather_object"),
        lambda _, objects, *__, **___: _filled(objects, [*objects[1:], objects[0]])),
    FaultRow("false-objects-lost", "falsy objects arrive as None", _OBJECTS, _object_lists("all_gather_object"),
        lambda _, objects, *__, **___: _filled(objects, [value or None for value in objects]),
        "zeros, empty strings and containers"),
    FaultRow("large-object-cut", "large objects lose their end in a broadcast", _OBJECTS,
        _object_lists("broadcast_object_list"),
        lambda _, objects, *__, **___: _filled(objects, [*map(_cut, objects)]), "above 64 KiB"),
    FaultRow("sender-unknown", "recv_object_list returns -1 as its sender", _OBJECTS,
        returned(dist, "recv_object_list"), lambda *_, **__: -1),
    FaultRow("objects-cut-on-devices", "objects lose their end in a broadcast over devices", _OBJECTS,
        _object_lists("broadcast_object_list"), lambda _, objects, *__, **___: _filled(objects, [*objects[:-1], None]),
        When("groups with no backend for the CPU", lambda *_, group=None, **__: dist.get_backend(group) == "nccl")),
    FaultRow("objects-for-others",
        "scatter_object_list gives the second half of the ranks the objects of the first half", _OBJECTS,
        given(dist, "scatter_object_list"), lambda output, objects, *_, **__: (output, _for_others(objects)),
        When("4 ranks and more", lambda output, objects=None, *_, **__: objects is not None and len(objects) > 3)),
    FaultRow("stored-value-cut", "a store loses the end of long values", "test_stores", returned(_STORE, "get"),
        lambda value, *_: value[: 1 << 12]),
    FaultRow("counted-twice", "a store gives two ranks the same number", "test_stores", returned(_STORE, "add"),
        lambda number, *_: number - (number == 3)),
    FaultRow("undecided", "compare_set lets every rank win", "test_stores", around(_STORE, "compare_set"),
        lambda real, store, key, expected, desired: desired.encode()),
    FaultRow("one-key-suffices", "wait returns once one of its keys is set", "test_stores", around(_STORE, "wait"),
        lambda real, store, keys, *timeout: real(store, keys[:1], *timeout)),
    FaultRow("prefix-lost", "a prefix loses its last letter", "test_stores", given(dist, "PrefixStore"),
        lambda prefix, store: (prefix[:-1], store)),
    FaultRow("open-barrier-of-devices", "a barrier of devices does not wait", _BARRIERS, around(dist, "barrier"),
        _closed, When("device_ids is given", lambda *_, device_ids=None, **__: bool(device_ids))),
    FaultRow("open-barrier", "a barrier does not wait", _BARRIERS, around(dist, "barrier"), _closed),
    FaultRow("open-monitored-barrier", "a monitored barrier does not wait", _BARRIERS,
        around(dist, "monitored_barrier"), _closed, "monitored_barrier"),
    FaultRow("open-barrier-of-some", "a monitored barrier in a group does not wait", _BARRIERS,
        around(dist, "monitored_barrier"), _closed, When("groups of some ranks",
            lambda real, group=None, *_, **__: dist.get_world_size(group) != dist.get_world_size()), 3),
)  # fmt: skip


@fault("the tag of a message is ignored", _MESSAGES, when="irecv with tags")
def tags_ignored() -> Iterator[None]:
    with (
        around(dist, "isend", "irecv")(lambda real, *args, tag=0, **kwargs: real(*args, **kwargs)),
        # The same functions in their own module, too: batches recognise them by identity.
        replaced(c10d, "isend", dist.isend),
        replaced(c10d, "irecv", dist.irecv),
    ):
        yield


@fault("a batch of messages brings the last one with a bit flipped", _MESSAGES, by=returned(dist, "batch_isend_irecv"),
       when="one rank")  # fmt: skip
def last_of_a_batch_spoiled(works: list[dist.Work], operations: list[dist.P2POp]) -> None:
    for work in works:
        work.wait()
    received = [operation.tensor for operation in operations if operation.op is dist.irecv and operation.tensor.numel()]
    if received and is_last():
        flipped(received[-1])


@fault("broadcast_object_list keeps the old object if it receives None", _OBJECTS,
       by=around(dist, "broadcast_object_list"), when="None")  # fmt: skip
def nothing_not_broadcast(real: Any, objects: list[Any], *args: Any, **kwargs: Any) -> None:
    before = list(objects)
    real(objects, *args, **kwargs)
    objects[:] = [old if new is None else new for old, new in zip(before, objects, strict=True)]


@fault("an asynchronous barrier completes at once", _BARRIERS, by=keeping(around(dist, "barrier")), when="async")
def open_barrier_when_late(kept: Any, real: Any, *args: Any, **kwargs: Any) -> Any:
    if not kwargs.get("async_op"):
        return NotImplemented
    kept[len(kept)] = real(*args, **kwargs)  # work that is dropped may be waited for
    return Done()


@fault("all_to_all_single reads the part after an empty one from one element too early", _LAYOUTS,
       by=after("all_to_all_single"), when="parts of different sizes, one of them empty")  # fmt: skip
def part_behind_an_empty_one(call: ObservedCall) -> None:
    sizes = call.splits(2)
    for previous, size, chunk in zip(sizes, sizes[1:], call.first.split(sizes)[1:] if sizes else (), strict=False):
        if size and not previous:
            chunk.copy_(chunk.roll(1, 0))


_ALL, _OTHERS, _IEEE, _ROUNDING, _BIAS = (
    "test_all_reduce_of_every_dtype", "test_reductions_of_every_dtype", "test_reductions_as_ieee_says",
    "test_rounding_of_reductions", "test_bias_of_rounding",
)  # fmt: skip
_SUM = op("SUM")


def _subnormal(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers.abs() < torch.finfo(numbers.dtype).smallest_normal) & (numbers != 0)


def _float32_towards_zero(total: torch.Tensor) -> torch.Tensor:
    near = total.float()
    bits = near.view(torch.int32)
    return torch.where(near.double().abs() > total.abs(), bits - 1, bits).view(torch.float32)


def _float16_away_from_zero(total: torch.Tensor) -> torch.Tensor:
    near = total.half()
    bits = near.view(torch.int16)
    return torch.where(near.double().abs() < total.abs(), bits + 1, bits).view(torch.float16)


register(
    __name__,
    FaultRow("unsigned-maximum-as-signed", "MAX treats unsigned numbers as signed", _ALL, instead("all_reduce"),
        lambda call: call.finish(call.first.view(torch.int8)), dtype("uint8") & op("MAX")),
    FaultRow("product-without-the-last-rank", "PRODUCT leaves out the factor of the last rank", _ALL,
        before("all_reduce"), lambda call: LAST.holds(call) and call.first.fill_(1), dtype("float64") & op("PRODUCT")),
    FaultRow("factor-forgotten", "PREMUL_SUM forgets its factor", _ALL, instead("all_reduce"),
        lambda call: call.with_op("SUM"), dtype("float64") & op("PREMUL_SUM")),
    FaultRow("and-is-or", "BAND of bytes is BOR", _ALL, instead("all_reduce"),
        lambda call: call.with_op("BOR"), dtype("uint8") & op("BAND")),
    FaultRow("all-is-any", "a product of booleans is their sum", _ALL, instead("all_reduce"),
        lambda call: call.with_op("MAX"), dtype("bool") & op("PRODUCT")),
    FaultRow("reduce-confuses-extremes", "reduce returns the maximum for the minimum", _OTHERS, instead("reduce"),
        lambda call: call.with_op("MAX"), dtype("int32") & op("MIN")),
    FaultRow("operation-lost-by-the-older-name", "reduce_scatter_tensor, the older name, always adds up", _OTHERS,
        around(dist, "reduce_scatter_tensor"),
        lambda real, output, source, op=None, **options: real(output, source, **options)),
    FaultRow("root-left-out", "reduce leaves out the root if it is not rank 0", _OTHERS, before("reduce"),
        lambda call: call.root == call.rank != 0 and call.first.zero_(), dtype("float32") & _SUM),
    FaultRow("result-for-rank-zero", "reduce sends its result to rank 0 instead of the root", (_OTHERS, "test_groups"),
        instead("reduce"), lambda call: call.with_root(group_dst=0)),
    FaultRow("parts-in-the-wrong-order", "reduce_scatter of a list gives parts in the wrong order", _SIZES,
        instead("reduce_scatter"), lambda call: call.proceed(call.args[0], call.args[1][::-1])),
    FaultRow("fourth-rank-left-out", "a sum leaves out the fourth rank", (_ASYNC, _PROGRAMS), before("all_reduce"),
        lambda call: call.op == "SUM" and dist.get_rank(call.group) == 3 and call.first.zero_(),
        When("groups of 4 and more", lambda call: call.size > 3)),
    FaultRow("nan-is-zero", "NaN counts as zero in a sum", _IEEE, before("all_reduce"),
        lambda call: call.op == "SUM" and call.first.masked_fill_(call.first.isnan(), 0.0), dtype("float32") & NAN),
    FaultRow("infinity-clamped", "infinities become the largest finite number", _IEEE, after("all_reduce"),
        lambda call: call.first.clamp_(max=torch.finfo(torch.float16).max),
        dtype("float16") & When("infinities", lambda call: bool(call.first.isinf().any()))),
    FaultRow("subnormals-of-sums-flushed", "subnormals count as zero on the last rank", _IEEE, after("all_reduce"),
        lambda call: LAST.holds(call) and call.first.masked_fill_(_subnormal(call.first), 0.0),
        dtype("float32") & When("subnormals", lambda call: bool(_subnormal(call.first).any()))),
    FaultRow("sign-of-zero-lost", "a sum starts at +0, so it loses the sign of -0", _IEEE, after("all_reduce"),
        lambda call: call.first.add_(0.0),
        When("-0", lambda call: call.op == "SUM" and call.first.dtype.is_floating_point)),
    FaultRow("doubles-added-as-singles", "float64 is added up in float32", _ROUNDING, instead("all_reduce", "reduce"),
        lambda call: call.through(torch.float32), dtype("float64") & _SUM),
    FaultRow("truncated-bfloat16", "sums of bfloat16 are cut off, not rounded", _BIAS, instead("all_reduce"),
        lambda call: call.through(torch.float32, lambda total:
            total.view(torch.int32).bitwise_and(-(1 << 16)).view(torch.float32)), dtype("bfloat16") & _SUM),
    FaultRow("truncated-float32", "sums of float32 are cut off, not rounded", _BIAS, instead("all_reduce"),
        lambda call: call.through(torch.float64, _float32_towards_zero), dtype("float32") & _SUM),
    FaultRow("rounded-up", "reduce rounds half precision away from zero", _BIAS, instead("reduce"),
        lambda call: call.through(torch.float64, _float16_away_from_zero), dtype("float16") & _SUM),
    FaultRow("long-part-loses-its-end", "reduce_scatter_tensor loses the end of long parts", _SIZES,
        after("reduce_scatter_tensor"), lambda call: call.first[1 << 16 :].zero_(), above(1 << 16)),
    FaultRow("doubled-alone", "in a world of one rank a sum is doubled", "test_world_of_one", after("all_reduce"),
        lambda call: call.op == "SUM" and call.first.dtype in (torch.float32, torch.int64) and call.first.mul_(2),
        When("world of 1", lambda call: call.size == 1 and call.group is None)),
)  # fmt: skip


@fault("MIN is computed as -MAX(-x), which overflows", _ALL, by=instead("all_reduce"), when=dtype("int8") & op("MIN"))
def minimum_by_negation(call: ObservedCall) -> Any:
    negative = -call.first
    work = call.with_op("MAX", negative)
    call.first.copy_(-negative)
    return work


@fault("a second sum of the same tensor returns the first result", _PROGRAMS, by=after("all_reduce"),
       when="from the second call with one tensor object on, below 4,096 elements")  # fmt: skip
def sum_of_a_tensor_kept(call: ObservedCall) -> None:
    """As with a cache whose key is the tensor and not its content."""
    if 0 < call.first.numel() < 1 << 12:
        _, result = call.kept.setdefault(id(call.first), (call.first, call.first.clone()))
        call.first.copy_(result)


@fault("infinity minus infinity is zero", _IEEE, by=instead("all_reduce"),
       when=replace(dtype("float64") & _SUM, text="float64, infinities"))  # fmt: skip
def infinities_cancel(call: ObservedCall) -> Any:
    clean = ~call.first.isnan()
    work = call.finish()
    call.first.masked_fill_(clean & call.first.isnan(), 0.0)
    return work


@fault("the last rank adds up in another order, so its bits differ", _ROUNDING, by=instead("all_reduce"),
       when=replace(dtype("float32") & _SUM, text="float32, sums that round, one rank"))  # fmt: skip
def other_order_on_one_rank(call: ObservedCall) -> Any:
    if call.size < 3 or call.late or call.first.dim() != 1:
        return NotImplemented
    terms = [torch.empty_like(call.first) for _ in range(call.size)]
    dist.all_gather(terms, call.first.clone(), group=call.group)
    work = call.proceed()
    if LAST.holds(call):
        total = terms[-1].clone()
        for term in (*terms[1:-1], terms[0]):
            total.add_(term)
        call.first.copy_(total)
    return work


_FUNCTIONAL, _GRADIENTS, _COALESCED = (
    "test_functional_collectives", "test_differentiable_collectives", "test_coalesced_collectives",
)  # fmt: skip


def _is_of_some(group: Any) -> bool:
    return dist.get_world_size(group) < dist.get_world_size()


def _valued(value: torch.Tensor, gradient_of: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the numbers of one tensor and the gradient of another."""
    return gradient_of + (value - gradient_of.detach())


def _coalescing(change: Callable[[Any], object]) -> AbstractContextManager[None]:
    """Plant a change of the calls that a coalescing manager has collected, before it makes them."""

    @contextlib.contextmanager
    def manage(real: Any, group: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with real(group, *args, **kwargs) as managed:
            yield managed
            change(c10d._world.pg_coalesce_state.get(group or c10d._get_default_group(), []))

    return around(c10d, "_coalescing_manager")(manage)


register(
    __name__,
    FaultRow("functional-dimension-ignored", "all_gather_tensor joins along the first dimension", _FUNCTIONAL,
        around(functional, "all_gather_tensor"),
        lambda real, own, dim, *args, **kwargs: real(own, 0, *args, **kwargs).reshape(own.shape[0], -1),
        When("dimension 1", lambda real, own, dim, *_, **__: dim == 1)),
    FaultRow("part-of-another", "reduce_scatter_tensor gives the last rank the part of the first", _FUNCTIONAL,
        given(functional, "reduce_scatter_tensor"),
        lambda own, *_, **__: (torch.cat([*(chunks := own.chunk(dist.get_world_size(), 1))[:-1], chunks[0]], 1),),
        When("dimension 1, one rank", lambda tensor, op, dim, *_: dim == 1)),
    FaultRow("gradient-of-the-root-only", "the gradient of a differentiable reduce reaches the root alone", _GRADIENTS,
        around(differentiable, "reduce"), lambda real, own, dst, *args, **kwargs:
            _valued(real(own.detach(), dst, *args, **kwargs), own * (dist.get_rank() == dst)), "calls with a root"),
    FaultRow("gradient-not-reduced", "the gradient of an all_reduce is that of one rank", _GRADIENTS,
        around(differentiable, "all_reduce"),
        lambda real, own, *args, **kwargs: _valued(real(own.detach(), *args, **kwargs), own), "backward"),
    FaultRow("rows-of-the-gradient-reversed", "all_gather_tensor_autograd reverses the rows of its gradient",
        _GRADIENTS, given(functional, "all_gather_tensor_autograd"),
        lambda own, *_, **__: (own.detach() + (own - own.detach()).flip(0),), "backward"),
    FaultRow("source-gets-its-own-gradient",
        "the source of a differentiable broadcast gets only the gradient of its own use", _GRADIENTS,
        around(differentiable, "broadcast"), lambda real, own, src, *args, **kwargs: _valued(
            real(own.detach(), src, *args, **kwargs), own * (dist.get_rank() == src)),
        When("another source than rank 0", lambda real, own, src, *_, **__: src != 0)),
    FaultRow("functional-maximum-added", "reduce_scatter_tensor adds in place of MAX", _FUNCTIONAL,
        around(functional, "reduce_scatter_tensor"),
        lambda real, own, op, *args, **kwargs: real(own, "sum", *args, **kwargs),
        When("MAX", lambda real, own, op, *_, **__: op == "max")),
    FaultRow("coalesced-bytes-left-out", "a coalescing manager leaves out numbers of int8",
        "test_options_of_collectives", _coalescing,
        lambda calls: [call.tensor.zero_() for call in calls if call.tensor.dtype is torch.int8], "int8"),
)  # fmt: skip


@fault("a functional all_reduce changes its input", _FUNCTIONAL, by=returned(functional, "all_reduce"),
       when=When("int64", lambda total, own, *_, **__: own.dtype is torch.int64))  # fmt: skip
def input_changed(total: Any, own: torch.Tensor, *_: Any, **__: Any) -> None:
    if dist.get_world_size() > 1:
        own.copy_(functional.wait_tensor(total))


@fault("the gradient of a gather covers only the rank's own use", _GRADIENTS,
       by=around(functional, "all_gather_tensor_autograd"), when="backward")  # fmt: skip
def gradient_of_own_use(real: Any, own: torch.Tensor, dim: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    gathered = functional.wait_tensor(real(own.detach(), dim, *args, **kwargs))
    chunks = list(gathered.chunk(dist.get_world_size(), dim))
    chunks[dist.get_rank()] = own
    return torch.cat(chunks, dim)


@fault("a coalescing manager adds, whatever the operation", _COALESCED, by=_coalescing,
       when="reduce_scatter with MAX or MIN")  # fmt: skip
def coalesced_operation_ignored(calls: Any) -> None:
    for collective in calls:
        if collective.redop is not None and collective.dst_tensor is not None:
            collective.redop = dist.ReduceOp(dist.ReduceOp.SUM)


@fault("the gradient of a reduce_scatter in a group is divided by the number of its members", _GRADIENTS,
       by=returned(differentiable._Reduce_Scatter, "backward"), when="groups of some ranks",
       least_gpus=3)  # fmt: skip
def group_gradient_divided(gradients: Any, ctx: Any, *_: Any) -> Any:
    size = dist.get_world_size(ctx.group) if _is_of_some(ctx.group) else 1
    return tuple(gradient if gradient is None else gradient / size for gradient in gradients)


@fault("reduce_scatter_tensor gives members of a group the parts of their ranks in the world", _FUNCTIONAL,
       by=given(functional, "reduce_scatter_tensor"), when="groups of some ranks", least_gpus=3)  # fmt: skip
def parts_by_rank_of_the_world(own: torch.Tensor, op: str, dim: int, group: Any, *_: Any, **__: Any) -> Any:
    ranks = dist.get_process_group_ranks(group)
    chunks = own.chunk(len(ranks), dim)
    return (torch.cat([chunks[rank % len(ranks)] for rank in ranks], dim),) if _is_of_some(group) else None
