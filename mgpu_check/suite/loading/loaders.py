"""Check data loaders: each batch must hold the samples of its sampler, in order, with workers and pinned memory too.

Two epochs are loaded with each pair of values of DataLoader's options. The samples of `NumberedDataset` show their
number, in values of several dtypes and all bit patterns. A sample follows from its number alone, so the right batch can
be computed for many samples at once, without collation.
"""

from __future__ import annotations

import io
import itertools
import random
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils.data.graph_settings  # each worker process imports it, unless it has it from here
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
    random_split,
)

from mgpu_check.asserts.collectives import first_difference, same_bits
from mgpu_check.asserts.findings import Findings
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import ShardError
from mgpu_check.oracles.generated_data import mix_
from mgpu_check.suite.common.pairs import drawn_rows, words_of
from mgpu_check.suite.loading.samplers import assert_shares, batches_of, require, sampler_over
from mgpu_check.suite.recipes import tutorials
from mgpu_check.suite.recipes.tutorials import SharedStream

_FIELDS = {
    "image": torch.float32,
    "half": torch.bfloat16,
    "wide": torch.complex64,
    "mask": torch.bool,
    "pixel": torch.uint8,
    "turned": torch.float64,
}


def _bits(indices: torch.Tensor, words: int, seed: int) -> torch.Tensor:
    """Return (n, words) words of 64 bits; all bits of a word depend on its sample and place."""
    places = (indices[:, None] << 24) + torch.arange(words, device="cpu")
    return mix_(places, seed, torch.empty_like(places))


