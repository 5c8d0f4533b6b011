"""A run on one device and a run on several ranks, side by side: the same step, the same parameter, the same samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mgpu_check.compare.trace import Parameter, Step, Summary, Trace, chunk_sizes, positions

__all__ = ["Aligned", "Deviation", "Kind", "Samples", "deviation", "of_kind"]

Kind = Literal["before", "gradient", "parameter", "state"]
"""A tensor of a step: the parameter before the first step, the gradient, the parameter after the step, and a state of the
optimizer or a buffer after the step."""


@dataclass(frozen=True)
class Deviation:
    """The deviation of a tensor from the expected one.

    Attributes:
        size: of the number that is furthest off, in proportion to the tensor (see `Summary.entries`).
        what: which number that is: "norm", "sum of elements 0 to 9", "element [3, 1]".
        got, expected: its values.
    """

    size: float
    what: str = ""
    got: float = 0.0
    expected: float = 0.0

    def __str__(self) -> str:
        if not self.what:
            return "there is none" if math.isinf(self.size) else ""
        return f"{self.what}: {self.got:.7g} instead of {self.expected:.7g}"


def deviation(got: Summary | None, expected: Summary | None, shape: Sequence[int]) -> Deviation:
    """Return how far `got` is from `expected`; infinitely where one of them is none, or not finite where the other is."""
    if got is None or expected is None:
        return Deviation(0.0 if got is expected else math.inf)
    if got == expected:
        return Deviation(0.0)
    count = max(math.prod(shape), 1)
    worst = Deviation(0.0)
    pairs = zip(_names(shape), got.entries(count), expected.entries(count), strict=True)
    for (name, is_element), (value, size_here), (wanted, size) in pairs:
        if value == wanted or (math.isnan(value) and math.isnan(wanted)):
            continue
        # Where the expected tensor is zero, what is there is all of it.
        apart = abs(value - wanted) / (size or size_here)
        apart = apart if math.isfinite(apart) else math.inf
        # Elements say more than sums, where they are not nearer to right.
        if apart > worst.size or (apart >= worst.size / 2 and is_element):
            worst = Deviation(max(apart, worst.size), name, value, wanted)
    return worst


def _names(shape: Sequence[int]) -> list[tuple[str, bool]]:
    """Name each entry of a summary, and tell whether it is an element."""
    count = math.prod(shape)
    names, start = [("norm", False)], 0
    for size in chunk_sizes(count):
        names.append((f"sum of elements {start} to {start + size - 1} of {count}" if size > 1 else "sum", False))
        start += size
    return [*names, *((f"element {_index(position, shape)}", True) for position in positions(count))]


def _index(position: int, shape: Sequence[int]) -> list[int]:
    index = []
    for size in reversed(shape):
        index.append(position % size)
        position //= size
    return index[::-1]


def of_kind(step: Step, kind: Kind) -> dict[str, Summary | None]:
    """Return the tensors of one kind in a step, by parameter."""
    if kind == "gradient":
        return step.gradients
    return dict({"before": step.before, "parameter": step.parameters, "state": step.states}[kind])


@dataclass(frozen=True)
class Samples:
    """The samples that the ranks have seen at a step, and those of one device, as multisets of digests."""

    one: Counter[int]
    ranks: tuple[Counter[int], ...]
    divided: bool = False
    """Ranks hold parts of the model: several see the same samples rightly."""
    staged: bool = False
    """Some ranks see what others have computed."""

    @property
    def together(self) -> Counter[int]:
        total: Counter[int] = Counter()
        seen: list[Counter[int]] = []
        for part in self.ranks:
            if not self.divided or part not in seen:
                total += part
                seen.append(part)
        return total

    @property
    def known(self) -> bool:
        """True if a model was seen to be called, on one device and on the ranks.

        The first of several stages may be called with parts of the batch, of which the first alone is recorded. Then
        samples say something only if they are those of one device.
        """
        if self.staged or (self.divided and not self.together - self.one):
            return bool(self.one) and self.same
        return bool(self.one) and any(self.ranks)

    @property
    def hidden(self) -> bool:
        """True if ranks hold parts of the model, and none was seen to be given a sample: they may be given what was computed."""
        return self.divided and not self.common

    @property
    def same(self) -> bool:
        return self.together == self.one

    @property
    def common(self) -> int:
        """Number of samples of one device that the ranks have seen, too."""
        return (self.together & self.one).total()

    @property
    def repeated_on_each_rank(self) -> bool:
        """True if all ranks have seen the same samples."""
        return (
            len(self.ranks) > 1
            and not self.divided
            and bool(self.ranks[0])
            and all(part == self.ranks[0] for part in self.ranks)
        )

    @property
    def counts(self) -> list[int]:
        return [part.total() for part in self.ranks]


@dataclass
class Aligned:
    """Both runs. Steps are counted from 1 for people, and from 0 here.

    Attributes:
        one: the trace of the one device.
        ranks: those of the ranks, in their order; one of a single process that has several devices.
        world: number of those ranks, or devices.
        divided, reasons, placements, holders, parts: see `mgpu_check.compare.assembly.Assembly`.
        names: parameters that both have, in the order of the model.
        states: states of optimizers and buffers that both have, in the same order, but for buffers that never change.
        missing: those that one device trains, and no rank.
        extra: those that ranks train, and one device does not.
    """

    one: Trace
    ranks: list[Trace]
    world: int = 0
    divided: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)
    placements: Mapping[str, str] = field(default_factory=dict)
    holders: Mapping[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    parts: Mapping[str, Mapping[int, object]] = field(default_factory=dict)
    names: list[str] = field(init=False)
    states: list[str] = field(init=False)
    missing: list[str] = field(init=False)
    extra: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.world = self.world or len(self.ranks)
        there = {name for trace in self.ranks for name in trace.parameters}
        ordered = sorted(self.one.parameters.values(), key=lambda parameter: parameter.order)
        self.names = [p.name for p in ordered if p.name in there]
        self.missing = [p.name for p in ordered if p.name not in there]
        self.extra = sorted(there - self.one.parameters.keys())
        changing = {
            name for trace in (self.one, *self.ranks) for name, state in trace.states.items() if not state.constant
        }
        kept = sorted(self.one.states.values(), key=lambda state: (state.order, state.key))
        held = {name for trace in self.ranks for name in trace.states}
        self.states = [state.name for state in kept if state.name in held & changing]

    @property
    def where(self) -> str:
        """Name of the runs that are compared with one device: "4 ranks"."""
        return f"{self.world} ranks" if len(self.ranks) == self.world else f"{self.world} GPUs of one process"

    @property
    def steps(self) -> int:
        """The number of steps that all have made."""
        return min(len(trace.steps) for trace in (self.one, *self.ranks))

    @property
    def compared(self) -> int:
        """The number of those before one device has what is no finite number: after that all are alike, and say nothing."""
        return min(self.steps, self.one.finite_steps)

    def parameter(self, name: str) -> Parameter:
        """Return a parameter of one device, or a state or buffer, by its name."""
        return self.one.parameters.get(name) or self.one.states[name]

    def named(self, kind: Kind) -> list[str]:
        """Return the names of the tensors of one kind that both have."""
        return self.states if kind == "state" else self.names

    def found(self, step: int, kind: Kind, name: str) -> tuple[Summary | None, dict[int, Summary | None]]:
        """Return a tensor of a step: on one device, and on the ranks that have it and whose shape is the same."""
        expected = of_kind(self.one.steps[step], kind).get(name)
        shape = self.parameter(name).shape
        here = {}
        for trace in self.ranks:
            values = of_kind(trace.steps[step], kind)
            if name in values and (own := trace.entry(name)) is not None and own.shape == shape:
                here[trace.rank] = values[name]
        return expected, here

    @property
    def held(self) -> list[str]:
        """The parameters of which one device and some rank have the whole, at some step."""
        return [
            name
            for name in self.names
            if any(
                expected is not None and any(here.values())
                for expected, here in (self.found(step, "parameter", name) for step in range(self.steps))
            )
        ]

    def samples(self, step: int) -> Samples:
        """Return the rows of the model's inputs; their columns where it is those that the ranks have shared out."""
        steps = [trace.steps[step] for trace in self.ranks]
        one = self.one.steps[step]
        rows = self._samples(one.seen, [here.seen for here in steps])
        if rows.same:
            return rows
        columns = self._samples(one.seen_columns, [here.seen_columns for here in steps])
        return columns if columns.known and columns.same else rows

    def _samples(self, one: Sequence[int], ranks: Sequence[Sequence[int]]) -> Samples:
        expected, seen = Counter(one), [Counter(rank) for rank in ranks]
        if self.divided and any(part & expected for part in seen):
            held = [set(trace.parameters) for trace in self.ranks]
            first = [index for index, part in enumerate(seen) if part & expected]
            # Other stages are given what the first has computed. They hold other parameters.
            seen = [
                part
                if any(2 * len(held[index] & held[other]) >= min(len(held[index]), len(held[other])) for other in first)
                else Counter()
                for index, part in enumerate(seen)
            ]
            return Samples(expected, tuple(seen), divided=True, staged=not all(seen))
        return Samples(expected, tuple(seen), self.divided)

    def losses(self, step: int) -> tuple[float | None, float | None, list[float | None]]:
        """Return the losses on one device; over the ranks, the mean by samples where their numbers are known; of each
        rank.
        """
        here = [trace.steps[step].loss for trace in self.ranks]
        known = [loss for loss in here if loss is not None]
        if len(known) < len(here):
            return self.one.steps[step].loss, None, here
        weights = self.samples(step).counts
        if not all(weights):
            weights = [1] * len(known)
        mean = math.fsum(w * loss for w, loss in zip(weights, known, strict=True)) / sum(weights)
        return self.one.steps[step].loss, mean, here
