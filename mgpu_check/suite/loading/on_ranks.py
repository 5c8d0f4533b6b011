"""Check that the loaders of all ranks together yield each sample once, each rank on its device."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from mgpu_check.asserts.findings import Findings
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import ShardError
from mgpu_check.suite.loading.loaders import assert_batches, sent, torchs_own_warnings, workers_ending
from mgpu_check.suite.loading.numbered import Numbered, indices_of
from mgpu_check.suite.loading.sampling import assert_shares, batches_of, sampler_over
from mgpu_check.suite.recipes.loading import SharedStream

_BATCH = 3


def assert_samplers_of_ranks(rank: Rank, seed: int) -> None:
    """Assert that a `DistributedSampler` without a rank argument finds rank and world, and that all ranks agree.

    Covers datasets that do and do not divide by the number of ranks, shuffled and not. Torch's global generators differ
    between ranks.
    """
    torch.manual_seed(seed + rank.index)
    with Findings() as findings:
        for length, shuffle, drop_last in itertools.product((0, 1, 7, 60), (False, True), (False, True)):
            sampler = sampler_over(length, shuffle=shuffle, drop_last=drop_last, seed=seed)
            what = f"DistributedSampler of {length} samples, {shuffle=}, {drop_last=}"
            with findings.collected():
                _require_told(sampler, what, rank)
            if findings.anywhere(rank):
                return
            sampler.set_epoch(1)
            with findings.collected():
                assert_shares(_of_all(list(sampler)), length, drop_last=drop_last, what=what)


def _require_told(sampler: Any, what: str, rank: Rank) -> None:
    if (sampler.num_replicas, sampler.rank) != (rank.size, rank.index):
        raise ShardError(
            f"{what}, on rank {rank.index} of {rank.size}: it takes itself for rank {sampler.rank} of "
            f"{sampler.num_replicas}",
            ranks=(rank.index,),
        )


def _of_all(own: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


@torchs_own_warnings()
def assert_loaders_cover(rank: Rank, seed: int) -> None:
    """Assert that the ranks' loaders yield each sample once per epoch, on their devices, bit for bit, in equal batches.

    They load as training code does: with a persistent worker, pinned memory, non-blocking copies, and `set_epoch`.
    """
    dataset = Numbered(5 * rank.size + 2)
    sampler: Any = DistributedSampler(dataset, seed=seed)
    loader = DataLoader(dataset, _BATCH, sampler=sampler, num_workers=1, persistent_workers=True, pin_memory=True)
    with workers_ending(loader), Findings() as findings:
        for epoch in range(3):
            sampler.set_epoch(epoch)
            expected = batches_of(sampler, _BATCH, False)
            there = (sent(batch, rank.device) for batch in loader)
            what = f"loader of rank {rank.index} of {rank.size}, epoch {epoch}"
            with findings.collected():
                assert_batches(there, expected, dataset, what, rank.device, ranks=(rank.index,))
            if findings.anywhere(rank):
                return
            # The expected samples are those that came, as checked above.
            share = list(itertools.chain.from_iterable(expected))
            what = f"loaders of {rank.size} ranks, epoch {epoch}"
            with findings.collected():
                assert_shares(_of_all(share), len(dataset), drop_last=False, what=what)


@torchs_own_warnings()
def assert_streams_cover(rank: Rank) -> None:
    """Assert that an iterable dataset that ranks and their workers share yields each sample once, also in last batches.

    Covers two workers and no workers. Each worker has its own last batch, which must come unless ``drop_last`` drops
    it.
    """
    dataset = Numbered(7 * rank.size + 3)
    with Findings() as findings:
        for workers, drop_last in ((0, False), (0, True), (2, False), (2, True)):
            what = f"stream of rank {rank.index} of {rank.size} with {workers} workers, {drop_last=}"
            with findings.collected():
                got = _streamed(dataset, workers, drop_last, rank, what)
            if findings.anywhere(rank):
                return
            if drop_last:
                continue
            every = sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(_of_all(got))))
            with findings.collected():
                if every != list(range(len(dataset))):
                    raise ShardError(
                        f"{what}: over all ranks come the samples {every}, expected each of {len(dataset)} once"
                    )


def _streamed(dataset: Numbered, workers: int, drop_last: bool, rank: Rank, what: str) -> list[list[int]]:
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
        seen = list(loader)
    got = [indices_of(batch) for batch in seen]
    if got != expected:
        raise ShardError(f"{what}: expected the batches {expected}, got {got}", ranks=(rank.index,))
    assert_batches(seen, expected, dataset, what)
    return got
