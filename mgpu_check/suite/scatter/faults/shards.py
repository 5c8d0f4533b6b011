"""Defects of scatter and gather, and of batches split by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import _functions, comm, scatter_gather

from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.suite.recipes import batches
from mgpu_check.torch_hooks.patches import replaced

Shards = tuple[torch.Tensor, ...]


def scatter_changed(change: Callable[[Callable[..., Shards], torch.Tensor, list[Any], int], Shards]) -> Any:
    """Change `comm.scatter`, the basis of all scattering, for calls without given sizes."""
    scatter: Callable[..., Shards] = comm.scatter

    def changed(
        tensor: torch.Tensor, devices: Any = None, chunk_sizes: Any = None, dim: int = 0, *rest: Any, **named: Any
    ) -> Shards:
        # Without devices the caller gives output tensors, and so the sizes.
        given = devices is None or chunk_sizes is not None
        if given or tensor.dim() == 0:
            return scatter(tensor, devices, chunk_sizes, dim, *rest, **named)
        return change(lambda x, to, sizes=None: scatter(x, to, sizes, dim, *rest, **named), tensor, list(devices), dim)

    return replaced(comm, "scatter", changed)


@fault(
    "the remainder is dropped when the batch does not divide by the number of devices", "test_shards_cover_the_batch"
)
def remainder_dropped() -> Iterator[None]:
    """Every device gets the same number of samples; the rest is lost."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        return scatter(x.narrow(dim, 0, x.shape[dim] // len(devices) * len(devices)), devices)

    with scatter_changed(change):
        yield


@fault("the second shard starts one sample early, so shards overlap", "test_shards_cover_the_batch")
def shards_overlap() -> Iterator[None]:
    """The last sample of the first shard is also the first of the second."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        size = -(-x.shape[dim] // len(devices))
        if len(devices) == 1 or size == 0 or x.shape[dim] <= size:
            return scatter(torch.cat([x, x.narrow(dim, 0, min(1, x.shape[dim]))], dim), devices)
        second = min(size, x.shape[dim] - size)
        again = torch.cat(
            [
                x.narrow(dim, 0, size),
                x.narrow(dim, size - 1, second),
                x.narrow(dim, size + second, x.shape[dim] - size - second),
            ],
            dim,
        )
        return scatter(again, devices)

    with scatter_changed(change):
        yield


def _reordered(order: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Any:
    """Send shards, with their sizes, to devices in another order."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        parts = order(list(x.chunk(len(devices), dim)))
        sizes = [part.shape[dim] for part in parts] + [0] * (len(devices) - len(parts))
        return scatter(torch.cat(parts, dim), devices, sizes)[: len(parts)]

    return scatter_changed(change)


@fault("two shards are swapped", "test_shards_cover_the_batch")
def shards_swapped() -> Iterator[None]:
    """The first shard goes to the last device that gets a shard, and the last shard to the first device."""
    with _reordered(lambda parts: [parts[-1], *parts[1:-1], parts[0]] if len(parts) > 1 else parts):
        yield


@fault(
    "the last two of five or more shards are swapped",
    "test_shards_cover_the_batch",
    condition="5 devices and more",
    least_gpus=5,
)
def last_shards_swapped() -> Iterator[None]:
    """The others are right."""
    with _reordered(lambda parts: [*parts[:-2], parts[-1], parts[-2]] if len(parts) > 4 else parts):
        yield


@fault("the last shard stays on the first device", "test_shards_cover_the_batch")
def shard_on_the_wrong_device() -> Iterator[None]:
    """All shards are right, but one is on the wrong device."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        shards = scatter(x, devices)
        other = devices[0] if len(shards) > 1 else (devices[0] + 1) % torch.cuda.device_count()
        wrong = torch.device("cuda", other)
        return (*shards[:-1], shards[-1].to(wrong))

    with scatter_changed(change):
        yield


@fault("the shard of the second device is zero", "test_shards_cover_the_batch")
def stale_copy() -> Iterator[None]:
    """As with a broken link between two devices."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        shards = scatter(x, devices)
        broken = min(1, len(shards) - 1)
        return tuple(torch.zeros_like(shard) if index == broken else shard for index, shard in enumerate(shards))

    with scatter_changed(change):
        yield


