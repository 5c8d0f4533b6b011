"""Evidence of a difference between ranks and one device, from a gate or from a comparison of scripts.

A gate keeps whole tensors and records calls; a comparison of scripts has recorded summaries. Both describe their
observations as `Evidence`, and the same rules judge it. A field without an observation is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mgpu_check.processes.collective_records import Entered

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
        entered = any(one.name.startswith(name) for one in self.last.values())
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
