"""The gate for samplers: each way to give ranks the wrong samples is refuted by its name, its right twin
passes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from mgpu_check import assert_loader_covers
from tests.gates.loaders import numbers, refuted, sampled

pytestmark = pytest.mark.gpus(4)


def test_padding(ranks):
    make = functools.partial(sampled, n=11)
    error = refuted(
        ranks, make, "padding-counted", match="world size 2: epoch 0: 1 of 11 samples too many", world_sizes=[4, 2]
    )
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
        own = torch.arange(1, 8)[rank.index :: rank.size]
        return torch.cat([own, own.new_zeros((4 - len(own)) * (rank.size > 1))]).split(2)

    refuted(ranks, make, match="1 seen that world size 1 does not give: 0", world_sizes=[2])


def test_dropping(ranks):
    make = functools.partial(sampled, n=27, drop_last=True)
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

    refuted(ranks, make, "samples-missed", match="8 of 24 samples on no rank: 16, 17, 18, 19, …", dropped=True)


def test_every_rank_sees_the_share_of_rank_0(ranks):
    def make(rank):
        data = numbers(24)
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, rank.size, 0, shuffle=False))

    error = refuted(ranks, make, "samples-missed", match="12 of 24 samples on no rank: 1, 3, 5, 7")
    assert "ranks 0-1 see the same samples" in str(error) and error.ranks == (1,)


def test_only_the_order_of_one_rank_shows_that_it_should_change(ranks):
    def make(rank):
        data = numbers(24)
        sampler: DistributedSampler[Any] | None = DistributedSampler(data, shuffle=False) if rank.size > 1 else None
        return DataLoader(data, batch_size=2, sampler=sampler, shuffle=sampler is None)

    refuted(ranks, make, "epochs-not-reshuffled", match="does not shuffle")


def test_set_epoch_on_rank_0_only(ranks):
    error = refuted(
        ranks,
        lambda rank: sampled(rank, set_epoch=rank.index == 0),
        "epochs-not-reshuffled",
        "split-differs-between-ranks",
        match="epoch 1: ",
    )
    assert "rank 1 only" in str(error)


def test_too_few_samples_to_tell(ranks):
    assert_loader_covers(ranks, lambda rank: sampled(rank, 4, set_epoch=False))
    assert_loader_covers(ranks, lambda rank: sampled(rank, set_epoch=False), epochs=1)
