"""The gate for data loading: each way to give ranks the wrong samples is refuted by its name, its right twin
passes."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from mgpu_check import RankDied, RankFailure, RankHang, ScalingMismatch, assert_loader_covers
from tests.gates.loaders import numbers, plain, refuted, sampled
from tests.gates.patience import OnTime

pytestmark = pytest.mark.gpus(4)


class Stream(IterableDataset[Any]):
    def __init__(self, n, rank, by_rank=True, by_worker=True):
        self.n, self.rank, self.by_rank, self.by_worker = n, rank, by_rank, by_worker

    def __iter__(self):
        worker = get_worker_info() if self.by_worker else None
        part, parts = (worker.id, worker.num_workers) if worker else (0, 1)
        if self.by_rank:
            part, parts = part + parts * self.rank.index, parts * self.rank.size
        yield from (torch.tensor([i]) for i in range(part, self.n, parts))


def streamed(workers=0, **options):
    return lambda rank: DataLoader(Stream(16, rank, **options), batch_size=2, num_workers=workers)


def test_streams(ranks):
    assert_loader_covers(ranks, streamed())
    error = refuted(ranks, streamed(by_rank=False), "dataset-not-split", match="16 of 16 samples too many")
    assert "world size 2" in str(error) and "workers" not in str(error).partition("looks like")[0]


def test_streams_with_workers(ranks):
    assert_loader_covers(ranks, streamed(2), world_sizes=[2])
    error = refuted(ranks, streamed(2, by_worker=False), "dataset-not-split", match="16 of 16 samples too many")
    assert "world size 1, samples 16, workers 2" in str(error) and "each of the 2 workers" in str(error)
    refuted(ranks, streamed(2, by_rank=False), "dataset-not-split", match="at world size 2", world_sizes=[2])


def test_unequal_shares(ranks):
    def make(rank):
        return DataLoader(Subset(numbers(9), range(rank.index, 9, rank.size)), batch_size=2)

    error = refuted(ranks, make, "uneven-steps", match="numbers of batches differ: 3 on rank 0, 2 on rank 1")
    assert error.ranks == (0,) or error.ranks == (1,)
    assert "waits in backward" in str(error)
    assert_loader_covers(ranks, make, uneven=True)


class Augmented(Dataset[Any]):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return {"id": i, "image": torch.rand(3, 4), "name": f"image {i}"}


def augmented(rank):
    return DataLoader(Augmented(), batch_size=2, sampler=DistributedSampler(Augmented(), shuffle=False))


def test_random_contents_need_a_key(ranks):
    with pytest.raises(ValueError, match=r"at world size 1, epoch 1 of make_loader differs .*pass key="):
        assert_loader_covers(ranks, augmented)
    with pytest.raises(ScalingMismatch, match="pass key=") as caught:
        assert_loader_covers(ranks, augmented, epochs=1)
    assert caught.value.mistakes == ()
    assert_loader_covers(ranks, augmented, key=lambda batch: batch["id"])
    assert_loader_covers(ranks, augmented, key=lambda batch: batch["name"])
    whole, by_id = lambda rank: DataLoader(Augmented(), batch_size=2), lambda batch: batch["id"]
    refuted(ranks, whole, "dataset-not-split", match="16 of 16 samples too many: 0, 1, 2", key=by_id)


def test_equal_samples_count_as_often_as_they_are_there(ranks):
    def make(rank, step=0):
        data = torch.tensor([1, 1, 2, 2, 2, 3, 3, 4])
        return data[rank.index :: step if step and rank.size > 1 else rank.size].split(2)

    assert_loader_covers(ranks, make, uneven=True)
    missing = functools.partial(make, step=4)
    refuted(ranks, missing, "samples-missed", match="on no rank", world_sizes=[2], uneven=True)


def test_texts_and_loaders_of_lists(ranks):
    texts = [f"sentence {i}" for i in range(8)]
    assert_loader_covers(ranks, lambda rank: [texts[i : i + 2] for i in range(2 * rank.index, 8, 2 * rank.size)])
    refuted(ranks, lambda rank: [texts], "dataset-not-split", match="sentence 0")


def test_what_cannot_be_repeated(ranks):
    def make(rank):
        seed = [int.from_bytes(os.urandom(4), "big")]  # as torch.seed() does
        dist.broadcast_object_list(seed, 0)
        return sampled(rank, 400, seed=seed[0], batch=50)

    error = refuted(ranks, make, match="run again under the same seeds")
    assert error.ranks == (0, 1) and "repeatable" in str(error)


def test_errors_of_ranks_say_where(ranks):
    def make(rank):
        if rank.size == 4:
            raise OSError("no such file")
        return sampled(rank)

    with pytest.raises(RankFailure, match="no such file") as caught:
        assert_loader_covers(ranks, make)
    assert caught.value.__notes__ == ["while checking the loader at world size 4, 2 epochs"]


def one_by_one(rank, made=lambda x: (x, x[:, 0] * 2)):
    for x in torch.arange(24.0).reshape(24, 1).split(2)[rank.index :: rank.size]:
        yield made(x)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"epochs": 0}, "epochs=0; give an int of at least 1, and 2 or more"),
        ({"key": "id"}, "key is 'id'; give a function"),
        ({"world_sizes": 2}, "world_sizes is 2"),
        ({"key": lambda batch: [{}]}, "gave a dict, which is not hashable"),
        ({"make_loader": one_by_one, "epochs": 1}, r"yielded twice, though epochs is 1.* if it yields batches"),
    ],
)
def test_misuse(ranks, options, match):
    with pytest.raises(ValueError, match=match):
        assert_loader_covers(ranks, **{"make_loader": sampled, **options})


def drawn(rank):
    sampler = WeightedRandomSampler([1.0] * 24, 24, generator=torch.Generator().manual_seed(3))
    return DataLoader(numbers(24), batch_size=2, sampler=sampler)


BATCHES = "if it yields batches, return a loader"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (drawn, "as WeightedRandomSampler does, pass epochs=1"),
        (DataLoader(numbers(4)), "make_loader is a DataLoader"),
        (lambda rank: None, "returned a NoneType"),
        (lambda rank: [], "no samples at world size 1"),
        (lambda rank: sampled(rank, epochs=1), "yielded 1 loaders, and epochs is 2"),
        (lambda rank: [(torch.ones(3), torch.ones(2))], r"leaves of \[2, 3\] rows"),
        (lambda rank: [[object()]], "holds a object"),
        (lambda rank: iter(plain(rank)), "an iterator, which has nothing left for epoch 1; return the loader itself"),
        (lambda rank: one_by_one(rank), f"no sample in common .* {BATCHES}, or a list of"),
        (lambda rank: one_by_one(rank, lambda x: (x, 3)), f"a batch of type int .* {BATCHES}"),
        (lambda rank: one_by_one(rank, lambda x: {"x": x}), f"yielded a dict; .* {BATCHES}"),
    ],
)
def test_what_is_no_loader(ranks, make, match):
    with pytest.raises(ValueError, match=match):
        assert_loader_covers(ranks, make)


def test_what_looks_like_these_and_is_right(ranks):
    # Lists on devices that are loaders, more than epochs; and iterators where there is one epoch, or one for each.
    def lists(rank):
        for _epoch in range(3):
            yield [part.to(rank.device) for part in torch.arange(24).split(2)[rank.index :: rank.size]]

    assert_loader_covers(ranks, lists, world_sizes=[2])
    assert_loader_covers(ranks, lists, world_sizes=[2], epochs=1)

    def loader(rank):
        return DataLoader(Subset(numbers(24), range(rank.index, 24, rank.size)), batch_size=2)

    assert_loader_covers(ranks, lambda rank: iter(loader(rank)), epochs=1, world_sizes=[2])
    assert_loader_covers(ranks, lambda rank: (iter(loader(rank)) for epoch in range(2)), world_sizes=[2])
    assert_loader_covers(ranks, lambda rank: list(one_by_one(rank)), world_sizes=[2])


@pytest.mark.gpus(1)
def test_one_rank(ranks):
    with pytest.raises(ValueError, match="--gpus=2 or more"):
        assert_loader_covers(ranks, sampled)


def test_a_rank_that_hangs(ranks):
    def make(rank):
        for _epoch in range(2):
            if rank.size == 2 and rank.index == 1:
                dist.barrier()
            yield plain(rank)

    limited: Any = OnTime(ranks, 3)
    with pytest.raises(RankHang) as caught:
        assert_loader_covers(limited, make, world_sizes=[2])
    assert caught.value.__notes__ == ["while checking the loader at world size 2, 2 epochs"]


def test_a_rank_that_dies(ranks):
    def make(rank):
        if rank.index == 1:
            os._exit(3)
        return plain(rank)

    with pytest.raises(RankDied, match="exit code 3") as caught:
        assert_loader_covers(ranks, make)
    assert caught.value.__notes__ == ["while checking the loader at world size 2, 2 epochs"]
