"""Find the first step where the ranks differ from one device, and its wrong tensors, options and outputs.

Optimizers may reduce gradients within their step, and their ranks may keep states of other rows (ZeRO-2, Muon). The
gradients before such a step are those of each rank. They are right if their mean over the ranks is the gradient of one
device, and if the ranks agree about the parameters and states after the step.

Outputs of modules show where a forward pass parts. They explain a difference, and never decide a verdict: correct ranks
may compute partial results, which one device never has.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mgpu_check.compare.alignment import (
    QUANTITIES,
    Aligned,
    Deviation,
    Quantity,
    Samples,
    deviation,
    of_quantity,
    output_deviation,
)
from mgpu_check.compare.assembly import mean_of
from mgpu_check.compare.rounding import Rounding
from mgpu_check.compare.trace import OutputSummary, TensorSummary, Trace, views
from mgpu_check.diagnosis.report import Finding, Observable
from mgpu_check.numerics.factors import common_factor
from mgpu_check.processes.rank_lists import few, named

_NEAR_ROWS = 1e-2  # relative deviation of a state's norm and sum: other rows than supposed almost always cause more


def reduced_within(aligned: Aligned, rounding: Rounding, step: int, differing: Collection[str]) -> list[str]:
    """Return the parameters whose gradients differ between ranks, but that the step changes alike.
    `differing`: parameters and states that differ between ranks after the step."""
    states = {name: aligned.reference.states[name] for name in aligned.states}
    off = {states[name].of if name in states else name for name in differing}
    in_states = {state.of for state in states.values() if state.count > 1}
    return [
        name
        for name in aligned.names
        if name not in off
        and _is_mean(aligned, rounding, step, name)  # first, because most gradients are equal on all ranks
        and _alike(aligned, step, name)
        and (name in in_states or _changed(aligned, step, name))
    ]


def factor_within(
    aligned: Aligned, step: int, differing: Collection[str], *, least: float, of_largest: float
) -> float | None:
    """Return the factor of the mean gradient over the ranks, relative to one device; None without a common factor.

    It is also None if the ranks do not reduce these gradients within the step.

    `differing`: parameters whose gradients differ between ranks. `least`, `of_largest`: see
    `mgpu_check.numerics.factors.common_factor`.
    """
    pairs: list[tuple[float, float]] = []
    for name in differing:
        expected, gradients = _gradients(aligned, step, name)
        if expected is None or not gradients or not _alike(aligned, step, name) or not _changed(aligned, step, name):
            return None
        mean = mean_of(gradients, [1 / len(gradients)] * len(gradients))
        if expected.norm:
            both = zip(mean.samples, expected.samples, strict=True)
            pairs += [(g / expected.norm, e / expected.norm) for g, e in both]
    return common_factor(pairs, least=least, of_largest=of_largest)


def _gradients(aligned: Aligned, step: int, name: str) -> tuple[TensorSummary | None, list[TensorSummary]]:
    """Return a gradient on one device, and that of each rank; empty if a rank lacks it."""
    expected, by_rank = aligned.values_of(step, "gradient", name)
    gradients = [value for value in by_rank.values() if value is not None]
    return expected, gradients if len(gradients) >= aligned.world else []


def _alike(aligned: Aligned, step: int, name: str) -> bool:
    """Return whether ranks have a parameter of equal bits, as a reduction leaves it.
    A step smaller than the tolerance of the parameter would hide gradients that stay on each rank."""
    _, by_rank = aligned.values_of(step, "parameter", name)
    return len({value.bits for value in by_rank.values() if value is not None}) == 1


def _changed(aligned: Aligned, step: int, name: str) -> bool:
    """Return whether a step changed a parameter, so that its result shows the gradient as a state would."""
    trace = aligned.reference
    sources = [trace.steps[step].before, *(earlier.parameters for earlier in reversed(trace.steps[:step]))]
    before = next((values[name] for values in sources if name in values), None)
    after = trace.steps[step].parameters.get(name)
    return before is not None and after is not None and before.bits != after.bits


def _is_mean(aligned: Aligned, rounding: Rounding, step: int, name: str) -> bool:
    """Return whether ranks have different gradients, whose mean is the gradient of one device."""
    expected, gradients = _gradients(aligned, step, name)
    if expected is None or len(gradients) < 2 or all(value == gradients[0] for value in gradients):
        return False
    mean = replace(mean_of(gradients, [1 / len(gradients)] * len(gradients)), norm=expected.norm)
    # Parts that cancel have larger rounding errors than their mean.
    cancelled = max(value.norm for value in gradients) / (expected.norm or math.inf)
    tolerance = rounding.tolerance(step, "gradient", name) * max(cancelled, 1.0)
    return deviation(mean, expected, aligned.parameter(name).shape).size <= tolerance


def with_rows_together(reference: Trace, ranks: Sequence[Trace]) -> list[Trace]:
    """Return the ranks with the states of all rows, in place of states that each rank keeps of its own rows.
    The rows of a rank follow those of the rank before; the last rank may pad its rows with zeros. The norm and the sum
    of all rows are known. The other numbers of the summary are those of one device."""
    joint_states = {name: rows for name in reference.states if (rows := _rows(reference, ranks, name))}
    if not joint_states:
        return list(ranks)

    def with_rows(trace: Trace) -> Trace:
        kept = {name: trace.states[name] for name in joint_states if name in trace.states}
        states = {n: replace(reference.states[n], dtype=own.dtype, device=own.device) for n, own in kept.items()}
        steps = []
        for i, step in enumerate(trace.steps):
            # If some rank lacks a state at a step, the others have only rows of it.
            others = {name: value for name, value in step.states.items() if name not in joint_states}
            steps.append(replace(step, states=others | {n: rows[i] for n, rows in joint_states.items() if i in rows}))
        return replace(trace, states=trace.states | states, steps=steps)

    return list(map(with_rows, ranks))


def _rows(reference: Trace, ranks: Sequence[Trace], name: str) -> dict[int, TensorSummary]:
    """Return a state of all rows by step; empty if ranks do not keep it in this way.
    A single row is on one rank. The others keep zeros, as padding."""
    state, own = reference.states[name], [trace.states.get(name) for trace in ranks]
    if len(ranks) < 2 or not state.key or not state.shape:
        return {}
    shape = (-(-state.shape[0] // len(ranks)), *state.shape[1:])
    if any(rank_state is None or rank_state.shape != shape for rank_state in own):
        return {}
    values = [[step.states.get(name) for step in trace.steps] for trace in ranks]
    nonzero = sum(any(v is not None and v.norm for v in rank_values) for rank_values in values)
    if shape == state.shape and nonzero != 1:
        return {}
    # A state whose gradient is off by the number of ranks still has these rows.
    for factor in (1.0, float(len(ranks)), 1 / len(ranks)):
        rows: dict[int, TensorSummary] = {}
        for i, (step, *shards) in enumerate(zip(reference.steps, *values, strict=False)):
            pieces = [shard for shard in shards if shard is not None]
            if name not in step.states or len(pieces) < len(shards):
                continue
            one = step.states[name]
            sums, samples = (tuple(factor * number for number in numbers) for numbers in (one.sums, one.samples))
            off = math.fsum(sum(piece.sums) for piece in pieces) - math.fsum(sums)
            row_sums = tuple(value + off / len(sums) for value in sums)
            rows[i] = TensorSummary(0, math.hypot(*(piece.norm for piece in pieces)), row_sums, samples)
            expected = one if factor == 1 else TensorSummary(0, one.norm * factor, sums, samples)
            if len(rows) == 1 and not deviation(rows[i], expected, state.shape).size <= _NEAR_ROWS:
                break
        else:
            if rows:
                return rows
    return {}


def remark(aligned: Aligned, rounding: Rounding) -> str | None:
    """Report gradients that are reduced within the step; None without such gradients."""
    parameters = next(filter(None, (reduced_within(aligned, rounding, s, ()) for s in range(aligned.compared))), [])
    if not parameters:
        return None
    subject = f"the gradients of {len(parameters)} parameters differ between ranks before the step"
    return f"{subject}, and their mean is that of one device: the optimizer reduces them"


_SAME_SIZE = 0.9  # deviations this close to the largest count as equal, so the report names the first in the model
_SHOWN: dict[Quantity, str] = {"before": "before", "gradient": "gradient", "parameter": "after", "state": "after"}


@dataclass(frozen=True)
class WrongTensor:
    """A tensor that differs from one device: the ranks, and the deviation on the worst rank."""

    quantity: Quantity
    name: str
    ranks: tuple[int, ...]
    worst: Deviation
    worst_rank: int


@dataclass
class FirstDifference:
    """A step (counted from 0) with wrong tensors.
    `first_difference` makes it, `diagnose` collects evidence from it, and the reports and the verdict end with it."""

    aligned: Aligned
    rounding: Rounding
    step: int
    mismatches: dict[Quantity, list[WrongTensor]]  # the tensors that differ from one device, in the order of the model
    differing: dict[Quantity, list[str]]  # the names of the tensors that differ between ranks

    @property
    def quantity(self) -> Quantity | None:
        """The first wrong quantity, in the order of `QUANTITIES`; None if only the samples are wrong."""
        return next((own for own in QUANTITIES if self.mismatches[own] or self.differing[own]), None)

    @property
    def main(self) -> WrongTensor | None:
        """The tensor of the first wrong quantity with the largest deviation; among equals, the first in the model."""
        quantity = self.quantity
        if quantity is None or not self.mismatches[quantity]:
            return None
        largest = max(tensor.worst.size for tensor in self.mismatches[quantity])
        return next(tensor for tensor in self.mismatches[quantity] if tensor.worst.size >= _SAME_SIZE * largest)

    @property
    def samples(self) -> Samples:
        return self.aligned.samples(self.step)

    @property
    def saw_other_samples(self) -> bool:
        """True if the ranks saw other samples than one device.
        Hidden samples that led to correct gradients count as the same."""
        samples = self.samples
        if not samples.known or (samples.hidden and self.quantity in ("parameter", "state")):
            return False
        return not samples.same or self.quantity is None

    def ratio(self, quantity: Quantity, name: str) -> float | None:
        """Return the norm of a wrong tensor relative to one device, on the worst rank; None if unknown."""
        expected, by_rank = self.aligned.values_of(self.step, quantity, name)
        worst = next((tensor.worst_rank for tensor in self.mismatches[quantity] if tensor.name == name), None)
        return None if worst is None else ratio_of(by_rank.get(worst), expected)

    def observables(self) -> list[Observable]:
        """Return each tensor of the step: whether it equals that of one device, and whether ranks agree about it."""
        observables = []
        for quantity in QUANTITIES:
            mismatches = {entry.name: entry for entry in self.mismatches[quantity]}
            for name in self.aligned.named(quantity):
                expected, by_rank = self.aligned.values_of(self.step, quantity, name)
                if not by_rank or (expected is None and not any(by_rank.values())):
                    continue
                entry = mismatches.get(name)
                ratio = ratio_of(by_rank[entry.worst_rank], expected) if entry else None
                relations = {"one device": entry is None, "ranks agree": name not in self.differing[quantity]}
                detail = "" if entry is None else f"{entry.worst}{f'; norm x {ratio:.4g}' if ratio else ''}"
                observables.append(Observable(f"{_SHOWN[quantity]}: {name}", relations, detail))
        return observables


@dataclass
class Diagnosis:
    """The diagnosis of a first difference."""

    comparable: bool = True  # the difference lies in the training step, not in its inputs
    findings: list[Finding] = field(default_factory=list)
    reason: str | None = None  # how the inputs of the step differ, in a clause; None if the runs are comparable
    todo: list[str] = field(default_factory=list)  # a line for each remedy
    failed: list[str] = field(default_factory=list)  # a line for each part of the diagnosis that raised an error
    axes: str | None = None  # see `mgpu_check.compare.diagnosis.describe_axes`
    of_slices: str | None = None  # see `mgpu_check.compare.diagnosis.describe_slice`
    outputs: str | None = None  # see `mgpu_check.compare.first_difference.describe_outputs`


def ratio_of(got: TensorSummary | OutputSummary | None, expected: TensorSummary | OutputSummary | None) -> float | None:
    """Return the norm of a tensor relative to the expected norm; None if the ratio is undefined."""
    if got is None or expected is None or not expected.norm or not math.isfinite(got.norm / expected.norm):
        return None
    return got.norm / expected.norm


def first_difference(aligned: Aligned, rounding: Rounding) -> FirstDifference | None:
    """Return the first step with a deviation beyond rounding, or whose whole work each rank does. The last step checked
    is the first with a non-finite tensor on one device: its finite tensors can still be compared."""
    for step in range(min(aligned.compared + 1, aligned.steps)):
        difference = _difference_at(aligned, rounding, step)
        if difference.quantity is not None or _whole_batch_on_each_rank(difference):
            return difference
    return None


def _difference_at(aligned: Aligned, rounding: Rounding, step: int) -> FirstDifference:
    mismatches: dict[Quantity, list[WrongTensor]] = {quantity: [] for quantity in QUANTITIES}
    differing: dict[Quantity, list[str]] = {quantity: [] for quantity in QUANTITIES}
    for quantity in QUANTITIES:
        for name in aligned.named(quantity):
            worst, ranks_differ = _compared(aligned, rounding, step, quantity, name)
            if worst is not None:
                mismatches[quantity].append(worst)
            if ranks_differ:
                differing[quantity].append(name)
    if differing["gradient"]:
        reduced = reduced_within(aligned, rounding, step, {*differing["parameter"], *differing["state"]})
        mismatches["gradient"] = [entry for entry in mismatches["gradient"] if entry.name not in reduced]
        differing["gradient"] = [name for name in differing["gradient"] if name not in reduced]
    return FirstDifference(aligned, rounding, step, mismatches, differing)


def _compared(
    aligned: Aligned, rounding: Rounding, step: int, quantity: Quantity, name: str
) -> tuple[WrongTensor | None, bool]:
    """Return the difference of a tensor from one device, if any, and whether the tensor differs between ranks."""
    expected, by_rank = aligned.values_of(step, quantity, name)
    tolerance = rounding.tolerance(step, quantity, name)
    shape = aligned.parameter(name).shape
    if expected is not None and not expected.finite:
        if rounding.leaves_numbers(step, quantity, name):
            return None, False
        # Ranks with non-finite values agree with one device. Finite values have an infinite deviation.
        by_rank = {rank: value for rank, value in by_rank.items() if value is None or value.finite}
        tolerance = 0.0
    deviations = {rank: deviation(value, expected, shape) for rank, value in by_rank.items()}
    off = {rank: difference for rank, difference in deviations.items() if difference.size > tolerance}
    rank = max(off, key=lambda r: off[r].size, default=None)
    worst = None
    if rank is not None:
        at_fault = _at_fault(aligned, name, expected, by_rank[rank], tolerance) & off.keys()
        worst = WrongTensor(quantity, name, tuple(r for r in off if not at_fault or r in at_fault), off[rank], rank)
    head = next(iter(by_rank.values()), None)
    return worst, any(value != head and deviation(value, head, shape).size > tolerance for value in by_rank.values())


def _at_fault(
    aligned: Aligned, name: str, expected: TensorSummary | None, got: TensorSummary | None, tolerance: float
) -> set[int]:
    """Return the ranks that hold the wrong elements of a sliced parameter; empty if unknown."""
    holders = aligned.holders.get(name)
    if holders is None or expected is None or got is None:
        return set()
    size = expected.norm / math.sqrt(max(aligned.parameter(name).count, 1))
    pairs = zip(holders, expected.samples, got.samples, strict=False)
    return {rank for ranks, a, b in pairs for rank in ranks if not abs(a - b) <= tolerance * max(size, abs(a))}


def _whole_batch_on_each_rank(difference: FirstDifference) -> bool:
    """Return whether at the first step each rank did the whole work of one device, with all of its samples.
    Ranks that hold parts of the model correctly see all samples. Ranks with different losses divide the work within the
    model, as in context parallelism."""
    aligned, samples, step = difference.aligned, difference.samples, difference.step
    if step or not samples.repeated_on_each_rank or samples.ranks[0] != samples.reference or samples.divided:
        return False
    parameters = [parameter for trace in aligned.ranks for parameter in trace.parameters.values()]
    shapes = {name: aligned.parameter(name).shape for name in aligned.names}
    if not aligned.fully_sharded and any(
        own.sharded or own.shape != shapes.get(own.name, own.shape) for own in parameters
    ):
        return False
    losses = [loss for loss in aligned.losses(step)[2] if loss is not None]
    return not losses or max(losses) - min(losses) <= difference.rounding.of_loss(step) * max(map(abs, losses))


def updates(difference: FirstDifference, name: str) -> list[tuple[float, float]]:
    """Return the changes of a parameter's kept elements in this step, as pairs (first rank that has it, one device)."""
    holder = next((index for index, trace in enumerate(difference.aligned.ranks) if name in trace.parameters), 0)
    return list(zip(changes_of(difference, name, holder), changes_of(difference, name, None), strict=False))


