"""The gate for data loading: each way in which ranks get the wrong samples is refuted by its name, its right twin passes."""

from __future__ import annotations

GPUS = ("--gpus=4", "--simulate", "--rank-timeout=60")

COMMON = """
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info, random_split
from torch.utils.data.distributed import DistributedSampler

from mgpu_check import assert_loader_covers
from mgpu_check.errors import RankDied, RankFailure, RankHang, ScalingMismatch

def numbers(n):
    return TensorDataset(torch.arange(n), torch.arange(n) * 0.5)

def sampled(rank, n=24, *, set_epoch=True, seed=0, batch=2, epochs=2, **options):
    data = numbers(n)
    options = {"shuffle": True, **options}
    sampler = DistributedSampler(data, rank.size, rank.index, seed=seed, **options)
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    for epoch in range(epochs):
        if set_epoch:
            sampler.set_epoch(epoch)
        yield loader

def plain(rank, n=24, batch=2, **options):
    return DataLoader(numbers(n), batch_size=batch, **options)

def refuted(ranks, make_loader, *mistakes, match, **options):
    with pytest.raises(ScalingMismatch, match=match) as caught:
        assert_loader_covers(ranks, make_loader, **options)
    assert caught.value.mistakes == mistakes, str(caught.value)
    return caught.value
"""


def passed(run, pytester, body: str, count: int) -> None:
    pytester.makepyfile(test_it=COMMON + body)
    run(*GPUS).assert_outcomes(passed=count)


def test_samplers(run, pytester):
    passed(
        run,
        pytester,
        """
def test_sampler(ranks):
    assert_loader_covers(ranks, sampled)

def test_a_sampler_that_does_not_shuffle_needs_no_set_epoch(ranks):
    def make(rank):
        data = numbers(24)
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
    assert_loader_covers(ranks, make)

def test_padding(ranks):
    def make(rank):
        return sampled(rank, 11)
    error = refuted(ranks, make, "padding-counted", match="world size 2: epoch 0: 1 of 11 samples too many", world_sizes=[4, 2])
    assert "smallest case: world size 2, samples 11" in str(error) and "DistributedSampler" in str(error)
    assert_loader_covers(ranks, make, padding=True)
    assert_loader_covers(ranks, make, world_sizes=[1])

def test_padding_does_not_excuse_overlap(ranks):
    def overlapping(rank):
        share = 24 // rank.size
        first = rank.index * share
        return DataLoader(Subset(numbers(24), range(first, min(first + share + 1, 24))), batch_size=2)
    error = refuted(ranks, overlapping, match="1 of 24 samples too many: 12", padding=True, uneven=True)
    assert "only once" in str(error)

def test_padding_does_not_excuse_more_than_the_last_batches(ranks):
    def make(rank):
        own = list(range(rank.index, 24, rank.size))
        return DataLoader(Subset(numbers(24), own + own[:4] * (rank.size > 1)), batch_size=2)
    refuted(ranks, make, match="8 of 24 samples too many: 0, 2, 4, 6, …", padding=True)

def test_blanks(ranks):
    def make(rank):
        own = torch.arange(1, 8)[rank.index::rank.size]
        return torch.cat([own, own.new_zeros((4 - len(own)) * (rank.size > 1))]).split(2)
    refuted(ranks, make, match="1 seen that world size 1 does not give: 0", world_sizes=[2])

def test_dropping(ranks):
    def make(rank):
        return sampled(rank, 27, drop_last=True)
    error = refuted(ranks, make, "samples-missed", match="world size 2: epoch 0: 1 of 27 samples on no rank")
    assert "dropped=True" in str(error)
    assert_loader_covers(ranks, make, dropped=True)

def test_dropping_others_each_time_at_world_size_1(ranks):
    def make(rank):
        for loader in sampled(rank, 27):
            yield DataLoader(loader.dataset, batch_size=4, sampler=loader.sampler, drop_last=True)
    with pytest.raises(ValueError, match="dropped=True"):
        assert_loader_covers(ranks, make)
    assert_loader_covers(ranks, make, dropped=True, padding=True, world_sizes=[2])

def test_dropping_does_not_excuse_more_than_the_last_batches(ranks):
    def make(rank):
        share = 24 // rank.size - 4 * (rank.size > 1)
        return DataLoader(Subset(numbers(24), range(rank.index * share, (rank.index + 1) * share)), batch_size=2)
    error = refuted(ranks, make, "samples-missed", match="8 of 24 samples on no rank: 16, 17, 18, 19, …", dropped=True)

def test_every_rank_sees_all(ranks):
    error = refuted(ranks, plain, "dataset-not-split", match="24 of 24 samples too many")
    assert "each of the 2 ranks sees all 24 samples" in str(error)

def test_every_rank_sees_the_share_of_rank_0(ranks):
    def make(rank):
        data = numbers(24)
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, rank.size, 0, shuffle=False))
    error = refuted(ranks, make, "samples-missed", match="12 of 24 samples on no rank: 1, 3, 5, 7")
    assert "ranks 0-1 see the same samples" in str(error) and error.ranks == (1,)

def test_epochs_in_the_same_order(ranks):
    error = refuted(ranks, lambda rank: sampled(rank, set_epoch=False), "epochs-not-reshuffled", match="does not shuffle")
    assert error.ranks == (0, 1) and "all ranks: the same order in each of 2 epochs" in str(error)

def test_only_the_order_of_one_rank_shows_that_it_should_change(ranks):
    def make(rank):
        data = numbers(24)
        sampler = DistributedSampler(data, shuffle=False) if rank.size > 1 else None
        return DataLoader(data, batch_size=2, sampler=sampler, shuffle=sampler is None)
    refuted(ranks, make, "epochs-not-reshuffled", match="does not shuffle")

def test_an_order_that_changes_without_a_sampler(ranks):
    def make(rank):
        for epoch in range(2):
            generator = torch.Generator().manual_seed(epoch if rank.size == 1 else 0)
            yield torch.randperm(24, generator=generator)[rank.index::rank.size].split(2)
    refuted(ranks, make, "epochs-not-reshuffled", match="does not shuffle")

def test_set_epoch_on_rank_0_only(ranks):
    def make(rank):
        return sampled(rank, set_epoch=rank.index == 0)
    error = refuted(ranks, make, "epochs-not-reshuffled", "split-differs-between-ranks", match="epoch 1: ")
    assert "rank 1 only" in str(error)

def test_too_few_samples_to_tell(ranks):
    assert_loader_covers(ranks, lambda rank: sampled(rank, 4, set_epoch=False))
    assert_loader_covers(ranks, lambda rank: sampled(rank, set_epoch=False), epochs=1)

def test_a_seed_for_each_rank(ranks):
    def make(rank):
        return sampled(rank, seed=rank.index)
    error = refuted(ranks, make, "split-differs-between-ranks", match="on no rank")
    assert "seen several times" in str(error)
""",
        17,
    )


