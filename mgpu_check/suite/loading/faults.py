"""Defects of splits of datasets, of samplers, and of loaders and their workers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._utils import ExceptionWrapper
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
    _DatasetKind,
    dataloader,
    get_worker_info,
)
from torch.utils.data._utils import collate, fetch, pin_memory, worker

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.suite.common.faults.planting import around, both, given, returned
from mgpu_check.suite.common.faults.registry import FaultRow, Planter, When, caught_by, fault, register
from mgpu_check.suite.recipes import tutorials
from mgpu_check.torch_hooks.patches import replaced


@fault("a sampler does not draw from its restored generator", "test_epochs_are_resumed",
       by=around(RandomSampler, "__iter__"), when="after a checkpoint")  # fmt: skip
def restored_generator_ignored(real: Any, self: Any) -> Iterator[int]:
    """A resumed epoch has another order: some samples are repeated and others are missing."""
    restored, self.generator = self.generator, torch.Generator().manual_seed(int(torch.rand(()) * 1e6))
    try:
        yield from list(real(self))
    finally:
        self.generator = restored


register(
    __name__,
    # One rank validates on samples that another rank trains on.
    FaultRow("split-by-the-global-generator",
        "random_split ignores its generator, so ranks split the dataset differently", "test_datasets_are_divided",
        both(around(torch, "randperm"), around("torch.utils.data.dataset", "randperm")),
        lambda real, n, *args, generator=None, **named: real(n, *args, **named)),
    # As with a bisection from the wrong side.
    FaultRow("seam-off-by-one", "ConcatDataset returns the previous sample for the first sample of a later part",
        "test_datasets_are_divided", given(ConcatDataset, "__getitem__"), lambda self, index: (self, index - 1),
        When("first samples of later parts", lambda self, index: index > 0 and index in self.cumulative_sizes[:-1])),
    # Each part is a prefix of the dataset.
    FaultRow("part-forgets-its-indices", "samples of a part are indexed in the whole dataset",
        "test_datasets_are_divided", around(Subset, "__getitem__"), lambda real, self, index: self.dataset[index],
        "parts that were divided by random_split"),
    # Single samples are right.
    FaultRow("inner-parts-skipped", "batches of a nested Subset ignore the inner Subset", "test_datasets_are_divided",
        around(Subset, "__getitems__"),
        lambda real, self, places: [self.dataset.dataset[self.indices[index]] for index in places],
        When("Subset of a Subset, batches", lambda real, self, places: isinstance(self.dataset, Subset))),
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


@fault("batch samplers yield the same list object for every batch", "test_batch_samplers_cut_in_batches", by=_batches)
def one_list_for_all_batches(sampler: Any, batches: Iterator[list[int]]) -> Iterator[list[int]]:
    """Batches kept in a list all become the last one."""
    shared_list: list[int] = []
    for batch in batches:
        shared_list[:] = batch
        yield shared_list


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
            "ranks", "test_samplers_know_their_rank", _default_world,
        lambda world: max(torch.cuda.device_count(), world, 2), "worlds smaller than the number of GPUs"),
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
        lambda self: self.generator.manual_seed(self.generator.initial_seed()),
        When("a generator is given", lambda self: self.generator is not None)),
    # Ranks draw different samples than with their generator.
    FaultRow("weights-drawn-globally", "WeightedRandomSampler ignores its generator",
        "test_samplers_draw_from_their_generator", around(WeightedRandomSampler, "__init__"),
        lambda real, self, weights, num_samples, replacement=True, generator=None:
            real(self, weights, num_samples, replacement), "a generator is given"),
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
    # As if the shuffle sometimes skipped its last step.
    FaultRow("last-sample-stays-behind", "in one epoch of four, the last sample stays last",
        "test_every_order_is_as_likely", _share,
        lambda sampler, share: [*(index for index in share if index != len(share) - 1), len(share) - 1],
        When("one epoch in four",
            lambda sampler, share: sampler.shuffle and sampler.epoch % 4 == 3 and sampler.num_replicas == 1 and share)),
    # A learning-rate schedule based on it ends too early.
    FaultRow("len-without-the-last-batch", "len of a loader does not count an incomplete last batch",
        "test_last_batches_are_loaded", around(DataLoader, "__len__"),
        lambda real, self: len(self.sampler) // self.batch_size,
        When("shares not divisible by the batch size", lambda real, self: self.batch_size and not self.drop_last)),
)  # fmt: skip


in_order = caught_by("test_workers_keep_the_order")
seeded = caught_by("test_workers_are_seeded_apart")
on_ranks = caught_by("test_loaders_of_ranks_cover_the_dataset")
pinned = caught_by("test_batches_are_pinned")

_MIB = 1 << 20
_ITERATOR = dataloader._MultiProcessingDataLoaderIter


_WORKER_LOOP = given(worker, "_worker_loop")  # of its arguments 8 is the base seed, and 10 the number of the worker


def _collating(sample_type: type) -> Planter:
    """Plant a function that collates samples of a type; it gets the original and the samples."""
    real = collate.default_collate_fn_map[sample_type]

    def plant(function: Callable[..., Any]) -> AbstractContextManager[None]:
        def collated(batch: Any, **named: Any) -> Any:
            result = function(lambda batch: real(batch, **named), batch)
            return real(batch, **named) if result is NotImplemented else result

        context: Any = mock.patch.dict(collate.default_collate_fn_map, {sample_type: collated})
        return context  # type: ignore[no-any-return]

    return plant


_IN_WORKERS = When("in workers", lambda *args: get_worker_info() is not None)
_LARGE_PINNED = When(
    "above 1 MiB, pinned and non_blocking",
    lambda result, self, *args, **named: (
        bool(named.get("non_blocking")) and result.is_cuda and self.nbytes > _MIB and self.is_pinned()
    ),
)
_LOOKUP = When(
    "IndexError and KeyError of worker processes",
    lambda self, data, *rest: isinstance(data, ExceptionWrapper) and issubclass(data.exc_type, LookupError),
)


def _is_sent_by_the_last(self: torch.Tensor, *args: Any, **named: Any) -> bool:
    rank = current_rank()
    return bool(named.get("non_blocking")) and rank is not None and rank.index == rank.size - 1


@in_order("a LookupError of a worker ends the epoch silently", given(_ITERATOR, "_process_data"), _LOOKUP)
def lookup_errors_end_the_epoch(self: Any, data: Any, *rest: Any) -> None:
    """The model trains only on the samples before it."""
    raise StopIteration


@in_order("batches above 1 MiB from workers end with zero bytes", _collating(torch.Tensor),
    When("above 1 MiB", lambda real, batch: sum(value.nbytes for value in batch) > _MIB) & _IN_WORKERS)  # fmt: skip
def large_batches_of_workers_cut(real: Any, batch: Any) -> torch.Tensor:
    """As if shared memory were a page too small."""
    collated: torch.Tensor = real(batch)
    collated.view(-1)[-4:] = 0
    return collated


def _by_memory(value: torch.Tensor) -> torch.Tensor:
    dense = value.nbytes == value.untyped_storage().nbytes()
    return value.as_strided((value.numel(),), (1,), 0).view(value.shape) if dense else value


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


@seeded("persistent workers get the same seed in each epoch", given(_DatasetKind, "create_fetcher"),
    When("persistent workers, later epochs", _IN_WORKERS.holds))  # fmt: skip
def persistent_workers_repeat(*args: Any) -> None:
    """Every epoch has the same augmentations."""
    info: Any = get_worker_info()
    torch.manual_seed(info.seed)
    random.seed(info.seed)


@pinned("the result of a batch's own pin_memory method is dropped",
    when="classes with a method pin_memory, within another batch")  # fmt: skip
def own_pinning_lost() -> Iterator[None]:
    """The method is called, but the unpinned batch is returned, so its copies block."""
    real, depth = pin_memory.pin_memory, threading.local()

    def changed(data: Any, device: Any = None) -> Any:
        inner = getattr(depth, "value", 0)
        depth.value = inner + 1
        try:
            result = real(data, device)
        finally:
            depth.value = inner
        own = hasattr(data, "pin_memory") and not isinstance(data, torch.Tensor)
        return data if own and inner else result

    with replaced(pin_memory, "pin_memory", changed):
        yield


@pinned("non-blocking copies from pinned memory stop after the first MiB", returned(torch.Tensor, "to"), _LARGE_PINNED)
def large_pinned_copies_cut(result: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    """As if the source were reused before the end of the copy."""
    result = result.clone()
    result.view(-1)[_MIB // result.element_size() :] = 0
    return result


register(
    __name__,
    FaultRow("chain-ends-early", "a chain of datasets lacks the last sample", "test_options_of_loaders",
        around("torch.utils.data:ChainDataset", "__iter__"), lambda real, self: iter(list(real(self))[:-1])),
    FaultRow("length-of-streams-rounded-up", "len of a loader counts the batch of a stream that it drops",
        "test_options_of_loaders", around("torch.utils.data:DataLoader", "__len__"),
        lambda real, self: -(-len(self.dataset) // self.batch_size),
        When("streams with a length, drop_last", lambda real, self: isinstance(self.dataset, IterableDataset))),
    # As if one process used an offset into the dataset.
    FaultRow("second-worker-off-by-one", "the second worker loads the next samples instead of the requested ones",
        "test_workers_keep_the_order", given(fetch._MapDatasetFetcher, "fetch"),
        lambda self, wanted: (self, [(index + 1) % len(self.dataset) for index in wanted]),
        When("the second of several workers", lambda *args: (info := get_worker_info()) is not None and info.id == 1)),
    # Such as images with their channels moved to the front.
    FaultRow("collated-by-memory", "a worker collates samples by the order of their memory",
        "test_workers_keep_the_order",
        _collating(torch.Tensor), lambda real, batch: real([_by_memory(value) for value in batch]),
        When("worker processes, samples that are dense and not contiguous", _IN_WORKERS.holds)),
    # An iterable dataset split by worker repeats the samples of the first and misses the rest.
    FaultRow("workers-take-themselves-for-the-first", "every worker gets the number of the first",
        "test_streams_are_shared", returned(tutorials, "get_worker_info"),
        lambda info: info and SimpleNamespace(id=0, num_workers=info.num_workers),
        "two workers or more, of an iterable dataset"),
    # The right dtype is float64, and a label may need all its digits.
    FaultRow("floats-collated-in-float32", "Python's floats are collated in float32", "test_batches_are_pinned",
        _collating(float), lambda real, batch: torch.tensor(batch, dtype=torch.float32).double(),
        "Python's floats only"),
    # Their copies block, but deliver the right data.
    FaultRow("lists-not-pinned", "tensors in lists are not pinned", "test_batches_are_pinned",
        around(pin_memory, "pin_memory"), lambda real, data, *_: data,
        When("tensors in lists", lambda real, data, device=None: isinstance(data, list))),
    # As with ``drop_last``, but not requested.
    FaultRow("last-batch-of-a-stream-dropped", "the incomplete last batch of an iterable dataset is dropped",
        "test_streams_are_shared", around(fetch._IterableDatasetFetcher, "__init__"),
        lambda real, *args: real(*args[:-1], True), "last batches of iterable datasets"),
    # All workers draw the same augmentations.
    FaultRow("workers-seeded-alike", "all workers have the seed of the first", "test_workers_are_seeded_apart",
        _WORKER_LOOP, lambda *args: (*args[:8], args[8] - args[10], *args[9:]), "two workers or more"),
    # Each sample gets the same augmentation in every epoch.
    FaultRow("workers-seeded-once", "workers have the same seeds in each epoch", "test_workers_are_seeded_apart",
        _WORKER_LOOP, lambda *args: (*args[:8], 1234, *args[9:]), "epochs after the first"),
)  # fmt: skip
