"""Load data for several ranks by hand: partitions, streams shared by ranks and workers, and resumable samplers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, get_worker_info


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

    All ranks must pass the same seed. Sizes are rounded down; the last part gets the rest.
    """
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
    counts = [int(size * len(order)) for size in sizes[:-1]]
    bounds = [0, *itertools.accumulate(counts), len(order)]
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
        """Resume from a state."""
        self.set_epoch(state["epoch"])
        self.start = state["start"]
