"""Defects of worker processes, collation and pinning."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import (
    _DatasetKind,
    dataloader,
    get_worker_info,
)
from torch.utils.data._utils import collate, fetch, pin_memory, worker

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.suite.recipes import loading
from mgpu_check.torch_hooks.patches import replaced


@fault(
    "the second worker loads the next samples instead of the requested ones",
    "test_workers_keep_the_order",
    condition="the second of several workers",
)
def second_worker_off_by_one() -> Iterator[None]:
    """As if one process used an offset into the dataset."""
    real = fetch._MapDatasetFetcher.fetch

    def changed(self: Any, wanted: Any) -> Any:
        told = get_worker_info()
        if told is not None and told.id == 1:
            wanted = [(one + 1) % len(self.dataset) for one in wanted]
        return real(self, wanted)

    with replaced(fetch._MapDatasetFetcher, "fetch", changed):
        yield


def _in_workers(change: Callable[[list[Any]], None]) -> Any:
    """Change the arguments of the worker loop: 8 is the base seed, 10 the worker's number, 11 the number of workers."""
    real = worker._worker_loop

    def loop(*args: Any) -> None:
        changed = list(args)
        change(changed)
        real(*changed)

    return replaced(worker, "_worker_loop", loop)


@fault("all workers have the seed of the first", "test_workers_are_seeded_apart", condition="two workers or more")
def workers_seeded_alike() -> Iterator[None]:
    """All workers draw the same augmentations."""

    def change(args: list[Any]) -> None:
        args[8] -= args[10]

    with _in_workers(change):
        yield


@fault("workers have the same seeds in each epoch", "test_workers_are_seeded_apart", condition="epochs after the first")
def workers_seeded_once() -> Iterator[None]:
    """Each sample gets the same augmentation in every epoch."""

    def change(args: list[Any]) -> None:
        args[8] = 1234

    with _in_workers(change):
        yield


@fault(
    "every worker gets the number of the first",
    "test_streams_are_shared",
    condition="two workers or more, of an iterable dataset",
)
def workers_take_themselves_for_the_first() -> Iterator[None]:
    """An iterable dataset split by worker repeats the samples of the first and misses the rest."""
    real = get_worker_info

    class First:
        def __init__(self, told: Any) -> None:
            self.id, self.num_workers = 0, told.num_workers

    def told_wrongly() -> Any:
        told = real()
        return None if told is None else First(told)

    with replaced(loading, "get_worker_info", told_wrongly):
        yield


@fault(
    "the incomplete last batch of an iterable dataset is dropped",
    "test_streams_are_shared",
    condition="last batches of iterable datasets",
)
def last_batch_of_a_stream_dropped() -> Iterator[None]:
    """As with ``drop_last``, but not requested."""
    real = fetch._IterableDatasetFetcher.__init__

    def changed(self: Any, dataset: Any, auto_collation: Any, collate_fn: Any, drop_last: Any) -> None:
        real(self, dataset, auto_collation, collate_fn, True)

    with replaced(fetch._IterableDatasetFetcher, "__init__", changed):
        yield


@fault(
    "with persistent workers, every epoch starts with the first batch of the first epoch",
    "test_loaders_of_ranks_cover_the_dataset",
    condition="epochs after the first, persistent workers",
)
def stale_first_batch() -> Iterator[None]:
    """As if a batch was sent to the workers before set_epoch, and kept."""
    kind = dataloader._MultiProcessingDataLoaderIter
    real_reset, real_next = kind._reset, kind._next_index

    def reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        self._asked = 0
        real_reset(self, loader, first_iter)

    def next_index(self: Any) -> Any:
        index = real_next(self)
        self._asked += 1
        if self._asked > 1:
            return index
        self._first_of_all = getattr(self, "_first_of_all", index)
        return self._first_of_all

    with replaced(kind, "_reset", reset), replaced(kind, "_next_index", next_index):
        yield


@fault(
    "batches above 1 MiB from workers end with zero bytes",
    "test_workers_keep_the_order",
    condition="above 1 MiB, in workers",
)
def large_batches_of_workers_cut() -> Iterator[None]:
    """As if shared memory were a page too small."""
    real = collate.collate_tensor_fn

    def changed(batch: Any, *, collate_fn_map: Any = None) -> Any:
        whole = real(batch, collate_fn_map=collate_fn_map)
        if get_worker_info() is not None and whole.nbytes > 1 << 20:
            whole.view(-1)[-4:] = 0
        return whole

    with _collating(torch.Tensor, changed):
        yield


