"""Check scatter and gather, and batches that are split over devices by hand, as tutorials do.

Autograd must return the gradient to the source of the values. Some checks take a drawn split. Others have many cases:
containers, arbitrary bits, large batches, given sizes, and given tensors.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import comm

from mgpu_check.asserts import collectives
from mgpu_check.errors import ShardError
from mgpu_check.oracles.agreement import difference
from mgpu_check.oracles.generated_data import counted
from mgpu_check.oracles.tensors import COMPLEX_DTYPES, DTYPES, KINDS, PINNED, Leaf, Nested, Split, TensorSpec
from mgpu_check.oracles.training import models
from mgpu_check.suite.recipes import tutorials


def assert_split_aligned(
    inputs: torch.Tensor,
    labels: torch.Tensor,
    split: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    devices: Sequence[collectives.Device],
) -> None:
    """Assert that `inputs` and `labels`, (n, …) each, were split equally: input k and label k are in one shard."""
    input_shards, label_shards = split
    if len(input_shards) != len(label_shards):
        raise ShardError(f"inputs are in {len(input_shards)} shards, labels in {len(label_shards)}")
    shards = [{"inputs": x, "labels": y} for x, y in zip(input_shards, label_shards, strict=True)]
    for index, (x, y) in enumerate(zip(input_shards, label_shards, strict=True)):
        if len(x) != len(y):
            text = f"shard {index}, on {x.device}: {len(x)} inputs, but {len(y)} labels"
            raise ShardError(text, ranks=(index,))
        if x.device != y.device:
            text = f"shard {index}: its inputs are on {x.device}, its labels on {y.device}"
            raise ShardError(text, ranks=(index,))
    collectives.assert_shards_cover({"inputs": inputs, "labels": labels}, shards, devices)


def assert_scalars_stacked(
    values: Sequence[float], devices: Sequence[torch.device], target: torch.device | str
) -> None:
    """Assert that gathering a scalar of each device, such as a loss, gives an ordered vector, and each its gradient."""
    losses = [
        torch.tensor(value, device=device, requires_grad=True) for value, device in zip(values, devices, strict=True)
    ]
    with _torchs_own_warnings():
        got = nn.parallel.gather(losses, target)  # type: ignore[arg-type]  # as above
    expected = torch.tensor(list(values), device="cpu")
    if got.device != torch.device(target) or not collectives.same_bits(expected, got):
        shown = f"{got.tolist()} on {got.device}"
        raise ShardError(f"gathered scalars: expected {expected.tolist()} on {target}, got {shown}")
    factors = torch.arange(1.0, len(losses) + 1, device="cpu")
    with _torchs_own_warnings():
        (got * factors.to(got.device)).sum().backward()
    for index, (loss, factor) in enumerate(zip(losses, factors, strict=True)):
        _require(f"gathered scalars: number {index}", loss, factor, index)


@contextmanager
def _torchs_own_warnings() -> Iterator[None]:
    """Ignore torch's warnings about its own code: scatter's backward uses -1 for the CPU, and gather stacks scalars."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using -1 to represent CPU tensor", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Was asked to gather along dimension 0")
        yield


def _require(label: str, leaf: torch.Tensor, expected: torch.Tensor, index: int) -> None:
    gradient = leaf.grad
    if gradient is None:
        text = "there is no gradient"
    elif gradient.device != leaf.device:
        text = f"its gradient is on {gradient.device}"
    elif off := difference(gradient, expected, "bits"):
        text = f"its gradient is wrong: {off}"
    else:
        return
    raise ShardError(f"{label}, on {leaf.device}: {text}", ranks=(index,))


def _assert_restored(
    batch: Any, devices: Sequence[torch.device], dim: int = 0, targets: Sequence[torch.device | str] = ()
) -> None:
    """Assert that the shards of a batch cover it, and that gathering them on each of `targets` gives the batch.
    Without `targets`, it is the last of `devices`."""
    shards = nn.parallel.scatter(batch, devices, dim)
    collectives.assert_shards_cover(batch, shards, devices, dim)
    for target in targets or devices[-1:]:
        # The annotation of gather lacks the string "cpu", which it supports and requires.
        collectives.assert_gathered(batch, nn.parallel.gather(shards, target, dim), target)  # type: ignore[arg-type]