@fault("shards are rounded to bfloat16", "test_shards_cover_the_batch")
def shards_rounded() -> Iterator[None]:
    """As if the batch were sent in half precision to save time."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        return scatter(x if x.is_complex() else x.bfloat16().to(x.dtype), devices)

    with scatter_changed(change):
        yield


@fault(
    "shards are as even as can be, 4+3+3 instead of 4+4+2",
    "test_shards_have_the_sizes_of_chunk",
    "test_tutorial_shapes",
)
def sizes_evened_out() -> Iterator[None]:
    """As with `torch.tensor_split`. The shards cover the batch, but are not those of torch."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        return scatter(x, devices, [part.shape[dim] for part in x.tensor_split(len(devices), dim)])

    with scatter_changed(change):
        yield


@fault(
    "with fewer samples than devices, the last devices get empty shards instead of no shard",
    "test_shards_have_the_sizes_of_chunk",
    condition="fewer samples than devices",
    least_gpus=2,
)
def empty_shards_at_the_end() -> Iterator[None]:
    """Replicas there run on empty batches, and the mean of their losses is NaN."""

    def change(scatter: Callable[..., Shards], x: torch.Tensor, devices: list[Any], dim: int) -> Shards:
        few, none = x.shape[dim], len(devices) - x.shape[dim]
        return scatter(x, devices, [1] * few + [0] * none) if few and none > 0 else scatter(x, devices)

    with scatter_changed(change):
        yield


@fault(
    "DataParallel uses its first device only, whose model sees the whole batch",
    "test_tutorial_shapes",
    condition="in DataParallel, on two devices or more",
    least_gpus=2,
)
def other_devices_left_out() -> Iterator[None]:
    """Results are right, but the other devices are idle."""
    real = nn.DataParallel.__init__

    def changed(self: Any, module: nn.Module, device_ids: Any = None, *rest: Any, **named: Any) -> None:
        every = range(torch.cuda.device_count()) if device_ids is None else device_ids
        real(self, module, list(every)[:1], *rest, **named)

    with replaced(nn.DataParallel, "__init__", changed):
        yield


@fault("numbers and strings reach the first device only", "test_leaves_reach_every_device")
def leaves_reach_one_device() -> Iterator[None]:
    """All other shards have None instead."""
    scatter = scatter_gather.scatter

    def changed(inputs: Any, target_gpus: Sequence[Any], dim: int = 0) -> Any:
        shards = scatter(inputs, target_gpus, dim)
        if isinstance(inputs, torch.Tensor):
            return shards
        return [
            shard if index == 0 and len(shards) > 1 else _without_leaves(shard) for index, shard in enumerate(shards)
        ]

    with replaced(scatter_gather, "scatter", changed), replaced(nn.parallel, "scatter", changed):
        yield


@fault(
    "numbers and strings in keyword arguments reach the last device as None",
    "test_leaves_reach_every_device",
    condition="keyword arguments, the last device only",
)
def last_device_without_keywords() -> Iterator[None]:
    """Its replica uses the defaults."""
    real = scatter_gather.scatter_kwargs

    def changed(inputs: Any, kwargs: Any, target_gpus: Sequence[Any], dim: int = 0) -> Any:
        args, named = real(inputs, kwargs, target_gpus, dim)
        return args, (*named[:-1], *map(_without_leaves, named[-1:]))

    with replaced(scatter_gather, "scatter_kwargs", changed):
        yield


def _without_leaves(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return part
    if isinstance(part, dict):
        return {key: _without_leaves(value) for key, value in part.items()}
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*map(_without_leaves, part))
    return type(part)(map(_without_leaves, part)) if isinstance(part, (tuple, list)) else None


