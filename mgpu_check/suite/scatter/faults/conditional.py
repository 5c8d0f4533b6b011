"""Defects that affect some shards only: of a size, a dtype, a dim, an order of devices, or a kind of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import _functions, comm, scatter_gather

from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.suite.scatter.faults.shards import Shards, gather_changed, scatter_changed
from mgpu_check.torch_hooks.patches import replaced
from mgpu_check.torch_hooks.tensors import as_bits, plain

_LARGE = 1 << 20


def _touched(shard: torch.Tensor, change: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return the shard after `change` on the CPU: a contiguous tensor on the device of the shard."""
    values = plain(shard).clone(memory_format=torch.contiguous_format)
    change(values)
    return values.to(shard.device)


def _flip_first(values: torch.Tensor) -> None:
    as_bits(values).view(-1)[0] ^= 1


def _zero_at_end(values: torch.Tensor) -> None:
    values.view(-1)[-4:] = 0


@fault("the last elements of a large shard are zero", "test_large_batches", condition="shards above 1 MiB")
def large_shards_cut() -> Iterator[None]:
    """As with a copy in pieces that forgets the last one."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        shards = scatter(x, devices)
        return tuple(_touched(shard, _zero_at_end) if shard.nbytes > _LARGE else shard for shard in shards)

    with scatter_changed(change):
        yield


@fault(
    "shards of 64 KiB to 1 MiB from pinned memory arrive as zeros on the last device",
    "test_large_batches",
    condition="pinned sources, 64 KiB to 1 MiB, the last device only",
)
def pinned_shard_not_waited_for() -> Iterator[None]:
    """As without a wait for the stream of the copy."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        shards = scatter(x, devices)
        late = x.device.type == "cpu" and x.is_pinned() and 1 << 16 <= shards[-1].nbytes <= _LARGE
        return (*shards[:-1], torch.zeros_like(shards[-1])) if late else shards

    with scatter_changed(change):
        yield


@fault(
    "gather of more than 1 MiB along dim 1 replaces the last shard by the first",
    "test_large_batches",
    condition="above 1 MiB, dim 1 only",
)
def large_columns_gathered_wrongly() -> Iterator[None]:
    """As in a kernel for large tensors with a wrong pointer."""

    def change(tensors: Sequence[torch.Tensor], dim: int) -> Sequence[torch.Tensor]:
        if dim == 0 or sum(tensor.nbytes for tensor in tensors) <= _LARGE:
            return tensors
        last, first = tensors[-1], tensors[0]
        if len(tensors) == 1:
            return [torch.zeros_like(last)]
        return [*tensors[:-1], first.narrow(dim, 0, last.shape[dim]).to(last.device)]

    with gather_changed(change):
        yield


@fault(
    "along dim 1, the first column of every shard is that of the first shard",
    "test_shards_cover_the_batch",
    condition="dim 1 only",
)
def columns_of_the_first_shard() -> Iterator[None]:
    """As with an offset that is computed for dim 0 only."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        if dim != 1 or not x.shape[1]:
            return scatter(x, devices)
        size = -(-x.shape[1] // len(devices))
        starts = list(range(0, x.shape[1], size))
        wrong = x.clone()
        for start in starts[1:] or [x.shape[1] - 1]:
            wrong.select(1, start).copy_(x.select(1, 0) if start else torch.zeros_like(x.select(1, 0)))
        return scatter(wrong, devices)

    with scatter_changed(change):
        yield


@fault(
    "shards along a negative dim go to the devices in reverse order",
    "test_shards_cover_the_batch",
    condition="negative dims, two shards or more",
    least_gpus=2,
)
def negative_dims_turn_the_devices() -> Iterator[None]:
    """As if the list of devices were indexed from its end. Gathering the shards still restores the batch."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        shards = scatter(x, devices)
        if dim >= 0:
            return shards
        backwards = reversed(devices[: len(shards)])
        return tuple(shard.to(torch.device("cuda", place)) for shard, place in zip(shards, backwards, strict=True))

    with scatter_changed(change):
        yield


@fault(
    "every NaN becomes the default NaN of the CPU",
    "test_every_dtype_and_order",
    condition="NaN with a payload, float32 and float64",
)
def scattered_payloads_lost() -> Iterator[None]:
    """As with a copy by arithmetic, such as x + 0."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        if x.dtype not in (torch.float32, torch.float64):
            return scatter(x, devices)
        return scatter(torch.where(x.isnan(), torch.full_like(x, float("nan")), x), devices)

    with scatter_changed(change):
        yield


@fault("subnormal numbers arrive as zeros", "test_every_dtype_and_order", condition="subnormal numbers only")
def subnormals_of_shards_flushed() -> Iterator[None]:
    """As on a device that flushes subnormals."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        if not x.is_floating_point():
            return scatter(x, devices)
        subnormal = (x.abs() < torch.finfo(x.dtype).smallest_normal) & (x != 0)
        return scatter(torch.where(subnormal, torch.zeros_like(x), x), devices)

    with scatter_changed(change):
        yield


