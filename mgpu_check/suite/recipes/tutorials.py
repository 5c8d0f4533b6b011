"""Data parallelism by hand, as in tutorials: choose devices, split a batch over them, and load data for several ranks.

Data are loaded by partitions, by streams that ranks and workers share, and by resumable samplers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, get_worker_info


def try_gpu(i: int = 0) -> torch.device:
    """Return GPU number `i` if it exists, else the CPU.

    Raises:
        ValueError: `i` is negative.
    """
    if i < 0:
        raise ValueError(f"try_gpu: i={i} is not valid; devices are counted from 0")
    if i < torch.cuda.device_count():
        return torch.device("cuda", i)
    return torch.device("cpu")


def try_all_gpus() -> list[torch.device]:
    """Return all GPUs in order; without GPUs, the CPU."""
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]


def split_batch(
    X: torch.Tensor, y: torch.Tensor, devices: Sequence[torch.device]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Split inputs `X` and labels `y`, both (n, …), along the first dimension: one shard of each per device.

    Raises:
        ValueError: `X` and `y` have different numbers of samples.
    """
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


class Partition(Dataset[Any]):
    """The samples of `data` at `indices`, as a dataset."""

    def __init__(self, data: Dataset[Any], indices: Sequence[int]) -> None:
        self.data = data
        self.indices = list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.data[self.indices[index]]


def partitions(data: Any, sizes: Sequence[float], seed: int) -> list[Partition]:
    """Divide a dataset at random into one part for each of `sizes`, which are fractions with the sum 1.
    All ranks must pass the same seed. Sizes are rounded down; the last part gets the rest."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
    bounds = [0, *itertools.accumulate([int(size * len(order)) for size in sizes[:-1]]), len(order)]
    return [Partition(data, order[start:stop]) for start, stop in itertools.pairwise(bounds)]


class SharedStream(IterableDataset[Any]):
    """A stream of samples: each worker of each rank takes every (ranks * workers)-th sample."""

    def __init__(self, data: Any, rank: int, world_size: int) -> None:
        self.data = data
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, own = (1, 0) if worker is None else (worker.num_workers, worker.id)
        step = self.world_size * workers
        for index in range(self.rank * workers + own, len(self.data), step):
            yield self.data[index]


class ResumableSampler(DistributedSampler[Any]):
    """A `DistributedSampler` that can resume in the middle of an epoch, after the samples recorded in a checkpoint."""

    start = 0

    def __iter__(self) -> Iterator[Any]:
        order = itertools.islice(super().__iter__(), self.start, None)
        self.start = 0
        return order

    def __len__(self) -> int:
        return super().__len__() - self.start

    def state_dict(self, consumed: int) -> dict[str, int]:
        """Return the state after `consumed` samples of this epoch on this rank."""
        return {"epoch": self.epoch, "start": consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.set_epoch(state["epoch"])
        self.start = state["start"]