def changes_of(difference: FirstDifference, name: str, rank: int | None) -> list[float]:
    """Return the changes of a parameter's kept elements in this step on a rank, or on one device for None."""
    trace = difference.aligned.reference if rank is None else difference.aligned.ranks[rank]
    now = trace.steps[difference.step].parameters.get(name)
    earlier = [of_quantity(trace.steps[difference.step], "before").get(name)]
    earlier += [step.parameters.get(name) for step in reversed(trace.steps[: difference.step])]
    before = next((summary for summary in earlier if summary is not None), None)
    if now is None or before is None:
        return []
    return [a - b for a, b in zip(now.samples, before.samples, strict=True)]


UPDATE_RULE = (
    "the options of its groups equal those of one device: check its update rule, and whether state such as momentum "
    "was lost or changed"
)
_NEAR_OPTION = 1e-9  # relative: the same learning rate, computed in another order of operations, differs by less


def other_options(aligned: Aligned, step: int) -> list[str]:
    """Return a clause for each optimizer option that differs between ranks and one device at a step."""
    expected = aligned.reference.steps[step].options
    differences: dict[tuple[str, str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for trace in aligned.ranks:
        for name, options in trace.steps[step].options.items():
            if (own := expected.get(name)) is None or name not in trace.parameters:
                continue
            for key in sorted(own.keys() | options.keys()):
                if not _same(own.get(key), options.get(key)):
                    differences[key, _told(own, key), _told(options, key)][name].append(trace.rank)
    clauses = []
    for (key, on_reference, on_rank), ranks_by_name in differences.items():
        ranks = sorted({rank for holders in ranks_by_name.values() for rank in holders})
        subject = f"{_WORDS.get(key, key)} of {few(list(ranks_by_name), 3)}"
        clauses.append(f"{subject} is {on_rank} on {named(ranks)}, and {on_reference} on one device")
    groups, *counts = (
        len({repr(sorted(entry.items(), key=str)) for entry in trace.steps[step].options.values()})
        for trace in (aligned.reference, *aligned.ranks)
    )
    others = [(trace.rank, count) for trace, count in zip(aligned.ranks, counts, strict=True) if count != groups]
    for rank, count in others[:1] if clauses else ():
        clause = f"the parameters have {count} different sets of options on rank {rank}, and {groups} on one device"
        clauses.append(f"{clause}: were groups lost?")
    return clauses


_WORDS = {"lr": "the learning rate", "weight_decay": "the weight decay", "optimizer": "the optimizer"}


def _told(options: Mapping[str, Any], key: str) -> str:
    value = options.get(key, "none")
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _same(a: object, b: object) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) <= _NEAR_OPTION * max(abs(a), abs(b))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


@dataclass(frozen=True)
class ComparedOutput:
    """The outputs of a module at a step, compared with those of one device."""

    expected: OutputSummary | None = None  # those of one device; None if it has none
    by_rank: Mapping[int, OutputSummary] = field(default_factory=dict)  # the whole outputs from the view of each rank
    reason: str | None = None  # why they are not compared; None if they are

    def deviation(self, rank: int) -> Deviation:
        """Return the deviation on a rank."""
        return output_deviation(self.by_rank[rank], self.expected)

    def wrong(self, tolerance: float) -> list[int]:
        """Return the ranks whose outputs deviate by more than the tolerance."""
        return [rank for rank in self.by_rank if self.deviation(rank).size > tolerance]


def compared_output(aligned: Aligned, step: int, name: str, tolerance: float) -> ComparedOutput:
    """Compare the outputs of a module at a step, counted from 0.
    `tolerance`: that of the module; it decides whether ranks have partial results."""
    expected = aligned.reference.steps[step].outputs.get(name)
    at = {trace.rank: trace.steps[step] for trace in aligned.ranks}
    shards = {rank: own.outputs[name] for rank, own in at.items() if name in own.outputs}
    if expected is None or not shards:
        return ComparedOutput(expected, reason="called on one side only, or its outputs cannot be read")
    possible = views(shards, {rank: tuple(sorted(at[rank].seen)) for rank in shards})
    full_view = next((view for view in possible if {own.count for own in view.values()} == {expected.count}), None)
    if full_view is None:
        counts = sorted({shard.count for shard in shards.values()})
        return ComparedOutput(expected, reason=f"ranks have {counts} elements, and one device {expected.count}")
    compared = ComparedOutput(expected, full_view)
    if full_view is possible[0] and len(shards) > 1 and compared.wrong(tolerance):
        size = tolerance * max(expected.norm, *(shard.norm for shard in shards.values()))
        sums = [shard.sum for shard in shards.values()]
        numbers = [len(at[rank].seen) for rank in shards]
        weights = numbers if all(numbers) else [1] * len(sums)
        mean = math.fsum(map(operator.mul, weights, sums)) / sum(weights)  # such as the mean loss of its samples
        for name_of_result, result in (("sum", math.fsum(sums)), ("mean", mean)):
            if abs(result - expected.sum) <= size < max(abs(own - expected.sum) for own in sums):
                reason = f"ranks have partial results, whose {name_of_result} is that of one device"
                return ComparedOutput(expected, reason=reason)
    return compared


def describe_outputs(difference: FirstDifference) -> str | None:
    """Name the first module whose outputs differ at the step of a wrong gradient; None if that is unknown.
    A module whose outputs also differed at an earlier step, when all gradients were right, proves nothing."""

    def compared(step: int, name: str) -> tuple[ComparedOutput, list[int], float]:
        tolerance = difference.rounding.of_output(step, name)
        outputs = compared_output(difference.aligned, step, name, tolerance)
        return outputs, outputs.wrong(tolerance), tolerance

    if difference.quantity != "gradient" or difference.saw_other_samples:
        return None
    equal, mismatches, skipped = [], [], 0
    for name in difference.aligned.reference.modules:
        outputs, off, tolerance = compared(difference.step, name)
        unknown = outputs.reason or math.isinf(tolerance)
        if unknown or (off and any(compared(earlier, name)[1] for earlier in range(difference.step))):
            skipped += 1
        elif off:
            mismatches.append((name, off, outputs))
        else:
            equal.append(name)
    message = f"the outputs of {len(equal)} module{'s' * (len(equal) > 1)} are right" if equal else ""
    not_compared = f"; {skipped} {'was' if skipped == 1 else 'were'} not compared" if skipped else ""
    if mismatches:
        name, off, outputs = mismatches[0]
        rank = max(off, key=lambda rank: outputs.deviation(rank).size)
        ratio = ratio_of(outputs.by_rank[rank], outputs.expected)
        factor = f"; norm x {ratio:.5g}" if ratio is not None and abs(ratio - 1) > 1e-3 else ""
        location = f"{module_name(name)}, on {named(off)} ({outputs.deviation(rank)}{factor})"
        clause = f"; {message}" if equal else ""
        return f"forward: the first output that differs is that of {location}{clause}{not_compared}"
    if equal:
        complete = "" in equal and not skipped
        so = ", so the error is in the loss, the backward pass or a reduction" if complete else ""
        return f"forward: {message}{so}{not_compared}"
    return None


def module_name(name: str) -> str:
    """Return the name of a module in reports."""
    return name or "the model"
