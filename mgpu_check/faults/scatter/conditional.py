"""Defects that strike some shards only: of a size, a dtype, a dim, an order of devices, a kind of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import _functions, comm, scatter_gather

from mgpu_check.faults.registry import fault
from mgpu_check.faults.scatter.shards import Shards, gather_changed, scatter_changed
from mgpu_check.torch_hooks.patches import replaced
from mgpu_check.torch_hooks.tensors import as_bits, plain

_LARGE = 1 << 20


def _touched(shard: torch.Tensor, change: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return a copy of a shard, where it is, that `change` has changed on the CPU, contiguous."""
    values = plain(shard).clone(memory_format=torch.contiguous_format)
    change(values)
    return values.to(shard.device)


def _flip_first(values: torch.Tensor) -> None:
    as_bits(values).view(-1)[0] ^= 1


def _zero_at_end(values: torch.Tensor) -> None:
    values.view(-1)[-4:] = 0


@fault(
    "scatter",
    "the last elements of a large shard are zero",
    caught_by=("test_large_batches",),
    condition="shards above 1 MiB",
)
def large_shards_cut() -> Iterator[None]:
    """As by a copy in pieces whose last one is forgotten."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        shards = scatter(x, devices)
        return tuple(_touched(shard, _zero_at_end) if shard.nbytes > _LARGE else shard for shard in shards)

    with scatter_changed(change):
        yield


@fault(
    "scatter",
    "shards of 64 KiB to 1 MiB from pinned memory bring zeros to the last device",
    caught_by=("test_large_batches",),
    condition="pinned sources, 64 KiB to 1 MiB, the last device only",
)
def pinned_shard_not_waited_for() -> Iterator[None]:
    """As where nobody waits for the stream of the copy."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        shards = scatter(x, devices)
        late = x.device.type == "cpu" and x.is_pinned() and 1 << 16 <= shards[-1].nbytes <= _LARGE
        return (*shards[:-1], torch.zeros_like(shards[-1])) if late else shards

    with scatter_changed(change):
        yield


@fault(
    "scatter",
    "what was gathered along the last dim is wrong above 1 MiB: its last shard is its first",
    caught_by=("test_large_batches",),
    condition="above 1 MiB, dim 1 only",
)
def large_columns_gathered_wrongly() -> Iterator[None]:
    """A kernel for large tensors that takes one pointer for another."""

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
    "scatter",
    "along dim 1 the first row of each shard is that of the first shard",
    caught_by=("test_shards_cover_the_batch",),
    condition="dim 1 only",
)
def columns_of_the_first_shard() -> Iterator[None]:
    """An offset that is worked out for dim 0 only."""

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
    "scatter",
    "shards along a dim that is counted from the end go to the devices backwards",
    caught_by=("test_shards_cover_the_batch",),
    condition="negative dims, two shards or more",
    least_gpus=2,
)
def negative_dims_turn_the_devices() -> Iterator[None]:
    """The list of devices is walked from its end, too: gathered, the shards are the batch again."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        shards = scatter(x, devices)
        if dim >= 0:
            return shards
        backwards = reversed(devices[: len(shards)])
        return tuple(shard.to(torch.device("cuda", place)) for shard, place in zip(shards, backwards, strict=True))

    with scatter_changed(change):
        yield


@fault(
    "scatter",
    "payloads of NaN are lost: all are the one that the CPU makes",
    caught_by=("test_every_dtype_and_order",),
    condition="NaN with a payload, float32 and float64",
)
def scattered_payloads_lost() -> Iterator[None]:
    """What a copy that computes does, x + 0."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        if x.dtype not in (torch.float32, torch.float64):
            return scatter(x, devices)
        return scatter(torch.where(x.isnan(), torch.full_like(x, float("nan")), x), devices)

    with scatter_changed(change):
        yield


@fault(
    "scatter",
    "subnormal numbers arrive as zeros",
    caught_by=("test_every_dtype_and_order",),
    condition="subnormal numbers only",
)
def subnormals_of_shards_flushed() -> Iterator[None]:
    """As on a device that flushes them."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        if not x.is_floating_point():
            return scatter(x, devices)
        subnormal = (x.abs() < torch.finfo(x.dtype).smallest_normal) & (x != 0)
        return scatter(torch.where(subnormal, torch.zeros_like(x), x), devices)

    with scatter_changed(change):
        yield


@fault(
    "scatter",
    "shards go to the devices in ascending order, whichever was asked for",
    caught_by=("test_every_dtype_and_order",),
    condition="device orders that are not ascending",
)
def devices_sorted() -> Iterator[None]:
    """DataParallel with ``device_ids=[1, 0]`` would have its inputs where its replicas are not."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        if torch.cuda.device_count() == 1:  # it has one order only, and is taken for another
            return tuple(shard.cpu() for shard in scatter(x, devices))
        shards = scatter(x, devices)
        places = sorted(devices)
        return tuple(shard.to(torch.device("cuda", place)) for shard, place in zip(shards, places, strict=False))

    with scatter_changed(change):
        yield


