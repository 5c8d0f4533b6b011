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
from mgpu_check.compare.alignment import KINDS, Aligned, Kind, deviation, of_kind
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
    """Two runs, side by side, and the verdict.

    Attributes:
        aligned: the second run beside the first one.
        rounding: None if all bits are equal, or if rounding was measured in neither run.
    """

    aligned: Aligned
    rounding: Rounding | None
    verdict: ComparisonVerdict


class _Unmeasured(Rounding):
    """The tolerance if rounding was not measured: nothing but the digits of summaries."""

    def __init__(self, one: Trace) -> None:
        self._one, self._others, self.margin = one, [], 1.0

    def tolerance(self, step: int, kind: Kind, name: str) -> float:
        return _UNMEASURED

    def of_loss(self, step: int) -> float:
        return _UNMEASURED

    def of_output(self, step: int, name: str) -> float:
        return _UNMEASURED

    def useful_until(self, steps: int) -> int:
        return steps


def compare_runs(
    one: RecordedRun, other: RecordedRun, unjudged: Mapping[str, str] = MappingProxyType({})
) -> RunComparison:
    """Judge `other` against `one`.

    Args:
        unjudged: pattern of parameters that need not be compared -> the reason.
    """
    apart = disagreeing(one.ranks)
    ranks, others = one.ranks, other.ranks
    moved = {"one": one.moved, "other": other.moved}
    left: list[str] = []
    if apart and one.world == other.world:
        ranks, others, moved["one"], moved["other"] = (
            [renamed(trace, {name: f"{name} (rank {trace.rank})" for name in apart}) for trace in some]
            for some in (ranks, others, *moved.values())
        )
    elif apart:
        reference = merged(ranks, one.divided)
        rounding = Rounding(reference, [merged(one.moved, one.divided)]) if one.moved else _Unmeasured(reference)
        left = [name for name in apart if _differs(name, ranks, rounding)]
    reference = merged(ranks, one.divided, left)
    reasons = dict(other.reasons) | dict.fromkeys(left, f"the ranks of {one.name} hold different values of it")
    if set(reference.parameters) != {name for trace in others for name in trace.parameters}:
        found = assembled(reference, others)
        others, reasons = found.ranks, reasons | dict(found.reasons)
        moved["other"] = assembled(reference, moved["other"]).ranks
    aligned = Aligned(
        reference,
        others,
        other.world,
        other.divided,
        reasons,
        holders=other.holders,
        parts=other.parts,
        partial=other.partial,
    )
    measured: Rounding | None = None
    parting = _first_bits(aligned)
    if parting is not None and moved["one"]:
        measured = Rounding(reference, [merged(moved["one"], one.divided)])
    elif parting is not None and moved["other"]:
        measured = Rounding(merged(others, other.divided), [merged(moved["other"], other.divided)])
    return RunComparison(aligned, measured, _verdict(one, other, aligned, parting, measured, unjudged))


def _differs(name: str, ranks: list[Trace], rounding: Rounding) -> bool:
    """Return whether ranks hold a tensor with values that differ by more than rounding."""
    shape = next(entry.shape for trace in ranks if (entry := trace.entry(name)) is not None)
    for number, steps in enumerate(zip(*(trace.steps for trace in ranks), strict=False)):
        for kind in KINDS:
            values = [value for step in steps if (value := of_kind(step, kind).get(name)) is not None]
            sizes = (deviation(value, values[0], shape).size for value in values)
            if values and max(sizes) > rounding.tolerance(number, kind, name):
                return True
    return False


def _verdict(
    one: RecordedRun,
    other: RecordedRun,
    aligned: Aligned,
    parting: _FirstBits | None,
    rounding: Rounding | None,
    unjudged: Mapping[str, str],
) -> ComparisonVerdict:
    known = rounding or _Unmeasured(aligned.one)
    difference = None if parting is None else first_difference(aligned, known)
    if difference is not None:
        found = _differing(difference) if rounding is not None else _unmeasured(difference)
    else:
        found = verdict_of(aligned, known, None, unjudged)
        if parting is not None and rounding is None and found.kind == "equal":
            found = replace(found, kind="undecided", report=_undecided(f"step {parting.step + 1}: {parting}"))
    report = found.report
    if parting is None:
        report = replace(report, headline=report.headline.replace(", within rounding", ", bit by bit"))
    remarks = [*report.remarks, *_renamed(one, other, aligned)]
    if parting is not None and found.kind == "equal":
        remarks.append(f"the first tensor that is not equal bit by bit: {parting}, at step {parting.step + 1}")
    if changes := other_environment(one, other):
        what = "a possible cause: the environments differ" if found.kind == "differs" else "the environments differ"
        remarks.append(f"{what}: {'; '.join(changes)}")
    elements = ""
    if difference is not None and (main := difference.main) and main.kind in ("gradient", "parameter"):
        key = f"{difference.step + 1}/{main.kind}/{main.name}"
        tolerance = known.tolerance(difference.step, main.kind, main.name)
        elements = described((one.values, other.values), (key, key), tolerance)
    report = replace(report, remarks=remarks, known=[*report.known, elements])
    return replace(found, report=_in_words(report, one.name))


