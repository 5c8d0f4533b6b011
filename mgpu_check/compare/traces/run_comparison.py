"""Judge a run against another run, as `compare` judges ranks against one device.

The first run takes the place of one device: its tensors, samples and losses are merged over its ranks. If its ranks
hold different values of a tensor, and the second run has as many ranks, each rank is compared with the same rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from mgpu_check.compare import reports
from mgpu_check.compare.alignment import QUANTITIES, Aligned, Quantity, deviation, of_quantity
from mgpu_check.compare.assembly import assembled
from mgpu_check.compare.comparability import trained
from mgpu_check.compare.diagnosis import diagnose
from mgpu_check.compare.first_difference import FirstDifference, first_difference
from mgpu_check.compare.rounding import Rounding, roundoff
from mgpu_check.compare.trace import Trace
from mgpu_check.compare.traces.files import RecordedRun, described, disagreeing, merged, renamed
from mgpu_check.compare.verdict import ComparisonVerdict, of_difference, verdict_of
from mgpu_check.diagnosis.report import Report
from mgpu_check.processes.rank_lists import few

_UNMEASURED = 1e-11
"""Relative: the numbers of a summary have twelve digits, and sums of slices are added in another order."""


@dataclass
class RunComparison:
    """Two runs, side by side, and the verdict."""

    aligned: Aligned  # the second run beside the first one
    rounding: Rounding | None  # None if all bits are equal, or if rounding was measured in neither run
    verdict: ComparisonVerdict


class _Unmeasured(Rounding):
    """The tolerance if rounding was not measured: nothing but the digits of summaries."""

    def __init__(self, reference: Trace) -> None:
        self._one, self._others, self.margin = reference, [], 1.0

    def tolerance(self, step: int, quantity: Quantity, name: str) -> float:
        return _UNMEASURED

    def of_loss(self, step: int) -> float:
        return _UNMEASURED

    def of_output(self, step: int, name: str) -> float:
        return _UNMEASURED

    def useful_until(self, steps: int) -> int:
        return steps


def compare_runs(
    baseline: RecordedRun,
    candidate: RecordedRun,
    unjudged: Mapping[str, str] = MappingProxyType({}),
    bitwise: bool = False,
) -> RunComparison:
    """Judge `candidate` against `baseline`.

    `unjudged`: pattern of parameters that need not be compared -> the reason. `bitwise`: other bits are a difference,
    also if rounding explains them.
    """
    disputed = disagreeing(baseline.ranks)
    ranks, others = baseline.ranks, candidate.ranks
    moved = {"one": baseline.moved, "other": candidate.moved}
    unresolved: list[str] = []
    if disputed and baseline.world == candidate.world:
        ranks, others, moved["one"], moved["other"] = (
            [renamed(trace, {name: f"{name} (rank {trace.rank})" for name in disputed}) for trace in traces]
            for traces in (ranks, others, *moved.values())
        )
    elif disputed:
        reference, moved_one = (merged(own, baseline.divided) if own else None for own in (ranks, baseline.moved))
        assert reference is not None
        rounding = Rounding(reference, [moved_one]) if moved_one else _Unmeasured(reference)
        unresolved = [name for name in disputed if _differs(name, ranks, rounding)]
    reference = merged(ranks, baseline.divided, unresolved)
    reasons = dict(candidate.reasons) | dict.fromkeys(
        unresolved, f"the ranks of {baseline.name} hold different values of it"
    )
    if set(reference.parameters) != {name for trace in others for name in trace.parameters}:
        assembly = assembled(reference, others)
        others, reasons = assembly.ranks, reasons | dict(assembly.reasons)
        moved["other"] = assembled(reference, moved["other"]).ranks
    aligned = Aligned(reference, others, candidate.world, **candidate.placed() | {"reasons": reasons})
    measured: Rounding | None = None
    parting = _first_bits(aligned)
    if parting is not None and moved["one"]:
        measured = Rounding(reference, [merged(moved["one"], baseline.divided)])
    elif parting is not None and moved["other"]:
        measured = Rounding(merged(others, candidate.divided), [merged(moved["other"], candidate.divided)])
    verdict = _verdict(baseline, candidate, aligned, parting, measured, unjudged)
    if bitwise and parting is not None and verdict.kind in ("equal", "undecided"):
        headline = f"differs: step {parting.step + 1}: {parting} is not equal bit by bit, though all is within rounding"
        if measured is None:
            headline = headline.rpartition(",")[0]
        verdict = replace(verdict, kind="differs", report=replace(verdict.report, headline=headline))
    return RunComparison(aligned, measured, verdict)


def _differs(name: str, ranks: list[Trace], rounding: Rounding) -> bool:
    shape = next(entry.shape for trace in ranks if (entry := trace.entry(name)) is not None)
    for number, steps in enumerate(zip(*(trace.steps for trace in ranks), strict=False)):
        for quantity in QUANTITIES:
            values = [value for step in steps if (value := of_quantity(step, quantity).get(name)) is not None]
            sizes = (deviation(value, values[0], shape).size for value in values)
            if values and max(sizes) > rounding.tolerance(number, quantity, name):
                return True
    return False


def _verdict(
    baseline: RecordedRun,
    candidate: RecordedRun,
    aligned: Aligned,
    parting: _FirstBits | None,
    rounding: Rounding | None,
    unjudged: Mapping[str, str],
) -> ComparisonVerdict:
    tolerances = rounding or _Unmeasured(aligned.reference)
    difference = None if parting is None else first_difference(aligned, tolerances)
    if difference is not None:
        verdict = _differing(difference) if rounding is not None else _unmeasured(difference)
    else:
        verdict = verdict_of(aligned, tolerances, None, unjudged)
        if parting is not None and rounding is None and verdict.kind == "equal":
            verdict = replace(verdict, kind="undecided", report=_undecided(f"step {parting.step + 1}: {parting}"))
    report = verdict.report
    if parting is None:
        report = replace(report, headline=report.headline.replace(", within rounding", ", bit by bit"))
    remarks = [*report.remarks]
    theirs = {name for trace in candidate.ranks for name in trace.parameters}
    fresh = [name for name in aligned.names if name not in theirs and not name.endswith(")")]
    if fresh and trained(aligned.reference):
        listing = f"{few(fresh, 3)}, found by their initial values"
        remarks.append(f"parameters with other names in {candidate.name}: {listing}")
    if parting is not None and verdict.kind == "equal":
        remarks.append(f"the first tensor that is not equal bit by bit: {parting}, at step {parting.step + 1}")
    if changes := other_environment(baseline, candidate):
        cause = "a possible cause: the environments differ" if verdict.kind == "differs" else "the environments differ"
        remarks.append(f"{cause}: {'; '.join(changes)}")
    details = [*report.known]
    if difference is not None and (main := difference.main) and main.quantity in ("gradient", "parameter"):
        key = f"{difference.step + 1}/{main.quantity}/{main.name}"
        tolerance = tolerances.tolerance(difference.step, main.quantity, main.name)
        details += filter(None, [described((baseline.values, candidate.values), (key, key), tolerance)])
    report = replace(report, remarks=remarks, known=details)
    return replace(verdict, report=_in_words(report, baseline.name))


class _FirstBits(NamedTuple):
    """The first tensor that is not equal bit by bit, at a step counted from 0."""

    step: int
    quantity: Quantity
    name: str

    def __str__(self) -> str:
        return reports.TENSORS[self.quantity].format(self.name)


def _first_bits(aligned: Aligned) -> _FirstBits | None:
    """Return the first tensor that is not equal bit by bit, or None. Needs no torch."""
    for step in range(aligned.steps):
        for quantity in QUANTITIES:
            for name in aligned.named(quantity):
                expected, by_rank = aligned.values_of(step, quantity, name)
                shape = aligned.parameter(name).shape
                for value in by_rank.values():
                    bits = (value and value.bits) == (expected and expected.bits)
                    # A statistic that is the mean over slices has no bits of its own.
                    if not bits or (
                        expected and expected.finite and deviation(value, expected, shape).size > _UNMEASURED
                    ):
                        return _FirstBits(step, quantity, name)
    return None


def _unmeasured(difference: FirstDifference) -> ComparisonVerdict:
    """Judge a first difference if rounding was not measured.
    As in a run that is repeated, a difference in the upper half of the digits is not rounding."""
    verdict = _differing(difference)
    main = difference.main
    if main is None or not main.worst.size <= math.sqrt(roundoff(difference.aligned.parameter(main.name).dtype)):
        return verdict
    return replace(verdict, kind="undecided", report=_undecided(verdict.report.headline.removeprefix("differs: ")))


def _undecided(parting: str) -> Report:
    return Report(
        f"undecided: the runs are not equal bit by bit, and the effect of rounding was measured in neither: {parting}",
        remarks=["do: record one of the runs without --no-rounding"],
    )


def _differing(difference: FirstDifference) -> ComparisonVerdict:
    """Return the verdict on a difference. Other samples, or another start, are differences too."""
    samples = difference.samples
    reason = (
        f"step {difference.step + 1}: the batches differ: the model received {samples.together.total()} samples, "
        f"and {samples.common} of them are among the {samples.reference.total()} samples of one device"
    )
    shown = reason if difference.saw_other_samples else None
    verdict = of_difference(difference, replace(diagnose(difference), comparable=True, reason=shown, todo=[]))
    return replace(verdict, report=replace(verdict.report, remarks=[*verdict.report.remarks, *_modules(difference)]))


def _modules(difference: FirstDifference) -> Iterator[str]:
    """Name the modules of the first wrong tensors, if the tensors of other modules are right."""
    quantity = difference.quantity
    if quantity is None:
        return
    mismatches = [entry.name for entry in difference.mismatches[quantity]]
    equal = set(difference.aligned.named(quantity)) - set(mismatches)
    modules = list(dict.fromkeys(name.rpartition(".")[0] or "the model" for name in mismatches))
    if mismatches and equal and quantity != "state":
        subject = "the gradients of " if quantity == "gradient" else ""
        yield f"wrong in {few(modules, 5)}: {subject}{few(mismatches, 5)}; right at this step: {len(equal)} others"


def other_environment(baseline: RecordedRun, candidate: RecordedRun) -> list[str]:
    """Return a clause for each fact of the environment that differs."""
    expected, actual = baseline.environment, candidate.environment
    return [
        f"{key} is {actual.get(key, 'not set')}, and was {expected.get(key, 'not set')} in {baseline.name}"
        for key in dict.fromkeys((*expected, *actual))
        if expected.get(key) != actual.get(key)
    ]


def _in_words(report: Report, name: str) -> Report:
    """Return the report with the name of the first run in place of one device, whose place the run has."""

    def said(text: str) -> str:
        return text.replace("on one device", f"in {name}").replace("one device", name)

    return replace(
        report,
        headline=said(report.headline),
        known=[said(line) for line in report.known if line],
        axes=said(report.axes),
        remarks=[said(line) for line in report.remarks if line],
        findings=[replace(finding, evidence=said(finding.evidence)) for finding in report.findings],
        observables=[
            replace(own, relations={said(key): value for key, value in own.relations.items()})
            for own in report.observables
        ],
    )
