"""State the verdict: equal, differs, or not comparable; where first; and what it looks like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from mgpu_check.compare.alignment import Aligned, of_kind
from mgpu_check.compare.alignment import Kind as TensorKind
from mgpu_check.compare.diagnosis import diagnose
from mgpu_check.compare.first_difference import KINDS, Diagnosis, FirstDifference, first_difference, ratio_of
from mgpu_check.compare.judged import account, not_compared, trained
from mgpu_check.compare.obstacles import FLOAT32, LOSS, SEEDS, narrow
from mgpu_check.compare.options import UPDATE_RULE, other_options
from mgpu_check.compare.processes import Ended, Run
from mgpu_check.compare.rounding import Repeat, Rounding
from mgpu_check.mistakes.report import Report
from mgpu_check.processes.rank_lists import few, named

__all__ = ["Kind", "Verdict", "of_failure", "refused", "starts_its_own", "verdict_of", "without_steps"]

Kind = Literal["equal", "differs", "not comparable", "undecided"]

_TENSORS = {
    "before": "{} before its first update",
    "gradient": "the gradient of {}",
    "parameter": "{} after the update",
}


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison.

    Attributes:
        step: the first that parts ways, from 1.
        parameter, tensor: what is furthest off at it: "before", "gradient" or "parameter" (after the step).
        ranks: on which it is.
        ratio: its norm by that on one device.
        compared: how many steps were.
        not_compared: trained parameters that were not, with the reason of each.
    """

    kind: Kind
    report: Report
    step: int | None = None
    parameter: str | None = None
    tensor: str | None = None
    ranks: tuple[int, ...] = ()
    ratio: float | None = None
    compared: int = 0
    not_compared: Mapping[str, str] = field(default_factory=dict)


def refused(why: str, todo: Sequence[str] = (), compared: int = 0) -> Verdict:
    """Return "not comparable", for a reason that is no step's."""
    return Verdict("not comparable", Report(f"not comparable: {why}", remarks=_todo(todo)), compared=compared)


def of_failure(run: Run, failed: Ended, one_device: bool) -> Verdict:
    """Return the verdict on a run that did not come to its end."""
    where = "on one device" if one_device else f"on {len(run.ranks)} ranks"
    verb = "hung" if failed.how == "hung" else "failed"
    remarks = [*(str(ended) for ended in run.ranks if ended is not failed), *last_words(failed)]
    kind: Kind = "not comparable" if one_device else "differs"
    reached = min(ended.steps for ended in run.ranks)
    return Verdict(
        kind,
        Report(f"{kind}: {where} the script {verb}: {failed}", remarks=remarks),
        step=None if one_device else reached + 1,
        ranks=() if one_device else (failed.rank,),
        compared=reached,
    )


def last_words(ended: Ended) -> list[str]:
    """Return what a rank wrote last: why it has left may stand there, in a message of its own."""
    found: list[str] = []
    for stream, text in (("stderr", ended.stderr), ("stdout", ended.stdout)):
        if text and (not found or ended.how == "finished"):
            found.append(f"the last lines of what rank {ended.rank} wrote to {stream}:")
            found += [f"  {line}" for line in text.splitlines()]
    return found


def without_steps(run: Run, silent: Sequence[Ended]) -> Verdict:
    """Return the verdict on a run in which `silent` have come to their ends without a step of an optimizer."""
    where = "on one device" if len(run.ranks) == 1 else f"on {named([ended.rank for ended in silent])}"
    todo = [
        "if the script ended with a message of its own, follow it: the script has to train on one device, too",
        "train with an optimizer of torch.optim, or one derived from torch.optim.Optimizer, in the script's own process",
    ]
    loads = silent[0].trace.of("load") if silent[0].trace else []
    if files := list(dict.fromkeys(run.shown(event["file"]) for event in loads if event["file"])):
        todo.insert(0, f"the script has loaded {few(files, 3)}: if that is a training that has ended, remove it")
    return Verdict(
        "not comparable",
        Report(f"not comparable: no optimizer step was seen {where}", remarks=[*last_words(silent[0]), *_todo(todo)]),
    )