def assert_scattered(gpus: Sequence[torch.device], split: Split) -> None:
    """Assert that the shards of `nn.parallel.scatter` cover the batch; see `assert_shards_cover`."""
    batch, devices = split.build(), split.on(gpus)
    collectives.assert_shards_cover(batch, nn.parallel.scatter(batch, devices, split.dim), devices, split.dim)


def assert_sizes_of_chunk(gpus: Sequence[torch.device], split: Split) -> None:
    """Assert that the shards have the sizes of `torch.chunk`; see `assert_shard_sizes`."""
    devices = split.on(gpus)
    shards = nn.parallel.scatter(split.build(), devices, split.dim)
    collectives.assert_shard_sizes(shards, collectives.chunk_sizes(split.size, split.devices), devices, split.dim)


def assert_leaves_everywhere(gpus: Sequence[torch.device], split: Split) -> None:
    """Assert that positional and keyword arguments without tensors reach all devices: `assert_leaves_replicated`."""
    args, kwargs = (split.build(), "train"), {"again": split.build(), "scale": 0.5}
    devices = split.on(gpus)
    shards = zip(*nn.parallel.scatter_gather.scatter_kwargs(args, kwargs, devices, split.dim), strict=True)
    collectives.assert_leaves_replicated((args, kwargs), list(shards), devices)


def assert_sizes_of_tutorial(devices: Sequence[torch.device], size: int, features: int, sizes: Sequence[int]) -> None:
    """Assert that the replicas of the tutorial's model see shards of these sizes, which cover the batch. The batch and
    the output have `size` samples."""
    batch = TensorSpec((size, features)).build()
    shards, output = models.inputs_seen(batch, devices)
    collectives.assert_shard_sizes(shards, sizes, devices)
    collectives.assert_shards_cover(batch, shards, devices)
    collectives.assert_shard_sizes([output], [size], devices)


def assert_gather_restores(gpus: Sequence[torch.device], split: Split) -> None:
    """Assert that gathering the shards gives the batch on the target; see `assert_gathered`."""
    batch = split.build()
    shards = nn.parallel.scatter(batch, split.on(gpus), split.dim)
    collectives.assert_gathered(batch, nn.parallel.gather(shards, split.target, split.dim), split.target)  # type: ignore[arg-type]


def assert_labels_aligned(gpus: Sequence[torch.device], inputs: Split, seed: int) -> None:
    """Assert that `split_batch` puts each input and its label in one shard; see `assert_split_aligned`."""
    devices, X, y = inputs.on(gpus), inputs.build(), TensorSpec((inputs.size,), "int64", seed=seed).build()
    assert_split_aligned(X, y, tutorials.split_batch(X, y, devices), devices)


def assert_dealt_by_hand(gpus: Sequence[torch.device], split: Split) -> None:
    """Assert that a batch that is split by hand is on the devices in parts, and equals the batch when collected."""
    batch, devices = split.build(), split.on(gpus)
    shards = tutorials.split_and_load(batch, devices)
    collectives.assert_shards_cover(batch, shards, devices)
    collectives.assert_gathered(batch, tutorials.collect(shards, devices[0]), devices[0])