def gather_changed(change: Callable[[Sequence[torch.Tensor], int], Sequence[torch.Tensor]]) -> Any:
    """Change the tensors that `comm.gather`, the basis of all gathering, gets."""
    gather: Callable[..., torch.Tensor] = comm.gather

    def changed(tensors: Sequence[torch.Tensor], dim: int = 0, *rest: Any, **named: Any) -> torch.Tensor:
        return gather(change(list(tensors), dim), dim, *rest, **named)

    return replaced(comm, "gather", changed)


@fault("gather joins the shards in reverse order", "test_gather_restores_the_batch")
def gathered_backwards() -> Iterator[None]:
    """The last shard comes first."""
    with gather_changed(lambda tensors, dim: tensors[::-1]):
        yield


@fault("gather leaves out the last shard", "test_losses_gather_to_a_vector")
def gather_drops_a_shard() -> Iterator[None]:
    """As with a loop that ends one step early."""
    with gather_changed(lambda tensors, dim: tensors[:-1] if len(tensors) > 1 else [tensors[0].narrow(dim, 0, 0)]):
        yield


@fault("gather puts its result on the first device", "test_gather_restores_the_batch")
def gathered_elsewhere() -> Iterator[None]:
    """The destination is ignored."""
    gather: Callable[..., torch.Tensor] = comm.gather

    def changed(
        tensors: Sequence[torch.Tensor], dim: int = 0, destination: Any = None, *, out: Any = None
    ) -> torch.Tensor:
        return gather(tensors, dim, 0) if out is None else gather(tensors, dim, out=out)

    with replaced(comm, "gather", changed):
        yield


@fault("the first device gets its labels in another order than its inputs", "test_inputs_and_labels_stay_aligned")
def labels_not_split_alike() -> Iterator[None]:
    """As if inputs were split before the shuffle and labels after it."""

    def split_batch(X: torch.Tensor, y: torch.Tensor, devices: Sequence[torch.device]) -> tuple[Any, Any]:
        return nn.parallel.scatter(X, devices), nn.parallel.scatter(y.roll(1), devices)

    with replaced(batches, "split_batch", split_batch):
        yield


@fault("every device gets all labels", "test_inputs_and_labels_stay_aligned")
def labels_not_split() -> Iterator[None]:
    """Each device has its own inputs and the labels of all."""

    def split_batch(X: torch.Tensor, y: torch.Tensor, devices: Sequence[torch.device]) -> tuple[Any, Any]:
        shards = nn.parallel.scatter(X, devices)
        # With one device all labels would be right, so they stay on their device instead.
        return shards, tuple(y.to(shard.device if len(shards) > 1 else "cpu") for shard in shards)

    with replaced(batches, "split_batch", split_batch):
        yield


@fault("a batch split by hand loses the remainder", "test_batches_split_by_hand")
def remainder_dropped_by_hand() -> Iterator[None]:
    """Slices of n // devices samples each."""

    def split_and_load(X: torch.Tensor, devices: Sequence[torch.device]) -> list[torch.Tensor]:
        size = len(X) // len(devices) if len(devices) > 1 else len(X) - 1
        return [X[index * size : (index + 1) * size].to(device) for index, device in enumerate(devices)]

    with replaced(batches, "split_and_load", split_and_load):
        yield


@fault("no gradient comes back from the last shard", "test_gradient_returns_through_scatter")
def gradient_of_a_shard_lost() -> Iterator[None]:
    """The backward of scatter takes the last shard's gradient for zero."""
    backward = _functions.Scatter.backward

    def changed(context: Any, *gradients: torch.Tensor) -> Any:
        return backward(context, *gradients[:-1], torch.zeros_like(gradients[-1]))

    with replaced(_functions.Scatter, "backward", staticmethod(changed)):
        yield


@fault("shards get the gradients of other shards", "test_gradient_returns_through_gather")
def gradients_to_the_wrong_shard() -> Iterator[None]:
    """The backward of gather distributes the parts of the gradient in reverse order."""
    backward = _functions.Gather.backward

    def changed(context: Any, gradient: torch.Tensor) -> Any:
        return backward(context, gradient.flip(context.dim))

    with replaced(_functions.Gather, "backward", staticmethod(changed)):
        yield
