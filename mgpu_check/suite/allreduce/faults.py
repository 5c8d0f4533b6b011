"""Planted faults of reductions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import comm

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.oracles.training import gradient_exchange as recipe
from mgpu_check.suite.common.faults.planting import around, given, is_last, returned
from mgpu_check.suite.common.faults.registry import FaultRow, When, fault, register
from mgpu_check.torch_hooks.tensors import as_bits, plain

_ALL_REDUCE, _OPERATIONS, _BY_HAND, _ON_DEVICES, _THEN_BROADCAST, _VIEWS_ON_DEVICES = (
    "test_all_reduce", "test_all_reduce_of_other_operations", "test_hand_written_allreduce",
    "test_reduce_add_and_broadcast", "test_reduce_then_broadcast", "test_all_reduce_of_views_on_devices",
)  # fmt: skip
_VECTOR = 8  # elements
_ALIGNED = 32  # bytes
_SUM = dist.ReduceOp.SUM


def _has_gaps(tensor: torch.Tensor) -> bool:
    """Return whether the memory of `tensor` has gaps between its elements."""
    return not torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _flip_lowest_bit(tensor: torch.Tensor) -> None:
    """Invert the lowest bit of the element in the middle."""
    if tensor.numel():
        values = plain(tensor)
        as_bits(values).view(-1)[tensor.numel() // 2] ^= 1
        tensor.detach().copy_(values)


register(
    __name__,
    FaultRow("last-gathers-nothing", "the last device of one process gathers nothing", "test_nccl_in_one_process",
        returned("torch.cuda.nccl", "all_gather"), lambda _, inputs, outputs, *streams: outputs[-1].zero_()),
    FaultRow("sum-misses-the-last-rank", "all_reduce and reduce leave out the last rank", _THEN_BROADCAST,
        given(dist, "all_reduce", "reduce"), lambda tensor, *_, **__: tensor.zero_() if is_last() else None),
    FaultRow("ring-skips-a-chunk", "the ring leaves out the last chunk", "test_ring_allreduce",
        returned(recipe, "chunks"),
        lambda pieces, elements, count: [*pieces[:-1], slice(elements, elements)] if count > 1 else None),
    FaultRow("added-up-in-order-of-dtypes", "tensors that are added up together come back in order of dtype",
        _ON_DEVICES,
        around(comm, "_reorder_tensors_as"), lambda real, tensors, ordered: tuple(tensors), "several dtypes"),
    FaultRow("reduce-add-misses-a-device", "reduce_add forgets the last device", _ON_DEVICES, given(comm, "reduce_add"),
        lambda inputs, *_, **__: (inputs[:-1] or inputs,)),
    FaultRow("reduce-without-broadcast", "reduce is not followed by a broadcast", _THEN_BROADCAST,
        around(dist, "broadcast"), lambda real, *_, **__: None),
    FaultRow("operation-ignored", "all_reduce adds up for every operation", _OPERATIONS, around(dist, "all_reduce"),
        lambda real, tensor, op=None, **named: real(tensor, **named)),
    FaultRow("reduced-copy-dropped", "all_reduce of a view reduces a contiguous copy and drops it", _VIEWS_ON_DEVICES,
        given(dist, "all_reduce"), lambda tensor, *_, **__: (tensor.contiguous(),)),
    FaultRow("view-on-the-cpu-misses-the-last-rank", "all_reduce of a view on the CPU leaves out the last rank",
        "test_all_reduce_of_views_on_the_cpu", given(dist, "all_reduce"),
        lambda tensor, *_, **__: tensor.zero_() if is_last() else None,
        When("views with gaps on the CPU", lambda tensor, *_, **__: tensor.device.type == "cpu" and _has_gaps(tensor))),
    FaultRow("view-on-a-device-reduced-without-gaps", "a view on a device is reduced as if it had no gaps",
        _VIEWS_ON_DEVICES, given(dist, "all_reduce"),
        lambda tensor, *_, **__: (tensor.as_strided((tensor.numel(),), (1,)),),
        When("views with gaps on devices", lambda tensor, *_, **__: tensor.device.type != "cpu" and _has_gaps(tensor))),
    FaultRow("flipped-bit-on-one-rank",
        "one bit of the result is flipped on the last rank, after all_reduce and broadcast", _OPERATIONS,
        returned(dist, "all_reduce", "broadcast"),
        lambda work, tensor, *_, **__: _flip_lowest_bit(tensor) if is_last() else None),
    # With two tensors the sum is a new tensor.
    FaultRow("contribution-added-to", "reduce_add adds up in place, in the input of its own device", _ON_DEVICES,
        returned(comm, "reduce_add"),
        lambda total, inputs, *_: next(tensor for tensor in inputs if tensor.device == total.device).copy_(total),
        When("3 devices and more", lambda total, inputs, *_: len(inputs) > 2), 3),
    FaultRow("last-given-tensor-left-out", "broadcast to given tensors leaves out the last", _ON_DEVICES,
        around(comm, "broadcast"), lambda real, tensor, *devices, out: real(tensor, *devices, out=out[:-1]),
        When("out=, several devices", lambda *_, out=(), **__: len(out or ()) > 1)),
    FaultRow("part-left-out-elsewhere", "reduce_add to a device that is not current leaves out the last tensor",
        _ON_DEVICES, returned(comm, "reduce_add"), lambda total, inputs, *_: total - inputs[-1].to(total.device),
        When("destinations other than the current device",
             lambda total, *_: total.device.index != torch.cuda.current_device())),
)  # fmt: skip


@fault("all_reduce adds up in half precision", _ALL_REDUCE, by=around(dist, "all_reduce"))
def sum_in_half_precision(real: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not tensor.is_floating_point():
        return NotImplemented
    half = tensor.to(torch.float16)
    real(half, *args, **kwargs)
    return tensor.copy_(half)


def _last_copy_flipped(copies: Sequence[torch.Tensor], *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    last = copies[-1].clone()  # the first copy may be the tensor itself
    _flip_lowest_bit(last)
    return (*copies[:-1], last)


@fault("one bit is flipped on the way to the last device", _ON_DEVICES)
def flipped_bit_on_one_device() -> Iterator[None]:
    by_hand = returned(recipe, "allreduce")(lambda _, data: _flip_lowest_bit(data[-1]))
    with by_hand, returned(comm, "broadcast")(_last_copy_flipped):
        yield


@fault("the tree leaves out ranks beyond the largest power of two", "test_tree_allreduce", by=returned(dist, "recv"))
def tree_for_powers_of_two_only(sender: int, tensor: torch.Tensor, source: int, *_: Any, **__: Any) -> None:
    rank = current_rank()
    if rank is not None and source > rank.index and source >= 1 << (rank.size.bit_length() - 1):
        tensor.zero_()


@fault("the sum is not copied back to the last device", _BY_HAND, by=around(recipe, "allreduce"))
def result_not_copied_back(real: Any, data: Sequence[torch.Tensor]) -> None:
    for tensor in data[1:]:
        data[0].add_(tensor.to(data[0].device))
    for tensor in data[1:-1]:
        tensor.copy_(data[0])


@fault("all_reduce gives the mean instead of the sum", _ALL_REDUCE, by=returned(dist, "all_reduce"))
def mean_instead_of_sum(work: Any, tensor: torch.Tensor, op: Any = _SUM, group: Any = None, **_: Any) -> None:
    if op == _SUM:
        tensor.div_(dist.get_world_size(group), rounding_mode=None if tensor.is_floating_point() else "trunc")


@fault("broadcast_coalesced copies a slice as if it had no gaps", "test_broadcast_of_every_layout",
       by=returned(comm, "broadcast_coalesced"), when="tensors with gaps, several devices")  # fmt: skip
def slices_broadcast_without_gaps(rows: Any, tensors: Sequence[torch.Tensor], *_: Any) -> None:
    for number, tensor in enumerate(tensors):
        for row in rows[1:] if _has_gaps(tensor) else ():
            row[number].copy_(tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(tensor.shape))
