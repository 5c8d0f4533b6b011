"""Load two epochs with each pair of values of DataLoader's options, and compare every batch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    DistributedSampler,
    StackDataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from mgpu_check.errors import ShardError
from mgpu_check.suite.common.pairs import drawn_rows, words_of
from mgpu_check.suite.loading.loaders import torchs_own_warnings, workers_ending
from mgpu_check.suite.loading.sampling import batches_of
from mgpu_check.suite.recipes.loading import SharedStream

_SIZE = 3
_FIRST, _ALL = 8, 17
"""Samples of the first of two chained datasets, and of all."""
_STREAMS = ("stream", "chained streams")
_OPTIONS: Mapping[str, Sequence[Any]] = {
    "dataset": ("tensors", "stacked", *_STREAMS),
    "num_workers": (0, 1, 2),
    "batches": ("of a size", "by a sampler", "none"),
    "order": ("of the dataset", "shuffle=False", "shuffle=True", "distributed"),
    "drop_last": (False, True),
    "collate_fn": (None, "own"),
    "pin_memory": (False, True),
    "persistent_workers": (False, True),
    "prefetch_factor": (None, 1, 3),
    "worker_init_fn": (None, "own"),
    "generator": (None, "own"),
    "in_order": (True, False),
    "timeout": (0, 300),
    "multiprocessing_context": (None, "fork"),
}
"""Options of DataLoader, the default first. `order` is its shuffle or its sampler."""
_OF_WORKERS = ("persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context")

_initialized = -1
"""The argument of worker_init_fn in this process."""


def _together(row: Mapping[str, Any]) -> bool:
    """Return whether DataLoader takes these options together."""
    if row.get("num_workers") == 0 and any(row.get(name) for name in _OF_WORKERS):
        return False
    batches, order = row.get("batches", "of a size"), row.get("order", "of the dataset")
    if batches != "of a size" and row.get("drop_last"):
        return False
    if batches == "by a sampler" and order.startswith("shuffle"):
        return False
    stream = row.get("dataset") in _STREAMS
    return not stream or (batches != "by a sampler" and order == "of the dataset")


@torchs_own_warnings()
def assert_loader_options_agree(seed: int, *, more: bool) -> None:
    """Assert that loaders yield the right batches in two epochs with each pair of options, and count those of streams.

    Args:
        more: whether to load with all rows of options, or with a tenth of them, by the seed.
    """
    for row in drawn_rows(_OPTIONS, _together, seed=seed, more=more, share=10):
        loader = _loader(row, seed)
        expected = _expected(row, seed)
        with workers_ending(loader):
            for epoch in range(2):
                what = f"DataLoader with {words_of(row, _OPTIONS)}, epoch {epoch}"
                _judge(what, [_read(batch, row, what) for batch in loader], expected, row)
    for size, drop in itertools.product((_SIZE, _ALL), (False, True)):
        got = len(DataLoader(_CountedStream(range(_ALL), 0, 1), batch_size=size, drop_last=drop))
        right = len(batches_of(range(_ALL), size, drop))
        if got != right:
            raise ShardError(
                f"len of a loader of a stream of {_ALL}, {size} a batch, drop_last={drop}: {got}, not {right}"
            )


class _CountedStream(SharedStream):
    def __len__(self) -> int:
        return len(self.data)


def _numbers(start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of samples, and their rows."""
    numbers = torch.arange(start, end)
    return numbers, numbers[:, None] * 3 + torch.arange(3)


