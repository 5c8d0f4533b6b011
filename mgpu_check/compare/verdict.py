"""Decide the verdict: equal, differs, not comparable, or undecided. `reports` writes the reports.

Rounding is measured again before a difference counts that one perturbed run may have missed. By chance, a perturbed run
moves some numbers less than rounding does. A step of Adam divides each element of a gradient by its size, so the step
of an element near zero may turn its sign. So a difference counts only if further perturbed runs do not explain it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from mgpu_check.compare import reports
from mgpu_check.compare.alignment import Aligned
from mgpu_check.compare.comparability import account, left_over, not_compared
from mgpu_check.compare.diagnosis import diagnose
from mgpu_check.compare.first_difference import Diagnosis, FirstDifference, first_difference
from mgpu_check.compare.processes import Ended, ScriptRun
from mgpu_check.compare.rounding import Repeat, Rounding
from mgpu_check.compare.trace import Trace
from mgpu_check.diagnosis.report import Report

Kind = Literal["equal", "differs", "not comparable", "undecided"]


@dataclass(frozen=True)
class ComparisonVerdict:
    """The outcome of a comparison."""

    kind: Kind
    report: Report
    step: int | None = None  # the first step that differs, counted from 1
    parameter: str | None = None  # name of the most wrong tensor at this step
    tensor: str | None = None  # its kind: "before", "gradient", "parameter" or "state" (the last two after the step)
    ranks: tuple[int, ...] = ()  # the ranks on which it is wrong
    ratio: float | None = None  # its norm relative to one device
    compared: int = 0  # number of steps that were compared and are equal
    # trained parameter, state or buffer that was not compared -> the reason
    not_compared: Mapping[str, str] = field(default_factory=dict)
    # not comparable, because one device was given other samples, random numbers or parameters
    inputs_differ: bool = False
    replayed: bool = False  # one device was given the inputs of the ranks


def of_inputs(reason: str, todo: Sequence[str], step: int | None = None) -> ComparisonVerdict:
    """Return the verdict on runs with other inputs than one device."""
    return replace(refused(reason, todo), step=step, inputs_differ=True)


def refused(reason: str, todo: Sequence[str] = ()) -> ComparisonVerdict:
    """Return the verdict "not comparable" for a reason outside of a step."""
    return refused_with(reports.refusal(reason, todo))


def refused_with(report: Report, compared: int = 0) -> ComparisonVerdict:
    """Return the verdict "not comparable" with a report."""
    return ComparisonVerdict("not comparable", report, compared=compared)


def of_failure(run: ScriptRun, failed: Ended, one_device: bool) -> ComparisonVerdict:
    """Return the verdict on a run that failed or hung."""
    reached = min(ended.steps for ended in run.ranks)
    report = reports.failed_run(run, failed, one_device)
    if one_device:
        return refused_with(report, reached)
    return ComparisonVerdict("differs", report, step=reached + 1, ranks=(failed.rank,), compared=reached)


def verdict_of(
    aligned: Aligned,
    rounding: Rounding | None,
    repeat: Repeat | None,
    unjudged: Mapping[str, str] = MappingProxyType({}),
) -> ComparisonVerdict:
    """Judge runs that all reached their ends.

    `rounding`: None if the script is not repeatable from the first step on, so that rounding was not measured.
    `repeat`: the first difference between two runs on one device; None if there is none. `unjudged`: pattern of
    parameters that need not be compared -> the reason.
    """
    steps, difference = aligned.compared, first_difference(aligned, rounding) if rounding is not None else None
    if repeat is not None and (
        (rounding is None or repeat.step == 0)
        or ((difference is None or repeat.step <= difference.step) and (repeat.step < steps or steps == aligned.steps))
    ):
        return replace(refused_with(reports.not_repeatable(repeat), repeat.step), inputs_differ=True)
    assert rounding is not None
    if difference is not None:
        return of_difference(difference, diagnose(difference))
    if steps == 0:
        return refused_with(reports.starts_without_numbers(aligned))
    counts = [len(trace.steps) for trace in aligned.ranks]
    if any(count != len(aligned.one.steps) for count in counts):
        report = reports.step_counts_apart(aligned, counts)
        return ComparisonVerdict("differs", report, step=aligned.steps + 1, compared=steps)
    return _of_equal(aligned, rounding, unjudged)


def _of_equal(aligned: Aligned, rounding: Rounding, unjudged: Mapping[str, str]) -> ComparisonVerdict:
    """Judge runs without a difference: whether the comparison was significant, and complete."""
    steps = aligned.compared
    if not aligned.held:
        return refused_with(reports.names_apart(aligned))
    if nothing := _says_nothing(aligned):
        return nothing
    useful = rounding.useful_until(steps)
    compared = [name for name in aligned.held if rounding.drowned(useful, "parameter", name) is None]
    if useful == 0 or not compared:
        return refused_with(reports.nothing_tells(aligned, useful), steps)
    missed = not_compared(aligned, rounding)
    remaining, lines, idle = account(missed, unjudged)
    if remaining or idle:
        clause = left_over(aligned, remaining) if remaining else ""
        report = reports.undecided(aligned, rounding, useful, lines, clause, idle)
        return ComparisonVerdict("undecided", report, compared=steps, not_compared=missed)
    report = reports.equal(aligned, rounding, compared, useful, lines)
    return ComparisonVerdict("equal", report, compared=steps, not_compared=missed)


def _says_nothing(aligned: Aligned) -> ComparisonVerdict | None:
    """Return a refusal if all gradients are zero or samples differ, so that agreement proves nothing."""
    steps = range(aligned.compared)
    gradients = [aligned.one.steps[step].gradients.get(name) for step in steps for name in aligned.held]
    if not any(gradient is not None and gradient.norm for gradient in gradients):
        return refused_with(reports.nothing_learned(len(steps)), len(steps))
    for step in steps:
        samples = aligned.samples(step)
        reference_count, together = samples.one.total(), samples.together.total()
        if samples.known and samples.common < reference_count / 2 and not samples.hidden:
            report = reports.not_the_same_samples(step, samples.common, reference_count, together)
            return replace(refused_with(report, len(steps)), inputs_differ=True)
    return None


def of_difference(difference: FirstDifference, diagnosis: Diagnosis) -> ComparisonVerdict:
    """Return the verdict on a difference, from its diagnosis."""
    main = difference.main
    ratio = difference.ratio(main.quantity, main.name) if main else None
    differing = difference.differing[difference.quantity] if difference.quantity else []
    return ComparisonVerdict(
        "differs" if diagnosis.comparable else "not comparable",
        reports.differs(difference, diagnosis, ratio),
        step=difference.step + 1,
        parameter=main.name if main else (differing[0] if differing else None),
        tensor=difference.quantity,
        ranks=main.ranks if main else tuple(trace.rank for trace in difference.aligned.ranks),
        ratio=ratio,
        compared=difference.step,
        inputs_differ=not diagnosis.comparable,
    )


SEED = 1  # any fixed seed of the perturbations, so that a comparison can be repeated
FURTHER = range(SEED + 1, SEED + 4)
"""Seeds of the further runs: the largest of four movements is rarely far below the rounding error."""
_SURE = 1000.0
"""Times its tolerance: a larger deviation is no rounding error that a perturbed run has missed. If only few parameters
differ, no deviation is: Adam may have turned their steps."""


def measured(aligned: Aligned, others: Sequence[Trace], further: Callable[[int], ScriptRun]) -> Rounding:
    """Return the tolerances, from further runs if they may explain a difference.

    `others`: see `Rounding`. `further`: runs the script on one device, perturbed with a seed.
    """
    traces = [*others]
    for seed in FURTHER:
        rounding = Rounding(aligned.one, traces)
        difference = first_difference(aligned, rounding)
        if difference is None or not _is_doubtful(difference):
            return rounding
        run = further(seed)
        if run.failed or len(run.traces[0].steps) < len(aligned.one.steps):
            return rounding
        traces.append(run.traces[0])
    return Rounding(aligned.one, traces)


def _is_doubtful(difference: FirstDifference) -> bool:
    quantity, step = difference.quantity, difference.step
    if quantity is None or quantity == "before":
        return False
    tolerance, wrong = difference.rounding.tolerance, difference.mismatches[quantity]
    excess = [entry.worst.size / tolerance(step, quantity, entry.name) for entry in wrong]
    if not all(map(math.isfinite, excess)):
        return False
    named = {*difference.differing[quantity], *(entry.name for entry in wrong)}
    few = 2 * len(named) < len(difference.aligned.named(quantity))
    return (few and quantity == "parameter") or max(excess, default=0.0) < _SURE
