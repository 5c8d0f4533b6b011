"""Decide the verdict: equal, differs, not comparable, or undecided. `reports` writes the reports.

Rounding is measured again before a difference counts that one perturbed run may have missed. By chance, a perturbed run
moves some numbers less than rounding does. A step of Adam divides each element of a gradient by its size, so the step
of an element near zero may turn its sign. So a difference counts only if further perturbed runs do not explain it.

If the inputs of one device differ from those of the ranks, the script runs on one device twice more, with the tapes of
the ranks (`mgpu_check.compare.in_script.replay`): once unchanged, and once moved by roundoffs. A replay of batches
cannot show which samples the loaders of the ranks give in an epoch, so the samples that each rank lists are compared.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from mgpu_check.compare import reports
from mgpu_check.compare.alignment import Aligned
from mgpu_check.compare.assembly import Assembly
from mgpu_check.compare.comparability import account, left_over, not_compared
from mgpu_check.compare.diagnosis import diagnose
from mgpu_check.compare.first_difference import Diagnosis, FirstDifference, first_difference, with_rows_together
from mgpu_check.compare.processes import ProcessResult, ScriptRun
from mgpu_check.compare.reports import last_words
from mgpu_check.compare.rounding import Repeat, Rounding, repeatability
from mgpu_check.compare.trace import Trace
from mgpu_check.diagnosis.evidence import Evidence, Factor
from mgpu_check.diagnosis.report import Attempts, Finding, Report
from mgpu_check.diagnosis.rules.order import findings_of
from mgpu_check.processes.rank_lists import few

Kind = Literal["equal", "differs", "not comparable", "undecided"]


@dataclass(frozen=True)
class ComparisonVerdict:
    """The outcome of a comparison: made here once its runs have ended, refined by a replay, and then reported."""

    kind: Kind
    report: Report
    step: int | None = None  # the first step that differs, counted from 1
    parameter: str | None = None  # name of the most wrong tensor at this step
    tensor: str | None = None  # its kind: "before", "gradient", "parameter" or "state" (the last two after the step)
    ranks: tuple[int, ...] = ()  # the ranks on which it is wrong
    ratio: float | None = None  # its norm relative to one device
    compared: int = 0  # number of steps that were compared and are equal
    not_compared: Mapping[str, str] = field(default_factory=dict)  # trained parameter, state or buffer -> the reason
    inputs_differ: bool = False  # not comparable: one device was given other samples, random numbers or parameters
    untrained: bool = False  # the script could be imported, and ended on one device before its first step
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


def of_failure(run: ScriptRun, failed: ProcessResult, one_device: bool) -> ComparisonVerdict:
    """Return the verdict on a run that failed or hung."""
    reached = min(ended.steps for ended in run.ranks)
    report = reports.failed_run(run, failed, one_device)
    if one_device or failed.is_slow:
        untrained = not (reached or failed.how == "hung" or failed.unimported)
        return replace(refused_with(report, reached), untrained=untrained)
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
    return _without_difference(aligned, rounding, unjudged)


def _without_difference(aligned: Aligned, rounding: Rounding, unjudged: Mapping[str, str]) -> ComparisonVerdict:
    """Judge runs whose common steps have no difference."""
    steps = aligned.compared
    if steps == 0:
        return refused_with(reports.starts_without_numbers(aligned))
    counts = [len(trace.steps) for trace in aligned.ranks]
    if any(count != len(aligned.reference.steps) for count in counts):
        report = reports.step_counts_apart(aligned, counts)
        return ComparisonVerdict("differs", report, step=aligned.steps + 1, compared=steps)
    return _of_equal(aligned, rounding, unjudged)


def settled(aligned: Aligned, unjudged: Mapping[str, str]) -> tuple[ComparisonVerdict, Rounding] | None:
    """Return "equal" if the runs agree within the least tolerance that rounding can have, else None.
    No measurement of rounding can change this verdict, because it only widens the tolerance."""
    rounding = _least(aligned)
    if first_difference(aligned, rounding) is not None:
        return None
    verdict = _without_difference(aligned, rounding, unjudged)
    return (verdict, rounding) if verdict.kind == "equal" else None


def _least(aligned: Aligned) -> Rounding:
    """Return the least tolerances: those of a script that rounding does not move at all."""
    return Rounding(aligned.reference, [aligned.reference])


def unconfirmed(aligned: Aligned) -> str:
    """Return a clause about the first difference before rounding and repetition are known."""
    difference = first_difference(aligned, _least(aligned))
    if difference is None:
        return f"{aligned.compared} steps on {aligned.where} agree with one device so far"
    ratio = difference.ratio(difference.main.quantity, difference.main.name) if difference.main else None
    clause = reports.clause_of(difference, ratio)
    return f"whether rounding explains it is not known: at step {difference.step + 1} {clause}"


def _of_equal(aligned: Aligned, rounding: Rounding, unjudged: Mapping[str, str]) -> ComparisonVerdict:
    """Judge runs without a difference: whether the comparison was significant, and complete."""
    steps = aligned.compared
    if not aligned.whole_parameters:
        return refused_with(reports.names_apart(aligned))
    if nothing := _says_nothing(aligned):
        return nothing
    useful = rounding.useful_until(steps)
    compared = [name for name in aligned.whole_parameters if rounding.drowned(useful, "parameter", name) is None]
    if useful == 0 or not compared:
        return refused_with(reports.nothing_tells(aligned, useful), steps)
    if hidden := _hidden_by_clipping(aligned, rounding):
        return hidden
    missed = not_compared(aligned, rounding)
    remaining, lines, idle = account(missed, unjudged)
    if remaining or idle:
        clause = left_over(aligned, remaining) if remaining else None
        report = reports.undecided(aligned, rounding, useful, lines, clause, idle)
        return ComparisonVerdict("undecided", report, compared=steps, not_compared=missed)
    report = reports.equal(aligned, rounding, compared, useful, lines)
    return ComparisonVerdict("equal", report, compared=steps, not_compared=missed)


_NEAR = 1e-2  # relative accuracy of a norm that is taken for a multiple of another one


def _hidden_by_clipping(aligned: Aligned, rounding: Rounding) -> ComparisonVerdict | None:
    """Return "differs" if all ranks clip gradients of another norm than one device, to the same norm.

    The clipped gradients are equal until a norm falls below the limit. Slices may have other norms, so ranks must hold
    whole parameters.
    """
    if any(own.sharded or own.held is not None for trace in aligned.ranks for own in trace.parameters.values()):
        return None
    for step in range(aligned.compared):
        calls = [trace.clips(step) for trace in (aligned.reference, *aligned.ranks)]
        if len(set(map(len, calls))) > 1:
            return None
        if not calls[0]:
            continue
        tolerance = max([_NEAR, *(rounding.tolerance(step, "gradient", name) for name in aligned.whole_parameters)])
        for expected, *own in zip(*calls, strict=True):
            norms, limits = [event["norm"] for event in own], {event["most"] for event in (expected, *own)}
            ratio = norms[0] / expected["norm"] if expected["norm"] else math.nan
            alike = len(limits) == 1 and max(norms) - min(norms) <= tolerance * max(norms)
            if alike and math.isfinite(ratio) and abs(ratio - 1) > tolerance:
                return _clipped(aligned.world, step, ratio, norms[0], expected)
    return None


def _clipped(world: int, step: int, ratio: float, norm: float, expected: Mapping[str, Any]) -> ComparisonVerdict:
    """Return "differs" for ranks that clip a norm of `ratio` times that of one device. `expected`: its call."""
    clause = f"at step {step + 1} clip_grad_norm_ gets {ratio:.4g} times the norm of one device"
    report = Report(
        f"differs: step {step + 1}: before clipping, the gradients of the ranks have {ratio:.5g} times the norm of one "
        f"device ({norm:.6g} instead of {expected['norm']:.6g}); clipping to {expected['most']:g} hides it from the "
        "parameters",
        findings=findings_of(Evidence(world, factor=Factor(ratio, _NEAR, clause, rough=True)), 1, Attempts()),
    )
    return ComparisonVerdict("differs", report, step=step + 1, ratio=ratio, compared=step)


def _says_nothing(aligned: Aligned) -> ComparisonVerdict | None:
    """Return a refusal if all gradients are zero or samples differ, so that agreement proves nothing."""
    steps = range(aligned.compared)
    compared_steps = aligned.reference.steps[: aligned.compared]
    gradients = [step.gradients.get(name) for step in compared_steps for name in aligned.whole_parameters]
    if not any(gradient is not None and gradient.norm for gradient in gradients):
        return refused_with(reports.nothing_learned(len(steps)), len(steps))
    for step in steps:
        samples = aligned.samples(step)
        reference_count, together = samples.reference.total(), samples.together.total()
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
    `others`: see `Rounding`. `further`: runs the script on one device, perturbed with a seed."""
    traces = [*others]
    for seed in FURTHER:
        rounding = Rounding(aligned.reference, traces)
        difference = first_difference(aligned, rounding)
        if difference is None or not _is_doubtful(difference):
            return rounding
        run = further(seed)
        if run.failed or len(run.traces[0].steps) < len(aligned.reference.steps):
            return rounding
        traces.append(run.traces[0])
    return Rounding(aligned.reference, traces)