def assert_gradient_scattered(
    gpus: Sequence[torch.device], split: Split, seed: int, used_shards: Collection[int] | None
) -> None:
    """Assert that the gradient of sum(batch · weights), computed from shards, is the weights, on the device of `batch`.

    The weights come from `seed`. The gradient is a copy of them, so it is compared bit for bit. The loss uses
    `used_shards`, modulo their number (None: all); others get zero gradients.
    """
    weights, devices, dim = split.tensor.like("contiguous", seed=seed).build(), split.on(gpus), split.dim
    leaf = split.build().detach().clone().requires_grad_()
    shards = nn.parallel.scatter(leaf, devices, dim)
    shard_weights = weights.split([shard.shape[dim] for shard in shards], dim)
    chosen = {i % len(shards) for i in (range(len(shards)) if used_shards is None else used_shards)}
    terms = [(shards[i] * shard_weights[i].to(shards[i].device)).sum().to(devices[0]) for i in sorted(chosen)]
    expected = torch.cat(
        [weight if i in chosen else torch.zeros_like(weight) for i, weight in enumerate(shard_weights)], dim
    )
    with _torchs_own_warnings():
        torch.stack(terms).sum().backward()
    _require("scatter", leaf, expected, 0)


def assert_gradient_gathered(gpus: Sequence[torch.device], split: Split) -> None:
    """Assert that each shard gets its part of the gradient of the gathered tensor, on its own device.
    Shards of ones are gathered on the target, multiplied by the batch as weights, and summed."""
    weights, devices, dim = split.tensor.build(), split.on(gpus), split.dim
    shard_weights = weights.split(collectives.chunk_sizes(weights.shape[dim], len(devices)), dim)
    shards = [
        torch.ones_like(weight, device=device).requires_grad_()
        for weight, device in zip(shard_weights, devices, strict=False)
    ]
    gathered = nn.parallel.gather(shards, split.target, dim)  # type: ignore[arg-type]  # it needs the string "cpu"
    with _torchs_own_warnings():
        (gathered * weights.to(gathered.device)).sum().backward()
    for index, (shard, weight) in enumerate(zip(shards, shard_weights, strict=True)):
        _require(f"gather: shard {index}", shard, weight, index)


_SIZES = ((1 << 16) - 16, 1 << 16, (1 << 16) + 16, (1 << 20) - 16, 1 << 20, (1 << 20) + 16, (1 << 22) + 16)
"""Bytes of a shard: below, at and above 64 KiB and 1 MiB, where copies and kernels change their method, and above 4
MiB."""

_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64)


def assert_containers(devices: Sequence[torch.device]) -> None:
    """Assert that scatter and gather support every container, and every container in every other.

    Scattered batches also have leaves that are not tensors. Gather supports tensors only, and matches the entries of
    dicts by key.
    """
    size = 2 * len(devices) + 1
    specs = [
        TensorSpec((size, 2), dtype, seed=seed) for seed, dtype in enumerate(("float32", "int64", "bool", "float32"))
    ]
    for outer, inner in itertools.product(KINDS, (None, *KINDS)):
        spec = Nested(outer, (specs[0], specs[1] if inner is None else Nested(inner, (specs[2], specs[3]))))
        _assert_restored(spec.build(), devices)
        leaves = Nested(outer, (spec, Leaf("train"))).build()
        collectives.assert_shards_cover(leaves, nn.parallel.scatter(leaves, devices), devices)
    # Replicas may fill their dicts in different orders; gather must match keys, and keep the order of the first dict.
    named = {"a": specs[0].build(), "b": specs[3].build()}
    shards = enumerate(nn.parallel.scatter(named, devices))
    turned = [dict(sorted(shard.items(), reverse=bool(number % 2))) for number, shard in shards]
    collectives.assert_gathered(named, nn.parallel.gather(turned, devices[-1]), devices[-1])


