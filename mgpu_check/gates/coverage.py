"""Check that the samples of all ranks are those of one rank: each once, and in another order in each epoch.

Plain counting: no torch, no ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mgpu_check.mistakes.report import Finding
from mgpu_check.processes.rank_lists import grouped, named

__all__ = ["Accepted", "Coverage", "Epoch", "Visits", "coverage_of", "same_orders", "shown"]

ALL_SEEN, ONLY_ONCE, KNOWN, AS_MANY = "all seen", "only once", "known", "as many batches"
"""Relations: each sample on some rank, on no more than one, and none that one rank does not see; batches on all ranks."""
_SHOWN = 4
_CHANCE = 1e-4  # that a shuffle which works gives the same order twice: below it, it is taken for one that does not
_UNKNOWN = 0.5  # share of a rank's samples that world size 1 does not give, above which contents are taken to be random


@dataclass(frozen=True)
class Epoch:
    """The samples that one rank was given in one epoch: for each batch, their identities."""

    batches: tuple[tuple[Hashable, ...], ...]

    @property
    def samples(self) -> tuple[Hashable, ...]:
        return tuple(sample for batch in self.batches for sample in batch)

    @property
    def counts(self) -> Counter[Hashable]:
        return Counter(self.samples)


@dataclass
class Visits:
    """The epochs that one rank was given.

    Attributes:
        labels: how a sample is shown, by identity.
        shuffles: a sampler was seen that is to shuffle.
        workers: the most worker processes that read an IterableDataset.
        bare: a generator gave lists, tuples or the like, which may be loaders or batches.
        problem: what of the user's functions cannot be used; nothing where they can.
    """

    epochs: list[Epoch] = field(default_factory=list)
    labels: dict[Hashable, str] = field(default_factory=dict)
    shuffles: bool = False
    workers: int = 0
    bare: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Accepted:
    """Deviations that the user has said to be as intended."""

    padding: bool = False
    dropped: bool = False
    uneven: bool = False


@dataclass
class Coverage:
    """The coverage of one epoch.

    `details` say what is wrong, in clauses; `ranks` are those at fault, where it is told.
    """

    relations: dict[str, bool | None] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)


def coverage_of(
    expected: Counter[Hashable],
    parts: Sequence[Epoch],
    accepted: Accepted,
    labels: Mapping[Hashable, str],
    workers: int = 0,
) -> Coverage:
    """Hold what the ranks were given in one epoch against what they should have been given together.

    Args:
        expected: how often each sample is to be seen; at least one sample.
        parts: what each rank was given, in rank order.
        workers: worker processes of each rank that read an IterableDataset.
    """
    counts = [part.counts for part in parts]
    total: Counter[Hashable] = sum(counts, Counter())
    missing, surplus = expected - total, total - expected
    unknown = Counter({sample: count for sample, count in surplus.items() if sample not in expected})
    repeated = surplus - unknown
    largest = max((len(batch) for part in parts for batch in part.batches), default=0)
    # What one batch of each rank less than full can leave out, or repeat.
    tail = len(parts) * largest - 1
    kind = _Kind(expected, counts, missing, repeated, unknown, workers)
    padded = kind.may_be_padding and repeated.total() <= tail
    result = Coverage()
    result.relations = {
        ALL_SEEN: not missing or (accepted.dropped and not repeated and missing.total() <= tail),
        ONLY_ONCE: not repeated or (accepted.padding and padded),
        KNOWN: not unknown or (accepted.dropped and unknown.total() < max(largest, 1)),
        AS_MANY: _even(parts, accepted),
    }
    size = expected.total()
    if not result.relations[ALL_SEEN]:
        result.details.append(f"{missing.total()} of {size} samples on no rank: {shown(missing, labels)}")
    if not result.relations[ONLY_ONCE]:
        result.details.append(f"{repeated.total()} of {size} samples too many: {shown(repeated, labels)}")
    if not result.relations[KNOWN]:
        result.details.append(f"{unknown.total()} seen that world size 1 does not give: {shown(unknown, labels)}")
    if result.relations[AS_MANY] is False:
        numbers = grouped((len(part.batches), rank) for rank, part in enumerate(parts))
        texts = [f"{number} on {named(ranks)}" for number, ranks in numbers]
        result.details.append(f"numbers of batches differ: {', '.join(texts)}")
        result.ranks.update(sorted((ranks for _, ranks in numbers), key=len)[0])
        result.remarks.append(
            "where ranks have different numbers of batches, DistributedDataParallel waits in backward for those that are "
            "done: drop or pad the last ones, or use torch.distributed.algorithms.Join; uneven=True accepts it in loops "
            "without collectives"
        )
    if not all(result.relations[name] for name in (ALL_SEEN, ONLY_ONCE, KNOWN)):
        _explain(result, kind, labels, padded=padded, tail=tail)
    elif result.relations[AS_MANY] is False:
        result.findings.append(Finding("uneven-steps", result.details[-1]))
    return result


@dataclass(frozen=True)
class _Kind:
    """The counts of an epoch, and the patterns that they may show."""

    expected: Counter[Hashable]
    counts: Sequence[Counter[Hashable]]
    missing: Counter[Hashable]
    repeated: Counter[Hashable]
    unknown: Counter[Hashable]
    workers: int

    @property
    def whole(self) -> bool:
        """Every rank sees all."""
        many = len(self.counts) > 1 and all(count >= self.expected for count in self.counts)
        # With as few samples as ranks, repeating them to fill the shards gives each rank all of them.
        return many and self.repeated.total() >= len(self.counts)

    @property
    def per_worker(self) -> bool:
        """True if a rank sees its samples once for each of its workers."""
        return self.workers > 1 and all(
            count[sample] >= self.workers * max(self.expected[sample], 1) for count in self.counts for sample in count
        )

    @property
    def may_be_padding(self) -> bool:
        alike = len({count.total() for count in self.counts}) == 1
        return len(self.counts) > 1 and alike and not (self.missing or self.unknown or self.whole or self.per_worker)

    @property
    def twins(self) -> list[list[int]]:
        """Ranks that see exactly the same samples, where there are several."""
        same = grouped((frozenset(count.items()), rank) for rank, count in enumerate(self.counts) if count)
        return [ranks for _, ranks in same if len(ranks) > 1]

    def strangers(self) -> list[float]:
        """Return, for each rank, which share of its samples world size 1 does not give."""
        return [
            sum(n for sample, n in count.items() if sample in self.unknown) / max(count.total(), 1)
            for count in self.counts
        ]


def _explain(result: Coverage, kind: _Kind, labels: Mapping[Hashable, str], *, padded: bool, tail: int) -> None:
    """Add the class of mistakes that the counts look like."""
    size, missing, repeated = kind.expected.total(), kind.missing, kind.repeated
    shares = kind.strangers()

    def found(mistake: str, evidence: str, ranks: Iterable[int] = ()) -> None:
        result.findings.append(Finding(mistake, evidence))
        result.ranks.update(ranks)

    if min(shares) > 0:
        result.remarks.append(
            "the contents differ from those at world size 1: where samples are augmented at random, or padded to the "
            "longest of their batch, pass key=, a function from a batch to the ids of its samples"
        )
    if min(shares) > _UNKNOWN:
        return
    if kind.per_worker:
        seen = f"each of the {kind.workers} workers of a rank reads what the others read, too"
        found("dataset-not-split", seen + (", and every rank all samples" if kind.whole else ""))
    elif kind.whole:
        found("dataset-not-split", f"each of the {len(kind.counts)} ranks sees all {size} samples")
    elif padded and repeated:
        how = "DistributedSampler" if repeated.total() < len(kind.counts) else "samplers that fill the last batches"
        found(
            "padding-counted",
            f"{repeated.total()} of {size} samples repeated ({shown(repeated, labels)}), and as many samples on each rank, "
            f"as {how} would have it; padding=True accepts it",
        )
    elif missing and kind.twins:
        same = " and ".join(named(ranks) for ranks in kind.twins)
        found(
            "samples-missed",
            f"{same} see the same samples, and nobody {missing.total()} of {size}: is the sampler given each rank's own "
            "index, and the number of ranks?",
            (rank for ranks in kind.twins for rank in ranks[1:]),
        )
    elif missing and (repeated or kind.unknown):
        strange = [rank for rank, share in enumerate(shares) if share]
        several = f"{repeated.total()} seen several times ({shown(repeated, labels)})" if repeated else ""
        other = f"{named(strange)} with samples that world size 1 does not give" if strange else ""
        none = f"{missing.total()} on none ({shown(missing, labels)})"
        found("split-differs-between-ranks", ", ".join(filter(None, [several, other, none])), strange)
    elif missing:
        drop = "; as many as drop_last may drop, which dropped=True accepts" if missing.total() <= tail else ""
        found("samples-missed", f"{missing.total()} of {size} on no rank ({shown(missing, labels)}){drop}")


def same_orders(visits: Sequence[Visits], samples: int) -> tuple[list[int], bool]:
    """Return the ranks that visit their samples in the same order in all epochs; and whether that can be told from
    chance.

    Of `samples` that are shuffled, k can come in n!/(n-k)! orders.
    """
    same = [
        rank
        for rank, visit in enumerate(visits)
        if visit.epochs[0].samples and len({epoch.samples for epoch in visit.epochs}) == 1
    ]
    most = max((len(set(visits[rank].epochs[0].samples)) for rank in same), default=0)
    drawn = samples if len(same) == len(visits) else min(most, samples)
    orders = math.lgamma(samples + 1) - math.lgamma(samples - drawn + 1)
    repeats = len(visits[0].epochs) - 1
    return same, repeats > 0 and orders * repeats > -math.log(_CHANCE)


def shown(samples: Counter[Hashable], labels: Mapping[Hashable, str]) -> str:
    """Return a few of them."""
    texts = [labels.get(sample, "?") for sample in samples]
    return ", ".join(texts[:_SHOWN]) + (", …" if len(texts) > _SHOWN else "")


def _even(parts: Sequence[Epoch], accepted: Accepted) -> bool | None:
    if len(parts) == 1:
        return None
    return accepted.uneven or len({len(part.batches) for part in parts}) == 1