def _is_doubtful(difference: FirstDifference) -> bool:
    quantity, step = difference.quantity, difference.step
    if quantity is None or quantity == "before":
        return False
    tolerance, mismatches = difference.rounding.tolerance, difference.mismatches[quantity]
    excess = [entry.worst.size / tolerance(step, quantity, entry.name) for entry in mismatches]
    if not all(map(math.isfinite, excess)):
        return False
    named = {*difference.differing[quantity], *(entry.name for entry in mismatches)}
    few = 2 * len(named) < len(difference.aligned.named(quantity))
    return (few and quantity == "parameter") or max(excess, default=0.0) < _SURE


_WHOLE = 0.8
"""Part of the dataset: a loader that drops its last batch gives less than all, and one of two ranks gives half."""

_BY_CHANCE = 8  # samples: samplers that draw by seeds of their own may draw the same few


def mistakes_of(ranks: Sequence[Trace]) -> list[Finding]:
    """Return the mistakes that an epoch of the loaders shows."""
    attempts, world = Attempts(), len(ranks)
    evidence: list[Evidence] = []
    # The models had the same inputs on all ranks, which may also share the order, and slice it.
    samples = [[step.seen for step in trace.steps] for trace in ranks]
    saw_the_same = any(samples[0]) and all(own == samples[0] for own in samples)
    for _, epochs in _loaders(ranks):
        if not _share_data(epochs):
            continue
        indices = [set(epoch["indices"]) for epoch in epochs]
        length, head = epochs[0]["length"], indices[0]
        message = None
        if length > 1 and all(len(own) > _WHOLE * length for own in indices):
            fewest = min(map(len, indices))
            message = f"in an epoch each of the {world} ranks gets {fewest} of {length} samples of the dataset"
        elif epochs[0]["endless"] and len(head) >= _BY_CHANCE and all(own == head for own in indices) and saw_the_same:
            message = f"the samplers have no end, and give each of the {world} ranks the same {len(head)} samples"
        if message:
            evidence.append(Evidence(world, same_samples=message))
    trained = len(ranks[0].steps)  # `epoch_of` begins an epoch too, after the last step
    for event in ranks[0].of("sampler"):
        unset = event["shuffle"] and not event["set_epoch"]
        if unset and event["iteration"] > 1 and event["after"] < trained:
            begin = f"epoch {event['iteration']} begins at step {event['after'] + 1}"
            evidence.append(Evidence(world, repeated_epoch=f"{begin}, and set_epoch was never called"))
            break
    findings = [finding for own in evidence for finding in findings_of(own, 1, attempts)]
    return list({finding.mistake: finding for finding in findings}.values())