def _rows(indices: torch.Tensor, name: str, features: int) -> torch.Tensor:
    """Return a field of n samples: (n, features) for "image", (n, 3, 2) for "turned", (n, k), with a small k, else."""
    dtype, seed = _FIELDS[name], list(_FIELDS).index(name)
    if name == "mask":
        return _bits(indices, 3, seed) > 0
    if name == "turned":  # as images in channels_last: a sample is dense, but not contiguous
        return _bits(indices, 6, seed).view(dtype).view(-1, 2, 3).transpose(1, 2)
    words = _bits(indices, -(-features // 2) if name == "image" else 2, seed)
    return words.view(dtype)[:, :features] if name == "image" else words.view(dtype)


class Numbered(Dataset[Any]):
    """A dataset of `length` samples: dicts of a number, tensors with `features` floats and others, a text, and a pair.

    The floats have arbitrary bits, including all kinds of NaN, infinities and subnormals. Samples of even number have
    `large` times as many features, and then cannot share a batch with odd ones. Reading sample `broken` raises a
    LookupError.
    """

    def __init__(self, length: int, features: int = 5, large: int = 1, broken: int | None = None) -> None:
        self.length, self.features, self.large, self.broken = length, features, large, broken

    def __len__(self) -> int:
        return self.length

    def features_of(self, index: int) -> int:
        """Return the number of features of a sample."""
        return self.features * (self.large if index % 2 == 0 else 1)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(f"sample {index} of {self.length}")
        if index == self.broken:
            raise LookupError(f"sample {index} cannot be read")
        own = torch.tensor([index], device="cpu")
        rows: dict[str, Any] = {name: _rows(own, name, self.features_of(index))[0] for name in _FIELDS}
        return {"number": index, **rows, "score": index / 3, "name": f"sample {index}", "pair": (own, index % 2 == 0)}


def indices_of(batch: dict[str, Any]) -> list[int]:
    """Return the numbers of the samples in a batch, read from the batch."""
    numbers: list[int] = batch["number"].tolist()
    return numbers


def assert_batch(
    batch: Any,
    indices: Sequence[int],
    dataset: Numbered,
    label: str,
    device: torch.device | str = "cpu",
    pinned: bool = False,
) -> None:
    """Assert that `batch` has the samples `indices` of `dataset` in this order, bit for bit, as torch collates them."""
    require(isinstance(batch, dict), f"{label}: it is a {type(batch).__name__}, expected a dict")
    own = torch.tensor(list(indices), dtype=torch.int64, device="cpu")
    features = dataset.features_of(indices[0]) if indices else dataset.features
    expected: dict[str, Any] = {name: _rows(own, name, features) for name in _FIELDS}
    expected |= {"number": own, "score": own.to(torch.float64) / 3}
    names = sorted({*expected, "name", "pair"})
    require(sorted(batch) == names, f"{label}: it has the entries {sorted(batch)}, expected {names}")
    named = batch["name"] == [f"sample {index}" for index in indices]
    require(named, f"{label}: the names are {batch['name']}, expected those of the samples {list(indices)}")
    pair = batch["pair"]
    if type(pair) not in (list, tuple) or len(pair) != 2:
        raise ShardError(f"{label}: the pair is {pair!r}, expected one of two tensors")
    entries = {name: batch[name] for name in expected} | {"pair[0]": pair[0], "pair[1]": pair[1]}
    expected |= {"pair[0]": own[:, None], "pair[1]": own % 2 == 0}
    for name, wanted in expected.items():
        got = entries[name]
        if not isinstance(got, torch.Tensor):
            raise ShardError(f"{label}: {name} is a {type(got).__name__}, expected a tensor")
        require(got.device == torch.device(device), f"{label}: {name} is on {got.device}, expected on {device}")
        require(not pinned or got.is_pinned(), f"{label}: {name} is not in pinned memory")
        text = f"{tuple(got.shape)} of {got.dtype}, expected {tuple(wanted.shape)} of {wanted.dtype}"
        require((got.shape, got.dtype) == (wanted.shape, wanted.dtype), f"{label}: {name} is {text}")
        if not same_bits(wanted, got):
            at = first_difference(wanted, got)
            raise ShardError(
                f"{label}: {name}, {got.nbytes} bytes of {got.dtype}: row {at[0]} (sample {indices[at[0]]}), element "
                f"{list(at)}: expected {wanted[at].item()}, got {got[at].item()}"
            )


LARGE = 300_000  # features of a large sample, which takes 1.2 MB in float32


@contextmanager
def torchs_own_warnings() -> Iterator[None]:
    """Ignore torch's warnings about more workers than cores, and about empty parts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        warnings.filterwarnings("ignore", message="Length of split at index")
        yield


@contextmanager
def workers_ending(loader: DataLoader[Any]) -> Iterator[None]:
    """End persistent workers at the end of the context, even after a failure: they would keep their rank alive."""
    try:
        yield
    finally:
        running: Any = loader._iterator
        if running is not None:
            running._shutdown_workers()


def assert_batches(
    batches: Iterable[Any],
    expected: Sequence[Sequence[int]],
    dataset: Numbered,
    label: str,
    device: torch.device | str = "cpu",
    pinned: bool = False,
    ranks: Sequence[int] = (),
) -> None:
    """Assert that exactly the expected batches come; see `assert_batch`. Errors of their number have `ranks`."""
    count = 0
    for count, batch in enumerate(batches, 1):
        if count > len(expected):
            text = f"more than {len(expected)} batches come; the next holds {indices_of(batch)}"
            raise ShardError(f"{label}: {text}", ranks=ranks)
        where = f"{label}: batch {count - 1} of {len(expected)}"
        assert_batch(batch, expected[count - 1], dataset, where, device, pinned)
    if count < len(expected):
        text = f"{count} batches come, expected {len(expected)}; {expected[count]} is missing"
        raise ShardError(f"{label}: {text}", ranks=ranks)


def assert_last_batches() -> None:
    """Assert that loaders yield each sample of a rank's share, also in a last batch that is not full.
    ``len`` must be the number of batches."""
    for length, batch_size, drop_last, world in itertools.product(
        (0, 1, 2, 3, 5, 8, 9, 17), (1, 2, 3, 4, 8, 32), (False, True), (1, 3)
    ):
        for rank in range(world):
            sampler = sampler_over(length, world, rank, shuffle=False)
            indices: Any = range(length)
            loader = DataLoader(indices, batch_size=batch_size, sampler=sampler, drop_last=drop_last)
            expected = batches_of(sampler, batch_size, drop_last)
            got = [batch.tolist() for batch in loader]
            label = f"loader of rank {rank} of {world} over {length} samples, {batch_size=}, {drop_last=}"
            require(got == expected, f"{label}: expected the batches {expected}, got {got}", (rank,))
            text = f"{label}: len is {len(loader)}, but {len(expected)} batches come"
            require(len(loader) == len(expected), text, (rank,))


class _Telling(Numbered):
    """Samples that record the worker that has made them, and its initialization."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        worker = get_worker_info()
        own = None if worker is None else (worker.id, worker.num_workers, worker.dataset is self, _initialized)
        return {**super().__getitem__(index), "worker": own}


def _listed(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return samples


@torchs_own_warnings()
def assert_workers_in_order(seed: int) -> None:
    """Assert that batches from several worker processes come in the order of the sampler.

    A batch of one persistent worker takes far longer than that of the other. Each worker must know its number, and must
    have called ``worker_init_fn`` with it. An exception in a worker must be raised in place of its batch.
    """
    dataset = Numbered(7, features=3, large=LARGE // 3)
    sampler: Any = DistributedSampler(dataset, 1, 0, seed=seed)
    workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}
    loader = DataLoader(dataset, batch_size=1, sampler=sampler, **workers)
    with workers_ending(loader):
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            label = f"loader with 2 persistent workers, epoch {epoch}"
            assert_batches(loader, [[index] for index in sampler], dataset, label)
    telling = _Telling(7, broken=6)
    telling_loader = DataLoader(telling, batch_size=2, num_workers=3, collate_fn=_listed, worker_init_fn=_initialize)
    label = "loader with 3 workers"
    batches = iter(telling_loader)
    for number in range(3):
        expected = (number, 3, True, number)
        for sample in next(batches):
            text = f"{sample['worker']}, expected {expected}"
            names = "(worker, workers, own dataset, argument of worker_init_fn)"
            require(sample["worker"] == expected, f"{label}: sample {sample['number']} has {names} {text}")
    try:
        next(batches)
    except LookupError as error:
        # Break the cycle of error, frames and iterator: if the garbage collector finds it, it waits for each worker for
        # MP_STATUS_CHECK_INTERVAL, 5 s: torch/utils/data/dataloader.py, _shutdown_workers, torch 2.13.
        error.__traceback__ = None
        if type(error) is not LookupError or "sample 6 cannot be read" not in str(error):
            text = f"a worker raised LookupError('sample 6 cannot be read'), but {error!r} came"
            raise ShardError(f"{label}: {text}") from None
    except StopIteration:
        raise ShardError(f"{label}: a worker raised LookupError, and the epoch ended as if all were loaded") from None
    else:
        raise ShardError(f"{label}: a worker raised LookupError, but a batch came")


class _Seeds(Numbered):
    """Samples that hold the seeds and random numbers of their worker."""

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        assert worker is not None
        return worker.id, worker.seed, torch.initial_seed(), torch.rand(4).tolist(), random.random()


@torchs_own_warnings()
def assert_worker_seeds(seed: int) -> None:
    """Assert that each worker's seed is the sum of a base seed and its number.

    Each epoch must have a new base seed, and the same generator must give the same seeds again. Persistent workers must
    keep their seed and draw on. Python's generator must be seeded too.
    Source: documentation of `torch.utils.data`, "Randomness in multi-process data loading".
    """
    epochs = []
    for run in range(2):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(run)  # must have no influence: the loader has a generator
        options: dict[str, Any] = {"num_workers": 2, "generator": generator, "persistent_workers": bool(run)}
        loader = DataLoader(_Seeds(4), batch_size=1, collate_fn=_listed, **options)
        with workers_ending(loader):
            epochs += [[next(iter(batch)) for batch in loader] for _ in range(2)]
    second_epoch = epochs.pop()
    for epoch, workers in zip((0, 1, 0), epochs, strict=True):
        base = workers[0][1]
        for number, (worker, worker_seed, initial, numbers, _) in enumerate(workers[:2]):
            text = f"has initial_seed {initial} and worker seed {worker_seed}, expected {base} + {number}"
            right = number == worker and worker_seed == initial == base + worker
            require(right, f"epoch {epoch}: worker {worker} {text}")
            due = torch.rand(4, generator=torch.Generator().manual_seed(worker_seed)).tolist()
            text = f"worker {worker}, seeded with {worker_seed}, draws {numbers}, expected {due}"
            require(numbers == due, f"epoch {epoch}: {text}")
        first, second = workers[0][4], workers[1][4]
        require(first != second, f"epoch {epoch}: Python's random numbers are the same in both workers: {first}")
    again = f"{epochs[0]}, then {epochs[2]}"
    require(epochs[0] == epochs[2], f"equal generators give workers different seeds or numbers: {again}")
    for sample, before in zip(second_epoch, epochs[2], strict=True):
        # Persistent workers keep their seed and draw on.
        if sample[:3] != before[:3] or sample[3] == before[3] or sample[4] == before[4]:
            raise ShardError(
                f"persistent worker {sample[0]} draws {sample[3:]} in its second epoch with seed {sample[2]}, and "
                f"{before[3:]} with {before[2]} in its first; expected other numbers of the same seed"
            )
    seeds = [epoch[0][1] for epoch in epochs[:2]]
    require(seeds[0] != seeds[1], f"the workers of epochs 0 and 1 have the same seeds: {seeds[0]}")


def sent(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on `device`, by copies that do not block."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: sent(element, device) for name, element in batch.items()}
    return [sent(element, device) for element in batch] if isinstance(batch, (list, tuple)) else batch


@torchs_own_warnings()
def assert_partitions(seed: int) -> None:
    """Assert that `recipes.tutorials.partitions` and `random_split` make the same disjoint parts on all ranks.
    Each place of a part, of a `Subset` or of a `ConcatDataset` must hold the right sample."""
    for length, sizes in itertools.product((0, 1, 5, 10, 23), ((1.0,), (0.5, 0.5), (0.7, 0.2, 0.1), (0.25,) * 4)):
        dataset = Numbered(length)
        ways: dict[str, Any] = {
            "partitions": lambda data, fractions: tutorials.partitions(data, fractions, seed),
            "random_split": lambda data, fractions: random_split(data, fractions, torch.Generator().manual_seed(seed)),
        }
        for name, divide in ways.items():
            parts_by_rank = []
            for rank in range(2):
                torch.manual_seed(rank)
                parts_by_rank.append([list(subset.indices) for subset in divide(dataset, sizes)])
            label, (parts, others) = f"{name} of {length} samples in {sizes}", parts_by_rank
            require(parts == others, f"{label}, of one seed: rank 0 has {parts}, rank 1 has {others}", (1,))
            every = sorted(itertools.chain.from_iterable(parts))
            require(every == [*range(length)], f"{label}: the parts are {parts}, which is not each sample once")
            if odd := [at for at, size in enumerate(sizes) if abs(len(parts[at]) - size * length) >= len(sizes)]:
                raise ShardError(f"{label}: part {odd[0]} has {len(parts[odd[0]])} samples", ranks=odd)
            assert_shares([every], length, drop_last=False, label=label)
            for subset in divide(dataset, sizes):
                for position, index in enumerate(subset.indices):
                    held = subset[position]["number"]
                    require(held == index, f"{label}: place {position} holds sample {held}, expected {index}")
    subsets = [Subset(Numbered(20), range(start, stop)) for start, stop in ((0, 3), (3, 3), (3, 4), (4, 11))]
    joined: ConcatDataset[Any] = ConcatDataset(subsets)
    got = [sample["number"] for sample in (joined[position] for position in (*range(len(joined)), -1, -11))]
    subject = "ConcatDataset of 3, 0, 1 and 7 samples, its last and first again"
    require(got == [*range(11), 10, 0], f"{subject}: holds {got}, expected the samples in order")
    # Loaders request whole batches from nested parts.
    inner = Subset(Numbered(20), range(19, 3, -2))
    divided: dict[str, tuple[Any, list[int]]] = {
        "Subset of a Subset": (Subset(inner, [5, 0, 2]), [9, 19, 15]),
        "Subset of a ConcatDataset": (Subset(joined, [10, 3, 2, 0]), [10, 3, 2, 0]),
        "ConcatDataset of Subsets of Subsets": (ConcatDataset([Subset(inner, [1, 6]), Subset(inner, [7])]), [17, 7, 5]),
    }
    for name, (divided_dataset, numbers) in divided.items():
        batches = DataLoader(divided_dataset, batch_size=2)
        assert_batches(batches, batches_of(numbers, 2, False), Numbered(20), f"loader of a {name}")


def assert_resumes(seed: int) -> None:
    """Assert that an epoch that is interrupted after any batch can be resumed, and that the next epoch is whole.
    It resumes by skipping the seen batches, by a sampler with its own state, and by the state of a generator."""
    world, length, size, epoch = 2, 11, 2, 2
    dataset = Numbered(length)
    for rank in range(world):
        sampler: Any = tutorials.ResumableSampler(dataset, world, rank, seed=seed)
        sampler.set_epoch(epoch)
        epoch_batches = [indices_of(batch) for batch in DataLoader(dataset, size, sampler=sampler)]
        for consumed in range(len(epoch_batches) + 1):
            label = f"loader of rank {rank} of {world}, epoch {epoch}, after {consumed} of {len(epoch_batches)} batches"
            resumed: Any = tutorials.ResumableSampler(dataset, world, rank, seed=seed)
            resumed.load_state_dict({"epoch": epoch, "start": 0})
            skipped = itertools.islice(DataLoader(dataset, size, sampler=resumed), consumed, None)
            assert_batches(skipped, epoch_batches[consumed:], dataset, f"{label}, skipped")
            state = _checkpointed(sampler.state_dict(min(consumed * size, len(sampler))))
            resumed = tutorials.ResumableSampler(dataset, world, rank, seed=seed)
            resumed.load_state_dict(state)
            loader, left = DataLoader(dataset, size, sampler=resumed), len(epoch_batches) - consumed
            require(len(loader) == left, f"{label}, resumed: len is {len(loader)}, expected {left}", (rank,))
            assert_batches(loader, epoch_batches[consumed:], dataset, f"{label}, resumed")
            assert_batches(loader, epoch_batches, dataset, f"{label}, gone through again")
    for consumed in (0, 1, 5, 6):
        generator = torch.Generator().manual_seed(seed)
        list(RandomSampler(dataset, generator=generator))
        state = _checkpointed(generator.get_state())
        epoch_batches = list(BatchSampler(RandomSampler(dataset, generator=generator), size, drop_last=False))
        restored = torch.Generator()
        restored.set_state(state)
        batches: Any = BatchSampler(RandomSampler(dataset, generator=restored), size, drop_last=False)
        rest = itertools.islice(DataLoader(dataset, batch_sampler=batches), consumed, None)
        label = f"loader with a generator, after {consumed} of {len(epoch_batches)} batches"
        assert_batches(rest, epoch_batches[consumed:], dataset, label)


def _checkpointed(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()))


_SIZE = 3
_FIRST, _ALL = 8, 17  # samples of the first of two chained datasets, and of all
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

_initialized = -1  # the argument of worker_init_fn in this process


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
    With `more` all rows of options are loaded, else a tenth of them, by the seed."""
    for row in drawn_rows(_OPTIONS, _together, seed=seed, more=more, share=10):
        loader = _loader(row, seed)
        expected = _expected(row, seed)
        with workers_ending(loader):
            for epoch in range(2):
                label = f"DataLoader with {words_of(row, _OPTIONS)}, epoch {epoch}"
                _judge(label, [_read(batch, row, label) for batch in loader], expected, row)
    for size, drop in itertools.product((_SIZE, _ALL), (False, True)):
        got = len(DataLoader(_CountedStream(range(_ALL), 0, 1), batch_size=size, drop_last=drop))
        due = len(batches_of(range(_ALL), size, drop))
        label = f"len of a loader of a stream of {_ALL}, {size} a batch, drop_last={drop}"
        require(got == due, f"{label}: {got}, not {due}")


class _CountedStream(SharedStream):
    def __len__(self) -> int:
        return len(self.data)


def _numbers(start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(start, end)
    return numbers, numbers[:, None] * 3 + torch.arange(3)


def _loader(row: Mapping[str, Any], seed: int) -> DataLoader[Any]:
    numbers, rows = _numbers(0, _ALL)
    halves = [TensorDataset(*_numbers(0, _FIRST)), TensorDataset(*_numbers(_FIRST, _ALL))]
    datasets: dict[str, Any] = {
        "tensors": TensorDataset(numbers, rows),
        "stacked": StackDataset(number=TensorDataset(numbers), row=TensorDataset(rows)),
        "stream": SharedStream(TensorDataset(numbers, rows), 0, 1),
        "chained streams": ChainDataset([SharedStream(half, 0, 1) for half in halves]),
    }
    dataset = datasets[row["dataset"]]
    options: dict[str, Any] = {
        name: row[name] for name in ("num_workers", "pin_memory", "in_order", "timeout", "multiprocessing_context")
    }
    options |= {name: row[name] for name in ("persistent_workers", "prefetch_factor") if row[name]}
    options |= {"collate_fn": _collated_with_initialization} if row["collate_fn"] else {}
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


def _collated_with_initialization(samples: Any) -> Any:
    """Return collated samples, and whether this worker was initialized with its number."""
    worker = get_worker_info()
    initialized = worker is not None and _initialized == worker.id
    return (default_collate(samples) if isinstance(samples, list) else samples), torch.tensor(initialized)


def _read(batch: Any, row: Mapping[str, Any], label: str) -> list[int]:
    """Return the numbers of the samples of a batch; check its rows, and where its tensors are."""
    numbers, rows, *initialized = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    indices: list[int] = numbers.reshape(-1).tolist()
    wanted = numbers.reshape(-1, 1).cpu() * 3 + torch.arange(3, device="cpu")
    if not torch.equal(rows.reshape(-1, 3).cpu(), wanted):
        raise ShardError(f"{label}: the samples {indices} have the rows {rows.tolist()}, expected {wanted.tolist()}")
    pinned = not row["pin_memory"] or (numbers.is_pinned() and rows.is_pinned())
    require(pinned, f"{label}: the batch {indices} is not in pinned memory")
    due = bool(row["worker_init_fn"] and row["num_workers"])
    if row["collate_fn"] and [bool(flag) for flag in initialized] != [due]:
        raise ShardError(f"{label}: worker_init_fn was {'not ' * due}called in the worker of the batch {indices}")
    return indices


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


def _judge(label: str, got: list[list[int]], expected: list[list[int]], row: Mapping[str, Any]) -> None:
    if row["order"] == "shuffle=True":
        samples = Counter(itertools.chain.from_iterable(got))
        agrees = sorted(map(len, got)) == sorted(map(len, expected)) and max(samples.values()) == 1
    elif row["in_order"]:
        agrees = got == expected
    else:
        agrees = sorted(got) == sorted(expected)
    suffix = " in some order" * (not row["in_order"])
    require(agrees, f"{label}: the batches are {got}, expected {expected}{suffix}")


@torchs_own_warnings()
def assert_pinned_batches(devices: Sequence[torch.device]) -> None:
    """Assert that ``pin_memory`` pins each tensor of a batch, in dicts and lists too, without changing a bit.
    A non-blocking copy sends each batch to the next of `devices`, where it is compared too."""
    for features, workers, length in ((4, 0, 9), (LARGE, 0, 2), (LARGE, 1, 3)):
        dataset = Numbered(length, features=features)
        loader = DataLoader(dataset, batch_size=2, pin_memory=True, num_workers=workers)
        label = f"pinned loader, {workers} workers, {features} features"
        expected = batches_of(range(length), 2, False)
        batches = list(loader)
        assert_batches(batches, expected, dataset, label, pinned=True)
        for number, batch in enumerate(batches):
            device = devices[number % len(devices)]
            on_device = sent(batch, device)
            assert_batch(on_device, expected[number], dataset, f"{label}: batch {number}, copied to {device}", device)


class _Own:
    """A user's class of samples with its own `pin_memory`, which returns a new object that counts the calls."""

    def __init__(self, samples: torch.Tensor, times: int = 0) -> None:
        self.samples, self.times = samples, times

    def pin_memory(self) -> _Own:
        return _Own(self.samples.pin_memory(), self.times + 1)


class _Two(NamedTuple):
    direct: Any
    nested: Any


def _own(samples: list[int], position: int) -> _Own:
    return _Own(torch.tensor(samples, device="cpu") * 10 + position)


def _containers_of_own(samples: list[int]) -> dict[str, Any]:
    value, a, b, c, d, e, f = (_own(samples, position) for position in range(7))
    return {"value": value, "tuple": (a, [b]), "named tuple": _Two(c, {"inner": d}), "list": [e, f]}


def _owned(batch: Any) -> dict[str, Any]:
    """Return name of a place in `_collated` -> object at this place, in the same order."""
    (a, (b,)), (c, d), (e, f) = batch["tuple"], batch["named tuple"], batch["list"]
    return {
        "the value of a dict": batch["value"],
        "a tuple": a,
        "a list in a tuple": b,
        "a named tuple": c,
        "a dict in a named tuple": d["inner"],
        "a list": e,
        "the end of a list": f,
    }


@torchs_own_warnings()
def assert_pinned_by_themselves() -> None:
    """Assert that ``pin_memory`` of a loader calls the method `pin_memory` of an object once, and yields its result.
    The object is the batch itself, or is in dicts, tuples, named tuples and lists."""
    length, size = 3, 2
    dataset: Any = range(length)
    ways: tuple[tuple[str, int, Any, Any], ...] = (
        ("nested", 0, _containers_of_own, _owned),
        ("nested", 1, _containers_of_own, _owned),
        ("alone", 0, partial(_own, position=0), lambda batch: {"the batch": batch}),
    )
    for how, workers, collate, places in ways:
        options: dict[str, Any] = {"collate_fn": collate, "pin_memory": True, "num_workers": workers}
        loader: DataLoader[Any] = DataLoader(dataset, batch_size=size, **options)
        for number, (batch, indices) in enumerate(zip(loader, batches_of(range(length), size, False), strict=True)):
            label = f"pinned loader, {workers} workers, batches of a class of one's own, {how}: batch {number}"
            for position, (name, owned) in enumerate(places(batch).items()):
                _require_own(owned, torch.tensor(indices, device="cpu") * 10 + position, f"{label}, {name}")


def _require_own(owned: Any, expected: torch.Tensor, label: str) -> None:
    if not isinstance(owned, _Own):
        raise ShardError(f"{label}: it is a {type(owned).__name__}, expected one of the class that was collated")
    require(owned.times == 1, f"{label}: it was pinned {owned.times} times by its own method, expected once")
    require(owned.samples.is_pinned(), f"{label}: its tensor is not in pinned memory")
    text = f"it holds {owned.samples.tolist()}, expected {expected.tolist()}"
    require(torch.equal(owned.samples, expected), f"{label}: {text}")


_BATCH = 3


def assert_samplers_of_ranks(rank: Rank, seed: int) -> None:
    """Assert that a `DistributedSampler` without a rank argument finds rank and world, and that all ranks agree.
    Torch's global generators differ between ranks."""
    torch.manual_seed(seed + rank.index)
    with Findings() as findings:
        for length, shuffle, drop_last in itertools.product((0, 1, 7, 60), (False, True), (False, True)):
            sampler = sampler_over(length, shuffle=shuffle, drop_last=drop_last, seed=seed)
            label = f"DistributedSampler of {length} samples, {shuffle=}, {drop_last=}"
            here, own = (rank.size, rank.index), (sampler.num_replicas, sampler.rank)
            with findings.collected():
                text = f"on rank {rank.index} of {rank.size}: it takes itself for rank {own[1]} of {own[0]}"
                require(own == here, f"{label}, {text}", (rank.index,))
            if findings.anywhere(rank):
                return
            sampler.set_epoch(1)
            with findings.collected():
                assert_shares(_of_all(list(sampler)), length, drop_last=drop_last, label=label)


def _of_all(own: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


@torchs_own_warnings()
def assert_loaders_cover(rank: Rank, seed: int) -> None:
    """Assert that the ranks' loaders yield each sample once per epoch, on their devices, bit for bit, in equal batches.
    They load as training code does: with a persistent worker, pinned memory, non-blocking copies, and `set_epoch`."""
    dataset = Numbered(5 * rank.size + 2)
    sampler: Any = DistributedSampler(dataset, seed=seed)
    loader = DataLoader(dataset, _BATCH, sampler=sampler, num_workers=1, persistent_workers=True, pin_memory=True)
    with workers_ending(loader), Findings() as findings:
        for epoch in range(3):
            sampler.set_epoch(epoch)
            expected = batches_of(sampler, _BATCH, False)
            on_device = (sent(batch, rank.device) for batch in loader)
            label = f"loader of rank {rank.index} of {rank.size}, epoch {epoch}"
            with findings.collected():
                assert_batches(on_device, expected, dataset, label, rank.device, ranks=(rank.index,))
            if findings.anywhere(rank):
                return
            # The expected samples are those that came, as checked above.
            share = list(itertools.chain.from_iterable(expected))
            label = f"loaders of {rank.size} ranks, epoch {epoch}"
            with findings.collected():
                assert_shares(_of_all(share), len(dataset), drop_last=False, label=label)


@torchs_own_warnings()
def assert_streams_cover(rank: Rank) -> None:
    """Assert that an iterable dataset that ranks and their workers share yields each sample once, also in last batches.
    Each worker has its own last batch, which must come unless ``drop_last`` drops it."""
    dataset = Numbered(7 * rank.size + 3)
    with Findings() as findings:
        for workers, drop_last in ((0, False), (0, True), (2, False), (2, True)):
            label = f"stream of rank {rank.index} of {rank.size} with {workers} workers, {drop_last=}"
            with findings.collected():
                got = _streamed(dataset, workers, drop_last, rank, label)
            if findings.anywhere(rank):
                return
            if drop_last:
                continue
            every = sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(_of_all(got))))
            with findings.collected():
                text = f"over all ranks come the samples {every}, expected each of {len(dataset)} once"
                require(every == list(range(len(dataset))), f"{label}: {text}")


def _streamed(dataset: Numbered, workers: int, drop_last: bool, rank: Rank, label: str) -> list[list[int]]:
    """Return the samples in a rank's batches, which must be its own, in turn from each of its workers."""
    stream: Any = SharedStream(dataset, rank.index, rank.size)
    own, step = max(1, workers), rank.size * max(1, workers)
    of_workers = [
        batches_of(range(rank.index * own + worker, len(dataset), step), _BATCH, drop_last) for worker in range(own)
    ]
    # Workers take turns as long as they have batches.
    turns = itertools.zip_longest(*of_workers)
    expected = [batch for turn in turns for batch in turn if batch is not None]
    loader = DataLoader(stream, _BATCH, num_workers=workers, drop_last=drop_last, persistent_workers=workers > 0)
    with workers_ending(loader):
        batches = list(loader)
    got = [indices_of(batch) for batch in batches]
    require(got == expected, f"{label}: expected the batches {expected}, got {got}", (rank.index,))
    assert_batches(batches, expected, dataset, label)
    return got