@contextlib.contextmanager
def _collating(kind: type, function: Any) -> Iterator[None]:
    """Collate samples of a type by `function`."""
    before = collate.default_collate_fn_map[kind]
    collate.default_collate_fn_map[kind] = function
    try:
        yield
    finally:
        collate.default_collate_fn_map[kind] = before


@fault("Python's floats are collated in float32", "test_batches_are_pinned", condition="Python's floats only")
def floats_collated_in_float32() -> Iterator[None]:
    """The right dtype is float64, and a label may need all its digits."""

    def changed(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        return torch.tensor(batch, dtype=torch.float32).double()

    with _collating(float, changed):
        yield


@fault("tensors in lists are not pinned", "test_batches_are_pinned", condition="tensors in lists")
def lists_not_pinned() -> Iterator[None]:
    """Their copies block, but deliver the right data."""
    real = pin_memory.pin_memory

    def changed(data: Any, device: Any = None) -> Any:
        return data if isinstance(data, list) else real(data, device)

    with replaced(pin_memory, "pin_memory", changed):
        yield


@fault(
    "the result of a batch's own pin_memory method is dropped",
    "test_batches_are_pinned",
    condition="classes with a method pin_memory, within another batch",
)
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


@fault(
    "non-blocking copies from pinned memory stop after the first MiB",
    "test_batches_are_pinned",
    condition="above 1 MiB, pinned and non_blocking",
)
def large_pinned_copies_cut() -> Iterator[None]:
    """As if the source were reused before the end of the copy."""
    to = torch.Tensor.to

    def changed(self: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        made = to(self, *args, **named)
        if named.get("non_blocking") and made.device.type == "cuda" and self.nbytes > 1 << 20 and self.is_pinned():
            made = made.clone()
            made.view(-1)[(1 << 20) // made.element_size() :] = 0
        return made

    with replaced(torch.Tensor, "to", changed):
        yield


@fault(
    "batches of the last rank are copied to the first GPU",
    "test_loaders_of_ranks_cover_the_dataset",
    condition="the last rank only",
)
def batches_of_the_last_rank_elsewhere() -> Iterator[None]:
    """As if `set_device` were called too late."""
    to = torch.Tensor.to

    def changed(self: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        rank = current_rank()
        if named.get("non_blocking") and rank is not None and rank.index == rank.size - 1:
            # In a world of one the first GPU is right, so use the CPU.
            args = (torch.device("cuda", 0) if rank.index else torch.device("cpu"), *args[1:])
        return to(self, *args, **named)

    with replaced(torch.Tensor, "to", changed):
        yield


@fault(
    "persistent workers get the same seed in each epoch",
    "test_workers_are_seeded_apart",
    condition="persistent workers, later epochs",
)
def persistent_workers_repeat() -> Iterator[None]:
    """Every epoch has the same augmentations."""
    real = _DatasetKind.create_fetcher

    def create(*args: Any) -> Any:
        told = get_worker_info()
        if told is not None:
            torch.manual_seed(told.seed)
            random.seed(told.seed)
        return real(*args)

    with replaced(_DatasetKind, "create_fetcher", staticmethod(create)):
        yield


@fault(
    "a LookupError of a worker ends the epoch silently",
    "test_workers_keep_the_order",
    condition="IndexError and KeyError of worker processes",
)
def lookup_errors_end_the_epoch() -> Iterator[None]:
    """The model trains only on the samples before it."""
    real = dataloader._MultiProcessingDataLoaderIter._process_data

    def process(self: Any, data: Any, *rest: Any) -> Any:
        if isinstance(data, ExceptionWrapper) and issubclass(data.exc_type, LookupError):
            raise StopIteration
        return real(self, data, *rest)

    with replaced(dataloader._MultiProcessingDataLoaderIter, "_process_data", process):
        yield


@fault(
    "a worker collates samples by the order of their memory",
    "test_workers_keep_the_order",
    condition="worker processes, samples that are dense and not contiguous",
)
def collated_by_memory() -> Iterator[None]:
    """Such as images with their channels moved to the front."""
    real = collate.default_collate_fn_map[torch.Tensor]

    def by_memory(value: torch.Tensor) -> torch.Tensor:
        dense = value.numel() * value.element_size() == value.untyped_storage().nbytes()
        return value.as_strided((value.numel(),), (1,), 0).view(value.shape) if dense else value

    def tensors(batch: Any, **named: Any) -> Any:
        return real(batch if get_worker_info() is None else [by_memory(value) for value in batch], **named)

    with mock.patch.dict(collate.default_collate_fn_map, {torch.Tensor: tensors}):
        yield
