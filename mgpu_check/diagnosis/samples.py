"""The evidence of a loader: how often each rank got each sample, and the patterns in these counts.

This module imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mgpu_check.processes.rank_lists import grouped, named

_SHOWN = 4
_UNKNOWN = 0.5  # above this share of samples that world size 1 does not give, contents are assumed to be random


@dataclass(frozen=True)
class Accepted:
    """Deviations that the user accepts."""

    padding: bool = False
    dropped: bool = False
    uneven: bool = False


@dataclass(frozen=True)
class EpochSamples:
    """The samples of one epoch.

    Attributes:
        expected: how often each sample should be seen; at least one sample.
        counts: how often each rank got each sample, in rank order.
        largest: samples in the largest batch.
        batches: number of batches that each rank got, in rank order.
        labels: the text that a report shows for a sample, by identity.
        workers: worker processes of each rank that read an IterableDataset.
    """

    expected: Counter[Hashable]
    counts: Sequence[Counter[Hashable]]
    largest: int
    batches: Sequence[int]
    labels: Mapping[Hashable, str] = field(default_factory=dict)
    workers: int = 0
    accepted: Accepted = Accepted()

    @cached_property
    def missing(self) -> Counter[Hashable]:
        return self.expected - self._together

    @cached_property
    def repeated(self) -> Counter[Hashable]:
        return self._surplus - self.unknown

    @cached_property
    def unknown(self) -> Counter[Hashable]:
        return Counter({sample: count for sample, count in self._surplus.items() if sample not in self.expected})

    @cached_property
    def _together(self) -> Counter[Hashable]:
        return sum(self.counts, Counter())

    @property
    def _surplus(self) -> Counter[Hashable]:
        return self._together - self.expected

    @property
    def most_in_tail(self) -> int:
        """The largest number of samples that one incomplete batch on each rank can leave out or repeat."""
        return len(self.counts) * self.largest - 1

    @property
    def all_seen(self) -> bool:
        """True if each sample is on some rank, or if the user accepts the missing ones."""
        dropped = self.accepted.dropped and not self.repeated and self.missing.total() <= self.most_in_tail
        return not self.missing or dropped

    @property
    def only_once(self) -> bool:
        return not self.repeated or (self.accepted.padding and self.padded)

    @property
    def known(self) -> bool:
        """True if world size 1 gives all samples, or if it may drop the others because the user accepts that."""
        return not self.unknown or (self.accepted.dropped and self.unknown.total() < max(self.largest, 1))

    @property
    def covered(self) -> bool:
        """True if the ranks together got the expected samples, apart from accepted deviations."""
        return self.all_seen and self.only_once and self.known

    @property
    def telling(self) -> bool:
        """True if samples are missing, and a rank knows at least half of its samples: counts are evidence."""
        return not self.covered and min(self.shares_unknown) <= _UNKNOWN

    @property
    def shares_unknown(self) -> list[float]:
        return [
            sum(n for sample, n in count.items() if sample in self.unknown) / max(count.total(), 1)
            for count in self.counts
        ]

    @property
    def whole(self) -> bool:
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
    def padded(self) -> bool:
        """True if the only defect is repeated samples, and they fit into the last batches of the ranks."""
        alike = len(self.counts) > 1 and len({count.total() for count in self.counts}) == 1
        other = self.missing or self.unknown or self.whole or self.per_worker
        return alike and not other and self.repeated.total() <= self.most_in_tail

    @property
    def twins(self) -> list[list[int]]:
        """Groups of two or more ranks that see exactly the same samples."""
        same = grouped((frozenset(count.items()), rank) for rank, count in enumerate(self.counts) if count)
        return [ranks for _, ranks in same if len(ranks) > 1]

    @property
    def numbers_of_batches(self) -> list[tuple[int, list[int]]]:
        """Each number of batches, with the ranks that got this number."""
        return grouped((number, rank) for rank, number in enumerate(self.batches))

    @property
    def uneven(self) -> bool:
        """True if ranks got different numbers of batches, and the user does not accept that."""
        return len(self.numbers_of_batches) > 1 and not self.accepted.uneven

    @property
    def told_of_batches(self) -> str:
        texts = [f"{number} on {named(ranks)}" for number, ranks in self.numbers_of_batches]
        return f"numbers of batches differ: {', '.join(texts)}"

    def shown(self, samples: Counter[Hashable]) -> str:
        texts = [self.labels.get(sample, "?") for sample in samples]
        return ", ".join(texts[:_SHOWN]) + (", …" if len(texts) > _SHOWN else "")


@dataclass(frozen=True)
class Loader:
    """All epochs of a loader.

    Attributes:
        repeating: the ranks that visit their samples in the same order in all epochs, if they should not.
        order: a clause that describes the repeated order.
    """

    epochs: Sequence[EpochSamples]
    repeating: Sequence[int] = ()
    order: str = ""
