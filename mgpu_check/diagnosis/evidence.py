"""Evidence of a difference between ranks and one device, from a gate or from a comparison of scripts.

A gate keeps whole tensors and records calls; a comparison of scripts has recorded summaries. Both describe their
observations as `Evidence`, and the same rules judge it. A field without an observation is empty.

The evidence of a loader is how often each rank got each sample, and the patterns in these counts.

This module imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mgpu_check.processes.collective_records import Entered
from mgpu_check.processes.rank_lists import grouped, named

if TYPE_CHECKING:
    from mgpu_check.diagnosis.tensors import Tensors


@dataclass(frozen=True)
class ByRank:
    """A value of each rank that should be the same on all ranks."""

    values: Sequence[object] = ()
    told: str = ""  # a clause that describes the difference, if there is one

    @property
    def apart(self) -> bool:
        return any(value != self.values[0] for value in self.values)


@dataclass(frozen=True)
class Start:
    """Ranks start from different parameters."""

    told: str  # a clause that describes the observation
    briefly: str  # a shorter clause, to append to another one


@dataclass(frozen=True)
class Sampler:
    """A sampler that distributes samples to ranks."""

    samples: int
    replicas: int
    drop_last: bool


@dataclass(frozen=True)
class Factor:
    """The one factor that explains all differences."""

    value: float
    near: float  # relative accuracy: numbers this close count as equal
    told: str  # a clause that ends with the result that the factor applies to: "gradient of 0.weight is"
    powers: tuple[int, ...] = (1, -1)  # the powers of the world size that the factor may be
    rough: bool = False  # whether `told` already names the number, because it comes from summaries only
    where: str = ""  # the call that causes the factor, as a clause; "" if it is unknown

    @property
    def ending(self) -> str:
        return f"; {self.where}" if self.where else ""

    def is_power(self, base: float, power: int) -> bool:
        """Return whether the factor equals `base` to the power `power`, within its accuracy."""
        return base > 1 and abs(self.value - base**power) <= self.near * base**power


@dataclass(frozen=True)
class Evidence:
    """The evidence of a failure.

    A text field holds a clause that describes an observation; it is "" if nothing was observed.
    """

    size: int  # number of ranks, or of devices of one process
    tensors: Tensors | None = None  # the results and calls of the ranks, if a gate has kept them
    start: Start | None = None  # how the initial parameters of ranks differ
    loads: ByRank = ByRank()  # how often each rank loaded a state
    parted: str = ""  # ranks started alike and differ later
    decisions: Sequence[ByRank] = ()  # the decisions of ranks, such as a learning rate
    grounds: Sequence[ByRank] = ()  # the values that ranks may base later decisions on
    gradients_apart: str = ""  # the optimizer finds a different gradient on each rank
    norms: ByRank = ByRank()  # the norm that clipping found on each rank, for gradients that are equal in the end
    factor: Factor | None = None  # the factor that explains all differences
    micro_batches: float = 1  # backward passes in a step
    # Backward passes of a rank in a step, relative to one device, if the losses of the step add up to as much; else 1.
    undivided: float = 1
    normalizes: str = ""  # the modules that normalize by statistics of the batch
    draws: str = ""  # ranks draw random numbers for their own parts of the batch
    may_draw: str = ""  # random numbers that change wrong results
    same_samples: str = ""  # all ranks saw the same samples
    repeated_epoch: str = ""  # an epoch had the order of an earlier one
    samplers: Sequence[Sampler] = ()  # the samplers that distribute samples
    surplus: str = ""  # the samples that came again
    uneven: str = ""  # parts of unequal size count alike
    # An optimizer updates differently from one device although gradients are right, and which settings differ.
    updates: str = ""
    buffers_apart: str = ""  # the buffers that differ between ranks after training
    answers_change: str = ""  # a rank gives another answer when it evaluates again
    answers_apart: str = ""  # ranks give different answers, though their parameters and buffers are equal


@dataclass(frozen=True)
class UnfinishedCall:
    """How a call ended that did not return on all ranks."""

    size: int
    samples: int
    told: str  # a description of what happened
    hung: str = ""  # a description of the ranks that did not finish, if ranks hung
    unmatched: str = ""  # a description of calls that ranks did not match by the end of a step
    # Rank -> its first collective that differs from that of other ranks.
    parted: Mapping[int, Entered] = field(default_factory=dict)
    parting: str = ""  # a description of `parted`
    last: Mapping[int, Entered] = field(default_factory=dict)  # rank -> the last collective that it entered
    messages: Mapping[int, Entered] = field(default_factory=dict)  # rank -> the send or receive that it waits in
    some_finished: bool = False  # some ranks returned, and others did not
    finished: Sequence[int] = ()  # the ranks that returned
    # Hanging rank -> a description of the collective, send or receive that it waits in.
    waiting: Mapping[int, str] = field(default_factory=dict)
    elsewhere: Sequence[int] = ()  # hanging ranks that wait in no such call
    # The errors that ranks raised, each with the line of the report that shows it.
    raised: Sequence[tuple[str, str]] = ()
    aborted: Sequence[str] = ()  # the stacks of ranks that SIGABRT ended


@dataclass(frozen=True)
class HashSeeds:
    """The evidence of a case that fails only with different hash seeds on ranks."""

    told: str  # a clause that describes the failure


@dataclass(frozen=True)
class Restored:
    """The evidence of a resumed run that ends with another state than an uninterrupted run.

    An entry that was lost in loading explains later differences. If there is one, the fields about the end are empty.
    """

    seen: bool  # whether the state right after loading could be compared with the saved state
    # Entries that loading restored on some ranks only -> the ranks where it did not.
    on_some: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    nowhere: Sequence[object] = ()  # entries that loading restored on no rank
    # Entries that are right on rank 0, while other ranks have the value of rank 0 -> those ranks.
    of_rank_0: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    numbers_of_rank_0: Mapping[Any, Sequence[int]] = field(default_factory=dict)  # the generators among `of_rank_0`
    # Entries equal on all ranks after an uninterrupted run, but not after the resumed run -> the wrong ranks.
    parted: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    # Other entries that are wrong at the end, but right on rank 0 -> the wrong ranks.
    right_on_rank_0: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    at_the_end: Sequence[object] = ()  # all entries that are wrong at the end
    epochs: str = ""  # a clause on a sampler that continues with the wrong epoch, if nothing but generators was lost
    # Entries whose saved parts are in wrong places after loading -> a description; in no other field.
    resharded: Mapping[Any, str] = field(default_factory=dict)
    # Entries with neither the saved value after loading nor that of a run that loads nothing -> those ranks; in no
    # other field. They are no evidence of a mistake.
    altered: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    of_other_steps: Mapping[Any, int] = field(default_factory=dict)  # those of them that are as after another step

    @property
    def lost(self) -> bool:
        return bool(self.on_some or self.nowhere or self.of_rank_0 or self.resharded or self.altered)


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
    """The samples of one epoch."""

    expected: Counter[Hashable]  # how often each sample should be seen; at least one sample
    counts: Sequence[Counter[Hashable]]  # how often each rank got each sample, in rank order
    largest: int  # samples in the largest batch
    batches: Sequence[int]  # number of batches that each rank got, in rank order
    # The text that a report shows for a sample, by identity.
    labels: Mapping[Hashable, str] = field(default_factory=dict)
    workers: int = 0  # worker processes of each rank that read an IterableDataset
    accepted: Accepted = Accepted()

    @cached_property
    def missing(self) -> Counter[Hashable]:
        return self.expected - self._together

    @cached_property
    def repeated(self) -> Counter[Hashable]:
        return self._together - self.expected - self.unknown

    @cached_property
    def unknown(self) -> Counter[Hashable]:
        return Counter({sample: count for sample, count in self._together.items() if sample not in self.expected})

    @cached_property
    def _together(self) -> Counter[Hashable]:
        return sum(self.counts, Counter())

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
        unknown = [sum(n for sample, n in count.items() if sample in self.unknown) for count in self.counts]
        return [number / max(count.total(), 1) for number, count in zip(unknown, self.counts, strict=True)]

    @property
    def whole(self) -> bool:
        many = len(self.counts) > 1 and all(count >= self.expected for count in self.counts)
        # With as few samples as ranks, repeating them to fill the shards gives each rank all of them.
        return many and self.repeated.total() >= len(self.counts)

    @property
    def per_worker(self) -> bool:
        """True if a rank sees its samples once for each of its workers."""
        often = {sample: self.workers * max(self.expected[sample], 1) for count in self.counts for sample in count}
        return self.workers > 1 and all(n >= often[sample] for count in self.counts for sample, n in count.items())

    @property
    def padded(self) -> bool:
        """True if the only defect is repeated samples, and they fit into the last batches of the ranks."""
        alike = len(self.counts) > 1 and len({count.total() for count in self.counts}) == 1
        irregular = self.missing or self.unknown or self.whole or self.per_worker
        return alike and not irregular and self.repeated.total() <= self.most_in_tail

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
    """All epochs of a loader."""

    epochs: Sequence[EpochSamples]
    # The ranks that visit their samples in the same order in all epochs, if they should not.
    repeating: Sequence[int] = ()
    order: str = ""  # a clause that describes the repeated order
