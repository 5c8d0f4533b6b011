"""Defects of samplers: `DistributedSampler`, `BatchSampler`, and the length of a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler

from mgpu_check.suite.common.faults.breaking import around, given, returned
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, fault, register
from mgpu_check.suite.common.faults.when import When

sampler_covers = caught_by("test_sampler_covers_the_dataset")
rank_known = caught_by("test_samplers_know_their_rank")
last_batches = caught_by("test_last_batches_are_loaded")


def _share(change: Callable[[Any, list[int]], list[int]]) -> AbstractContextManager[None]:
    """Plant a change of the share of each rank in `DistributedSampler`; it gets the sampler and the share."""

    def iterated(share: Iterator[int], self: Any) -> Iterator[int]:
        whole = list(share)
        made = change(self, whole)
        return iter(whole if made is NotImplemented else made)

    return returned(DistributedSampler, "__iter__")(iterated)


def _batches(change: Callable[[Any, Iterator[list[int]]], Iterator[list[int]]]) -> AbstractContextManager[None]:
    """Plant a change of the batches of `BatchSampler`; it gets the sampler and the batches."""
    return returned(BatchSampler, "__iter__")(lambda batches, self: change(self, batches))


def _default_world(count: Callable[[int], int]) -> AbstractContextManager[None]:
    """Make `DistributedSampler` without num_replicas use ``count(world size)``."""

    def init(self: Any, dataset: Any, num_replicas: Any = None, *rest: Any, **named: Any) -> Any:
        if num_replicas is None and dist.is_initialized():
            num_replicas = count(dist.get_world_size())
        return self, dataset, num_replicas

    return given(DistributedSampler, "__init__")(init)


def _remainder(sampler: Any) -> int:
    return 0 if sampler.drop_last else len(sampler.dataset) % sampler.num_replicas


_PADDED = When(
    "lengths that do not divide by the ranks", lambda sampler, share: 0 < _remainder(sampler) <= sampler.rank
)
_PADDED_TWICE = When("two samples of padding or more, with three ranks", _PADDED.holds)
_SHUFFLED = When("shuffled", lambda sampler, share: sampler.shuffle and len(share) > 0)
_IN_ORDER = When("not shuffled", lambda sampler, share: not sampler.shuffle and len(share) > 0)
_FOURTH = When(
    "one epoch in four",
    lambda sampler, share: sampler.shuffle and sampler.epoch % 4 == 3 and sampler.num_replicas == 1 and len(share) > 0,
)
_LAST_OF_FIVE = When(
    "worlds of 5 ranks and more",
    lambda result, self, *args, **named: self.num_replicas >= 5 and self.rank == self.num_replicas - 1,
)
_GIVEN = When("a generator is given", lambda self: self.generator is not None)


@sampler_covers("padding repeats one sample for all ranks that need one", _share, _PADDED_TWICE)
def padding_of_one_sample(sampler: Any, share: list[int]) -> list[int]:
    """An evaluation counts that sample too often."""
    generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
    order = torch.randperm(len(sampler.dataset), generator=generator).tolist() if sampler.shuffle else [0]
    return [*share[:-1], order[0]]


@sampler_covers("the last rank gets the samples of the previous rank", returned(DistributedSampler, "__init__"),
    _LAST_OF_FIVE)  # fmt: skip
def last_rank_like_the_one_before(result: None, self: Any, *args: Any, **named: Any) -> None:
    """As if the number of ranks had a fixed limit."""
    self.rank -= 1


@sampler_covers("ranks get contiguous blocks of the dataset instead of interleaved samples", _share, _IN_ORDER)
def blocks_in_place_of_turns(sampler: Any, share: list[int]) -> list[int]:
    """Code that interleaves gathered results gets a wrong order."""
    start = sampler.rank * sampler.num_samples
    return [place % len(sampler.dataset) for place in range(start, start + sampler.num_samples)]


@fault("samplers draw a number from torch's global generator", "test_sampler_shuffles_by_seed_and_epoch", by=_share)
def global_generator_moved_on(sampler: Any, share: list[int]) -> list[int]:
    """The shares are right, but dropout and augmentations depend on the number of iterators."""
    torch.rand(1)
    return share


@fault("in one epoch of four, the last sample stays last", "test_every_order_is_as_likely", by=_share, when=_FOURTH)
def last_sample_stays_behind(sampler: Any, share: list[int]) -> list[int]:
    """As if the shuffle sometimes skipped its last step."""
    last = len(share) - 1
    return [*(one for one in share if one != last), last]


@rank_known("samplers shuffle by torch's global generator, which differs between ranks", _share, _SHUFFLED)
def shuffled_by_the_global_generator(sampler: Any, share: list[int]) -> list[int]:
    """Shares overlap, and samples are missing."""
    order = torch.randperm(len(sampler.dataset)).tolist()
    return [order[(sampler.rank + sampler.num_replicas * place) % len(order)] for place in range(len(share))]


@fault("batch samplers yield the same list object for every batch", "test_batch_samplers_cut_in_batches", by=_batches)
def one_list_for_all_batches(sampler: Any, batches: Iterator[list[int]]) -> Iterator[list[int]]:
    """Batches kept in a list all become the last one."""
    held: list[int] = []
    for batch in batches:
        held[:] = batch
        yield held


@last_batches(
    "len of a loader does not count an incomplete last batch",
    around(DataLoader, "__len__"),
    When("shares not divisible by the batch size", lambda real, self: self.batch_size and not self.drop_last),
)
def len_without_the_last_batch(real: Any, self: Any) -> int:
    """A learning-rate schedule based on it ends too early."""
    full: int = len(self.sampler) // self.batch_size
    return full


register(
    __name__,
    # In a loop with collectives, the first ranks would wait forever.
    FaultRow("padding-left-out", "DistributedSampler does not pad, so the last ranks have one sample fewer",
        "test_sampler_covers_the_dataset", _share, lambda sampler, share: share[:-1], _PADDED),
    # Each rank has one sample too few.
    FaultRow("tail-dropped-where-it-divides", "drop_last drops samples even if the length is divisible by the ranks",
        "test_sampler_covers_the_dataset", _share, lambda sampler, share: share[:-1],
        When("drop_last, and lengths that divide by the ranks",
            lambda sampler, share: sampler.drop_last and len(sampler.dataset) % sampler.num_replicas == 0)),
    # The first two epochs are right.
    FaultRow("later-epochs-ignored", "set_epoch is ignored after the second epoch",
        "test_sampler_shuffles_by_seed_and_epoch", given(DistributedSampler, "set_epoch"), lambda self, *_: (self, 1),
        When("epochs after the second", lambda self, epoch: epoch > 1)),
    # Every epoch has the order of the first.
    FaultRow("epochs-alike-with-a-dropped-tail", "set_epoch has no effect", "test_samplers_draw_from_their_generator",
        given(DistributedSampler, "set_epoch"), lambda self, *_: (self, 0),
        When("drop_last", lambda self, epoch: self.drop_last)),
    # Neighbours stay neighbours in each epoch.
    FaultRow("rotated-in-place-of-shuffled", "a sampler shuffles by rotating the dataset",
        "test_every_order_is_as_likely", returned(torch, "randperm"),
        lambda order, n, *_, **__: (order[0] + torch.arange(n)) % n if n else order, "shuffled"),
    # Samples of GPUs without a rank are missing.
    FaultRow("devices-counted-for-ranks", "a sampler without num_replicas counts the GPUs of the machine, not the "
                                          "ranks",
        "test_samplers_know_their_rank", _default_world, lambda world: max(torch.cuda.device_count(), world, 2),
        "worlds smaller than the number of GPUs"),
    # Jobs on one GPU and on all GPUs are right; a job on some of them misses samples.
    FaultRow("devices-counted-for-several-ranks",
        "with two ranks or more, a sampler without num_replicas counts the GPUs of the machine",
        "test_samplers_know_their_rank", _default_world,
        lambda world: 1 if world == 1 else max(torch.cuda.device_count(), world),
        "worlds of two ranks and more that are smaller than the number of GPUs", least_gpus=3),
    # Oversampled rare classes become rare again.
    FaultRow("repeated-samples-left-out", "batches drop repeated samples of a sampler",
        "test_batch_samplers_cut_in_batches", _batches,
        lambda sampler, batches: (batch if None in batch else list(dict.fromkeys(batch)) for batch in batches),
        "samplers with repeated samples, such as those with replacement"),
    # As in programs where BatchNorm needs two samples.
    FaultRow("last-batch-of-one-left-out", "a last batch of one sample is left out",
        "test_batch_samplers_cut_in_batches",
        _batches, lambda sampler, batches: (batch for batch in batches if len(batch) > 1 or sampler.batch_size == 1),
        "last batches of one sample"),
    # Samples come in one order for the whole training.
    FaultRow("generator-begins-anew", "a sampler with a generator draws the same order in each epoch",
        "test_samplers_draw_from_their_generator", given(RandomSampler, "__iter__"),
        lambda self: self.generator.manual_seed(self.generator.initial_seed()), _GIVEN),
    # Ranks draw different samples than with their generator.
    FaultRow("weights-drawn-globally", "WeightedRandomSampler ignores its generator",
        "test_samplers_draw_from_their_generator", around(WeightedRandomSampler, "__init__"),
        lambda real, self, weights, num_samples, replacement=True, generator=None:
            real(self, weights, num_samples, replacement), "a generator is given"),
)  # fmt: skip
