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
        shards.append(X[start:stop].to(device))
        start = stop
    return shards


def collect(shards: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Concatenate the shards, (n_i, …) on a device each, into one tensor, (sum of n_i, …), on `device`."""
    return torch.cat([shard.to(device) for shard in shards])


def chunk_and_load(X: torch.Tensor, devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Split `X`, (n, …), by `torch.chunk`, and copy without blocking. The last devices may get no shard."""
    return [chunk.to(device, non_blocking=True) for chunk, device in zip(X.chunk(len(devices)), devices, strict=False)]


def deal(X: torch.Tensor, devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Split `X`, (n, …), in round-robin order: device i gets the rows i, i + len(devices), and so on."""
    return [X[index :: len(devices)].to(device) for index, device in enumerate(devices)]


def collect_dealt(shards: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Collect the shards of `deal` on `device`, in the original order."""
    collected = torch.empty(sum(map(len, shards)), *shards[0].shape[1:], dtype=shards[0].dtype, device=device)
    for index, shard in enumerate(shards):
        collected[index :: len(shards)] = shard.to(device)
    return collected