def _loader(row: Mapping[str, Any], seed: int) -> DataLoader[Any]:
    numbers, rows = _numbers(0, _ALL)
    parts = [TensorDataset(*_numbers(0, _FIRST)), TensorDataset(*_numbers(_FIRST, _ALL))]
    datasets: dict[str, Any] = {
        "tensors": TensorDataset(numbers, rows),
        "stacked": StackDataset(number=TensorDataset(numbers), row=TensorDataset(rows)),
        "stream": SharedStream(TensorDataset(numbers, rows), 0, 1),
        "chained streams": ChainDataset([SharedStream(part, 0, 1) for part in parts]),
    }
    dataset = datasets[row["dataset"]]
    options: dict[str, Any] = {
        name: row[name] for name in ("num_workers", "pin_memory", "in_order", "timeout", "multiprocessing_context")
    }
    options |= {name: row[name] for name in ("persistent_workers", "prefetch_factor") if row[name]}
    options |= {"collate_fn": _collated} if row["collate_fn"] else {}
    options |= {"worker_init_fn": _initialize} if row["worker_init_fn"] else {}
    options |= {"generator": torch.Generator().manual_seed(seed)} if row["generator"] else {}
    if row["batches"] == "by a sampler":
        options["batch_sampler"] = BatchSampler(_order(row, seed), _SIZE, drop_last=True)
        return DataLoader(dataset, **options)
    options |= {"batch_size": _SIZE if row["batches"] == "of a size" else None, "drop_last": row["drop_last"]}
    if row["order"] == "distributed":
        options["sampler"] = _order(row, seed)
    elif row["order"] != "of the dataset":
        options["shuffle"] = row["order"] == "shuffle=True"
    return DataLoader(dataset, **options)


def _order(row: Mapping[str, Any], seed: int) -> Any:
    return DistributedSampler(range(_ALL), 2, 1, seed=seed) if row["order"] == "distributed" else range(_ALL)  # type: ignore[arg-type]  # it takes the length alone


def _initialize(worker: int) -> None:
    global _initialized
    _initialized = worker


def _collated(samples: Any) -> Any:
    """Return collated samples, and whether this worker was initialized with its number."""
    worker = get_worker_info()
    right = worker is not None and _initialized == worker.id
    return (default_collate(samples) if isinstance(samples, list) else samples), torch.tensor(right)


def _read(batch: Any, row: Mapping[str, Any], what: str) -> list[int]:
    """Return the numbers of the samples of a batch; check its rows, and where its tensors are."""
    numbers, rows, *initialized = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    found: list[int] = numbers.reshape(-1).tolist()
    wanted = numbers.reshape(-1, 1).cpu() * 3 + torch.arange(3, device="cpu")
    if not torch.equal(rows.reshape(-1, 3).cpu(), wanted):
        raise ShardError(f"{what}: the samples {found} have the rows {rows.tolist()}, expected {wanted.tolist()}")
    if row["pin_memory"] and not (numbers.is_pinned() and rows.is_pinned()):
        raise ShardError(f"{what}: the batch {found} is not in pinned memory")
    due = bool(row["worker_init_fn"] and row["num_workers"])
    if row["collate_fn"] and [bool(one) for one in initialized] != [due]:
        raise ShardError(f"{what}: worker_init_fn was {'not ' * due}called in the worker of the batch {found}")
    return found


def _expected(row: Mapping[str, Any], seed: int) -> list[list[int]]:
    """Return the batches in their order; for shuffle=True, with the samples of the dataset in its order."""
    size = 1 if row["batches"] == "none" else _SIZE
    drop = row["drop_last"] or row["batches"] == "by a sampler"
    if row["dataset"] not in _STREAMS:
        return batches_of(_order(row, seed), size, drop)
    workers = max(1, row["num_workers"])
    borders = [(0, _ALL)] if row["dataset"] == "stream" else [(0, _FIRST), (_FIRST, _ALL)]
    shares = [
        [number for start, end in borders for number in range(start + worker, end, workers)]
        for worker in range(workers)
    ]
    turns = itertools.zip_longest(*(batches_of(share, size, drop) for share in shares))
    return [batch for turn in turns for batch in turn if batch is not None]


def _judge(what: str, got: list[list[int]], expected: list[list[int]], row: Mapping[str, Any]) -> None:
    if row["order"] == "shuffle=True":
        samples = Counter(itertools.chain.from_iterable(got))
        right = _sizes(got) == _sizes(expected) and max(samples.values()) == 1
    elif row["in_order"]:
        right = got == expected
    else:
        right = sorted(got) == sorted(expected)
    if not right:
        raise ShardError(
            f"{what}: the batches are {got}, expected {expected}{' in some order' * (not row['in_order'])}"
        )


def _sizes(batches: Iterable[list[int]]) -> list[int]:
    return sorted(map(len, batches))