def starts_its_own(one_device: bool) -> Verdict:
    """Return the verdict on a script that starts its ranks itself, where each process is one already."""
    return refused(
        "the script starts its ranks itself (torch.multiprocessing.spawn, or processes that make a process group), where "
        f"compare starts {'it on one device' if one_device else 'them'}, with the variables of torchrun",
        [
            "be one rank where RANK is set, and start ranks only where it is not: if 'RANK' in os.environ: main(int(os.environ['RANK']), "
            "int(os.environ['WORLD_SIZE'])), else: torch.multiprocessing.spawn(…)"
        ],
    )


def verdict_of(
    aligned: Aligned,
    rounding: Rounding | None,
    repeat: Repeat | None,
    unjudged: Mapping[str, str] = MappingProxyType({}),
) -> Verdict:
    """Judge runs that all came to their ends.

    Args:
        rounding: None where the script is not repeatable before it could be measured.
        repeat: where the script, run twice on one device, parted ways with itself.
        unjudged: parameters that need not be compared, by pattern, with the reason of each.
    """
    if repeat is not None and (rounding is None or repeat.step == 0):
        return _not_repeatable(repeat)
    assert rounding is not None
    steps = aligned.compared
    difference = first_difference(aligned, rounding)
    if (
        repeat is not None
        and (difference is None or repeat.step <= difference.step)
        and (repeat.step < steps or steps == aligned.steps)
    ):
        return _not_repeatable(repeat)
    if difference is not None:
        return _of_difference(difference)
    if steps == 0:
        return refused(
            f"not a number from the first step on: on one device {_not_finite(aligned)}",
            ["begin with numbers that stay finite: a smaller learning rate, a loss without division by zero"],
        )
    counts = [len(trace.steps) for trace in aligned.ranks]
    if any(count != len(aligned.one.steps) for count in counts):
        return _of_counts(aligned, counts)
    return _of_equal(aligned, rounding, unjudged)


def _of_equal(aligned: Aligned, rounding: Rounding, unjudged: Mapping[str, str]) -> Verdict:
    """Judge runs that part ways nowhere: whether that says something, and of what."""
    steps = aligned.compared
    if not aligned.held:
        one, rank = (few(list(trace.parameters), 3) for trace in (aligned.one, aligned.ranks[0]))
        why = "no parameter that one device trains is trained on the ranks under the same name, in the same shape"
        remarks = [f"one device trains {one}; rank 0 trains {rank}"]
        remarks += [f"{name}: {reason}" for name, reason in aligned.reasons.items()]
        return Verdict("not comparable", Report(f"not comparable: {why}", remarks=remarks))
    if nothing := _says_nothing(aligned):
        return nothing
    useful = rounding.useful_until(steps)
    compared = [name for name in aligned.held if rounding.drowned(useful, "parameter", name) is None]
    if useful == 0 or not compared:
        what = "gradients" if useful == 0 else "every parameter"
        since = "from the first step on" if useful == 0 else f"within {useful} steps"
        return refused(
            f"{since}, rounding alone moves {what} so far that not even a factor of two would show"
            + (f": {low}" if (low := narrow(aligned.one)) else ""),
            [FLOAT32] if low else ["compare fewer steps, with a smaller learning rate"],
            compared=steps,
        )
    remarks = _drowned(aligned, rounding, useful) + _remarks(aligned, rounding)
    if useful < steps:
        remarks.insert(
            0, f"after step {useful} rounding alone moves gradients so far that not even a factor of two would show"
        )
    missed = not_compared(aligned, rounding)
    left, lines, idle = account(missed, unjudged)
    remarks = [*lines, *remarks]
    if left or idle:
        return replace(_undecided(aligned, left, idle, remarks), not_compared=missed)
    said, end = f"{steps} steps", ""
    if steps < aligned.steps:
        said = f"steps 1 to {steps}" if steps > 1 else "step 1"
        end = "; after that nothing is a number"
        remarks.insert(
            0, f"at step {steps + 1}, on one device, {_not_finite(aligned)}: after that step nothing is compared"
        )
    headline = (
        f"equal: {said} on {aligned.where} train{'s' * (said == 'step 1')} the same "
        f"{_of(len(compared), len(aligned.one.parameters))} as on one device, within what rounding moves{end}"
    )
    return Verdict("equal", Report(headline, remarks=remarks), compared=steps, not_compared=missed)


