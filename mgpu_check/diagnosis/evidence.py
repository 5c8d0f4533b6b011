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
    """A value of each rank that should be the same on all ranks.

    Attributes:
        told: a clause that describes the difference, if there is one.
    """

    values: Sequence[object] = ()
    told: str = ""

    @property
    def apart(self) -> bool:
        return any(value != self.values[0] for value in self.values)


@dataclass(frozen=True)
class Start:
    """Ranks start from different parameters.

    Attributes:
        told: a clause that describes the observation.
        briefly: a shorter clause, to append to another one.
    """

    told: str
    briefly: str


@dataclass(frozen=True)
class Sampler:
    """A sampler that distributes samples to ranks."""

    samples: int
    replicas: int
    drop_last: bool

    @property
    def pads(self) -> bool:
        return bool(self.samples % self.replicas) and not self.drop_last


@dataclass(frozen=True)
class Factor:
    """The one factor that explains all differences.

    Attributes:
        near: relative accuracy: numbers this close count as equal.
        told: a clause that ends with the result that the factor applies to: "gradient of 0.weight is".
        powers: the powers of the world size that the factor may be.
        rough: whether `told` already names the number, because it comes from summaries only.
        where: the call that causes the factor, as a clause; "" if it is unknown.
    """

    value: float
    near: float
    told: str
    powers: tuple[int, ...] = (1, -1)
    rough: bool = False
    where: str = ""

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

    Attributes:
        size: number of ranks, or of devices of one process.
        tensors: the results and calls of the ranks, if a gate has kept them.
        start: how the initial parameters of ranks differ.
        loads: how often each rank loaded a state.
        parted: ranks started alike and differ later.
        decisions: the decisions of ranks, such as a learning rate.
        grounds: the values that ranks may base later decisions on.
        gradients_apart: the optimizer finds a different gradient on each rank.
        norms: the norm that clipping found on each rank, for gradients that are equal in the end.
        factor: the factor that explains all differences.
        micro_batches: backward passes in a step.
        undivided: backward passes of a rank in a step, relative to one device, if the losses of the step add up to as
            much; else 1.
        normalizes: the modules that normalize by statistics of the batch.
        draws: ranks draw random numbers for their own parts of the batch.
        may_draw: random numbers that change wrong results.
        same_samples: all ranks saw the same samples.
        repeated_epoch: an epoch had the order of an earlier one.
        samplers: the samplers that distribute samples.
        surplus: the samples that came again.
        uneven: parts of unequal size count alike.
        updates: an optimizer updates differently from one device although gradients are right, and which settings
            differ.
        buffers_apart: the buffers that differ between ranks after training.
        answers_change: a rank gives another answer when it evaluates again.
        answers_apart: ranks give different answers, though their parameters and buffers are equal.
    """

    size: int
    tensors: Tensors | None = None
    start: Start | None = None
    loads: ByRank = ByRank()
    parted: str = ""
    decisions: Sequence[ByRank] = ()
    grounds: Sequence[ByRank] = ()
    gradients_apart: str = ""
    norms: ByRank = ByRank()
    factor: Factor | None = None
    micro_batches: float = 1
    undivided: float = 1
    normalizes: str = ""
    draws: str = ""
    may_draw: str = ""
    same_samples: str = ""
    repeated_epoch: str = ""
    samplers: Sequence[Sampler] = ()
    surplus: str = ""
    uneven: str = ""
    updates: str = ""
    buffers_apart: str = ""
    answers_change: str = ""
    answers_apart: str = ""


@dataclass(frozen=True)
class UnfinishedCall:
    """How a call ended that did not return on all ranks.

    Attributes:
        told: a description of what happened.
        hung: a description of the ranks that did not finish, if ranks hung.
        unmatched: a description of calls that ranks did not match by the end of a step.
        parted: rank -> its first collective that differs from that of other ranks.
        parting: a description of `parted`.
        last: rank -> the last collective that it entered.
        messages: rank -> the send or receive that it waits in.
        some_finished: some ranks returned, and others did not.
        finished: the ranks that returned.
        waiting: hanging rank -> a description of the collective, send or receive that it waits in.
        elsewhere: hanging ranks that wait in no such call.
        raised: the errors that ranks raised, each with the line of the report that shows it.
        aborted: the stacks of ranks that SIGABRT ended.
    """

    size: int
    samples: int
    told: str
    hung: str = ""
    unmatched: str = ""
    parted: Mapping[int, Entered] = field(default_factory=dict)
    parting: str = ""
    last: Mapping[int, Entered] = field(default_factory=dict)
    messages: Mapping[int, Entered] = field(default_factory=dict)
    some_finished: bool = False
    finished: Sequence[int] = ()
    waiting: Mapping[int, str] = field(default_factory=dict)
    elsewhere: Sequence[int] = ()
    raised: Sequence[tuple[str, str]] = ()
    aborted: Sequence[str] = ()

    def aborted_in(self, name: str) -> bool:
        """Return whether a rank was aborted in a collective whose name starts with `name`."""
        entered = any(call.name.startswith(name) for call in self.last.values())
        return any(entered or name in stacks for stacks in self.aborted)


@dataclass(frozen=True)
class HashSeeds:
    """The evidence of a case that fails only with different hash seeds on ranks.

    Attributes:
        told: a clause that describes the failure.
    """

    told: str


@dataclass(frozen=True)
class Restored:
    """The evidence of a resumed run that ends with another state than an uninterrupted run.

    An entry that was lost in loading explains later differences. If there is one, the fields about the end are empty.

    Attributes:
        seen: whether the state right after loading could be compared with the saved state.
        on_some: entries that loading restored on some ranks only -> the ranks where it did not.
        nowhere: entries that loading restored on no rank.
        of_rank_0: entries that are right on rank 0, while other ranks have the value of rank 0 -> those ranks.
        numbers_of_rank_0: the generators among `of_rank_0`.
        parted: entries equal on all ranks after an uninterrupted run, but not after the resumed run -> the wrong ranks.
        right_on_rank_0: other entries that are wrong at the end, but right on rank 0 -> the wrong ranks.
        at_the_end: all entries that are wrong at the end.
        epochs: a clause on a sampler that continues with the wrong epoch, if nothing but generators was lost.
        resharded: entries whose saved parts are in wrong places after loading -> a description; in no other field.
        altered: entries with neither the saved value after loading nor that of a run that loads nothing -> those ranks;
            in no other field. They are no evidence of a mistake.
    """

    seen: bool
    on_some: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    nowhere: Sequence[object] = ()
    of_rank_0: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    numbers_of_rank_0: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    parted: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    right_on_rank_0: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    at_the_end: Sequence[object] = ()
    epochs: str = ""
    resharded: Mapping[Any, str] = field(default_factory=dict)
    altered: Mapping[Any, Sequence[int]] = field(default_factory=dict)

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
    """All epochs of a loader.

    Attributes:
        repeating: the ranks that visit their samples in the same order in all epochs, if they should not.
        order: a clause that describes the repeated order.
    """

    epochs: Sequence[EpochSamples]
    repeating: Sequence[int] = ()
    order: str = ""