@fault(
    "shards go to the devices in ascending order",
    "test_every_dtype_and_order",
    condition="device orders that are not ascending",
)
def devices_sorted() -> Iterator[None]:
    """With ``device_ids=[1, 0]``, inputs of DataParallel would be on other devices than their replicas."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        if torch.cuda.device_count() == 1:  # with one device there is only one order, so move the shards to the CPU
            return tuple(shard.cpu() for shard in scatter(x, devices))
        shards = scatter(x, devices)
        places = sorted(devices)
        return tuple(shard.to(torch.device("cuda", place)) for shard, place in zip(shards, places, strict=False))

    with scatter_changed(change):
        yield


@fault(
    "int64 is converted through float32, which rounds large numbers",
    "test_every_dtype_and_order",
    condition="int64 beyond 2^24",
)
def large_numbers_rounded() -> Iterator[None]:
    """Ids of samples and tokens then belong to others."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        return scatter(x.float().long() if x.dtype == torch.int64 else x, devices)

    with scatter_changed(change):
        yield


@fault(
    "gather swaps the first and the last value of a dict",
    "test_every_container",
    condition="dicts of two entries or more",
)
def keys_exchanged() -> Iterator[None]:
    """As if entries were sorted, but keys were not."""
    real = scatter_gather.gather

    def gather(outputs: Any, target_device: Any, dim: int = 0) -> Any:
        whole = real(outputs, target_device, dim)
        if isinstance(whole, dict) and len(whole) > 1:
            first, *rest = list(whole)
            whole[first], whole[rest[-1]] = whole[rest[-1]], whole[first]
        return whole

    with replaced(scatter_gather, "gather", gather), replaced(nn.parallel, "gather", gather):
        yield


@fault(
    "a device with a given size of 0 gets one row of the next device",
    "test_sizes_and_outputs_that_are_given",
    condition="a size of 0 among the given sizes",
)
def nothing_is_one_row() -> Iterator[None]:
    """As if sizes were clamped to 1."""
    scatter: Callable[..., Shards] = comm.scatter

    def changed(tensor: torch.Tensor, devices: Any = None, chunk_sizes: Any = None, *rest: Any, **named: Any) -> Shards:
        if chunk_sizes is not None and 0 in chunk_sizes:
            chunk_sizes = list(chunk_sizes)
            at, most = chunk_sizes.index(0), chunk_sizes.index(max(chunk_sizes))
            chunk_sizes[at], chunk_sizes[most] = 1, chunk_sizes[most] - 1
        return scatter(tensor, devices, chunk_sizes, *rest, **named)

    with replaced(comm, "scatter", changed):
        yield


@fault("gather ignores out and returns a new tensor", "test_sizes_and_outputs_that_are_given", condition="out= only")
def given_output_left_alone() -> Iterator[None]:
    """The tensor of the caller stays unchanged."""
    gather: Callable[..., torch.Tensor] = comm.gather

    def changed(tensors: Any, dim: int = 0, destination: Any = None, *, out: Any = None) -> torch.Tensor:
        return gather(tensors, dim, destination if out is None else out.device)

    with replaced(comm, "gather", changed):
        yield


@fault(
    "a slice is copied to a device from the start of its storage",
    "test_batches_split_by_hand",
    condition="views that start inside their storage",
)
def offset_of_slices_ignored() -> Iterator[None]:
    """Each device gets the first rows of the batch."""
    to = torch.Tensor.to

    def changed(self: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        goes = bool(args) and isinstance(args[0], torch.device) and args[0].type == "cuda" and self.device.type == "cpu"
        if goes and self.storage_offset():
            self = self.as_strided(self.shape, self.stride(), 0)
        return to(self, *args, **named)

    with replaced(torch.Tensor, "to", changed):
        yield


@fault("cat of three or more tensors swaps the last two", "test_batches_split_by_hand", condition="three parts or more")
def last_parts_exchanged() -> Iterator[None]:
    """Batches collected by hand have a wrong order."""
    cat: Callable[..., torch.Tensor] = torch.cat

    def changed(tensors: Any, *args: Any, **named: Any) -> torch.Tensor:
        parts = list(tensors)
        if len(parts) > 2 and parts[0].device.type == "cuda":
            parts[-1], parts[-2] = parts[-2], parts[-1]
        return cat(parts, *args, **named)

    with replaced(torch, "cat", changed):
        yield


@fault(
    "non-blocking copies to the second device flip a bit",
    "test_batches_split_by_hand",
    condition="non_blocking copies to the second device",
)
def bit_flipped_in_copies_that_do_not_block() -> Iterator[None]:
    """One link and one kind of copy."""
    to = torch.Tensor.to

    def changed(self: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        made = to(self, *args, **named)
        second = min(1, torch.cuda.device_count() - 1)
        if not (named.get("non_blocking") and made.device == torch.device("cuda", second) and made.numel()):
            return made
        return _touched(made, _flip_first)

    with replaced(torch.Tensor, "to", changed):
        yield


@fault(
    "no gradient comes back from shards of a single row",
    "test_gradient_returns_through_scatter",
    condition="shards of one row",
)
def gradient_of_single_rows_lost() -> Iterator[None]:
    """The last sample of an uneven batch does not affect training."""
    backward = _functions.Scatter.backward

    def changed(context: Any, *gradients: torch.Tensor) -> Any:
        kept = (torch.zeros_like(one) if one.shape[context.dim] == 1 else one for one in gradients)
        return backward(context, *kept)

    with replaced(_functions.Scatter, "backward", staticmethod(changed)):
        yield