def _undecided(aligned: Aligned, left: Sequence[str], idle: Sequence[str], remarks: Sequence[str]) -> Verdict:
    """Return the verdict on runs that part ways nowhere, though not all that is trained was compared."""
    total = len(trained(aligned.one)) + sum(name.partition(" (")[0] in aligned.extra for name in left)
    todo = [
        "build the model from one seed on one device and on the ranks; or accept what was not compared with "
        "--unjudged='PATTERN=reason'"
    ]
    why = f"{len(left)} of {total} trained parameters were not compared with one device"
    if not left:
        why = f"--unjudged has {', '.join(map(repr, idle))}, which matches no parameter that was not compared"
        todo = ["take it out, so that it hides nothing later"]
    return Verdict(
        "undecided",
        Report(f"undecided: {why}", remarks=[*remarks, *_todo(todo)]),
        compared=aligned.compared,
    )


def _says_nothing(aligned: Aligned) -> Verdict | None:
    """Return the verdict on runs that agree for no merit, because nothing was learned, or what they were given is not the
    same; None on others.
    """
    steps = range(aligned.compared)
    gradients = [aligned.one.steps[step].gradients.get(name) for step in steps for name in aligned.held]
    if not any(gradient is not None and gradient.norm for gradient in gradients):
        return refused(
            f"the gradients of all parameters are zero in all {len(steps)} steps, so that any two runs agree",
            [LOSS],
            compared=len(steps),
        )
    for step in steps:
        samples = aligned.samples(step)
        one, together = samples.one.total(), samples.together.total()
        if samples.known and samples.common < one / 2:
            return refused(
                f"the runs agree, but not on the same samples: at step {step + 1} the ranks together saw {together}, of which "
                f"{samples.common} are among the {one} of one device",
                [
                    "let both see the same global batch at each step, padded to the same length; see "
                    "https://github.com/mgpu-check/mgpu-check/blob/main/docs/how-to/compare.md",
                    "look at whether the gradients depend on the samples at all",
                ],
                compared=len(steps),
            )
    return None


def _not_finite(aligned: Aligned) -> str:
    """Return what first is no finite number on one device."""
    step = aligned.one.steps[aligned.compared]
    return next(
        f"{_TENSORS[kind].format(name)} is not finite (its norm is {summary.norm:g})"
        for kind in KINDS
        for name, summary in of_kind(step, kind).items()
        if summary is not None and not summary.finite
    )


def _drowned(aligned: Aligned, rounding: Rounding, steps: int) -> list[str]:
    """Name the tensors that count as equal because anything would, within so many steps."""
    remarks = []
    kinds: tuple[tuple[TensorKind, str], ...] = (
        ("gradient", "the gradients of"),
        ("parameter", "what the updates make of"),
    )
    for kind, said in kinds:
        since = {name: rounding.drowned(steps, kind, name) for name in aligned.held}
        names = [f"{name} (from step {step + 1} on)" for name, step in since.items() if step is not None]
        if names:
            remarks.append(
                f"rounding alone moves {said} {few(names, 5)} so far that not even a factor of two would show: not compared"
            )
    return remarks


def _of(part: int, total: int) -> str:
    return f"{total if part == total else f'{part} of {total}'} parameter{'s' * (total > 1)}"


def _not_repeatable(repeat: Repeat) -> Verdict:
    return refused(
        f"not repeatable: run twice on one device, the script differs from itself at step {repeat.step + 1}: "
        f"{repeat.what}",
        [
            SEEDS,
            "keep runs apart: none may read what an earlier one has written; --fresh-directory does that",
        ],
        compared=repeat.step,
    )


def _of_counts(aligned: Aligned, counts: list[int]) -> Verdict:
    one = len(aligned.one.steps)
    numbers = sorted(set(counts))
    said = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    equal = f"the {aligned.steps} that they share are equal"
    if aligned.compared < aligned.steps:
        equal = f"of those that they share the first {aligned.compared} are equal, and after that nothing is a number"
    report = Report(f"differs: one device makes {one} optimizer steps, the ranks {said}; {equal}")
    return Verdict("differs", report, step=aligned.steps + 1, compared=aligned.compared)