@fault(
    "scatter",
    "int64 goes through float32, and large numbers are rounded",
    caught_by=("test_every_dtype_and_order",),
    condition="int64 beyond 2^24",
)
def large_numbers_rounded() -> Iterator[None]:
    """Ids of samples and of tokens are then those of others."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        return scatter(x.float().long() if x.dtype == torch.int64 else x, devices)

    with scatter_changed(change):
        yield


@fault(
    "scatter",
    "the values of a dict are gathered under each other's keys",
    caught_by=("test_every_container",),
    condition="dicts of two entries or more",
)
def keys_exchanged() -> Iterator[None]:
    """As where entries are taken in sorted order, and keys are not."""
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
    "scatter",
    "sizes that are given are kept to but for a device that is to get nothing: it gets a row of the next",
    caught_by=("test_sizes_and_outputs_that_are_given",),
    condition="a size of 0 among those that are given",
)
def nothing_is_one_row() -> Iterator[None]:
    """A size that is clamped to 1."""
    scatter: Callable[..., Shards] = comm.scatter

    def changed(tensor: torch.Tensor, devices: Any = None, chunk_sizes: Any = None, *rest: Any, **named: Any) -> Shards:
        if chunk_sizes is not None and 0 in chunk_sizes:
            chunk_sizes = list(chunk_sizes)
            at, most = chunk_sizes.index(0), chunk_sizes.index(max(chunk_sizes))
            chunk_sizes[at], chunk_sizes[most] = 1, chunk_sizes[most] - 1
        return scatter(tensor, devices, chunk_sizes, *rest, **named)

    with replaced(comm, "scatter", changed):
        yield


@fault(
    "scatter",
    "gather makes a new tensor, where it is given one to fill",
    caught_by=("test_sizes_and_outputs_that_are_given",),
    condition="out= only",
)
def given_output_left_alone() -> Iterator[None]:
    """What the caller has stays as it was."""
    gather: Callable[..., torch.Tensor] = comm.gather

    def changed(tensors: Any, dim: int = 0, destination: Any = None, *, out: Any = None) -> torch.Tensor:
        return gather(tensors, dim, destination if out is None else out.device)

    with replaced(comm, "gather", changed):
        yield


@fault(
    "scatter",
    "a slice is copied to a device from the beginning of its storage",
    caught_by=("test_batches_split_by_hand",),
    condition="views that begin inside their storage",
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


@fault(
    "scatter",
    "cat of three tensors and more exchanges the last two",
    caught_by=("test_batches_split_by_hand",),
    condition="three parts or more",
)
def last_parts_exchanged() -> Iterator[None]:
    """What is put together by hand is in another order."""
    cat: Callable[..., torch.Tensor] = torch.cat

    def changed(tensors: Any, *args: Any, **named: Any) -> torch.Tensor:
        parts = list(tensors)
        if len(parts) > 2 and parts[0].device.type == "cuda":
            parts[-1], parts[-2] = parts[-2], parts[-1]
        return cat(parts, *args, **named)

    with replaced(torch, "cat", changed):
        yield


@fault(
    "scatter",
    "copies that do not block flip a bit on the way to the second device",
    caught_by=("test_batches_split_by_hand",),
    condition="non_blocking copies to the second device",
)
def bit_flipped_in_copies_that_do_not_block() -> Iterator[None]:
    """One link, and one way to use it."""
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
    "scatter",
    "no gradient comes back from shards of a single row",
    caught_by=("test_gradient_returns_through_scatter",),
    condition="shards of one row",
)
def gradient_of_single_rows_lost() -> Iterator[None]:
    """The last sample of an uneven batch teaches nothing."""
    backward = _functions.Scatter.backward

    def changed(context: Any, *gradients: torch.Tensor) -> Any:
        kept = (torch.zeros_like(one) if one.shape[context.dim] == 1 else one for one in gradients)
        return backward(context, *kept)

    with replaced(_functions.Scatter, "backward", staticmethod(changed)):
        yield
