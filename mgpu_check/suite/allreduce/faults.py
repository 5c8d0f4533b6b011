"""Planted faults of reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import comm

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.suite.common.faults.conditions import is_last
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.suite.recipes import allreduce as recipe
from mgpu_check.torch_hooks.patches import replaced
from mgpu_check.torch_hooks.tensors import as_bits, plain

_VECTOR = 8  # elements
_ALIGNED = 32  # bytes


def _has_gaps(tensor: torch.Tensor) -> bool:
    """Return whether the memory of `tensor` has gaps between its elements."""
    return not torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _flip_lowest_bit(tensor: torch.Tensor) -> None:
    """Invert the lowest bit of the element in the middle."""
    if tensor.numel():
        values = plain(tensor)
        as_bits(values).view(-1)[tensor.numel() // 2] ^= 1
        tensor.detach().copy_(values)


@fault("all_reduce and reduce leave out the last rank", "test_reduce_then_broadcast")
def sum_misses_the_last_rank() -> Iterator[None]:
    def without_last(real: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_last():
                tensor.zero_()
            return real(tensor, *args, **kwargs)

        return reduce

    with (
        replaced(dist, "all_reduce", without_last(dist.all_reduce)),
        replaced(dist, "reduce", without_last(dist.reduce)),
    ):
        yield


@fault("all_reduce adds up in half precision", "test_all_reduce")
def sum_in_half_precision() -> Iterator[None]:
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if not tensor.is_floating_point():
            real(tensor, *args, **kwargs)
            return
        half = tensor.to(torch.float16)
        real(half, *args, **kwargs)
        tensor.copy_(half)

    with replaced(dist, "all_reduce", all_reduce):
        yield


@fault("device 0 adds up float32 and float64 tensors in bfloat16", "test_hand_written_allreduce")
def sum_by_hand_in_low_precision() -> Iterator[None]:
    def allreduce(data: Sequence[torch.Tensor]) -> None:
        low = data[0].dtype.itemsize > 2 and data[0].is_floating_point()
        parts = [part.to(data[0].device, torch.bfloat16 if low else part.dtype) for part in data]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        for part in data:
            part.copy_(total)

    with replaced(recipe, "allreduce", allreduce):
        yield


@fault(
    "one bit of the result is flipped on the last rank, after all_reduce and broadcast",
    "test_all_reduce_of_other_operations",
)
def flipped_bit_on_one_rank() -> Iterator[None]:
    def flipping(real: Callable[..., Any]) -> Callable[..., Any]:
        def collective(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            work = real(tensor, *args, **kwargs)
            if is_last():
                _flip_lowest_bit(tensor)
            return work

        return collective

    with replaced(dist, "all_reduce", flipping(dist.all_reduce)), replaced(dist, "broadcast", flipping(dist.broadcast)):
        yield


@fault("one bit is flipped on the way to the last device", "test_reduce_add_and_broadcast")
def flipped_bit_on_one_device() -> Iterator[None]:
    real_allreduce, real_broadcast = recipe.allreduce, comm.broadcast

    def allreduce(data: Sequence[torch.Tensor]) -> None:
        real_allreduce(data)
        _flip_lowest_bit(data[-1])

    def broadcast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        copies = real_broadcast(tensor, *args, **kwargs)
        # A copy, because the first one may be the tensor itself.
        last = copies[-1].clone()
        _flip_lowest_bit(last)
        return (*copies[:-1], last)

    with replaced(recipe, "allreduce", allreduce), replaced(comm, "broadcast", broadcast):
        yield


@fault("the ring leaves out the last chunk", "test_ring_allreduce")
def ring_skips_a_chunk() -> Iterator[None]:
    real = recipe.chunks

    def chunks(elements: int, parts: int) -> list[slice]:
        return [*real(elements, parts)[:-1], slice(elements, elements)] if parts > 1 else real(elements, parts)

    with replaced(recipe, "chunks", chunks):
        yield


@fault("the tree leaves out ranks beyond the largest power of two", "test_tree_allreduce")
def tree_for_powers_of_two_only() -> Iterator[None]:
    def received(tensor: torch.Tensor, source: int, *args: Any, **kwargs: Any) -> int:
        sender = real(tensor, source, *args, **kwargs)
        rank = current_rank()
        # Messages of ranks beyond the largest power of two are dropped.
        if rank is not None and source > rank.index and source >= 1 << (rank.size.bit_length() - 1):
            tensor.zero_()
        return sender

    real = dist.recv
    with replaced(dist, "recv", received):
        yield


@fault("the sum is not copied back to the last device", "test_hand_written_allreduce")
def result_not_copied_back() -> Iterator[None]:
    def allreduce(data: Sequence[torch.Tensor]) -> None:
        for other in data[1:]:
            data[0].add_(other.to(data[0].device))
        for other in data[1:-1]:
            other.copy_(data[0])

    with replaced(recipe, "allreduce", allreduce):
        yield


@fault(
    "tensors that are added up together come back in order of dtype",
    "test_reduce_add_and_broadcast",
    condition="several dtypes",
)
def added_up_in_order_of_dtypes() -> Iterator[None]:
    with replaced(comm, "_reorder_tensors_as", lambda tensors, ordered: tuple(tensors)):
        yield


@fault("reduce_add forgets the last device", "test_reduce_add_and_broadcast")
def reduce_add_misses_a_device() -> Iterator[None]:
    real = comm.reduce_add

    def reduce_add(inputs: Sequence[torch.Tensor], destination: int | None = None) -> torch.Tensor:
        total: torch.Tensor = real(inputs[:-1] if len(inputs) > 1 else inputs, destination)
        return total

    with replaced(comm, "reduce_add", reduce_add):
        yield


@fault("all_reduce gives the mean instead of the sum", "test_all_reduce")
def mean_instead_of_sum() -> Iterator[None]:
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        work = real(tensor, op, group=group, async_op=async_op)
        if op == dist.ReduceOp.SUM:
            tensor.div_(dist.get_world_size(group), rounding_mode=None if tensor.is_floating_point() else "trunc")
        return work

    with replaced(dist, "all_reduce", all_reduce):
        yield


@fault("reduce is not followed by a broadcast", "test_reduce_then_broadcast")
def reduce_without_broadcast() -> Iterator[None]:
    def broadcast(tensor: torch.Tensor, src: int | None = None, *args: Any, **kwargs: Any) -> None:
        return None

    with replaced(dist, "broadcast", broadcast):
        yield


@fault("all_reduce adds up for every operation", "test_all_reduce_of_other_operations")
def operation_ignored() -> Iterator[None]:
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        return real(tensor, group=group, async_op=async_op)

    with replaced(dist, "all_reduce", all_reduce):
        yield


@fault("all_reduce of a view reduces a contiguous copy and drops it", "test_all_reduce_of_views_on_devices")
def reduced_copy_dropped() -> Iterator[None]:
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return real(tensor.contiguous(), *args, **kwargs)

    with replaced(dist, "all_reduce", all_reduce):
        yield


@fault("a group's all_reduce counts its first member twice", "test_all_reduce_in_a_group")
def group_counts_a_member_twice() -> Iterator[None]:
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if group is not None and dist.get_rank(group) == 0:
            tensor.mul_(2)
        return real(tensor, op, group=group, async_op=async_op)

    with replaced(dist, "all_reduce", all_reduce):
        yield


@fault(
    "all_reduce of a view on the CPU leaves out the last rank",
    "test_all_reduce_of_views_on_the_cpu",
    condition="views with gaps on the CPU",
)
def view_on_the_cpu_misses_the_last_rank() -> Iterator[None]:
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_last() and tensor.device.type == "cpu" and _has_gaps(tensor):
            tensor.zero_()
        return real(tensor, *args, **kwargs)

    with replaced(dist, "all_reduce", all_reduce):
        yield


@fault(
    "a view on a device is reduced as if it had no gaps",
    "test_all_reduce_of_views_on_devices",
    condition="views with gaps on devices",
)
def view_on_a_device_reduced_without_gaps() -> Iterator[None]:
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type != "cpu" and _has_gaps(tensor):
            tensor = tensor.as_strided((tensor.numel(),), (1,))
        return real(tensor, *args, **kwargs)

    with replaced(dist, "all_reduce", all_reduce):
        yield


@fault(
    "sums on the CPU leave out the elements after the last vector of eight",
    "test_all_reduce",
    condition="sums on the CPU of aligned tensors without gaps, with a size that is not a multiple of 8",
)
def rest_after_vectors_not_added() -> Iterator[None]:
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        own = tensor.clone()
        work = real(tensor, op, group=group, async_op=async_op)
        fast = tensor.device.type == "cpu" and not _has_gaps(tensor) and tensor.data_ptr() % _ALIGNED == 0
        if fast and op == dist.ReduceOp.SUM:
            rest = torch.arange(tensor.numel()) >= tensor.numel() // _VECTOR * _VECTOR
            tensor.copy_(torch.where(rest.view(tensor.shape), own, tensor))
        return work

    with replaced(dist, "all_reduce", all_reduce):
        yield


@fault(
    "reduce_add adds up in place, in the input of its own device",
    "test_reduce_add_and_broadcast",
    condition="3 devices and more",
    least_gpus=3,
)
def contribution_added_to() -> Iterator[None]:
    """With two tensors the sum is a new tensor."""
    real = comm.reduce_add

    def reduce_add(inputs: Sequence[torch.Tensor], destination: int | None = None) -> torch.Tensor:
        total: torch.Tensor = real(inputs, destination)
        if len(inputs) < 3:
            return total
        return next(one for one in inputs if one.device == total.device).copy_(total)

    with replaced(comm, "reduce_add", reduce_add):
        yield


@fault(
    "broadcast to given tensors leaves out the last", "test_reduce_add_and_broadcast", condition="out=, several devices"
)
def last_given_tensor_left_out() -> Iterator[None]:
    real = comm.broadcast

    def broadcast(tensor: torch.Tensor, devices: Any = None, *, out: Any = None) -> Any:
        return real(tensor, devices, out=out if out is None or len(out) < 2 else out[:-1])

    with replaced(comm, "broadcast", broadcast):
        yield


@fault(
    "reduce_add to a device that is not current leaves out the last tensor",
    "test_reduce_add_and_broadcast",
    condition="destinations other than the current device",
)
def part_left_out_elsewhere() -> Iterator[None]:
    real = comm.reduce_add

    def reduce_add(inputs: Sequence[torch.Tensor], destination: int | None = None) -> torch.Tensor:
        total: torch.Tensor = real(inputs, destination)
        return total if total.device.index == torch.cuda.current_device() else total - inputs[-1].to(total.device)

    with replaced(comm, "reduce_add", reduce_add):
        yield


@fault(
    "broadcast_coalesced copies a slice as if it had no gaps",
    "test_broadcast_of_every_layout",
    condition="tensors with gaps, several devices",
)
def slices_broadcast_without_gaps() -> Iterator[None]:
    real = comm.broadcast_coalesced

    def broadcast(tensors: Sequence[torch.Tensor], devices: Any, *size: Any) -> Any:
        rows = real(tensors, devices, *size)
        for number, one in enumerate(tensors):
            if _has_gaps(one):
                for row in rows[1:]:
                    row[number].copy_(one.as_strided((one.numel(),), (1,), one.storage_offset()).view(one.shape))
        return rows

    with replaced(comm, "broadcast_coalesced", broadcast):
        yield
