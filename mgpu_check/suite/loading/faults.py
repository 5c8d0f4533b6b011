"""Defects of splits of datasets, of samplers, and of loaders and their workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    DistributedSampler,
    Subset,
    dataloader,
)
from torch.utils.data._utils import fetch, pin_memory

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.suite.common.faults.planting import around, both, given, returned
from mgpu_check.suite.common.faults.registry import FaultRow, When, caught_by, fault, register
from mgpu_check.suite.recipes import tutorials

register(
    __name__,
    # One rank validates on samples that another rank trains on.
    FaultRow("split-by-the-global-generator",
        "random_split ignores its generator, so ranks split the dataset differently", "test_datasets_are_divided",
        both(around(torch, "randperm"), around("torch.utils.data.dataset", "randperm")),
        lambda real, n, *args, generator=None, **named: real(n, *args, **named)),
    # Each part is a prefix of the dataset.
    FaultRow("part-forgets-its-indices", "samples of a part are indexed in the whole dataset",
        "test_datasets_are_divided", around(Subset, "__getitem__"), lambda real, self, index: self.dataset[index],
        "parts that were divided by random_split"),
    # The last batch before the checkpoint is trained on twice.
    FaultRow("resumed-a-batch-too-early", "a resumed loader starts one batch too early", "test_epochs_are_resumed",
        given(tutorials.ResumableSampler, "load_state_dict"),
        lambda self, state: (self, {**state, "start": max(0, state["start"] - 2)}),
        "resumed after the first batch or later"),
)  # fmt: skip


sampler_covers = caught_by("test_sampler_covers_the_dataset")
rank_known = caught_by("test_samplers_know_their_rank")


def _share(change: Callable[[Any, list[int]], list[int]]) -> AbstractContextManager[None]:
    """Plant a change of the share of each rank in `DistributedSampler`; it gets the sampler and the share."""

    def iterated(share: Iterator[int], self: Any) -> Iterator[int]:
        indices = list(share)
        changed = change(self, indices)
        return iter(indices if changed is NotImplemented else changed)

    return returned(DistributedSampler, "__iter__")(iterated)


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


@sampler_covers("padding repeats one sample for all ranks that need one", _share, _PADDED_TWICE)
def padding_of_one_sample(sampler: Any, share: list[int]) -> list[int]:
    """An evaluation counts that sample too often."""
    generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
    order = torch.randperm(len(sampler.dataset), generator=generator).tolist() if sampler.shuffle else [0]
    return [*share[:-1], order[0]]


@fault("samplers draw a number from torch's global generator", "test_sampler_shuffles_by_seed_and_epoch", by=_share)
def global_generator_moved_on(sampler: Any, share: list[int]) -> list[int]:
    """The shares are right, but dropout and augmentations depend on the number of iterators."""
    torch.rand(1)
    return share


@rank_known("samplers shuffle by torch's global generator, which differs between ranks", _share, _SHUFFLED)
def shuffled_by_the_global_generator(sampler: Any, share: list[int]) -> list[int]:
    """Shares overlap, and samples are missing."""
    order = torch.randperm(len(sampler.dataset)).tolist()
    return [order[(sampler.rank + sampler.num_replicas * position) % len(order)] for position in range(len(share))]


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
    FaultRow("epochs-alike-with-a-dropped-tail", "set_epoch has no effect", "test_sampler_shuffles_by_seed_and_epoch",
        given(DistributedSampler, "set_epoch"), lambda self, *_: (self, 0),
        When("drop_last", lambda self, epoch: self.drop_last)),
    # Samples of GPUs without a rank are missing.
    FaultRow("devices-counted-for-ranks", "a sampler without num_replicas counts the GPUs of the machine, not the "
            "ranks", "test_samplers_know_their_rank", _default_world,
        lambda world: max(torch.cuda.device_count(), world, 2), "worlds smaller than the number of GPUs"),
    # Jobs on one GPU and on all GPUs are right; a job on some of them misses samples.
    FaultRow("devices-counted-for-several-ranks",
        "with two ranks or more, a sampler without num_replicas counts the GPUs of the machine",
        "test_samplers_know_their_rank", _default_world,
        lambda world: 1 if world == 1 else max(torch.cuda.device_count(), world),
        "worlds of two ranks and more that are smaller than the number of GPUs", least_gpus=3),
    # As if the number of ranks had a fixed limit.
    FaultRow("last-rank-like-the-one-before", "the last rank gets the samples of the previous rank",
        "test_sampler_covers_the_dataset", returned(DistributedSampler, "__init__"),
        lambda result, self, *_, **__: setattr(self, "rank", self.rank - 1), When("worlds of 5 ranks and more",
            lambda result, self, *args, **named: self.num_replicas >= 5 and self.rank == self.num_replicas - 1)),
    # Code that interleaves gathered results gets a wrong order.
    FaultRow("blocks-in-place-of-turns", "ranks get contiguous blocks of the dataset instead of interleaved samples",
        "test_sampler_covers_the_dataset", _share,
        lambda sampler, share: [(sampler.rank * sampler.num_samples + place) % len(sampler.dataset)
            for place in range(sampler.num_samples)],
        When("not shuffled", lambda sampler, share: not sampler.shuffle and len(share) > 0)),
)  # fmt: skip


on_ranks = caught_by("test_loaders_of_ranks_cover_the_dataset")
pinned = caught_by("test_batches_are_pinned")

_MIB = 1 << 20
_ITERATOR = dataloader._MultiProcessingDataLoaderIter


_LARGE_PINNED = When(
    "above 1 MiB, pinned and non_blocking",
    lambda result, self, *args, **named: (
        bool(named.get("non_blocking")) and result.is_cuda and self.nbytes > _MIB and self.is_pinned()
    ),
)


def _is_sent_by_the_last(self: torch.Tensor, *args: Any, **named: Any) -> bool:
    rank = current_rank()
    return bool(named.get("non_blocking")) and rank is not None and rank.index == rank.size - 1


@on_ranks("with persistent workers, every epoch starts with the first batch of the first epoch",
    when="epochs after the first, persistent workers")  # fmt: skip
def stale_first_batch() -> Iterator[None]:
    """As if a batch was sent to the workers before set_epoch, and kept."""

    def reset(self: Any, *args: Any, **named: Any) -> None:
        self._asked = 0

    def next_index(index: Any, self: Any) -> Any:
        self._asked += 1
        if self._asked > 1:
            return index
        self._first_of_all = getattr(self, "_first_of_all", index)
        return self._first_of_all

    with given(_ITERATOR, "_reset")(reset), returned(_ITERATOR, "_next_index")(next_index):
        yield


@on_ranks("batches of the last rank are copied to the first GPU", given(torch.Tensor, "to"),
    When("the last rank only", _is_sent_by_the_last))  # fmt: skip
def batches_of_the_last_rank_elsewhere(self: torch.Tensor, *args: Any, **named: Any) -> tuple[Any, ...]:
    """As if `set_device` were called too late."""
    rank = current_rank()
    # In a world of one the first GPU is right, so use the CPU.
    return self, torch.device("cuda", 0) if rank and rank.index else torch.device("cpu")


@pinned("non-blocking copies from pinned memory stop after the first MiB", returned(torch.Tensor, "to"), _LARGE_PINNED)
def large_pinned_copies_cut(result: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    """As if the source were reused before the end of the copy."""
    result = result.clone()
    result.view(-1)[_MIB // result.element_size() :] = 0
    return result


register(
    __name__,
    # An iterable dataset split by worker repeats the samples of the first and misses the rest.
    FaultRow("workers-take-themselves-for-the-first", "every worker gets the number of the first",
        "test_streams_are_shared", returned(tutorials, "get_worker_info"),
        lambda info: info and SimpleNamespace(id=0, num_workers=info.num_workers),
        "two workers or more, of an iterable dataset"),
    # Their copies block, but deliver the right data.
    FaultRow("lists-not-pinned", "tensors in lists are not pinned", "test_batches_are_pinned",
        around(pin_memory, "pin_memory"), lambda real, data, *_: data,
        When("tensors in lists", lambda real, data, device=None: isinstance(data, list))),
    # As with ``drop_last``, but not requested.
    FaultRow("last-batch-of-a-stream-dropped", "the incomplete last batch of an iterable dataset is dropped",
        "test_streams_are_shared", around(fetch._IterableDatasetFetcher, "__init__"),
        lambda real, *args: real(*args[:-1], True), "last batches of iterable datasets"),
)  # fmt: skip
