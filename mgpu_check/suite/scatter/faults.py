"""Defects of gather, of scatter, and of batches split by hand.

Those of gather affect all shards or a single one, masks, complex and plain numbers, and large or given tensors. Those
of scatter affect all shards, or a size, dtype, dim, order or memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import _functions, comm, scatter_gather
from torch.nn.parallel._functions import Gather

from mgpu_check.suite.common.faults.planting import around, both, call, first
from mgpu_check.suite.common.faults.registry import FaultRow, When, caught_by, entered, fault, register
from mgpu_check.suite.recipes import tutorials
from mgpu_check.torch_hooks.tensors import as_bits, plain

any_bits = caught_by("test_every_dtype_and_order")
containers = caught_by("test_every_container")
large = caught_by("test_large_batches")

GATHER = both(around(scatter_gather, "gather"), around(nn.parallel, "gather"))
"""The function that users call. It takes the outputs, which may be nested, the target and the dim."""
JOIN = around(comm, "gather")  # The basis of all gathering. It takes tensors, the dim and the destination.
LARGE = 1 << 20


@containers("gather swaps the first and the last value of a dict", GATHER, "dicts of two entries or more")
def keys_exchanged(gather: Any, *args: Any) -> Any:
    """As if entries were sorted, but keys were not."""
    gathered = gather(*args)
    if isinstance(gathered, dict) and len(gathered) > 1:
        head, *_, end = gathered
        gathered[head], gathered[end] = gathered[end], gathered[head]
    return gathered


@containers("a mask in a dict within a named tuple is gathered as bytes", GATHER,
    "bool, in a dict within a named tuple")  # fmt: skip
def nested_masks_gathered_as_bytes(gather: Any, *args: Any) -> Any:
    """As an index, it then selects the first two rows many times."""
    gathered = gather(*args)
    return type(gathered)(*map(_masks_as_bytes, gathered)) if hasattr(gathered, "_fields") else gathered


def _masks_as_bytes(entry: Any) -> Any:
    if type(entry) is not dict:
        return entry
    masks = {key: value for key, value in entry.items() if isinstance(value, Tensor) and value.dtype == torch.bool}
    return entry | {key: mask.byte() for key, mask in masks.items()}


@any_bits("gather loses the payload of NaN in complex numbers", JOIN, "NaN with a payload, complex64 and complex128")
def gathered_complex_payloads_lost(join: Any, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """As if complex numbers were computed from real and imaginary parts."""

    def of_one_kind(tensor: Tensor) -> Tensor:
        if not tensor.is_complex():
            return tensor
        components = torch.view_as_real(tensor)
        return torch.view_as_complex(
            torch.where(components.isnan(), torch.full_like(components, float("nan")), components)
        )

    return join([of_one_kind(tensor) for tensor in tensors], *args, **kwargs)


def _uneven_images(tensors: Sequence[Tensor]) -> bool:
    last = all(tensor.dim() == 4 and tensor.permute(0, 2, 3, 1).is_contiguous() for tensor in tensors)
    return last and len({tensor.shape for tensor in tensors}) > 1


@large("gather of more than 1 MiB along dim 1 replaces the last shard by the first", JOIN,
    call("above 1 MiB, dim 1 only",
        lambda tensors, dim=0, *_, **__: dim != 0 and sum(tensor.nbytes for tensor in tensors) > LARGE))  # fmt: skip
def large_columns_gathered_wrongly(join: Any, tensors: Sequence[Tensor], dim: int, *args: Any, **kwargs: Any) -> Any:
    """As in a kernel for large tensors with a wrong pointer."""
    *others, end = tensors
    replacement = others[0].narrow(dim, 0, end.shape[dim]).to(end.device) if others else torch.zeros_like(end)
    return join([*others, replacement], dim, *args, **kwargs)


def _first_mebibyte(shard: Tensor) -> Tensor:
    """Return a shard with zeros behind its first MiB."""
    fits = LARGE // shard.itemsize
    if shard.numel() <= fits:
        return shard
    flat = shard.reshape(-1)
    return torch.cat([flat[:fits], torch.zeros_like(flat[fits:])]).view(shard.shape)


register(
    __name__,
    FaultRow("gathered-backwards", "gather joins the shards in reverse order", "test_gather_restores_the_batch", JOIN,
        lambda join, tensors, *args, **kwargs: join(tensors[::-1], *args, **kwargs)),
    FaultRow("given-output-left-alone", "gather ignores out and returns a new tensor",
        "test_sizes_and_outputs_that_are_given", JOIN,
        lambda join, tensors, dim=0, *, out: join(tensors, dim, out.device),
        call("out= only", lambda *_, out=None, **__: out is not None)),
    FaultRow("gradients-to-the-wrong-shard", "shards get the gradients of other shards",
        "test_gradient_returns_through_gather", around(Gather, "backward"),
        lambda backward, context, gradient: backward(context, gradient.flip(context.dim))),
    # As with a loop that ends one step early.
    FaultRow("gather-drops-a-shard", "gather leaves out the last shard", "test_losses_gather_to_a_vector", JOIN,
        lambda join, tensors, dim=0, *args, **kwargs:
            join(tensors[:-1] if len(tensors) > 1 else [tensors[0].narrow(dim, 0, 0)], dim, *args, **kwargs)),
    FaultRow("gathered-elsewhere", "gather puts its result on the first device", "test_gather_restores_the_batch", JOIN,
        lambda join, tensors, dim=0, destination=None, *, out=None:
            join(tensors, dim, 0) if out is None else NotImplemented),
    # As with a shortcut for a single shard that skips the copy.
    FaultRow("single-shard-handed-back", "gather returns a single shard unchanged, on its own device",
        "test_gather_restores_the_batch", GATHER, lambda _, outputs, *__: outputs[0],
        first("a single shard",
            lambda outputs: len(outputs) == 1 and isinstance(outputs[0], Tensor) and outputs[0].dim() > 0)),
    # As with a fast path for dense memory that checks the format only for equal sizes.
    FaultRow("channels-last-taken-for-first", "gather ignores the channels_last format of images",
        "test_every_dtype_and_order", JOIN,
        lambda join, tensors, *args, **kwargs:
            join([tensor.permute(0, 2, 3, 1).reshape(tensor.shape) for tensor in tensors], *args, **kwargs),
        first("channels_last, shards of unequal sizes", _uneven_images), least_gpus=2),
    # As with a buffer of 1 MiB.
    FaultRow("host-buffer-too-small", "gather to the CPU loses the part of a shard beyond 1 MiB", "test_large_batches",
        GATHER, lambda gather, outputs, *args: gather([*outputs[:1], *map(_first_mebibyte, outputs[1:])], *args),
        call("to the CPU, shards above 1 MiB but the first",
            lambda outputs, target, *_:
                str(target) == "cpu" and all(isinstance(output, Tensor) for output in outputs))),
    # The mean of mean losses ignores that the last shard is smaller.
    FaultRow("losses-averaged", "gather returns the mean of numbers", "test_losses_gather_to_a_vector", GATHER,
        lambda _, outputs, target, *__: torch.stack([output.to(target) for output in outputs]).mean(),
        first("numbers, one from each device",
            lambda outputs: all(isinstance(output, Tensor) and output.dim() == 0 for output in outputs))),
)  # fmt: skip


by_hand = caught_by("test_batches_split_by_hand")
covering = caught_by("test_shards_cover_the_batch")
leaves = caught_by("test_leaves_reach_every_device")

Devices = list[Any]


def scattering(function: Callable[..., Any]) -> AbstractContextManager[None]:
    """Plant `function` instead of `comm.scatter`, the basis of all scattering, for calls without given sizes.
    It gets the original without its later arguments, the tensor, the devices and the dim."""

    def scatter(
        real: Any, tensor: Tensor, devices: Any = None, chunk_sizes: Any = None, dim: int = 0, *rest: Any, **named: Any
    ) -> Any:
        # Without devices the caller gives output tensors, and so the sizes.
        if devices is None or chunk_sizes is not None or tensor.dim() == 0:
            return NotImplemented
        return function(lambda x, to, sizes=None: real(x, to, sizes, dim, *rest, **named), tensor, list(devices), dim)

    return around(comm, "scatter")(scatter)


def _touched(shard: Tensor, change: Callable[[Tensor], None]) -> Tensor:
    """Return the shard after `change` on the CPU: a contiguous tensor on the device of the shard."""
    values = plain(shard).clone(memory_format=torch.contiguous_format)
    change(values)
    return values.to(shard.device)


@covering("the second shard starts one sample early, so shards overlap", scattering)
def shards_overlap(scatter: Any, x: Tensor, devices: Devices, dim: int) -> Any:
    samples, size = x.shape[dim], -(-x.shape[dim] // len(devices))
    if len(devices) == 1 or size == 0 or samples <= size:
        return scatter(torch.cat([x, x.narrow(dim, 0, min(1, samples))], dim), devices)
    second = min(size, samples - size)
    pieces = (0, size), (size - 1, second), (size + second, samples - size - second)
    return scatter(torch.cat([x.narrow(dim, *piece) for piece in pieces], dim), devices)


def _reordered(order: Callable[[list[Tensor]], list[Tensor]]) -> Callable[..., Any]:
    """Send shards, with their sizes, to devices in another order."""

    def change(scatter: Any, x: Tensor, devices: Devices, dim: int) -> Any:
        chunks = order(list(x.chunk(len(devices), dim)))
        sizes = [chunk.shape[dim] for chunk in chunks] + [0] * (len(devices) - len(chunks))
        return scatter(torch.cat(chunks, dim), devices, sizes)[: len(chunks)]

    return change


@covering("the last shard stays on the first device", scattering)
def shard_on_the_wrong_device(scatter: Any, x: Tensor, devices: Devices, dim: int) -> Any:
    shards = scatter(x, devices)
    target = devices[0] if len(shards) > 1 else (devices[0] + 1) % torch.cuda.device_count()
    return (*shards[:-1], shards[-1].to(torch.device("cuda", target)))


@covering("the shard of the second device is zero", scattering)
def stale_copy(scatter: Any, x: Tensor, devices: Devices, dim: int) -> Any:
    """As with a broken link between two devices."""
    shards = scatter(x, devices)
    broken = min(1, len(shards) - 1)
    return tuple(torch.zeros_like(shard) if index == broken else shard for index, shard in enumerate(shards))


@covering("along dim 1, the first column of every shard is that of the first shard", scattering,
    call("dim 1 only", lambda x, _, dim: dim == 1 and x.shape[1] > 0))  # fmt: skip
def columns_of_the_first_shard(scatter: Any, x: Tensor, devices: Devices, dim: int) -> Any:
    """As with an offset that is computed for dim 0 only."""
    starts = list(range(0, x.shape[1], -(-x.shape[1] // len(devices))))
    spoiled = x.clone()
    for start in starts[1:] or [x.shape[1] - 1]:
        spoiled.select(1, start).copy_(x.select(1, 0) if start else torch.zeros_like(x.select(1, 0)))
    return scatter(spoiled, devices)


@covering("shards along a negative dim go to the devices in reverse order", scattering,
    call("negative dims, two shards or more", lambda _, __, dim: dim < 0), least_gpus=2)  # fmt: skip
def negative_dims_turn_the_devices(scatter: Any, x: Tensor, devices: Devices, dim: int) -> Any:
    """As if the list of devices were indexed from its end. Gathering the shards still restores the batch."""
    shards = scatter(x, devices)
    backwards = reversed(devices[: len(shards)])
    return tuple(shard.to(torch.device("cuda", index)) for shard, index in zip(shards, backwards, strict=True))


@fault("DataParallel uses its first device only, whose model sees the whole batch", "test_tutorial_shapes",
       by=around(nn.DataParallel, "__init__"), when="in DataParallel, on two devices or more",
       least_gpus=2)  # fmt: skip
def other_devices_left_out(
    init: Any, model: Any, module: nn.Module, device_ids: Any = None, *rest: Any, **named: Any
) -> None:
    """Results are right, but the other devices are idle."""
    every = range(torch.cuda.device_count()) if device_ids is None else device_ids
    init(model, module, list(every)[:1], *rest, **named)


@leaves("numbers and strings reach the first device only",
    both(around(scatter_gather, "scatter"), around(nn.parallel, "scatter")))  # fmt: skip
def leaves_reach_one_device(scatter: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return NotImplemented
    shards = scatter(inputs, *args, **kwargs)
    return [shard if index == 0 and len(shards) > 1 else _without_leaves(shard) for index, shard in enumerate(shards)]


@leaves("numbers and strings in keyword arguments reach the last device as None",
    around(scatter_gather, "scatter_kwargs"), "keyword arguments, the last device only")  # fmt: skip
def last_device_without_keywords(scatter_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
    """Its replica uses the defaults."""
    inputs, named = scatter_kwargs(*args, **kwargs)
    return inputs, (*named[:-1], *map(_without_leaves, named[-1:]))


def _without_leaves(entry: Any) -> Any:
    if isinstance(entry, Tensor):
        return entry
    if isinstance(entry, dict):
        return {key: _without_leaves(value) for key, value in entry.items()}
    if isinstance(entry, tuple) and hasattr(entry, "_fields"):
        return type(entry)(*map(_without_leaves, entry))
    return type(entry)(map(_without_leaves, entry)) if isinstance(entry, (tuple, list)) else None


@large("the last elements of a large shard are zero", scattering, "shards above 1 MiB")
def large_shards_cut(scatter: Any, x: Tensor, devices: Devices, dim: int) -> Any:
    """As with a copy in pieces that forgets the last one."""

    def zero_at_end(values: Tensor) -> None:
        values.view(-1)[-4:] = 0

    shards = scatter(x, devices)
    return tuple(_touched(shard, zero_at_end) if shard.nbytes > LARGE else shard for shard in shards)


@large("shards of 64 KiB to 1 MiB from pinned memory arrive as zeros on the last device", scattering,
    "pinned sources, 64 KiB to 1 MiB, the last device only")  # fmt: skip
def pinned_shard_not_waited_for(scatter: Any, x: Tensor, devices: Devices, dim: int) -> Any:
    """As without a wait for the stream of the copy."""
    *shards, end = scatter(x, devices)
    late = x.device.type == "cpu" and x.is_pinned() and 1 << 16 <= end.nbytes <= LARGE
    return (*shards, torch.zeros_like(end) if late else end)


@any_bits("subnormal numbers arrive as zeros", scattering,
    first("subnormal numbers only", lambda x: x.is_floating_point()))  # fmt: skip
def subnormals_of_shards_flushed(scatter: Any, x: Tensor, devices: Devices, dim: int) -> Any:
    """As on a device that flushes subnormals."""
    subnormal = (x.abs() < torch.finfo(x.dtype).smallest_normal) & (x != 0)
    return scatter(torch.where(subnormal, torch.zeros_like(x), x), devices)


@any_bits("shards go to the devices in ascending order", scattering, "device orders that are not ascending")
def devices_sorted(scatter: Any, x: Tensor, devices: Devices, dim: int) -> Any:
    """With ``device_ids=[1, 0]``, inputs of DataParallel would be on other devices than their replicas."""
    shards = scatter(x, devices)
    if torch.cuda.device_count() == 1:  # with one device there is only one order, so move the shards to the CPU
        return tuple(shard.cpu() for shard in shards)
    return tuple(shard.to(torch.device("cuda", index)) for shard, index in zip(shards, sorted(devices), strict=False))


@fault("a device with a given size of 0 gets one row of the next device", "test_sizes_and_outputs_that_are_given",
       by=around(comm, "scatter"),
       when=call("a size of 0 among the given sizes",
           lambda tensor, devices=None, chunk_sizes=None, *_, **__:
               chunk_sizes is not None and 0 in chunk_sizes))  # fmt: skip
def nothing_is_one_row(scatter: Any, x: Tensor, devices: Any, chunk_sizes: Any, *rest: Any, **named: Any) -> Any:
    """As if sizes were clamped to 1."""
    sizes = list(chunk_sizes)
    at, most = sizes.index(0), sizes.index(max(sizes))
    sizes[at], sizes[most] = 1, sizes[most] - 1
    return scatter(x, devices, sizes, *rest, **named)


@fault("every device gets all labels", "test_inputs_and_labels_stay_aligned", by=around(tutorials, "split_batch"))
def labels_not_split(_: Any, X: Tensor, y: Tensor, devices: Sequence[torch.device]) -> tuple[Any, Any]:
    shards = nn.parallel.scatter(X, devices)
    # With one device all labels would be right, so they stay on their device instead.
    return shards, tuple(y.to(shard.device if len(shards) > 1 else "cpu") for shard in shards)


@by_hand("a batch split by hand loses the remainder", around(tutorials, "split_and_load"))
def remainder_dropped_by_hand(_: Any, X: Tensor, devices: Sequence[torch.device]) -> list[Tensor]:
    size = len(X) // len(devices) if len(devices) > 1 else len(X) - 1
    return [X[index * size : (index + 1) * size].to(device) for index, device in enumerate(devices)]


def _slice_goes_to_a_device(x: Tensor, *args: Any, **_: Any) -> bool:
    goes = bool(args) and isinstance(args[0], torch.device) and args[0].type == "cuda" and x.device.type == "cpu"
    return goes and x.storage_offset() > 0


@by_hand("non-blocking copies to the second device flip a bit", around(Tensor, "to"),
    call("non_blocking copies to the second device", lambda *_, non_blocking=False, **__: non_blocking))  # fmt: skip
def bit_flipped_in_copies_that_do_not_block(to: Any, *args: Any, **kwargs: Any) -> Any:
    def flip_first(values: Tensor) -> None:
        as_bits(values).view(-1)[0] ^= 1

    copy = to(*args, **kwargs)
    second = torch.device("cuda", min(1, torch.cuda.device_count() - 1))
    return _touched(copy, flip_first) if copy.device == second and copy.numel() else copy


register(
    __name__,
    # The first shard goes to the last device that gets a shard, and the last shard to the first device.
    FaultRow("shards-swapped", "two shards are swapped", "test_shards_cover_the_batch", entered,
        lambda: scattering(_reordered(
            lambda chunks: [chunks[-1], *chunks[1:-1], chunks[0]] if len(chunks) > 1 else chunks))),
    FaultRow("columns-of-square-matrices", "columns of square matrices are their rows", "test_every_dtype_and_order",
        scattering, lambda scatter, x, devices, dim: scatter(x.t(), devices),
        When("square matrices, dim=1", lambda scatter, x, devices, dim: dim == 1 and x.shape == (x.shape[0],) * 2)),
    # Replicas there run on empty batches, and the mean of their losses is NaN.
    FaultRow("empty-shards-at-the-end",
        "with fewer samples than devices, the last devices get empty shards instead of no shard",
        "test_shards_have_the_sizes_of_chunk", scattering,
        lambda scatter, x, devices, dim: scatter(x, devices, [1] * x.shape[dim] + [0] * (len(devices) - x.shape[dim])),
        call("fewer samples than devices", lambda x, devices, dim: 0 < x.shape[dim] < len(devices)), least_gpus=2),
    # Ids of samples and tokens then belong to others.
    FaultRow("large-numbers-rounded", "int64 is converted through float32, which rounds large numbers",
        "test_every_dtype_and_order", scattering, lambda scatter, x, devices, dim: scatter(x.float().long(), devices),
        first("int64 beyond 2^24", lambda x: x.dtype == torch.int64)),
    # As if inputs were split before the shuffle and labels after it.
    FaultRow("labels-not-split-alike", "the first device gets its labels in another order than its inputs",
        "test_inputs_and_labels_stay_aligned", around(tutorials, "split_batch"),
        lambda _, X, y, devices: (nn.parallel.scatter(X, devices), nn.parallel.scatter(y.roll(1), devices))),
    # Each device gets the first rows of the batch.
    FaultRow("offset-of-slices-ignored", "a slice is copied to a device from the start of its storage",
        "test_batches_split_by_hand", around(Tensor, "to"),
        lambda to, x, *args, **kwargs: to(x.as_strided(x.shape, x.stride(), 0), *args, **kwargs),
        call("views that start inside their storage", _slice_goes_to_a_device)),
    FaultRow("gradient-of-a-shard-lost", "no gradient comes back from the last shard",
        "test_gradient_returns_through_scatter", around(_functions.Scatter, "backward"),
        lambda backward, context, *gradients: backward(context, *gradients[:-1], torch.zeros_like(gradients[-1]))),
    FaultRow("remainder-dropped", "the remainder is dropped when the batch does not divide by the number of devices",
        "test_shards_cover_the_batch", scattering,
        lambda scatter, x, devices, dim:
            scatter(x.narrow(dim, 0, x.shape[dim] // len(devices) * len(devices)), devices)),
    FaultRow("last-shards-swapped", "the last two of five or more shards are swapped", "test_shards_cover_the_batch",
        entered,
        lambda: scattering(_reordered(
            lambda chunks: [*chunks[:-2], chunks[-1], chunks[-2]] if len(chunks) > 4 else chunks)),
        "5 devices and more", least_gpus=5),
    # As with `torch.tensor_split`. The shards cover the batch, but are not those of torch.
    FaultRow("sizes-evened-out", "shards are as even as can be, 4+3+3 instead of 4+4+2",
        ("test_shards_have_the_sizes_of_chunk", "test_tutorial_shapes"), scattering,
        lambda scatter, x, devices, dim:
            scatter(x, devices, [chunk.shape[dim] for chunk in x.tensor_split(len(devices), dim)])),
    # The last sample of an uneven batch does not affect training.
    FaultRow("gradient-of-single-rows-lost", "no gradient comes back from shards of a single row",
        "test_gradient_returns_through_scatter", around(_functions.Scatter, "backward"),
        lambda backward, context, *gradients:
            backward(context, *(
                torch.zeros_like(gradient) if gradient.shape[context.dim] == 1 else gradient
                for gradient in gradients)),
        "shards of one row"),
)  # fmt: skip
