"""Check batches that are split over devices by hand, as tutorials do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mgpu_check.asserts.scatter import Device, assert_gathered, assert_shards_cover
from mgpu_check.errors import ShardError
from mgpu_check.suite.recipes import batches
from mgpu_check.torch_hooks.tensors import plain


def assert_split_aligned(
    inputs: torch.Tensor,
    labels: torch.Tensor,
    split: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    devices: Sequence[Device],
) -> None:
    """Assert that `inputs` and `labels`, (n, …) each, were split equally: input k and label k are in one shard."""
    first, second = split
    if len(first) != len(second):
        raise ShardError(f"inputs are in {len(first)} shards, labels in {len(second)}")
    for index, (some, other) in enumerate(zip(first, second, strict=True)):
        if len(some) != len(other):
            raise ShardError(
                f"shard {index}, on {some.device}: {len(some)} inputs, but {len(other)} labels", ranks=(index,)
            )
        if some.device != other.device:
            raise ShardError(
                f"shard {index}: its inputs are on {some.device}, its labels on {other.device}", ranks=(index,)
            )
    assert_shards_cover({"inputs": inputs, "labels": labels}, [
        {"inputs": some, "labels": other} for some, other in zip(first, second, strict=True)
    ], devices)  # fmt: skip


def assert_split_by_hand(way: str, batch: torch.Tensor, devices: Sequence[torch.device]) -> None:
    """Assert that a batch, (n, …), that is split by hand is on `devices` in parts, and equals the batch when collected.

    Args:
        way: "slices", "chunks" or "every n-th row"; see `mgpu_check.suite.recipes.batches`.
    """
    if way == "every n-th row":
        shards = batches.deal(batch, devices)
        order = [row for index in range(len(devices)) for row in range(index, len(batch), len(devices))]
        assert_shards_cover(plain(batch)[order], shards, devices)
        assert_gathered(batch, batches.collect_dealt(shards, devices[0]), devices[0])
        return
    shards = (batches.split_and_load if way == "slices" else batches.chunk_and_load)(batch, devices)
    assert_shards_cover(batch, shards, devices)
    assert_gathered(batch, batches.collect(shards, devices[0]), devices[0])