def _of_difference(difference: FirstDifference) -> Verdict:
    found: Diagnosis = diagnose(difference)
    kind: Kind = "differs" if found.comparable else "not comparable"
    main = difference.main
    expected, here = difference.aligned.found(difference.step, main.kind, main.name) if main else (None, {})
    ratio = ratio_of(here.get(main.worst_rank), expected) if main else None
    headline = f"{kind}: step {difference.step + 1}: {_said(difference, ratio)}"
    if found.why:
        headline = f"{kind}: {found.why}"
    remarks = _todo(found.todo)
    if found.comparable and difference.kind == "parameter":
        options = other_options(difference.aligned, difference.step)
        remarks += [f"the gradients are right, and {one}" for one in options]
        remarks += [] if options or found.findings else [UPDATE_RULE]
    elif not found.findings and found.comparable:
        remarks.append("no known pattern fits")
    if found.why and main:
        remarks.append(f"first to differ: {_said(difference, ratio)}")
    observables = difference.observables() if found.comparable else []  # of other samples they say nothing
    remarks += _remarks(difference.aligned, None) + found.failed
    report = Report(headline, {}, observables, found.findings, remarks)
    apart = difference.apart[difference.kind] if difference.kind else []
    return Verdict(
        kind,
        report,
        step=difference.step + 1,
        parameter=main.name if main else (apart[0] if apart else None),
        tensor=difference.kind,
        ranks=main.ranks if main else tuple(trace.rank for trace in difference.aligned.ranks),
        ratio=ratio,
        compared=difference.step,
    )


def _said(difference: FirstDifference, ratio: float | None) -> str:
    main, world = difference.main, difference.aligned.world
    if difference.kind is None:
        return f"all {world} ranks do the work of one device: each sees its whole batch"
    tensor = _TENSORS[difference.kind]
    if main is None:
        return f"{tensor.format(difference.apart[difference.kind][0])} differs between ranks"
    where = named(main.ranks) if len(difference.aligned.ranks) > 1 else difference.aligned.where
    times = f"{ratio:.5g} times as large" if ratio and abs(ratio - 1) > 1e-3 else "another"
    agree = "" if len(main.ranks) < 2 else (
        "; the ranks disagree" if main.name in difference.apart[difference.kind] else "; the ranks agree with each other"
    )  # fmt: skip
    return f"{tensor.format(main.name)} is {times} on {where} ({main.worst}){agree}"


def _todo(lines: Sequence[str]) -> list[str]:
    return [f"do: {line}" for line in lines]


def _remarks(aligned: Aligned, rounding: Rounding | None) -> list[str]:
    remarks = []
    if rounding is None:
        if aligned.missing:
            remarks.append(f"trained on one device only: {few(aligned.missing, 5)}")
        if aligned.extra:
            remarks.append(f"trained on ranks only: {few(aligned.extra, 5)}")
        return remarks
    for step in range(aligned.compared):
        if options := other_options(aligned, step):
            remarks.append(f"at step {step + 1} {options[0]}, though gradients and parameters agree")
            break
    for step in range(aligned.compared):
        samples = aligned.samples(step)
        if samples.known and not samples.same and any(part != samples.one for part in samples.ranks):
            remarks.append(
                f"at step {step + 1} {samples.common} of the {samples.one.total()} samples of one device are those of the "
                "ranks, though what they lead to is the same: are some padded, or counted twice?"
            )
            break
    for step in range(aligned.compared):
        one, mean, _ = aligned.losses(step)
        if one is None or mean is None:
            continue
        # The script may divide gradients, and not losses, by the number of micro-batches.
        counts = {len(trace.steps[step].losses) for trace in aligned.ranks}
        times = (1.0, len(aligned.one.steps[step].losses) / max(counts)) if len(counts) == 1 and max(counts) else (1.0,)
        if any(abs(factor * mean - one) <= rounding.of_loss(step) * abs(one) for factor in times):
            continue
        remarks.append(
            f"the mean over ranks of their losses is not the loss of one device from step {step + 1} on ({mean:.7g} "
            f"instead of {one:.7g}), though gradients and parameters agree: the logged loss is scaled differently"
        )
        break
    return remarks