class _FirstBits(NamedTuple):
    """The first tensor that is not equal bit by bit, at a step counted from 0."""

    step: int
    kind: Kind
    name: str

    def __str__(self) -> str:
        return reports.TENSORS[self.kind].format(self.name)


def _first_bits(aligned: Aligned) -> _FirstBits | None:
    """Return the first tensor that is not equal bit by bit, or None. Needs no torch."""
    for step in range(aligned.steps):
        for kind in KINDS:
            for name in aligned.named(kind):
                expected, here = aligned.found(step, kind, name)
                shape = aligned.parameter(name).shape
                for value in here.values():
                    bits = (value and value.bits) == (expected and expected.bits)
                    # A statistic that is the mean over slices has no bits of its own.
                    if not bits or (
                        expected and expected.finite and deviation(value, expected, shape).size > _UNMEASURED
                    ):
                        return _FirstBits(step, kind, name)
    return None


def _unmeasured(difference: FirstDifference) -> ComparisonVerdict:
    """Judge a first difference if rounding was not measured.

    As in a run that is repeated, a difference in the upper half of the digits is not rounding.
    """
    found = _differing(difference)
    main = difference.main
    if main is None or not main.worst.size <= math.sqrt(roundoff(difference.aligned.parameter(main.name).dtype)):
        return found
    return replace(found, kind="undecided", report=_undecided(found.report.headline.removeprefix("differs: ")))


def _undecided(what: str) -> Report:
    return Report(
        f"undecided: the runs are not equal bit by bit, and the effect of rounding was measured in neither: {what}",
        remarks=["do: record one of the runs without --no-rounding"],
    )


def _differing(difference: FirstDifference) -> ComparisonVerdict:
    """Return the verdict on a difference. Other samples, or another start, are differences too."""
    samples = difference.samples
    why = ""
    if difference.others_seen:
        why = (
            f"step {difference.step + 1}: the batches differ: the model received {samples.together.total()} samples, "
            f"and {samples.common} of them are among the {samples.one.total()} samples of one device"
        )
    made = of_difference(difference, replace(diagnose(difference), comparable=True, why=why, todo=[]))
    return replace(made, report=replace(made.report, remarks=[*made.report.remarks, *_modules(difference)]))


def _modules(difference: FirstDifference) -> Iterator[str]:
    """Name the modules of the first wrong tensors, if the tensors of other modules are right."""
    kind = difference.kind
    if kind is None:
        return
    wrong = [entry.name for entry in difference.wrong[kind]]
    right = set(difference.aligned.named(kind)) - set(wrong)
    modules = list(dict.fromkeys(name.rpartition(".")[0] or "the model" for name in wrong))
    if wrong and right and kind != "state":
        what = "the gradients of " if kind == "gradient" else ""
        yield f"wrong in {few(modules, 5)}: {what}{few(wrong, 5)}; right at this step: {len(right)} others"


def _renamed(one: RecordedRun, other: RecordedRun, aligned: Aligned) -> Iterator[str]:
    theirs = {name for trace in other.ranks for name in trace.parameters}
    fresh = [name for name in aligned.names if name not in theirs and not name.endswith(")")]
    if fresh and trained(aligned.one):
        yield f"parameters with other names in {other.name}: {few(fresh, 3)}, found by their initial values"


def other_environment(one: RecordedRun, other: RecordedRun) -> list[str]:
    """Return a clause for each fact of the environment that differs."""
    here, there = one.environment, other.environment
    return [
        f"{key} is {there.get(key, 'not set')}, and was {here.get(key, 'not set')} in {one.name}"
        for key in dict.fromkeys((*here, *there))
        if here.get(key) != there.get(key)
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
            replace(one, relations={said(key): value for key, value in one.relations.items()})
            for one in report.observables
        ],
    )
