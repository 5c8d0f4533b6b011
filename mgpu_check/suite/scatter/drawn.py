"""Check scatter and gather of one drawn split."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from mgpu_check.asserts.scatter import (
    assert_gathered,
    assert_leaves_replicated,
    assert_shard_sizes,
    assert_shards_cover,
    chunk_sizes,
)
from mgpu_check.suite.common.tensors import TensorSpec
from mgpu_check.suite.recipes import batches, tutorial
from mgpu_check.suite.scatter.by_hand import assert_split_aligned, assert_split_by_hand
from mgpu_check.suite.scatter.cases import Split
from mgpu_check.suite.scatter.gradients import assert_gather_differentiable, assert_scatter_differentiable

WAYS = ("slices", "chunks", "every n-th row")


def assert_scattered(gpus: Sequence[torch.device], split: Split) -> None:
    """Assert that the shards of `nn.parallel.scatter` cover the batch; see `assert_shards_cover`."""
    batch, devices = split.build(), split.on(gpus)
    assert_shards_cover(batch, nn.parallel.scatter(batch, devices, split.dim), devices, split.dim)


def assert_sizes_of_chunk(gpus: Sequence[torch.device], split: Split) -> None:
    """Assert that the shards have the sizes of `torch.chunk`; see `assert_shard_sizes`."""
    devices = split.on(gpus)
    shards = nn.parallel.scatter(split.build(), devices, split.dim)
    assert_shard_sizes(shards, chunk_sizes(split.size, split.devices), devices, split.dim)


def assert_leaves_everywhere(gpus: Sequence[torch.device], split: Split) -> None:
    """Assert that positional and keyword arguments without tensors reach all devices: `assert_leaves_replicated`."""
    args, kwargs = (split.build(), "train"), {"again": split.build(), "scale": 0.5}
    devices = split.on(gpus)
    shards = zip(*nn.parallel.scatter_gather.scatter_kwargs(args, kwargs, devices, split.dim), strict=True)
    assert_leaves_replicated((args, kwargs), list(shards), devices)


def assert_sizes_of_tutorial(devices: Sequence[torch.device], size: int, features: int, sizes: Sequence[int]) -> None:
    """Assert that the replicas of the tutorial's model see shards of these sizes, which cover the batch.

    Args:
        size: number of samples of the batch, which is also that of the output.
    """
    batch = TensorSpec((size, features)).build()
    shards, output = tutorial.inputs_seen(batch, devices)
    assert_shard_sizes(shards, sizes, devices)
    assert_shards_cover(batch, shards, devices)
    assert_shard_sizes([output], [size], devices)


def assert_gather_restores(gpus: Sequence[torch.device], split: Split) -> None:
    """Assert that gathering the shards gives the batch on the target; see `assert_gathered`."""
    batch = split.build()
    shards = nn.parallel.scatter(batch, split.on(gpus), split.dim)
    # The annotation of `gather` lacks the string "cpu", which it accepts and needs.
    assert_gathered(batch, nn.parallel.gather(shards, split.target, split.dim), split.target)  # type: ignore[arg-type]


def assert_labels_aligned(gpus: Sequence[torch.device], inputs: Split, seed: int) -> None:
    """Assert that `split_batch` puts each input and its label in one shard; see `assert_split_aligned`."""
    devices, X, y = inputs.on(gpus), inputs.build(), TensorSpec((inputs.size,), "int64", seed=seed).build()
    assert_split_aligned(X, y, batches.split_batch(X, y, devices), devices)


def assert_dealt_by_hand(gpus: Sequence[torch.device], split: Split) -> None:
    """Assert what `assert_split_by_hand` asserts, for each way to split by hand."""
    batch, devices = split.build(), split.on(gpus)
    for way in WAYS:
        assert_split_by_hand(way, batch, devices)


def assert_gradient_scattered(
    gpus: Sequence[torch.device], split: Split, seed: int, used: Collection[int] | None
) -> None:
    """Assert that the gradient of the shards returns to the batch; see `assert_scatter_differentiable`.

    Args:
        split: the batch, a single tensor, and the devices that get its shards.
        seed: makes the weights of the loss sum(batch · weights).
        used: the shards that the loss uses, modulo their number; None for all. The others get zero gradients.

    Raises:
        ShardError: naming the element of the gradient, with the expected and the actual value.
        TypeError: the batch is not a single tensor.
    """
    weights = split.tensor.like("contiguous", seed=seed).build()
    assert_scatter_differentiable(split.build(), weights, split.on(gpus), split.dim, used)


def assert_gradient_gathered(gpus: Sequence[torch.device], split: Split) -> None:
    """Assert that the gradient of the gathered batch returns to the shards; see `assert_gather_differentiable`."""
    assert_gather_differentiable(split.tensor.build(), split.on(gpus), split.target, split.dim)
