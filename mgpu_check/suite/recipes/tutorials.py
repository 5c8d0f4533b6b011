"""Data parallelism by hand, as in tutorials: split a batch over devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def split_batch(
    X: torch.Tensor, y: torch.Tensor, devices: Sequence[torch.device]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Split inputs `X` and labels `y`, both (n, …), along the first dimension: one shard of each per device."""
    if len(X) != len(y):
        raise ValueError(f"split_batch: X has {len(X)} samples, but y has {len(y)}; give one label for each input")
    return nn.parallel.scatter(X, devices), nn.parallel.scatter(y, devices)


def split_and_load(X: torch.Tensor, devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Split `X`, (n, …), without `nn.parallel`: one slice per device; the first n % len(devices) have one more sample.
    Unlike `torch.chunk`, this returns a shard for every device; with fewer samples than devices, the last are empty."""
    size, rest = divmod(len(X), len(devices))
    shards, start = [], 0
    for index, device in enumerate(devices):
        stop = start + size + (index < rest)
        shards.append(X[start:stop].to(device, non_blocking=True))
        start = stop
    return shards


def collect(shards: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Concatenate the shards, (n_i, …) on a device each, into one tensor, (sum of n_i, …), on `device`."""
    return torch.cat([shard.to(device) for shard in shards])
