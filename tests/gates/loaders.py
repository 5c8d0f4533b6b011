"""Loaders as people make them for several ranks, and what tests of the gate for loaders assert."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from mgpu_check import Rank, assert_loader_covers
from tests.gates.steps import raised_by


def numbers(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(n), torch.arange(n) * 0.5)


def sampled(
    rank: Rank, n: int = 24, *, set_epoch: bool = True, seed: int = 0, batch: int = 2, epochs: int = 2, **options: Any
) -> Iterator[DataLoader[Any]]:
    """A loader for each epoch, by torch's own sampler."""
    data = numbers(n)
    options = {"shuffle": True, **options}
    sampler: DistributedSampler[Any] = DistributedSampler(data, rank.size, rank.index, seed=seed, **options)
    loader: DataLoader[Any] = DataLoader(data, batch_size=batch, sampler=sampler)
    for epoch in range(epochs):
        if set_epoch:
            sampler.set_epoch(epoch)
        yield loader


def plain(rank: Rank) -> DataLoader[Any]:
    return DataLoader(numbers(24), batch_size=2)


refuted = functools.partial(raised_by, assert_loader_covers)
