"""Check data loaders: each batch must hold the samples of its sampler, in order, with workers and pinned memory too."""

from __future__ import annotations

import io
import itertools
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.data.graph_settings  # each worker process imports it, unless it has it from here
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Subset,
    get_worker_info,
    random_split,
)

from mgpu_check.errors import ShardError
from mgpu_check.suite.loading.numbered import Numbered, assert_batch, indices_of
from mgpu_check.suite.loading.sampling import assert_shares, batches_of, sampler_over
from mgpu_check.suite.recipes import loading

LARGE = 300_000
"""Features of a large sample, which takes 1.2 MB in float32."""


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
    what: str,
    device: torch.device | str = "cpu",
    pinned: bool = False,
    ranks: Sequence[int] = (),
) -> None:
    """Assert that exactly the expected batches come; see `assert_batch`.

    Raises:
        ShardError: a batch is wrong; or there are fewer or more batches, and then `.ranks` has `ranks`.
    """
    count = 0
    for number, batch in enumerate(batches):
        if number >= len(expected):
            raise ShardError(
                f"{what}: more than {len(expected)} batches come; the next holds {indices_of(batch)}", ranks=ranks
            )
        assert_batch(batch, expected[number], dataset, f"{what}: batch {number} of {len(expected)}", device, pinned)
        count = number + 1
    if count < len(expected):
        raise ShardError(
            f"{what}: {count} batches come, expected {len(expected)}; {expected[count]} is missing", ranks=ranks
        )


def assert_last_batches() -> None:
    """Assert that loaders yield each sample of a rank's share, also in a last batch that is not full.

    Covers worlds of 1 and 3 ranks, datasets of 0 to 17 samples and batches of 1 to 32, with and without ``drop_last``
    of the loader. ``len`` must be the number of batches.
    """
    for length, batch_size, drop_last, world in itertools.product(
        (0, 1, 2, 3, 5, 8, 9, 17), (1, 2, 3, 4, 8, 32), (False, True), (1, 3)
    ):
        for rank in range(world):
            sampler = sampler_over(length, world, rank, shuffle=False)
            whole: Any = range(length)
            loader = DataLoader(whole, batch_size=batch_size, sampler=sampler, drop_last=drop_last)
            expected = batches_of(sampler, batch_size, drop_last)
            got = [batch.tolist() for batch in loader]
            what = f"loader of rank {rank} of {world} over {length} samples, {batch_size=}, {drop_last=}"
            if got != expected:
                raise ShardError(f"{what}: expected the batches {expected}, got {got}", ranks=(rank,))
            if len(loader) != len(expected):
                raise ShardError(f"{what}: len is {len(loader)}, but {len(expected)} batches come", ranks=(rank,))


def _told(worker: int) -> None:
    """Record in the worker's dataset that the worker was initialized."""
    told = get_worker_info()
    assert told is not None
    told.dataset.initialized = worker  # type: ignore[attr-defined]


class _Telling(Numbered):
    """Samples that record the worker that has made them, and its initialization."""

    initialized = -1

    def __getitem__(self, index: int) -> dict[str, Any]:
        worker = get_worker_info()
        own = None if worker is None else (worker.id, worker.num_workers, worker.dataset is self, self.initialized)
        return {**super().__getitem__(index), "worker": own}


