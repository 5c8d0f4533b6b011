"""Defects of worker processes, collation and pinning."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset, _DatasetKind, dataloader, get_worker_info
from torch.utils.data._utils import collate, fetch, pin_memory, worker

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.suite.common.faults.breaking import around, given, returned
from mgpu_check.suite.common.faults.registry import FaultRow, Planter, caught_by, register
from mgpu_check.suite.common.faults.when import When
from mgpu_check.suite.recipes import loading
from mgpu_check.torch_hooks.patches import replaced

in_order = caught_by("test_workers_keep_the_order")
seeded = caught_by("test_workers_are_seeded_apart")
on_ranks = caught_by("test_loaders_of_ranks_cover_the_dataset")
pinned = caught_by("test_batches_are_pinned")

_MIB = 1 << 20
_ITERATOR = dataloader._MultiProcessingDataLoaderIter


def _worker_arguments(change: Callable[[list[Any]], None]) -> AbstractContextManager[None]:
    """Plant a change of the arguments of a worker: 8 is the base seed, 10 its number, 11 the number of workers."""

    def loop(*args: Any) -> tuple[Any, ...]:
        change(changed := list(args))
        return tuple(changed)

    return given(worker, "_worker_loop")(loop)


def _collating(kind: type) -> Planter:
    """Plant a function that collates samples of a type; it gets the original and the samples."""
    real = collate.default_collate_fn_map[kind]

    def plant(function: Callable[..., Any]) -> AbstractContextManager[None]:
        def collated(batch: Any, **named: Any) -> Any:
            made = function(lambda batch: real(batch, **named), batch)
            return real(batch, **named) if made is NotImplemented else made

        context: Any = mock.patch.dict(collate.default_collate_fn_map, {kind: collated})
        return context  # type: ignore[no-any-return]

    return plant


_IN_WORKERS = When("in workers", lambda *args: get_worker_info() is not None)
_SECOND = When("the second of several workers", lambda *args: (told := get_worker_info()) is not None and told.id == 1)
_LISTS = When("tensors in lists", lambda real, data, device=None: isinstance(data, list))
_LARGE_PINNED = When(
    "above 1 MiB, pinned and non_blocking",
    lambda made, self, *args, **named: (
        bool(named.get("non_blocking")) and made.is_cuda and self.nbytes > _MIB and self.is_pinned()
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
    whole: torch.Tensor = real(batch)
    whole.view(-1)[-4:] = 0
    return whole


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


@seeded("all workers have the seed of the first", _worker_arguments, "two workers or more")
def workers_seeded_alike(args: list[Any]) -> None:
    """All workers draw the same augmentations."""
    args[8] -= args[10]


@seeded("workers have the same seeds in each epoch", _worker_arguments, "epochs after the first")
def workers_seeded_once(args: list[Any]) -> None:
    """Each sample gets the same augmentation in every epoch."""
    args[8] = 1234


@seeded("persistent workers get the same seed in each epoch", given(_DatasetKind, "create_fetcher"),
    When("persistent workers, later epochs", _IN_WORKERS.holds))  # fmt: skip
def persistent_workers_repeat(*args: Any) -> None:
    """Every epoch has the same augmentations."""
    told: Any = get_worker_info()
    torch.manual_seed(told.seed)
    random.seed(told.seed)


class _First:
    """Worker information with the number of the first worker."""

    def __init__(self, told: Any) -> None:
        self.id, self.num_workers = 0, told.num_workers


@pinned("the result of a batch's own pin_memory method is dropped",
    when="classes with a method pin_memory, within another batch")  # fmt: skip
def own_pinning_lost() -> Iterator[None]:
    """The method is called, but the unpinned batch is returned, so its copies block."""
    real, depth = pin_memory.pin_memory, threading.local()

    def changed(data: Any, device: Any = None) -> Any:
        inner = getattr(depth, "value", 0)
        depth.value = inner + 1
        try:
            made = real(data, device)
        finally:
            depth.value = inner
        own = hasattr(data, "pin_memory") and not isinstance(data, torch.Tensor)
        return data if own and inner else made

    with replaced(pin_memory, "pin_memory", changed):
        yield


@pinned("non-blocking copies from pinned memory stop after the first MiB", returned(torch.Tensor, "to"), _LARGE_PINNED)
def large_pinned_copies_cut(made: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    """As if the source were reused before the end of the copy."""
    made = made.clone()
    made.view(-1)[_MIB // made.element_size() :] = 0
    return made


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
        lambda self, wanted: (self, [(one + 1) % len(self.dataset) for one in wanted]), _SECOND),
    # Such as images with their channels moved to the front.
    FaultRow("collated-by-memory", "a worker collates samples by the order of their memory",
        "test_workers_keep_the_order",
        _collating(torch.Tensor), lambda real, batch: real([_by_memory(value) for value in batch]),
        When("worker processes, samples that are dense and not contiguous", _IN_WORKERS.holds)),
    # An iterable dataset split by worker repeats the samples of the first and misses the rest.
    FaultRow("workers-take-themselves-for-the-first", "every worker gets the number of the first",
        "test_streams_are_shared", returned(loading, "get_worker_info"), lambda told: told and _First(told),
        "two workers or more, of an iterable dataset"),
    # The right dtype is float64, and a label may need all its digits.
    FaultRow("floats-collated-in-float32", "Python's floats are collated in float32", "test_batches_are_pinned",
        _collating(float), lambda real, batch: torch.tensor(batch, dtype=torch.float32).double(),
        "Python's floats only"),
    # Their copies block, but deliver the right data.
    FaultRow("lists-not-pinned", "tensors in lists are not pinned", "test_batches_are_pinned",
        around(pin_memory, "pin_memory"), lambda real, data, *_: data, _LISTS),
    # As with ``drop_last``, but not requested.
    FaultRow("last-batch-of-a-stream-dropped", "the incomplete last batch of an iterable dataset is dropped",
        "test_streams_are_shared", around(fetch._IterableDatasetFetcher, "__init__"),
        lambda real, *args: real(*args[:-1], True), "last batches of iterable datasets"),
)  # fmt: skip
