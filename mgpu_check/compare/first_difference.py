"""Find where two runs part ways: the first step, and what is wrong at it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mgpu_check.compare.alignment import Aligned, Deviation, Kind, Samples, deviation, of_kind
from mgpu_check.compare.rounding import Rounding
from mgpu_check.compare.trace import Summary
from mgpu_check.mistakes.report import Finding, Observable

__all__ = ["KINDS", "Diagnosis", "FirstDifference", "Wrong", "first_difference", "ratio_of", "updates"]

KINDS: tuple[Kind, ...] = ("before", "gradient", "parameter", "state")
_SAME_SIZE = 0.9  # deviations that are nearly the largest count as the largest


_SHOWN: dict[Kind, str] = {"before": "before: ", "gradient": "gradient: ", "parameter": "after: ", "state": "after: "}


@dataclass(frozen=True)
class Wrong:
    """A tensor that is not that of one device: on which ranks, and how far on the worst of them."""

    kind: Kind
    name: str
    ranks: tuple[int, ...]
    worst: Deviation
    worst_rank: int


@dataclass
class FirstDifference:
    """A step (counted from 0) at which something is wrong.

    Attributes:
        wrong: by kind; in the order of the model.
        apart: by kind, the parameters in which ranks differ from each other.
    """

    aligned: Aligned
    rounding: Rounding
    step: int
    wrong: dict[Kind, list[Wrong]]
    apart: dict[Kind, list[str]]

    @property
    def kind(self) -> Kind | None:
        """The first kind of tensor that is wrong, as the step goes; None where only the samples tell something."""
        return next((kind for kind in KINDS if self.wrong[kind] or self.apart[kind]), None)

    @property
    def main(self) -> Wrong | None:
        """The tensor of the first wrong kind that is furthest off, the first of the model among equals."""
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
        """True if the ranks were given other samples than one device; those that led to the same gradients were the same."""
        samples = self.samples
        right = self.kind in ("parameter", "state")
        return samples.known and (not samples.same or self.kind is None) and not (right and samples.hidden)

    def ratio(self, kind: Kind, name: str) -> float | None:
        """Return how many times as large a wrong tensor is, on the rank where it is furthest off."""
        expected, here = self.aligned.found(self.step, kind, name)
        worst = next((wrong.worst_rank for wrong in self.wrong[kind] if wrong.name == name), None)
        return None if worst is None else ratio_of(here.get(worst), expected)

    def observables(self) -> list[Observable]:
        """Return each tensor of the step, with whether it is that of one device, and whether ranks agree about it."""
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
        comparable: the difference is one of the training step, and not of what the step was given.
        why: for what is not comparable: what the step was given, in a clause.
        todo: what to do about that, a line each.
        failed: what of the diagnosis has failed, a line each.
        axes: see `mgpu_check.compare.axes.told_axes`.
    """

    comparable: bool = True
    findings: list[Finding] = field(default_factory=list)
    why: str = ""
    todo: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    axes: str = ""


def ratio_of(got: Summary | None, expected: Summary | None) -> float | None:
    """Return how many times as large a tensor is as it should be, by its norm."""
    if got is None or expected is None or not expected.norm or not math.isfinite(got.norm / expected.norm):
        return None
    return got.norm / expected.norm


def first_difference(aligned: Aligned, rounding: Rounding) -> FirstDifference | None:
    """Return the first step at which a tensor is further off than rounding leads, or at which all ranks do the whole
    work.

    The last that is looked at is that at which one device first has a tensor that is not finite: its others say something.
    """
    for step in range(min(aligned.compared + 1, aligned.steps)):
        difference = _difference_at(aligned, rounding, step)
        if difference.kind is not None or _whole_batch_on_each_rank(difference):
            return difference
    return None


def _difference_at(aligned: Aligned, rounding: Rounding, step: int) -> FirstDifference:
    wrong: dict[Kind, list[Wrong]] = {kind: [] for kind in KINDS}
    apart: dict[Kind, list[str]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        for name in aligned.named(kind):
            worst, ranks_differ = _compared(aligned, rounding, step, kind, name)
            if worst is not None:
                wrong[kind].append(worst)
            if ranks_differ:
                apart[kind].append(name)
    return FirstDifference(aligned, rounding, step, wrong, apart)


def _compared(aligned: Aligned, rounding: Rounding, step: int, kind: Kind, name: str) -> tuple[Wrong | None, bool]:
    """Return how a value of the ranks differs from that of one device, if it does; and whether ranks differ in it."""
    expected, here = aligned.found(step, kind, name)
    tolerance = rounding.tolerance(step, kind, name)
    shape = aligned.parameter(name).shape
    if expected is not None and not expected.finite:
        if rounding.leaves_numbers(step, kind, name):
            return None, False
        # Ranks that have no numbers either are as they should be; others are infinitely far off.
        here = {rank: value for rank, value in here.items() if value is None or value.finite}
        tolerance = 0.0
    found = {rank: deviation(value, expected, shape) for rank, value in here.items()}
    off = {rank: one for rank, one in found.items() if one.size > tolerance}
    rank = max(off, key=lambda r: off[r].size, default=None)
    worst = None
    if rank is not None:
        at_fault = _at_fault(aligned, name, expected, here[rank], tolerance) & off.keys()
        worst = Wrong(kind, name, tuple(r for r in off if not at_fault or r in at_fault), off[rank], rank)
    first = next(iter(here.values()), None)
    return worst, any(value != first and deviation(value, first, shape).size > tolerance for value in here.values())


def _at_fault(aligned: Aligned, name: str, expected: Summary | None, got: Summary | None, tolerance: float) -> set[int]:
    """Return the ranks that hold the elements which are wrong, of a parameter that is held in slices; empty where not known."""
    holders = aligned.holders.get(name)
    if holders is None or expected is None or got is None:
        return set()
    size = expected.norm / math.sqrt(max(aligned.parameter(name).count, 1))
    pairs = zip(holders, expected.samples, got.samples, strict=False)
    return {rank for ranks, a, b in pairs for rank in ranks if not abs(a - b) <= tolerance * max(size, abs(a))}


def _whole_batch_on_each_rank(difference: FirstDifference) -> bool:
    """Return whether each rank saw, at the first step, the very samples of one device, and did the same work with them.

    Ranks that hold a part of the model each do see all samples, and rightly so. Ranks whose losses differ share the work
    out within the model, as context parallelism does.
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
    """Return by how much this step has changed a parameter's kept elements: (on the first rank that has it, on one device)."""
    holder = next((index for index, trace in enumerate(difference.aligned.ranks) if name in trace.parameters), 0)
    return list(zip(_update(difference, name, holder), _update(difference, name, None), strict=False))


def _update(difference: FirstDifference, name: str, rank: int | None) -> list[float]:
    trace = difference.aligned.one if rank is None else difference.aligned.ranks[rank]
    now = trace.steps[difference.step].parameters.get(name)
    earlier = [of_kind(trace.steps[difference.step], "before").get(name)]
    earlier += [step.parameters.get(name) for step in reversed(trace.steps[: difference.step])]
    before = next((summary for summary in earlier if summary is not None), None)
    if now is None or before is None:
        return []
    return [a - b for a, b in zip(now.samples, before.samples, strict=True)]
