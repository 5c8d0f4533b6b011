"""Find the first step where the ranks differ from one device, and its wrong tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mgpu_check.compare.alignment import KINDS, Aligned, Deviation, Kind, Samples, deviation, of_kind
from mgpu_check.compare.outputs import OutputSummary
from mgpu_check.compare.rounding import Rounding
from mgpu_check.compare.trace import TensorSummary
from mgpu_check.compare.within_step import reduced_within
from mgpu_check.diagnosis.report import Finding, Observable

_SAME_SIZE = 0.9  # deviations this close to the largest count as equal, so the report names the first in the model


_SHOWN: dict[Kind, str] = {"before": "before: ", "gradient": "gradient: ", "parameter": "after: ", "state": "after: "}


@dataclass(frozen=True)
class WrongTensor:
    """A tensor that differs from one device: the ranks, and the deviation on the worst rank."""

    kind: Kind
    name: str
    ranks: tuple[int, ...]
    worst: Deviation
    worst_rank: int


@dataclass
class FirstDifference:
    """A step (counted from 0) with wrong tensors.

    Attributes:
        wrong: by kind, the tensors that differ from one device, in the order of the model.
        apart: by kind, the names of the tensors that differ between ranks.
    """

    aligned: Aligned
    rounding: Rounding
    step: int
    wrong: dict[Kind, list[WrongTensor]]
    apart: dict[Kind, list[str]]

    @property
    def kind(self) -> Kind | None:
        """The first wrong kind of tensor, in the order of `KINDS`; None if only the samples are wrong."""
        return next((kind for kind in KINDS if self.wrong[kind] or self.apart[kind]), None)

    @property
    def main(self) -> WrongTensor | None:
        """The tensor of the first wrong kind with the largest deviation; among equals, the first in the model."""
        kind = self.kind
        if kind is None or not self.wrong[kind]:
            return None
        largest = max(wrong.worst.size for wrong in self.wrong[kind])
        return next(wrong for wrong in self.wrong[kind] if wrong.worst.size >= _SAME_SIZE * largest)

    @property
    def samples(self) -> Samples:
        return self.aligned.samples(self.step)

    @property
    def others_seen(self) -> bool:
        """True if the ranks saw other samples than one device.

        Hidden samples that led to correct gradients count as the same.
        """
        samples = self.samples
        right = self.kind in ("parameter", "state")
        return samples.known and (not samples.same or self.kind is None) and not (right and samples.hidden)

    def ratio(self, kind: Kind, name: str) -> float | None:
        """Return the norm of a wrong tensor relative to one device, on the worst rank; None if unknown."""
        expected, here = self.aligned.found(self.step, kind, name)
        worst = next((wrong.worst_rank for wrong in self.wrong[kind] if wrong.name == name), None)
        return None if worst is None else ratio_of(here.get(worst), expected)

    def observables(self) -> list[Observable]:
        """Return each tensor of the step: whether it equals that of one device, and whether ranks agree about it."""
        found = []
        for kind in KINDS:
            wrong = {entry.name: entry for entry in self.wrong[kind]}
            for name in self.aligned.named(kind):
                expected, here = self.aligned.found(self.step, kind, name)
                if not here or (expected is None and not any(here.values())):
                    continue
                entry = wrong.get(name)
                ratio = ratio_of(here[entry.worst_rank], expected) if entry else None
                found.append(
                    Observable(
                        _SHOWN[kind] + name,
                        {"one device": entry is None, "ranks agree": name not in self.apart[kind]},
                        "" if entry is None else f"{entry.worst}{f'; norm x {ratio:.4g}' if ratio else ''}",
                    )
                )
        return found


@dataclass
class Diagnosis:
    """The diagnosis of a first difference.

    Attributes:
        comparable: the difference lies in the training step, not in its inputs.
        why: how the inputs of the step differ, in a clause; "" if the runs are comparable.
        todo: a line for each remedy.
        failed: a line for each part of the diagnosis that raised an error.
        axes: see `mgpu_check.compare.axes.told_axes`.
        of_slices: see `mgpu_check.compare.calls.told_slice`.
        outputs: see `mgpu_check.compare.forward.told_outputs`.
    """

    comparable: bool = True
    findings: list[Finding] = field(default_factory=list)
    why: str = ""
    todo: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    axes: str = ""
    of_slices: str = ""
    outputs: str = ""


def ratio_of(got: TensorSummary | OutputSummary | None, expected: TensorSummary | OutputSummary | None) -> float | None:
    """Return the norm of a tensor relative to the expected norm; None if the ratio is undefined."""
    if got is None or expected is None or not expected.norm or not math.isfinite(got.norm / expected.norm):
        return None
    return got.norm / expected.norm


def first_difference(aligned: Aligned, rounding: Rounding) -> FirstDifference | None:
    """Return the first step with a deviation beyond rounding, or whose whole work each rank does.

    The last step checked is the first with a non-finite tensor on one device: its finite tensors can still be compared.
    """
    for step in range(min(aligned.compared + 1, aligned.steps)):
        difference = _difference_at(aligned, rounding, step)
        if difference.kind is not None or _whole_batch_on_each_rank(difference):
            return difference
    return None


def _difference_at(aligned: Aligned, rounding: Rounding, step: int) -> FirstDifference:
    wrong: dict[Kind, list[WrongTensor]] = {kind: [] for kind in KINDS}
    apart: dict[Kind, list[str]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        for name in aligned.named(kind):
            worst, ranks_differ = _compared(aligned, rounding, step, kind, name)
            if worst is not None:
                wrong[kind].append(worst)
            if ranks_differ:
                apart[kind].append(name)
    if apart["gradient"]:
        right = reduced_within(aligned, rounding, step, {*apart["parameter"], *apart["state"]})
        wrong["gradient"] = [entry for entry in wrong["gradient"] if entry.name not in right]
        apart["gradient"] = [name for name in apart["gradient"] if name not in right]
    return FirstDifference(aligned, rounding, step, wrong, apart)


def _compared(
    aligned: Aligned, rounding: Rounding, step: int, kind: Kind, name: str
) -> tuple[WrongTensor | None, bool]:
    """Return the difference of a tensor from one device, if any, and whether the tensor differs between ranks."""
    expected, here = aligned.found(step, kind, name)
    tolerance = rounding.tolerance(step, kind, name)
    shape = aligned.parameter(name).shape
    if expected is not None and not expected.finite:
        if rounding.leaves_numbers(step, kind, name):
            return None, False
        # Ranks with non-finite values agree with one device. Finite values have an infinite deviation.
        here = {rank: value for rank, value in here.items() if value is None or value.finite}
        tolerance = 0.0
    found = {rank: deviation(value, expected, shape) for rank, value in here.items()}
    off = {rank: one for rank, one in found.items() if one.size > tolerance}
    rank = max(off, key=lambda r: off[r].size, default=None)
    worst = None
    if rank is not None:
        at_fault = _at_fault(aligned, name, expected, here[rank], tolerance) & off.keys()
        worst = WrongTensor(kind, name, tuple(r for r in off if not at_fault or r in at_fault), off[rank], rank)
    first = next(iter(here.values()), None)
    return worst, any(value != first and deviation(value, first, shape).size > tolerance for value in here.values())


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
    model, as in context parallelism.
    """
    aligned = difference.aligned
    samples = difference.samples
    if difference.step or not samples.repeated_on_each_rank or samples.ranks[0] != samples.one:
        return False
    if aligned.divided or any(t.parameters[name].sharded for t in aligned.ranks for name in t.parameters):
        return False
    if any(
        t.parameters[n].shape != aligned.parameter(n).shape
        for t in aligned.ranks
        for n in aligned.names
        if n in t.parameters
    ):
        return False
    _, _, losses = aligned.losses(difference.step)
    known = [loss for loss in losses if loss is not None]
    return not known or max(known) - min(known) <= difference.rounding.of_loss(difference.step) * max(map(abs, known))


def updates(difference: FirstDifference, name: str) -> list[tuple[float, float]]:
    """Return the changes of a parameter's kept elements in this step, as pairs (first rank that has it, one device)."""
    holder = next((index for index, trace in enumerate(difference.aligned.ranks) if name in trace.parameters), 0)
    return list(zip(changes_of(difference, name, holder), changes_of(difference, name, None), strict=False))


def changes_of(difference: FirstDifference, name: str, rank: int | None) -> list[float]:
    """Return the changes of a parameter's kept elements in this step on a rank, or on one device for None."""
    trace = difference.aligned.one if rank is None else difference.aligned.ranks[rank]
    now = trace.steps[difference.step].parameters.get(name)
    earlier = [of_kind(trace.steps[difference.step], "before").get(name)]
    earlier += [step.parameters.get(name) for step in reversed(trace.steps[: difference.step])]
    before = next((summary for summary in earlier if summary is not None), None)
    if now is None or before is None:
        return []
    return [a - b for a, b in zip(now.samples, before.samples, strict=True)]