def _listed(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return samples


@torchs_own_warnings()
def assert_workers_in_order(seed: int) -> None:
    """Assert that batches from several worker processes come in the order of the sampler.

    Covers two epochs of persistent workers, where a batch of one worker takes far longer than that of the other. Each
    worker must know its number, and must have called ``worker_init_fn`` with it. An exception in a worker must be
    raised in place of its batch.
    """
    dataset = Numbered(7, features=3, large=LARGE // 3)
    sampler: Any = DistributedSampler(dataset, 1, 0, seed=seed)
    loader = DataLoader(
        dataset, batch_size=1, sampler=sampler, num_workers=2, persistent_workers=True, prefetch_factor=3
    )
    with workers_ending(loader):
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            assert_batches(
                loader, [[one] for one in sampler], dataset, f"loader with 2 persistent workers, epoch {epoch}"
            )
    telling = _Telling(7, broken=6)
    whole = DataLoader(telling, batch_size=2, num_workers=3, collate_fn=_listed, worker_init_fn=_told)
    what = "loader with 3 workers"
    batches = iter(whole)
    for number in range(3):
        for sample in next(batches):
            worker = number % 3
            if sample["worker"] != (worker, 3, True, worker):
                raise ShardError(
                    f"{what}: sample {sample['number']} has (worker, workers, own dataset, argument of worker_init_fn) "
                    f"{sample['worker']}, expected {(worker, 3, True, worker)}"
                )
    try:
        next(batches)
    except LookupError as error:
        # Break the cycle of error, frames and iterator: if the garbage collector finds it, it waits 5 s for each
        # worker.
        error.__traceback__ = None
        if type(error) is not LookupError or "sample 6 cannot be read" not in str(error):
            raise ShardError(
                f"{what}: a worker raised LookupError('sample 6 cannot be read'), but {error!r} came"
            ) from None
    except StopIteration:
        raise ShardError(f"{what}: a worker raised LookupError, and the epoch ended as if all were loaded") from None
    else:
        raise ShardError(f"{what}: a worker raised LookupError, but a batch came")


class _Seeds(Numbered):
    """Samples that hold the seeds and random numbers of their worker."""

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        assert worker is not None
        return worker.id, worker.seed, torch.initial_seed(), torch.rand(4).tolist(), random.random()


@torchs_own_warnings()
def assert_worker_seeds(seed: int) -> None:
    """Assert that each worker's seed is the sum of a base seed and its number.

    Each epoch must have a new base seed, and the same generator must give the same seeds again. So augmentations differ
    between workers and epochs, and a run can be repeated. Persistent workers must keep their seed and draw on. Python's
    generator must be seeded too.
    Source: documentation of `torch.utils.data`, "Randomness in multi-process data loading".
    """
    epochs = []
    for run in range(2):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(run)  # must have no influence: the loader has a generator
        loader = DataLoader(
            _Seeds(4),
            batch_size=1,
            num_workers=2,
            collate_fn=_listed,
            generator=generator,
            persistent_workers=bool(run),
        )
        with workers_ending(loader):
            epochs += [[next(iter(batch)) for batch in loader] for _ in range(2)]
    again = epochs.pop()
    for epoch, workers in zip((0, 1, 0), epochs, strict=True):
        base = workers[0][1]
        for number, (worker, told, initial, numbers, _) in enumerate(workers[:2]):
            if not (number == worker and told == initial == base + worker):
                raise ShardError(
                    f"epoch {epoch}: worker {worker} has initial_seed {initial} and worker seed {told}, expected "
                    f"{base} + {number}"
                )
            right = torch.rand(4, generator=torch.Generator().manual_seed(told)).tolist()
            if numbers != right:
                raise ShardError(
                    f"epoch {epoch}: worker {worker}, seeded with {told}, draws {numbers}, expected {right}"
                )
        if workers[0][4] == workers[1][4]:
            raise ShardError(f"epoch {epoch}: Python's random numbers are the same in both workers: {workers[0][4]}")
    if epochs[0] != epochs[2]:
        raise ShardError(f"equal generators give workers different seeds or numbers: {epochs[0]}, then {epochs[2]}")
    for sample, before in zip(again, epochs[2], strict=True):
        # Persistent workers keep their seed and draw on.
        if sample[:3] != before[:3] or sample[3] == before[3] or sample[4] == before[4]:
            raise ShardError(
                f"persistent worker {sample[0]} draws {sample[3:]} in its second epoch with seed {sample[2]}, and "
                f"{before[3:]} with {before[2]} in its first; expected other numbers of the same seed"
            )
    if epochs[0][0][1] == epochs[1][0][1]:
        raise ShardError(f"the workers of epochs 0 and 1 have the same seeds: {epochs[0][0][1]}")


def sent(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on `device`, by copies that do not block."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: sent(part, device) for name, part in batch.items()}
    return [sent(part, device) for part in batch] if isinstance(batch, (list, tuple)) else batch


@torchs_own_warnings()
def assert_partitions(seed: int) -> None:
    """Assert that `recipes.loading.partitions` and `random_split` make the same disjoint parts on all ranks.

    Each place of a part, of a `Subset` or of a `ConcatDataset` must hold the right sample.
    """
    for length, sizes in itertools.product((0, 1, 5, 10, 23), ((1.0,), (0.5, 0.5), (0.7, 0.2, 0.1), (0.25,) * 4)):
        dataset = Numbered(length)
        ways: dict[str, Any] = {
            "partitions": lambda data, parts: loading.partitions(data, parts, seed),
            "random_split": lambda data, parts: random_split(data, parts, torch.Generator().manual_seed(seed)),
        }
        for name, divide in ways.items():
            seen = []
            for rank in range(2):
                torch.manual_seed(rank)
                seen.append([list(part.indices) for part in divide(dataset, sizes)])
            what = f"{name} of {length} samples in {sizes}"
            if seen[0] != seen[1]:
                raise ShardError(f"{what}, of one seed: rank 0 has {seen[0]}, rank 1 has {seen[1]}", ranks=(1,))
            every = sorted(itertools.chain.from_iterable(seen[0]))
            if every != list(range(length)):
                raise ShardError(f"{what}: the parts are {seen[0]}, which is not each sample once")
            wrong = [at for at, size in enumerate(sizes) if abs(len(seen[0][at]) - size * length) >= len(sizes)]
            if wrong:
                raise ShardError(f"{what}: part {wrong[0]} has {len(seen[0][wrong[0]])} samples", ranks=wrong)
            assert_shares([every], length, drop_last=False, what=what)
            for part in divide(dataset, sizes):
                for place, index in enumerate(part.indices):
                    if part[place]["number"] != index:
                        raise ShardError(
                            f"{what}: place {place} holds sample {part[place]['number']}, expected {index}"
                        )
    parts = [Subset(Numbered(20), range(start, stop)) for start, stop in ((0, 3), (3, 3), (3, 4), (4, 11))]
    joined: ConcatDataset[Any] = ConcatDataset(parts)
    got = [sample["number"] for sample in (joined[place] for place in (*range(len(joined)), -1, -11))]
    if got != [*range(11), 10, 0]:
        raise ShardError(
            f"ConcatDataset of 3, 0, 1 and 7 samples, its last and first again: holds {got}, expected the samples in "
            "order"
        )
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

    Resumes in three ways: by skipping the seen batches of a checkpoint's epoch; by a sampler with its own state; and by
    the saved and loaded state of the generator of a `RandomSampler`.
    """
    world, length, size, epoch = 2, 11, 2, 2
    dataset = Numbered(length)
    for rank in range(world):
        sampler: Any = loading.ResumableSampler(dataset, world, rank, seed=seed)
        sampler.set_epoch(epoch)
        whole = [indices_of(batch) for batch in DataLoader(dataset, size, sampler=sampler)]
        for seen in range(len(whole) + 1):
            what = f"loader of rank {rank} of {world}, epoch {epoch}, after {seen} of {len(whole)} batches"
            again: Any = loading.ResumableSampler(dataset, world, rank, seed=seed)
            again.load_state_dict({"epoch": epoch, "start": 0})
            skipped = itertools.islice(DataLoader(dataset, size, sampler=again), seen, None)
            assert_batches(skipped, whole[seen:], dataset, f"{what}, skipped")
            state = _checkpointed(sampler.state_dict(min(seen * size, len(sampler))))
            again = loading.ResumableSampler(dataset, world, rank, seed=seed)
            again.load_state_dict(state)
            loader = DataLoader(dataset, size, sampler=again)
            if len(loader) != len(whole) - seen:
                raise ShardError(f"{what}, resumed: len is {len(loader)}, expected {len(whole) - seen}", ranks=(rank,))
            assert_batches(loader, whole[seen:], dataset, f"{what}, resumed")
            assert_batches(loader, whole, dataset, f"{what}, gone through again")
    for seen in (0, 1, 5, 6):
        generator = torch.Generator().manual_seed(seed)
        list(RandomSampler(dataset, generator=generator))
        state = _checkpointed(generator.get_state())
        whole = list(BatchSampler(RandomSampler(dataset, generator=generator), size, drop_last=False))
        restored = torch.Generator()
        restored.set_state(state)
        rest = itertools.islice(DataLoader(dataset, batch_sampler=_with(dataset, restored, size)), seen, None)
        assert_batches(rest, whole[seen:], dataset, f"loader with a generator, after {seen} of {len(whole)} batches")


def _with(dataset: Numbered, generator: torch.Generator, size: int) -> Any:
    return BatchSampler(RandomSampler(dataset, generator=generator), size, drop_last=False)


def _checkpointed(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()))
