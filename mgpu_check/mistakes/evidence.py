"""Evidence of a difference between ranks and one device, whoever has found it.

A gate keeps whole tensors, and knows what was called; a comparison of scripts has summaries that were recorded. Both say
what they have seen by `Evidence`, and the same rules judge it. What neither has looked at is empty here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mgpu_check.processes.record import Entered

if TYPE_CHECKING:
    from mgpu_check.mistakes.tensors import Tensors

__all__ = ["ByRank", "Calls", "Evidence", "Factor", "HashSeeds", "Restored", "Sampler", "Start"]


@dataclass(frozen=True)
class ByRank:
    """Something of each rank, which all should have alike.

    Attributes:
        told: what was seen, as a clause, where they have not.
    """

    values: Sequence[object] = ()
    told: str = ""

    @property
    def apart(self) -> bool:
        return any(value != self.values[0] for value in self.values)


@dataclass(frozen=True)
class Start:
    """Ranks start from other parameters than each other.

    Attributes:
        told: what was seen, as a clause.
        briefly: the same beside another clause.
    """

    told: str
    briefly: str


@dataclass(frozen=True)
class Sampler:
    """A sampler that deals out samples to ranks."""

    samples: int
    replicas: int
    drop_last: bool

    @property
    def pads(self) -> bool:
        """True if it repeats samples, so that each rank gets as many."""
        return bool(self.samples % self.replicas) and not self.drop_last


@dataclass(frozen=True)
class Factor:
    """The one number by which all that differs is off.

    Attributes:
        near: how exactly it is known, relative: two numbers as close as this are the same.
        told: what was seen, as a clause that ends in what the number is of: "gradient of 0.weight is".
        powers: which powers of the world size it may be.
        rough: `told` names the number already, for what it is in words would be said of summaries only.
    """

    value: float
    near: float
    told: str
    powers: tuple[int, ...] = (1, -1)
    rough: bool = False

    def is_power(self, base: float, power: int) -> bool:
        """Return whether it is that power of a number, as far as it is known."""
        return base > 1 and abs(self.value - base**power) <= self.near * base**power


@dataclass(frozen=True)
class Evidence:
    """The evidence of a failure.

    Attributes:
        size: number of ranks, or of devices of one process.
        tensors: all that was left and called, where a gate has kept it.
        start: how ranks start apart.
        loads: how often each rank has loaded a state.
        parted: that ranks have parted ways after they had started alike.
        decisions: what ranks have decided.
        grounds: by what they may decide yet.
        gradients_apart: that the optimizer finds another gradient on each rank.
        norms: what clipping has found on each rank, of gradients that are the same in the end.
        factor: by which all that differs is off.
        micro_batches: backward passes in a step.
        normalizes: which modules normalize by statistics of the batch.
        draws: that ranks were seen to draw random numbers for their own parts of the batch.
        numbers_apart: that ranks have drawn other random numbers than each other, where one device draws as many.
        may_draw: what may draw them.
        same_samples: that all ranks saw the same samples.
        repeated_epoch: that an epoch had the order of an earlier one.
        samplers: those that deal out samples.
        surplus: which samples came again.
        uneven: that parts of unequal size count alike.
        buffers_apart: which buffers differ between ranks after training.
        answers_change: that a rank, asked again, answers otherwise.
        answers_apart: that ranks answer differently, though all that they have learned is equal.
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
    normalizes: str = ""
    draws: str = ""
    numbers_apart: str = ""
    may_draw: str = ""
    same_samples: str = ""
    repeated_epoch: str = ""
    samplers: Sequence[Sampler] = ()
    surplus: str = ""
    uneven: str = ""
    buffers_apart: str = ""
    answers_change: str = ""
    answers_apart: str = ""


@dataclass(frozen=True)
class Calls:
    """The end of a call from which not all ranks returned.

    Attributes:
        size: the world size.
        samples: in each batch.
        told: what happened, in words.
        hung: who did not finish, in words, where that is the story.
        unmatched: what ranks have not done alike by the end of a step, in words.
        parted: rank -> the first collective that is another one than on other ranks.
        parting: the same in words.
        last: rank -> the collective that it has entered last.
        messages: rank -> the send or receive that it waits in.
        some_finished: some ranks have returned, and others have not.
        finished: ranks that have returned.
        waiting: rank that hangs -> the collective, send or receive that it is in, in words.
        elsewhere: ranks that hang in none.
        raised: texts that ranks have raised, each with the line that tells it.
        aborted: the stacks of ranks that SIGABRT has ended.
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
        """Return whether a rank was aborted in a collective whose name begins so."""
        entered = any(one.name.startswith(name) for one in self.last.values())
        return any(entered or name in stacks for stacks in self.aborted)


@dataclass(frozen=True)
class HashSeeds:
    """The evidence of a case that fails only where ranks have different hash seeds.

    Attributes:
        told: what was seen, as a clause.
    """

    told: str


@dataclass(frozen=True)
class Restored:
    """The evidence of a resumed run that ends otherwise than an uninterrupted one: entries of its state, or their ranks.

    What was lost right after loading explains what differs at the end, so where something was, nothing is told of the end.

    Attributes:
        seen: the state right after loading could be compared with what was saved.
        on_some: entries that are not as saved right after loading -> the ranks where, of those that are right on others.
        nowhere: entries that are as saved on no rank.
        of_rank_0: entries that are right on rank 0, and that other ranks have as rank 0 had them -> those ranks.
        numbers_of_rank_0: the generators of these.
        parted: entries that ranks have alike after an uninterrupted run, and not after the resumed one -> the wrong ranks.
        right_on_rank_0: other entries that are wrong at the end, and not on rank 0 -> the wrong ranks.
        at_the_end: all entries that are wrong at the end.
    """

    seen: bool
    on_some: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    nowhere: Sequence[object] = ()
    of_rank_0: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    numbers_of_rank_0: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    parted: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    right_on_rank_0: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    at_the_end: Sequence[object] = ()

    @property
    def lost(self) -> bool:
        """True if anything is not as saved right after loading."""
        return bool(self.on_some or self.nowhere or self.of_rank_0)