def test_splits_streams_and_contents(run, pytester):
    passed(
        run,
        pytester,
        """
class Stream(IterableDataset):
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

def split(generator_of):
    def make(rank):
        torch.manual_seed(1234 + rank.index)  # each rank augments otherwise
        train, held = random_split(numbers(40), [32, 8], generator=generator_of())
        return DataLoader(train, batch_size=2, sampler=DistributedSampler(train, rank.size, rank.index, shuffle=False))
    return make

def test_random_split(ranks):
    assert_loader_covers(ranks, split(lambda: torch.Generator().manual_seed(0)))
    error = refuted(ranks, split(lambda: None), "split-differs-between-ranks", match="samples that world size 1 does not give")
    assert error.ranks == (1,)

def test_unequal_shares(ranks):
    def make(rank):
        return DataLoader(Subset(numbers(9), range(rank.index, 9, rank.size)), batch_size=2)
    error = refuted(ranks, make, "uneven-steps", match="numbers of batches differ: 3 on rank 0, 2 on rank 1")
    assert error.ranks == (0,) or error.ranks == (1,)
    assert "waits in backward" in str(error)
    assert_loader_covers(ranks, make, uneven=True)

class Augmented(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return {"id": i, "image": torch.rand(3, 4), "name": f"image {i}"}

def augmented(rank):
    return DataLoader(Augmented(), batch_size=2, sampler=DistributedSampler(Augmented(), shuffle=False))

def test_random_contents_need_a_key(ranks):
    with pytest.raises(ValueError, match="at world size 1, epoch 1 of make_loader differs .*pass key="):
        assert_loader_covers(ranks, augmented)
    with pytest.raises(ScalingMismatch, match="pass key=") as caught:
        assert_loader_covers(ranks, augmented, epochs=1)
    assert caught.value.mistakes == ()
    assert_loader_covers(ranks, augmented, key=lambda batch: batch["id"])
    assert_loader_covers(ranks, augmented, key=lambda batch: batch["name"])
    refuted(
        ranks, lambda rank: DataLoader(Augmented(), batch_size=2), "dataset-not-split",
        match="16 of 16 samples too many: 0, 1, 2", key=lambda batch: batch["id"],
    )

def test_equal_samples_count_as_often_as_they_are_there(ranks):
    def make(rank, step=None):
        data = torch.tensor([1, 1, 2, 2, 2, 3, 3, 4])
        return data[rank.index::step or rank.size].split(2)
    assert_loader_covers(ranks, make, uneven=True)
    refuted(ranks, lambda rank: make(rank, 4 if rank.size > 1 else 1), "samples-missed", match="on no rank", world_sizes=[2], uneven=True)

def test_texts_and_loaders_of_lists(ranks):
    texts = [f"sentence {i}" for i in range(8)]
    assert_loader_covers(ranks, lambda rank: [texts[i:i + 2] for i in range(2 * rank.index, 8, 2 * rank.size)])
    refuted(ranks, lambda rank: [texts], "dataset-not-split", match="sentence 0")

def test_what_cannot_be_repeated(ranks):
    def make(rank):
        seed = [int.from_bytes(__import__("os").urandom(4), "big")]  # as torch.seed() does
        dist.broadcast_object_list(seed, 0)
        return sampled(rank, 400, seed=seed[0], batch=50)
    error = refuted(ranks, make, match="run again under the same seeds")
    assert error.ranks == (0, 1) and "repeatable" in str(error)

def test_devices(ranks):
    def make(rank):
        return [part.to(rank.device) for part in torch.randn(16, 3).chunk(4 * rank.size)[rank.index::rank.size]]
    assert_loader_covers(ranks, make)

def test_errors_of_ranks_say_where(ranks):
    def make(rank):
        if rank.size == 4:
            raise OSError("no such file")
        return sampled(rank)
    with pytest.raises(RankFailure, match="no such file") as caught:
        assert_loader_covers(ranks, make)
    assert caught.value.__notes__ == ["while checking the loader at world size 4, 2 epochs"]

def one_by_one(rank, made=lambda x: (x, x[:, 0] * 2)):
    for x in torch.arange(24.0).reshape(24, 1).split(2)[rank.index::rank.size]:
        yield made(x)

def test_misuse(ranks):
    for options, match in [
        ({"epochs": 0}, "epochs=0; give an int of at least 1, and 2 or more"),
        ({"epochs": True}, "epochs=True"),
        ({"key": "id"}, "key is 'id'; give a function"),
        ({"world_sizes": [9]}, "world_sizes has 9; give ints from 1 to 4"),
        ({"world_sizes": []}, "world_sizes is empty"),
        ({"world_sizes": 2}, "world_sizes is 2"),
    ]:
        with pytest.raises(ValueError, match=match):
            assert_loader_covers(ranks, sampled, **options)
    for make, match in [
        (DataLoader(numbers(4)), "make_loader is a DataLoader"),
        (lambda rank: torch.ones(3), "returned a Tensor"),
        (lambda rank: None, "returned a NoneType"),
        (lambda rank: [], "no samples at world size 1"),
        (lambda rank: sampled(rank, epochs=1), "yielded 1 loaders, and epochs is 2"),
        (lambda rank: [(torch.ones(3), torch.ones(2))], r"leaves of \\[2, 3\\] rows"),
        (lambda rank: [torch.tensor(1)], "no tensor with rows"),
        (lambda rank: [[object()]], "holds a object"),
        (lambda rank: iter(plain(rank)), "an iterator, which has nothing left for epoch 1; return the loader itself"),
        (lambda rank: one_by_one(rank), "no sample in common .* if it yields batches, return a loader, or a list of"),
        (lambda rank: one_by_one(rank, lambda x: (x, 3)), "a batch of type int .* if it yields batches, return a loader"),
        (lambda rank: one_by_one(rank, lambda x: {"x": x}), "yielded a dict; .* if it yields batches, return a loader"),
    ]:
        with pytest.raises(ValueError, match=match):
            assert_loader_covers(ranks, make)
    with pytest.raises(ValueError, match="yielded twice, though epochs is 1.* if it yields batches"):
        assert_loader_covers(ranks, one_by_one, epochs=1)
    with pytest.raises(ValueError, match="gave a dict, which is not hashable"):
        assert_loader_covers(ranks, sampled, key=lambda batch: [{}])

def test_what_looks_like_these_and_is_right(ranks):
    # Lists that are loaders, more of them than epochs; and iterators where there is one epoch, or one for each.
    def lists(rank):
        for epoch in range(3):
            yield [part for part in torch.arange(24).split(2)[rank.index::rank.size]]
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
""",
        13,
    )


def test_ranks_that_hang_or_die(run, pytester):
    pytester.makepyfile(
        test_it=COMMON
        + """
def hanging(rank):
    for epoch in range(2):
        if rank.size == 2 and rank.index == 1:
            dist.barrier()
        yield plain(rank)

def test_hang(ranks):
    with pytest.raises(RankHang) as caught:
        assert_loader_covers(ranks, lambda rank: hanging(rank))
    assert caught.value.__notes__ == ["while checking the loader at world size 2, 2 epochs"]

def test_death(ranks):
    def make(rank):
        if rank.index == 1:
            __import__("os")._exit(3)
        return plain(rank)
    with pytest.raises(RankDied, match="exit code 3") as caught:
        assert_loader_covers(ranks, make)
    assert caught.value.__notes__

def test_shown(ranks):
    assert_loader_covers(ranks, lambda rank: 1 / (rank.size - 1))
"""
    )
    result = run("--gpus=2", "--simulate", "--rank-timeout=3")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*ZeroDivisionError*", "while checking the loader at world size 1, 2 epochs"])
