"""Align a run on one device with a run on several ranks, by step, parameter and samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from mgpu_check.compare.trace import (
    OutputSummary,
    Parameter,
    Step,
    TensorSummary,
    Trace,
    chunk_sizes,
    divided_tensors,
    positions,
    samples_of,
)

Quantity = Literal["before", "gradient", "parameter", "state"]
"""A quantity of a step: a parameter before the first step, a gradient, a parameter after the step, or a state of
the optimizer or a buffer after the step."""

QUANTITIES: tuple[Quantity, ...] = ("before", "gradient", "parameter", "state")  # in the order of a step
FIELDS = {"before": "before", "gradient": "gradients", "parameter": "parameters", "state": "states"}
"""Quantity -> the field of a step with its tensors."""


@dataclass(frozen=True)
class Deviation:
    """The deviation of a tensor from the expected one."""

    size: float  # the largest deviation of a number, relative to the tensor (see `TensorSummary.entries`)
    number: str = ""  # name of the number: "norm", "sum of elements 0 to 9", "element [3, 1]"
    got: float = 0.0  # its two values
    expected: float = 0.0

    def __str__(self) -> str:
        if not self.number:
            return "the tensor is missing" if math.isinf(self.size) else ""
        return f"{self.number}: {self.got:.7g} instead of {self.expected:.7g}"


def deviation(got: TensorSummary | None, expected: TensorSummary | None, shape: Sequence[int]) -> Deviation:
    """Return the deviation of `got` from `expected`; infinite if only one of them exists, or only one is finite."""
    if got is None or expected is None:
        return Deviation(0.0 if got is expected else math.inf)
    if got == expected:
        return Deviation(0.0)
    count = max(math.prod(shape), 1)
    return largest_deviation(_names(shape), got.entries(count), expected.entries(count))


def largest_deviation(
    labels: Sequence[tuple[str, bool]], got: Sequence[tuple[float, float]], expected: Sequence[tuple[float, float]]
) -> Deviation:
    """Return the largest deviation among numbers, each with its typical size (see `TensorSummary.entries`).
    `labels`: the name of each number, and whether it is an element of the tensor."""
    worst = Deviation(0.0)
    for (name, is_element), (value, size_here), (wanted, size) in zip(labels, got, expected, strict=True):
        if value == wanted or (math.isnan(value) and math.isnan(wanted)):
            continue
        # If the expected tensor is zero, the deviation is relative to the tensor found.
        difference = abs(value - wanted) / (size or size_here)
        difference = difference if math.isfinite(difference) else math.inf
        # A report that names an element is more useful, so an element wins unless its deviation is much smaller.
        if difference > worst.size or (difference >= worst.size / 2 and is_element):
            worst = Deviation(max(difference, worst.size), name, value, wanted)
    return worst


def output_deviation(got: OutputSummary, expected: OutputSummary | None) -> Deviation:
    """Return the deviation of outputs with the same number of elements."""
    if expected is None or got == expected:
        return Deviation(0.0)
    return largest_deviation((("norm", False), ("sum", False)), got.entries, expected.entries)


def _names(shape: Sequence[int]) -> list[tuple[str, bool]]:
    count = math.prod(shape)
    labels, start = [("norm", False)], 0
    for size in chunk_sizes(count):
        labels.append((f"sum of elements {start} to {start + size - 1} of {count}" if size > 1 else "sum", False))
        start += size
    for position in positions(count):
        index = []
        for size in reversed(shape):
            position, along = divmod(position, size)
            index.append(along)
        labels.append((f"element {index[::-1]}", True))
    return labels


def of_quantity(step: Step, quantity: Quantity) -> dict[str, TensorSummary | None]:
    """Return the tensors of one quantity in a step, by parameter."""
    return getattr(step, FIELDS[quantity])


@dataclass(frozen=True)
class Samples:
    """The samples that one device and each rank have seen at a step, as multisets of digests."""

    reference: Counter[int]
    ranks: tuple[Counter[int], ...]
    divided: bool = False  # ranks hold parts of the model, so several ranks may correctly see the same samples
    staged: bool = False  # the inputs of some ranks are outputs of other ranks

    @property
    def together(self) -> Counter[int]:
        total: Counter[int] = Counter()
        distinct: list[Counter[int]] = []
        for samples in self.ranks:
            if not self.divided or samples not in distinct:
                total += samples
                distinct.append(samples)
        return total

    @property
    def known(self) -> bool:
        """True if a model was called on one device and on the ranks, so that samples can be compared.
        The first of several stages may be called with parts of the batch, and only the first part is recorded. Then the
        samples are known only if they equal the samples of one device."""
        if self.staged or (self.divided and not self.together - self.reference):
            return bool(self.reference) and self.same
        return bool(self.reference) and any(self.ranks)

    @property
    def hidden(self) -> bool:
        """True if ranks hold parts of the model and got no samples: their inputs may come from other ranks."""
        return self.divided and not self.common

    @property
    def same(self) -> bool:
        return self.together == self.reference

    @property
    def common(self) -> int:
        """Number of samples of one device that the ranks have also seen."""
        return (self.together & self.reference).total()

    @property
    def repeated_on_each_rank(self) -> bool:
        """True if all ranks have seen the same samples; equal samples of constant data are no evidence."""
        return (
            len(self.ranks) > 1
            and not self.divided
            and (len(self.ranks[0]) > 1 or self.ranks[0].total() == 1)
            and all(samples == self.ranks[0] for samples in self.ranks)
        )

    @property
    def counts(self) -> list[int]:
        return [samples.total() for samples in self.ranks]


def with_common_samples(traces: Sequence[Trace]) -> list[Trace]:
    """Return traces with the samples of the first call that all of them make in a step.
    One device and the ranks may call another outermost module: Lightning calls the module itself on one device, and its
    wrapper on ranks."""
    steps = [_with_common_samples(aligned) for aligned in zip(*(trace.steps for trace in traces), strict=False)]
    return [
        replace(trace, steps=[*(aligned[index] for aligned in steps), *trace.steps[len(steps) :]])
        for index, trace in enumerate(traces)
    ]


def _with_common_samples(steps: Sequence[Step]) -> Sequence[Step]:
    if sorted(steps[0].seen) == sorted(sample for step in steps[1:] for sample in step.seen):
        return steps
    calls_by_module = [[{call.module: call for call in calls} for calls in step.inputs] for step in steps]
    if not all(calls_by_module):
        return steps
    chains = [calls for own in calls_by_module for calls in own]
    name = next((name for name in calls_by_module[0][0] if all(name in calls for calls in chains)), None)
    if name is None:
        return steps
    rows = divided_tensors([own[0][name].rows for own in calls_by_module])
    columns = divided_tensors([own[0][name].columns for own in calls_by_module])
    return [
        replace(
            step,
            samples=[samples_of(calls[name].rows, rows) for calls in own],
            columns=[samples_of(calls[name].columns, columns) for calls in own],
        )
        for step, own in zip(steps, calls_by_module, strict=True)
    ]


@dataclass(kw_only=True)
class PlacedParts:
    """The parts of the model that ranks hold, as `assembled` has placed them."""

    divided: bool = False  # ranks hold parts of the model
    reasons: Mapping[str, str] = field(default_factory=dict)  # parameter -> why it could not be placed or assembled
    # sliced parameter -> the ranks that hold each of its `positions`
    holders: Mapping[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    # sliced parameter -> rank -> a key, equal for the same elements
    shard_keys: Mapping[str, Mapping[int, object]] = field(default_factory=dict)
    # state of an optimizer -> the parts of a parameter that ranks compute their own values of it from, in words
    partial: Mapping[str, str] = field(default_factory=dict)

    def placed(self) -> dict[str, Any]:
        """Return these fields by name, for another object that has them."""
        return {own.name: getattr(self, own.name) for own in fields(PlacedParts)}


@dataclass
class Aligned(PlacedParts):
    """The run on one device and the run on several ranks. Steps are counted from 0 here, and from 1 in reports.
    A comparison makes it from finished runs, again when the ranks have found their slices, and once more for a replay.
    The verdict, the diagnosis and the reports read it."""

    reference: Trace  # the trace of the run on one device
    ranks: list[Trace]  # the traces of the ranks, in order; one trace for a single process with several devices
    world: int = 0  # number of ranks, or of devices of the single process
    replayed: bool = False  # one device was given the samples and random numbers of the ranks
    names: list[str] = field(init=False)  # parameters in both runs, in the order of the model
    states: list[str] = field(init=False)  # states and buffers in both runs, without buffers that never change
    missing: list[str] = field(init=False)  # parameters that only one device trains
    extra: list[str] = field(init=False)  # parameters that only ranks train

    def __post_init__(self) -> None:
        self.world = self.world or len(self.ranks)
        self.reference, *self.ranks = with_common_samples([self.reference, *self.ranks])
        trained = {name for trace in self.ranks for name in trace.parameters}
        ordered = sorted(self.reference.parameters.values(), key=lambda parameter: parameter.order)
        self.names = [p.name for p in ordered if p.name in trained]
        self.missing = [p.name for p in ordered if p.name not in trained]
        self.extra = sorted(trained - self.reference.parameters.keys())
        states = [entry for trace in (self.reference, *self.ranks) for entry in trace.states.items()]
        changing = {name for name, state in states if not state.constant}
        kept = sorted(self.reference.states.values(), key=lambda state: (state.order, state.key))
        kept_states = {name for trace in self.ranks for name in trace.states}
        self.states = [state.name for state in kept if state.name in kept_states & changing]

    @property
    def where(self) -> str:
        """The name of the run that is compared with one device: "4 ranks"."""
        ranks = f"{self.world} rank{'s' * (self.world > 1)}"
        return ranks if len(self.ranks) == self.world else f"{self.world} GPUs of one process"

    @property
    def steps(self) -> int:
        """Number of steps that one device and all ranks have made."""
        return min(len(trace.steps) for trace in (self.reference, *self.ranks))

    @property
    def fully_sharded(self) -> bool:
        """True if the ranks only shard parameters, all among all ranks: then each must get samples of its own."""
        return all(any(event.get("fully_sharded") for event in trace.of("module")) for trace in self.ranks)

    @property
    def compared(self) -> int:
        """Number of these steps before the first non-finite value on one device: later values cannot be compared."""
        return min(self.steps, self.reference.finite_steps)

    def parameter(self, name: str) -> Parameter:
        """Return the parameter, state or buffer of one device with this name."""
        return self.reference.parameters.get(name) or self.reference.states[name]

    def named(self, quantity: Quantity) -> list[str]:
        """Return the names of the tensors of one quantity that both runs have."""
        return self.states if quantity == "state" else self.names

    def values_of(
        self, step: int, quantity: Quantity, name: str
    ) -> tuple[TensorSummary | None, dict[int, TensorSummary | None]]:
        """Return a tensor of a step on one device, and by rank on each rank that has it with the same shape."""
        expected = of_quantity(self.reference.steps[step], quantity).get(name)
        shape = self.parameter(name).shape
        by_rank = {}
        for trace in self.ranks:
            values = of_quantity(trace.steps[step], quantity)
            if name in values and (own := trace.entry(name)) is not None and own.shape == shape:
                by_rank[trace.rank] = values[name]
        return expected, by_rank

    @property
    def whole_parameters(self) -> list[str]:
        """The parameters that are whole at some step both on one device and on some rank."""

        def is_held(name: str) -> bool:
            values = (self.values_of(step, "parameter", name) for step in range(self.steps))
            return any(expected is not None and any(by_rank.values()) for expected, by_rank in values)

        return [name for name in self.names if is_held(name)]

    def samples(self, step: int) -> Samples:
        """Return the rows of the model's inputs, or the columns if only columns equal those of one device."""
        steps = [trace.steps[step] for trace in self.ranks]
        reference = self.reference.steps[step]
        rows = self._samples(reference.seen, [step_on_rank.seen for step_on_rank in steps])
        if rows.same:
            return rows
        columns = self._samples(reference.seen_columns, [step_on_rank.seen_columns for step_on_rank in steps])
        return columns if columns.known and columns.same else rows

    def _samples(self, reference: Sequence[int], ranks: Sequence[Sequence[int]]) -> Samples:
        expected, observed = Counter(reference), [Counter(rank) for rank in ranks]
        divided = self.divided and not self.fully_sharded
        if not divided or not any(samples & expected for samples in observed):
            return Samples(expected, tuple(observed), divided)
        trained = [set(trace.parameters) for trace in self.ranks]
        first_stages = [own for own, samples in zip(trained, observed, strict=True) if samples & expected]
        # Later stages receive outputs of the first stage. They hold other parameters than the first stage.
        for index, own in enumerate(trained):
            if not any(2 * len(own & stage) >= min(len(own), len(stage)) for stage in first_stages):
                observed[index] = Counter()
        return Samples(expected, tuple(observed), divided=True, staged=not all(observed))

    def losses(self, step: int) -> tuple[float | None, float | None, list[float | None]]:
        """Return the loss on one device, the mean loss of the ranks, and the loss of each rank.
        The mean is weighted by the number of samples of each rank if all numbers are known. It is None if a loss is
        unknown."""
        rank_losses = [trace.steps[step].loss for trace in self.ranks]
        finite_losses = [loss for loss in rank_losses if loss is not None]
        if len(finite_losses) < len(rank_losses):
            return self.reference.steps[step].loss, None, rank_losses
        weights = self.samples(step).counts
        if not all(weights):
            weights = [1] * len(finite_losses)
        mean = math.fsum(w * loss for w, loss in zip(weights, finite_losses, strict=True)) / sum(weights)
        return self.reference.steps[step].loss, mean, rank_losses
