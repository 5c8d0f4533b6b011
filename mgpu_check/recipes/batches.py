"""Spreading a batch over devices by hand, as tutorials teach it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["chunk_and_load", "collect", "collect_dealt", "deal", "split_and_load", "split_batch"]


def split_batch(
    X: torch.Tensor, y: torch.Tensor, devices: Sequence[torch.device]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Split inputs `X` and labels `y`, both (n, …), along their first dimension: a shard of each per device.

    Raises:
        ValueError: `X` and `y` have different numbers of samples.
    """
    if len(X) != len(y):
        raise ValueError(f"split_batch: X has {len(X)} samples, but y has {len(y)}; give one label for each input")
    return nn.parallel.scatter(X, devices), nn.parallel.scatter(y, devices)


def split_and_load(X: torch.Tensor, devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Split `X`, (n, …), without `nn.parallel`: a slice for each device, the first n % len(devices) one sample longer.

    Other than `torch.chunk`, this gives every device a shard; with fewer samples than devices the last are empty.
    """
    size, rest = divmod(len(X), len(devices))
    shards, start = [], 0
    for index, device in enumerate(devices):
        stop = start + size + (index < rest)
        shards.append(X[start:stop].to(device))
        start = stop
    return shards


def collect(shards: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Collect the shards, (n_i, …) each on its own device, in one tensor, (sum of n_i, …), on `device`."""
    return torch.cat([shard.to(device) for shard in shards])


def chunk_and_load(X: torch.Tensor, devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Split `X`, (n, …), by `torch.chunk`, and send it by copies that do not block: the last devices may get nothing."""
    return [part.to(device, non_blocking=True) for part, device in zip(X.chunk(len(devices)), devices, strict=False)]


def deal(X: torch.Tensor, devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Deal `X`, (n, …), out like cards: device i gets the rows i, i + len(devices), and so on."""
    return [X[index :: len(devices)].to(device) for index, device in enumerate(devices)]


def collect_dealt(shards: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Collect what was dealt out, in the order that it had before."""
    whole = torch.empty(sum(map(len, shards)), *shards[0].shape[1:], dtype=shards[0].dtype, device=device)
    for index, shard in enumerate(shards):
        whole[index :: len(shards)] = shard.to(device)
    return whole
