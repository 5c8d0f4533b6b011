"""Defects of samplers: `DistributedSampler`, `BatchSampler`, and the length of a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    WeightedRandomSampler,
)

from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced

Change = Callable[[Any, list[int]], list[int]]


def _sampler_changed(change: Change) -> Any:
    """Replace the share of each rank in `DistributedSampler`."""
    real = DistributedSampler.__iter__
    return replaced(DistributedSampler, "__iter__", lambda self: iter(change(self, list(real(self)))))


@fault(
    "DistributedSampler does not pad, so the last ranks have one sample fewer",
    "test_sampler_covers_the_dataset",
    condition="lengths that do not divide by the ranks",
)
def padding_left_out() -> Iterator[None]:
    """In a loop with collectives, the first ranks would wait forever."""

    def change(self: Any, share: list[int]) -> list[int]:
        short = not self.drop_last and self.rank >= (len(self.dataset) % self.num_replicas or self.num_replicas)
        return share[:-1] if short else share

    with _sampler_changed(change):
        yield


@fault(
    "padding repeats one sample for all ranks that need one",
    "test_sampler_covers_the_dataset",
    condition="two samples of padding or more, with three ranks",
)
def padding_of_one_sample() -> Iterator[None]:
    """An evaluation counts that sample too often."""

    def change(self: Any, share: list[int]) -> list[int]:
        padded = not self.drop_last and 0 < len(self.dataset) % self.num_replicas <= self.rank
        if not padded:
            return share
        whole = next(iter(torch.randperm(len(self.dataset), generator=_of(self)).tolist())) if self.shuffle else 0
        return [*share[:-1], whole]

    with _sampler_changed(change):
        yield


def _of(sampler: Any) -> torch.Generator:
    return torch.Generator().manual_seed(sampler.seed + sampler.epoch)


@fault(
    "drop_last drops samples even if the length is divisible by the ranks",
    "test_sampler_covers_the_dataset",
    condition="drop_last, and lengths that divide by the ranks",
)
def tail_dropped_where_it_divides() -> Iterator[None]:
    """Each rank has one sample too few."""

    def change(self: Any, share: list[int]) -> list[int]:
        return share[:-1] if self.drop_last and len(self.dataset) % self.num_replicas == 0 else share

    with _sampler_changed(change):
        yield


@fault(
    "the last rank gets the samples of the previous rank",
    "test_sampler_covers_the_dataset",
    condition="worlds of 5 ranks and more",
)
def last_rank_like_the_one_before() -> Iterator[None]:
    """As if the number of ranks had a fixed limit."""
    real = DistributedSampler.__init__

    def changed(self: Any, dataset: Any, num_replicas: Any = None, rank: Any = None, *rest: Any, **named: Any) -> None:
        real(self, dataset, num_replicas, rank, *rest, **named)
        if self.num_replicas >= 5 and self.rank == self.num_replicas - 1:
            self.rank -= 1

    with replaced(DistributedSampler, "__init__", changed):
        yield


@fault(
    "ranks get contiguous blocks of the dataset instead of interleaved samples",
    "test_sampler_covers_the_dataset",
    condition="not shuffled",
)
def blocks_in_place_of_turns() -> Iterator[None]:
    """Code that interleaves gathered results gets a wrong order."""

    def change(self: Any, share: list[int]) -> list[int]:
        if self.shuffle or not len(self.dataset):
            return share
        start = self.rank * self.num_samples
        return [place % len(self.dataset) for place in range(start, start + self.num_samples)]

    with _sampler_changed(change):
        yield


@fault(
    "set_epoch is ignored after the second epoch",
    "test_sampler_shuffles_by_seed_and_epoch",
    condition="epochs after the second",
)
def later_epochs_ignored() -> Iterator[None]:
    """The first two epochs are right."""

    def set_epoch(self: Any, epoch: int) -> None:
        self.epoch = min(epoch, 1)

    with replaced(DistributedSampler, "set_epoch", set_epoch):
        yield


@fault(
    "samplers shuffle by torch's global generator, which differs between ranks",
    "test_samplers_know_their_rank",
    condition="shuffled",
)
def shuffled_by_the_global_generator() -> Iterator[None]:
    """Shares overlap, and samples are missing."""

    def change(self: Any, share: list[int]) -> list[int]:
        if not self.shuffle or not share:
            return share
        order = torch.randperm(len(self.dataset)).tolist()
        return [order[(self.rank + self.num_replicas * place) % len(order)] for place in range(len(share))]

    with _sampler_changed(change):
        yield


@fault("samplers draw a number from torch's global generator", "test_sampler_shuffles_by_seed_and_epoch")
def global_generator_moved_on() -> Iterator[None]:
    """The shares are right, but dropout and augmentations depend on the number of iterators."""

    def change(self: Any, share: list[int]) -> list[int]:
        torch.rand(1)
        return share

    with _sampler_changed(change):
        yield


@fault("a sampler shuffles by rotating the dataset", "test_every_order_is_as_likely", condition="shuffled")
def rotated_in_place_of_shuffled() -> Iterator[None]:
    """Neighbours stay neighbours in each epoch."""
    real = torch.randperm

    def rotated(n: int, *args: Any, **named: Any) -> torch.Tensor:
        order = real(n, *args, **named)
        return (order[0] + torch.arange(n)) % n if n else order

    with replaced(torch, "randperm", rotated):
        yield


@fault(
    "in one epoch of four, the last sample stays last", "test_every_order_is_as_likely", condition="one epoch in four"
)
def last_sample_stays_behind() -> Iterator[None]:
    """As if the shuffle sometimes skipped its last step."""

    def change(self: Any, share: list[int]) -> list[int]:
        if self.shuffle and self.epoch % 4 == 3 and self.num_replicas == 1:
            return [one for one in share if one != len(share) - 1] + [len(share) - 1] * bool(share)
        return share

    with _sampler_changed(change):
        yield


@fault(
    "a sampler without num_replicas counts the GPUs of the machine, not the ranks",
    "test_samplers_know_their_rank",
    condition="worlds smaller than the number of GPUs",
)
def devices_counted_for_ranks() -> Iterator[None]:
    """Samples of GPUs without a rank are missing."""
    # A single GPU has a rank, so count at least two.
    with _world_counted(lambda world: max(torch.cuda.device_count(), world, 2)):
        yield


@contextmanager
def _world_counted(count: Callable[[int], int]) -> Iterator[None]:
    """Make `DistributedSampler` without num_replicas use ``count(world size)``."""
    real = DistributedSampler.__init__

    def changed(self: Any, dataset: Any, num_replicas: Any = None, rank: Any = None, *rest: Any, **named: Any) -> None:
        if num_replicas is None and dist.is_initialized():
            num_replicas = count(dist.get_world_size())
        real(self, dataset, num_replicas, rank, *rest, **named)

    with replaced(DistributedSampler, "__init__", changed):
        yield


@fault(
    "with two ranks or more, a sampler without num_replicas counts the GPUs of the machine",
    "test_samplers_know_their_rank",
    condition="worlds of two ranks and more that are smaller than the number of GPUs",
    least_gpus=3,
)
def devices_counted_for_several_ranks() -> Iterator[None]:
    """Jobs on one GPU and on all GPUs are right; a job on some of them misses samples."""
    with _world_counted(lambda world: 1 if world == 1 else max(torch.cuda.device_count(), world)):
        yield


@fault(
    "batches drop repeated samples of a sampler",
    "test_batch_samplers_cut_in_batches",
    condition="samplers with repeated samples, such as those with replacement",
)
def repeated_samples_left_out() -> Iterator[None]:
    """Oversampled rare classes become rare again."""
    real = BatchSampler.__iter__

    def changed(self: Any) -> Iterator[list[int]]:
        # The index of every sample of an iterable dataset is None.
        return (batch if None in batch else list(dict.fromkeys(batch)) for batch in real(self))

    with replaced(BatchSampler, "__iter__", changed):
        yield


@fault(
    "a last batch of one sample is left out",
    "test_batch_samplers_cut_in_batches",
    condition="last batches of one sample",
)
def last_batch_of_one_left_out() -> Iterator[None]:
    """As in programs where BatchNorm needs two samples."""
    real = BatchSampler.__iter__

    def changed(self: Any) -> Iterator[list[int]]:
        return (batch for batch in real(self) if len(batch) > 1 or self.batch_size == 1)

    with replaced(BatchSampler, "__iter__", changed):
        yield


@fault("batch samplers yield the same list object for every batch", "test_batch_samplers_cut_in_batches")
def one_list_for_all_batches() -> Iterator[None]:
    """Batches kept in a list all become the last one."""
    real = BatchSampler.__iter__

    def changed(self: Any) -> Iterator[list[int]]:
        held: list[int] = []
        for batch in real(self):
            held[:] = batch
            yield held

    with replaced(BatchSampler, "__iter__", changed):
        yield


@fault(
    "len of a loader does not count an incomplete last batch",
    "test_last_batches_are_loaded",
    condition="shares not divisible by the batch size",
)
def len_without_the_last_batch() -> Iterator[None]:
    """A learning-rate schedule based on it ends too early."""
    real = DataLoader.__len__

    def changed(self: Any) -> int:
        full = len(self.sampler) // self.batch_size if self.batch_size else real(self)
        return full if not self.drop_last else real(self)

    with replaced(DataLoader, "__len__", changed):
        yield


@fault(
    "a sampler with a generator draws the same order in each epoch",
    "test_samplers_draw_from_their_generator",
    condition="a generator is given",
)
def generator_begins_anew() -> Iterator[None]:
    """Samples come in one order for the whole training."""
    real = RandomSampler.__iter__

    def order(self: Any) -> Iterator[int]:
        if self.generator is not None:
            self.generator.manual_seed(self.generator.initial_seed())
        return real(self)

    with replaced(RandomSampler, "__iter__", order):
        yield


@fault(
    "WeightedRandomSampler ignores its generator",
    "test_samplers_draw_from_their_generator",
    condition="a generator is given",
)
def weights_drawn_globally() -> Iterator[None]:
    """Ranks draw different samples than with their generator."""
    real = WeightedRandomSampler.__init__

    def init(self: Any, weights: Any, num_samples: int, replacement: bool = True, generator: Any = None) -> None:
        real(self, weights, num_samples, replacement)

    with replaced(WeightedRandomSampler, "__init__", init):
        yield


@fault("set_epoch has no effect", "test_samplers_draw_from_their_generator", condition="drop_last")
def epochs_alike_with_a_dropped_tail() -> Iterator[None]:
    """Every epoch has the order of the first."""
    real = DistributedSampler.set_epoch

    def set_epoch(self: Any, epoch: int) -> None:
        real(self, 0 if self.drop_last else epoch)

    with replaced(DistributedSampler, "set_epoch", set_epoch):
        yield