def remarks_of(ranks: Sequence[Trace]) -> Iterator[str]:
    """Report what the loaders of the ranks give, and samples that several ranks saw, in lines."""
    for number, epochs in _loaders(ranks):
        if not _share_data(epochs):
            lengths = ", ".join(str(len(set(epoch["indices"]))) for epoch in epochs)
            subject = f"in an epoch of loader {number} the ranks get {lengths} samples of datasets of their own"
            yield f"{subject}, whose samples were not compared"
            continue
        counts = Counter(index for epoch in epochs for index in set(epoch["indices"]))
        shared = sum(count > 1 for count in counts.values())
        if shared >= len(ranks):  # fewer may come again, so that each rank has the same number
            yield f"in an epoch of loader {number} ranks share {shared} of {len(counts)} samples"
        else:
            yield f"in an epoch of loader {number} each rank gets samples of its own, {len(counts)} in all"
        seeds = {epoch["seed"] for epoch in epochs}
        if epochs[0]["workers"] and len(seeds) == 1:
            subject = f"the workers of loader {number} have the same seeds on each rank"
            yield f"{subject}: random augmentation draws the same numbers there"
    first_epochs = [event for event in ranks[0].of("sampler") if event["iteration"] == 1]
    if any(event["shuffle"] and not event["set_epoch"] for event in first_epochs):
        yield "set_epoch was not called before the first epoch: without it each epoch has the same order"
    for number, steps in enumerate(zip(*(trace.steps for trace in ranks), strict=False), 1):
        counts = Counter(sample for step in steps for sample in set(step.seen))
        if shared := sum(count > 1 for count in counts.values()):
            yield f"at step {number} {shared} of {len(counts)} samples came to several ranks; is that meant?"
            break