def assert_any_bits(devices: Sequence[torch.device], seed: int) -> None:
    """Assert that shards keep the bits of the batch in every dtype: all kinds of NaN, subnormals, the largest numbers.

    Covers dims 0 and 1, sources on the CPU, in pinned memory and on a device, and devices in ascending, descending and
    rotated order. Square matrices are split along both dims. Images in channels_last are split into unequal shards too.
    """
    orders = [list(devices), list(reversed(devices)), [*devices[1:], devices[0]]]
    sources = ("cpu", PINNED, str(devices[-1]))
    for number, (dtype, dim, source) in enumerate(itertools.product((*DTYPES, *COMPLEX_DTYPES), (0, 1), sources)):
        shape = (3 * len(devices) - 1, 16) if dim == 0 else (16, 3 * len(devices) - 1)
        batch = TensorSpec(shape, dtype, seed=seed + number, values="bits").build(source)
        chosen = orders[(number + number // len(sources)) % len(orders)]
        _assert_restored(batch, chosen, dim, chosen[:1])
    for chosen, dim in itertools.product(orders, (0, 1)):
        _assert_restored(_filled((3 * len(devices) - 1,) * 2, torch.float16, seed + dim), chosen, dim)
    for chosen in orders:
        images = _filled((3 * len(devices) - 1, 3, 2, 4), torch.float32, seed)
        _assert_restored(images.to(memory_format=torch.channels_last), chosen)


def _filled(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor on the CPU whose elements have pseudorandom bits, so that different places differ."""
    elements = torch.Size(shape).numel()
    words = counted((elements * dtype.itemsize // 8 + 1,), seed, torch.device("cpu"))
    return words.view(dtype)[:elements].view(tuple(shape))


def assert_large_batches(devices: Sequence[torch.device], seed: int) -> None:
    """Assert that large batches are scattered and gathered bit for bit, along rows and columns.
    They come from the CPU, from pinned memory and from a device, and are gathered on a device and on the CPU."""
    ways = list(itertools.product(("the CPU", "pinned memory", "a device"), (0, 1)))
    backwards = tuple(reversed(devices))
    for number, size in enumerate(_SIZES * 2):
        # Give each way sizes below and above 1 MiB.
        source, dim = ways[(number + number // len(_SIZES) * 3) % len(ways)]
        dtype = _DTYPES[(number + seed) % len(_DTYPES)]
        elements = size // dtype.itemsize
        # With several shards, the last one is smaller than the others.
        rows, columns = 16 * len(devices) - 1, elements // 16
        batch = _filled((rows, columns) if dim == 0 else (columns, rows), dtype, seed + number)
        if source == "pinned memory":
            batch = batch.pin_memory()
        elif source == "a device":
            batch = batch.to(devices[number % len(devices)])
        chosen = devices if number % 2 else backwards
        _assert_restored(batch, chosen, dim, (devices[(number + seed) % len(devices)], "cpu"))


def assert_given_sizes(devices: Sequence[torch.device], sizes: list[int], seed: int) -> None:
    """Assert that `comm.scatter` splits into given sizes, and that `comm.scatter` and `comm.gather` fill given tensors.

    Covers dims 0, 1 and -1, devices in both orders, and output tensors that hold other values before. `sizes` are those
    of the shards of the first ``len(sizes)`` devices, in order; some may be 0.
    """
    for dim, dtype, ascending in itertools.product((0, 1, -1), (torch.float32, torch.uint8), (True, False)):
        chosen = list(devices[: len(sizes)] if ascending else reversed(devices[: len(sizes)]))
        shape = [2, 3, 4]
        shape[dim] = sum(sizes)
        batch = _filled(shape, dtype, seed)
        got = comm.scatter(batch, chosen, sizes, dim)
        label = f"comm.scatter in sizes {sizes} along dim {dim}"
        if [shard.shape[dim] for shard in got] != sizes:
            raise ShardError(f"{label}: got sizes {[shard.shape[dim] for shard in got]}")
        collectives.assert_shards_cover(batch, got, chosen, dim)
        out = [torch.full_like(shard, 7) for shard in got]
        pairs = enumerate(zip(comm.scatter(batch, dim=dim, out=out), out, strict=True))
        mismatches = [index for index, (result, output) in pairs if result is not output]
        if mismatches:
            raise ShardError(f"{label}: the given output tensor {mismatches[0]} was not returned", ranks=mismatches)
        collectives.assert_shards_cover(batch, out, chosen, dim)
        gathered = torch.full_like(batch, 7, device=chosen[0])
        comm.gather(out, dim, out=gathered)
        collectives.assert_gathered(batch, gathered, chosen[0])
        collectives.assert_gathered(batch, comm.gather(out, dim, destination="cpu"), "cpu")
