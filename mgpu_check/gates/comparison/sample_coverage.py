"""Check that all ranks together get the samples of one rank, each once, and in a new order in each epoch.

This module only counts: it imports no torch and starts no ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from mgpu_check.diagnosis.evidence import Accepted, EpochSamples

ALL_SEEN, ONLY_ONCE, KNOWN, AS_MANY = "all seen", "only once", "known", "as many batches"
"""Relations: each sample is on some rank; no sample is on two ranks; every sample is known at world size 1; all ranks
have as many batches."""
_CHANCE = 1e-4  # a repeated order proves that a loader does not shuffle, if chance repeats it less often than this


@dataclass(frozen=True)
class Epoch:
    """The samples that one rank got in one epoch, as their identities by batch."""

    batches: tuple[tuple[Hashable, ...], ...]

    @property
    def samples(self) -> tuple[Hashable, ...]:
        return tuple(sample for batch in self.batches for sample in batch)

    @property
    def counts(self) -> Counter[Hashable]:
        return Counter(self.samples)


@dataclass
class Visits:
    """The epochs that one rank got."""

    epochs: list[Epoch] = field(default_factory=list)
    labels: dict[Hashable, str] = field(default_factory=dict)  # the text that a report shows for a sample, by identity
    shuffles: bool = False  # whether the loader has a sampler that should shuffle
    workers: int = 0  # the largest number of worker processes that read an IterableDataset
    bare: bool = False  # whether a generator yielded lists or tuples, which may be loaders or batches
    problem: str = ""  # why the user's functions cannot be used; "" if they can


@dataclass
class Coverage:
    """The coverage of one epoch, or the order of all epochs.

    `details` describe the defects, a clause each; `ranks` are the ranks at fault, if they are known.
    """

    relations: dict[str, bool | None] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)


def samples_of(
    expected: Counter[Hashable],
    rank_epochs: Sequence[Epoch],
    accepted: Accepted,
    labels: Mapping[Hashable, str],
    workers: int = 0,
) -> EpochSamples:
    """Return the samples that the ranks got in one epoch, with the samples that they should get together.

    `expected`: how often each sample should be seen; at least one sample.
    """
    largest = max((len(batch) for rank_epoch in rank_epochs for batch in rank_epoch.batches), default=0)
    batches = [len(rank_epoch.batches) for rank_epoch in rank_epochs]
    counts = [rank_epoch.counts for rank_epoch in rank_epochs]
    return EpochSamples(expected, counts, largest, batches, labels, workers, accepted)


def coverage_of(samples: EpochSamples) -> Coverage:
    result = Coverage()
    result.relations = {
        ALL_SEEN: samples.all_seen,
        ONLY_ONCE: samples.only_once,
        KNOWN: samples.known,
        AS_MANY: None if len(samples.counts) == 1 else not samples.uneven,
    }
    size, missing, repeated, unknown = samples.expected.total(), samples.missing, samples.repeated, samples.unknown
    if not samples.all_seen:
        result.details.append(f"{missing.total()} of {size} samples on no rank: {samples.shown(missing)}")
    if not samples.only_once:
        result.details.append(f"{repeated.total()} of {size} samples too many: {samples.shown(repeated)}")
    if not samples.known:
        result.details.append(f"{unknown.total()} seen that world size 1 does not give: {samples.shown(unknown)}")
    if samples.uneven:
        result.details.append(samples.told_of_batches)
        result.ranks.update(sorted((ranks for _, ranks in samples.numbers_of_batches), key=len)[0])
        result.remarks.append(
            "where ranks have different numbers of batches, DistributedDataParallel waits in backward for those that "
            "are done: drop or pad the last ones, or use torch.distributed.algorithms.Join; uneven=True accepts it in "
            "loops without collectives"
        )
    if not samples.covered and min(samples.shares_unknown) > 0:
        result.remarks.append(
            "the contents differ from those at world size 1: where samples are augmented at random, or padded to the "
            "longest of their batch, pass key=, a function from a batch to the ids of its samples"
        )
    return result


def same_orders(visits: Sequence[Visits], samples: int) -> tuple[list[int], bool]:
    """Return the ranks that visit their samples in the same order in all epochs, and whether chance is excluded.

    A rank that draws k of n shuffled samples has n!/(n-k)! possible orders.
    """
    orders_of_ranks = enumerate({epoch.samples for epoch in visit.epochs} for visit in visits)
    same = [rank for rank, orders in orders_of_ranks if len(orders) == 1 and any(orders)]
    most = max((len(set(visits[rank].epochs[0].samples)) for rank in same), default=0)
    drawn = samples if len(same) == len(visits) else min(most, samples)
    possible = math.lgamma(samples + 1) - math.lgamma(samples - drawn + 1)
    repeats = len(visits[0].epochs) - 1
    return same, repeats > 0 and possible * repeats > -math.log(_CHANCE)