def _share_data(epochs: Sequence[dict[str, Any]]) -> bool:
    """Return whether the ranks have the same dataset: an index means the same sample on all of them."""
    return len({epoch["data"] for epoch in epochs}) == 1


def _loaders(ranks: Sequence[Trace]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    for number, epochs in enumerate(zip(*(trace.of("epoch") for trace in ranks), strict=False), 1):
        if all(epoch["indices"] for epoch in epochs):
            yield number, list(epochs)


_REMEDY = (
    "do: at these lines, use tensors with an entry for each sample, or the same values on all ranks; or let one device "
    "get the data of all ranks by itself"
)


@dataclass(frozen=True)
class Replay:
    """The verdict of a replay, and what it compares; without a replay, the verdict says why."""

    verdict: ComparisonVerdict
    aligned: Aligned | None = None
    rounding: Rounding | None = None


def _short(run: ScriptRun, steps: int) -> ProcessResult | None:
    """Return the process of a run that failed, or made fewer steps."""
    return run.failed or next((ended for ended in run.ranks if ended.steps < steps), None)


def replayed(
    refused: ComparisonVerdict,
    reference: Trace,
    assembly: Assembly,
    tapes: Sequence[int],
    steps: int | None,
    unjudged: Mapping[str, str],
    run: Callable[..., ScriptRun],
) -> Replay:
    """Replay the ranks on one device, and judge the runs.

    Args:
        refused: the verdict without a replay, which is kept if the replay gives none.
        reference: the run on one device without a replay.
        assembly: the traces of the ranks.
        tapes: what the ranks were given, one file for each.
        steps: see `mgpu_check.compare.comparison.ComparisonPlan`.
        run: runs the script on one device.
    """
    # It imports torch, which other comparisons do without.
    from mgpu_check.compare.in_script.tape import STEPS, write_joint

    ranks = assembly.ranks
    if assembly.divided or assembly.may_hold_slices:
        return _none(refused, "the ranks hold parts of the model")
    counts = {len(step.losses) for trace in ranks for step in trace.steps[:1]}
    own = len(reference.steps[0].losses)
    times, rest = divmod(own, max(*counts, 1))
    dealt = times > 1  # one device has the micro-batches of all ranks
    if len(counts) != 1 or rest or times not in (1, len(ranks)):
        return _none(refused, "the ranks have another number of micro-batches than one device, or than each other")
    until = min(steps or STEPS, *(len(trace.steps) for trace in ranks))
    with tempfile.TemporaryFile() as file:

        def again(label: str, moved: int | None = None, **how: bool) -> ScriptRun:
            write_joint(file.fileno(), tapes, dealt, **how)
            return run(f"one device, {label}", steps=until, moved=moved, files={"replay": file.fileno()})

        def judged(label: str, **how: bool) -> Replay:
            done = again(label, None, **how)
            if failed := _short(done, until):
                return _none(refused, f"with the inputs of the ranks, {failed}", last_words(failed))
            trace = done.traces[0]
            events = [[e for e in rank.events if e.get("after", 0) < until] for rank in ranks]
            cut = [replace(r, steps=r.steps[:until], events=own) for r, own in zip(ranks, events, strict=True)]
            aligned = Aligned(trace, with_rows_together(trace, cut), len(ranks), replayed=True)
            if outcome := settled(aligned, unjudged):
                return Replay(outcome[0], aligned, outcome[1])
            moved = again(f"{label}, moved by roundoffs", SEED, **how)
            if failed := _short(moved, until):
                return _none(refused, f"with the inputs of the ranks, {failed}", last_words(failed))
            further = functools.partial(again, f"{label}, moved by other roundoffs", **how)
            rounding = measured(aligned, [moved.traces[0]], further)
            return Replay(verdict_of(aligned, rounding, None, unjudged), aligned, rounding)

        replay = judged("replaying the ranks")
        if replay.aligned is None:
            return replay
        trace = replay.aligned.reference
        if replay.verdict.kind == "differs" and trace.of("ambiguous"):
            turned = judged("replaying the ranks, with rows in another order", turned=True)
            replay = turned if turned.verdict.kind == "equal" else replay
        verdict = replay.verdict
        if verdict.kind == "differs":
            events = [event for event in trace.of("unreplayed") if event["after"] < (verdict.step or until)]
            if unreplayed := [f"{event['what']}: {event['why']}" for event in events]:
                return _none(refused, f"not all could be replayed: {few(unreplayed, 5)}", [_REMEDY])
            if (reason := _control(replay, trace, again)) is not None:
                return _none(refused, *reason)
    report = verdict.report
    hidden = mistakes_of(ranks)
    remarks = [*report.remarks, *_told(refused, trace, until), *remarks_of(ranks)]
    if hidden and verdict.kind == "equal":
        headline = f"differs: {hidden[0].evidence}; the steps agree, if one device gets the same batches"
        report = replace(report, headline=headline, findings=hidden)
        verdict = replace(verdict, kind="differs")
    return replace(replay, verdict=replace(verdict, report=replace(report, remarks=remarks), replayed=True))


def _control(replay: Replay, trace: Trace, rerun: Callable[..., ScriptRun]) -> tuple[str, list[str]] | None:
    """Return why a difference does not count, as the first lines of a remark; None if it does.
    Data that were not replayed must not explain it. Nor must the order of the samples, where the script did not join
    them itself: rows of a tensor may be steps of a sequence."""
    ordered, step = bool(trace.of("ordered")), replay.verdict.step or len(trace.steps)
    order = " and in another order" if ordered else ""
    reseeded = rerun(f"replaying the ranks, with other seeds{order}", other_seeds=True, backwards=ordered)
    if reseeded.failed:
        return f"with other seeds{order}, {reseeded.failed}", last_words(reseeded.failed)
    if not ordered:
        repeat = repeatability(trace, reseeded.traces[0])
        if repeat is None or repeat.step >= step:
            return None
        message = f"with other seeds it differs at step {repeat.step + 1}: {repeat.description}"
        return f"the replay does not cover all random numbers: {message}", []
    assert replay.rounding is not None
    difference = first_difference(Aligned(trace, [replace(reseeded.traces[0], rank=0)], replayed=True), replay.rounding)
    if difference is None or difference.step >= step:
        return None
    message = f"with other seeds, and the samples of the last rank first, it differs at step {difference.step + 1}"
    return f"the replay does not cover all random numbers, or the order of the rows has a meaning: {message}", []


def _none(refused: ComparisonVerdict, reason: str, lines: Sequence[str] = ()) -> Replay:
    remarks = [*refused.report.remarks, f"one device cannot be given what the ranks were given: {reason}", *lines]
    return Replay(replace(refused, report=replace(refused.report, remarks=remarks)))


def _told(refused: ComparisonVerdict, trace: Trace, steps: int) -> Iterator[str]:
    """Report what the replay gave one device, and what it therefore cannot show."""
    reason = refused.report.headline.removeprefix("not comparable: ")
    inputs = list(dict.fromkeys(event["what"] for event in trace.of("given")))
    yield f"replayed, because by itself the script is not comparable: {reason}"
    subject = few(inputs, 3) if inputs else "the random numbers"
    yield f"one device was given, joined along the samples of the ranks, for {steps} steps: {subject}"
    for event in trace.of("rate")[:1]:
        yield f"the learning rate of the ranks is {event['why']}, and that of one device {event['what']}: replayed too"
