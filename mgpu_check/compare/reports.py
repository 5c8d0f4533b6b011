"""Write the report of a comparison."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence

from mgpu_check.compare import first_difference
from mgpu_check.compare.alignment import QUANTITIES, Aligned, Quantity, of_quantity
from mgpu_check.compare.comparability import LOSS, SEEDS, narrow, remedy_of_narrow
from mgpu_check.compare.first_difference import Diagnosis, FirstDifference, other_options
from mgpu_check.compare.processes import ProcessResult, ScriptRun
from mgpu_check.compare.rounding import Repeat, Rounding
from mgpu_check.diagnosis.report import Report
from mgpu_check.processes.rank_lists import few, named

TENSORS = {
    "before": "{} before its first update",
    "gradient": "the gradient of {}",
    "parameter": "{} after the update",
    "state": "{} after the update",
}


def refusal(reason: str, todo: Sequence[str] = ()) -> Report:
    """Return the report of runs that are not comparable for a reason outside of a step."""
    return Report(f"not comparable: {reason}", remarks=_todo(todo))


def failed_run(run: ScriptRun, failed: ProcessResult, one_device: bool) -> Report:
    """Return the report of a run that failed or hung."""
    location = "on one device" if one_device else f"on {len(run.ranks)} ranks"
    outcome = "not comparable" if one_device or failed.is_slow else "differs"
    verb = "was too slow" if failed.is_slow else "hung" if failed.how == "hung" else "failed"
    remarks = [*(str(ended) for ended in run.ranks if ended is not failed), *last_words(failed)]
    remarks += _todo([_installation(name) for name in failed.unimported if name])
    if failed.how == "hung" and run.has("autocast"):
        remarks += _todo(["pass --float32: on simulated GPUs, processors may compute very slowly in float16"])
    if failed.is_slow:
        remarks += _todo(["pass a larger --timeout, or arguments that make it fast, such as a small model"])
    return Report(f"{outcome}: {location} the script {verb}: {failed}", remarks=remarks)


def _installation(module: str) -> str:
    """Return what to do about a module that a script could not import, or not all that it needs of it."""
    try:
        version = importlib.metadata.version(package := module.partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return f"install what provides the module {module}, which the script imports"
    return f"install the {package} that the script was written with: {version} lacks what it needs of {module}"


def no_steps(run: ScriptRun, silent: Sequence[ProcessResult]) -> Report:
    """Return the report of a run in which the processes `silent` ended without an optimizer step."""
    location = "on one device" if len(run.ranks) == 1 else f"on {named([ended.rank for ended in silent])}"
    todo = [
        "if the script ended with its own message, follow it: the script must also train on one device; one that needs "
        "several can be compared with itself, such as --a='--tp=1' --b='--tp=2'",
        "train in the script's own process, with an optimizer of torch.optim or a subclass of torch.optim.Optimizer",
    ]
    loads = silent[0].trace.of("load") if silent[0].trace else []
    if files := list(dict.fromkeys(run.shown(event["file"]) for event in loads if event["file"])):
        message = f"the script has loaded {few(files, 3)}: if it is a checkpoint of a finished training, remove it"
        todo.insert(0, message)
    remarks = [*last_words(silent[0]), *_todo(todo)]
    return Report(f"not comparable: no optimizer step was seen {location}", remarks=remarks)


def starts_other_ranks(run: ScriptRun, world: int) -> Report:
    """Return the report of a script that starts its ranks itself, and other ones than the run needs."""
    size = next((event["size"] for trace in run.traces for event in trace.of("starts")), None)
    return refusal(
        f"the script starts its ranks itself, {size} on {world} device{'s' * (world > 1)} in the run “{run.label}”",
        [
            "let it start torch.cuda.device_count() ranks, or as many as an argument says, such as --gpus={W} for the "
            "number, cuda:{R} for a word for each rank, or {R,} for numbers with commas",
        ],
    )


def not_repeatable(repeat: Repeat) -> Report:
    """Return the report of a script that differs from itself on one device."""
    headline = f"not repeatable: run twice on one device, the script differs from itself at step {repeat.step + 1}"
    separate = "keep runs separate: no run may read a file of an earlier run; --fresh-directory ensures this"
    return refusal(f"{headline}: {repeat.description}", [SEEDS, separate])


def starts_without_numbers(aligned: Aligned) -> Report:
    """Return the report of a script whose first step has values that are not finite."""
    return refusal(
        f"not a number from the first step on: on one device {_not_finite(aligned)}",
        ["keep values finite: use a smaller learning rate, or a loss without division by zero"],
    )


def names_apart(aligned: Aligned) -> Report:
    """Return the report of runs that have no trained parameter in common."""
    unread = {event["name"]: event["type"] for event in aligned.reference.of("unread") if not event["of"]}
    if unread and aligned.reference.parameters.keys() <= unread.keys():
        kinds = few(sorted(set(unread.values())), 3)
        return refusal(f"compare cannot read the values of the trained parameters, whose type is {kinds}")
    on_reference, on_rank = (few(list(trace.parameters), 3) for trace in (aligned.reference, aligned.ranks[0]))
    headline = "the ranks train no parameter with the name and shape of a parameter that one device trains"
    remarks = [f"one device trains {on_reference}; rank 0 trains {on_rank}"]
    remarks += [f"{name}: {reason}" for name, reason in aligned.reasons.items()]
    return Report(f"not comparable: {headline}", remarks=remarks)


def nothing_learned(steps: int) -> Report:
    """Return the report of runs whose gradients are all zero."""
    reason = f"the gradients of all parameters are zero in all {steps} steps, so any two runs agree"
    return refusal(reason, [LOSS])


def not_the_same_samples(step: int, common: int, reference: int, together: int) -> Report:
    """Return the report of runs that agree although their samples differ.
    `step`: the step, counted from 0. `common`, `reference`, `together`: number of samples in both runs, on one device,
    and on all ranks."""
    return refusal(
        f"the runs agree, but not on the same samples: at step {step + 1} the ranks together saw {together} samples; "
        f"{common} of them are among the {reference} samples of one device",
        [
            "use the same global batch on one device and on the ranks at each step, padded to the same length; see "
            "https://github.com/mgpu-check/mgpu-check/blob/main/docs/how-to/compare.md",
            "check whether the gradients depend on the samples",
        ],
    )


def nothing_tells(aligned: Aligned, useful: int) -> Report:
    """Return the report of runs in which rounding alone masks all differences.
    `useful`: number of steps before rounding hides a factor of two."""
    subject = "gradients" if useful == 0 else "every parameter"
    since = "from the first step on" if useful == 0 else f"within {useful} steps"
    reason = f"{since}, rounding alone changes {subject} so much that it would hide even a factor of two"
    if low := narrow(aligned.reference):
        return refusal(f"{reason}: {low}", [remedy_of_narrow(aligned.reference)])
    return refusal(reason, ["compare fewer steps, with a smaller learning rate"])


def equal(aligned: Aligned, rounding: Rounding, compared: Sequence[str], useful: int, lines: Sequence[str]) -> Report:
    """Return the report of runs without a difference.

    `compared`: the compared parameters. `useful`: number of steps before rounding changes gradients too much. `lines`:
    report lines about uncompared parameters, states and buffers.
    """
    steps, extent, end = aligned.compared, f"{aligned.compared} steps", ""
    remarks = [*lines, *_agreed(aligned, rounding, useful)]
    if steps < aligned.steps:
        extent = f"steps 1 to {steps}" if steps > 1 else "step 1"
        end = "; later values are not finite"
        remarks.insert(0, f"at step {steps + 1}, on one device, {_not_finite(aligned)}: later steps are not compared")
    count, total = len(compared), len(aligned.reference.parameters)
    trained = f"{total if count == total else f'{count} of {total}'} parameter{'s' * (total > 1)}"
    subject = f"{extent} on {aligned.where} train{'s' * (extent == 'step 1')}"
    return Report(f"equal: {subject} the same {trained} as on one device, within rounding{end}", remarks=remarks)


def undecided(
    aligned: Aligned, rounding: Rounding, useful: int, lines: Sequence[str], remaining: str | None, idle: Sequence[str]
) -> Report:
    """Return the report of runs without a difference whose verdict is open.

    Either some tensors were neither compared nor accepted with --unjudged, or a pattern of --unjudged accepts nothing.
    If both hold, the report names the first reason.

    `useful`, `lines`: see `equal`. `remaining`: a clause about the tensors that were neither compared nor accepted, if
    there are any. `idle`: the patterns of --unjudged that match no uncompared tensor; not empty without `remaining`.
    """
    reason, accepting = remaining, "accept what was not compared with --unjudged='PATTERN=reason'"
    narrow = any(trace.of("autocast") or trace.of("narrow") for trace in (aligned.reference, *aligned.ranks))
    seeds = "build the model from one seed on one device and on the ranks"
    exact = "compute in float32, as narrower dtypes round coarsely: --float32 turns autocast and GradScaler off"
    todo = f"{exact if narrow else seeds}; or {accepting}"
    if not remaining:
        reason = f"--unjudged has {', '.join(map(repr, idle))}, which matches no parameter that was not compared"
        todo = "remove the pattern, so that it hides nothing later"
    return Report(f"undecided: {reason}", remarks=[*lines, *_agreed(aligned, rounding, useful), *_todo([todo])])


def step_counts_apart(aligned: Aligned, counts: Sequence[int]) -> Report:
    """Return the report of ranks whose number of steps differs from one device."""
    reference_count = len(aligned.reference.steps)
    numbers = sorted(set(counts))
    extent = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    equal = f"the {aligned.steps} common steps are equal"
    if aligned.compared < aligned.steps:
        equal = f"the first {aligned.compared} common steps are equal, and later values are not finite"
    return Report(f"differs: one device makes {reference_count} optimizer steps, the ranks {extent}; {equal}")


def differs(difference: FirstDifference, diagnosis: Diagnosis, ratio: float | None) -> Report:
    """Return the report of the first difference. `ratio`: the norm of the most wrong tensor, relative to one device."""
    outcome, aligned = "differs" if diagnosis.comparable else "not comparable", difference.aligned
    reason = diagnosis.reason or f"step {difference.step + 1}: {clause_of(difference, ratio)}"
    remarks = _todo(diagnosis.todo)
    by_the_optimizer = any(finding.mistake == "optimizer-differs" for finding in diagnosis.findings)
    if diagnosis.comparable and difference.quantity == "parameter" and not by_the_optimizer:
        remarks += [f"the gradients are right, and {clause}" for clause in other_options(aligned, difference.step)]
    if diagnosis.reason and difference.main:
        remarks.append(f"first to differ: {clause_of(difference, ratio)}")
    for side, parameters in (("one device", aligned.missing), ("ranks", aligned.extra)):
        if parameters:
            remarks.append(f"trained on {side} only: {few(parameters, 5)}")
    return Report(
        f"{outcome}: {reason}",
        {},
        difference.observables() if diagnosis.comparable else [],  # other samples explain them
        diagnosis.findings,
        [*remarks, *diagnosis.failed],
        known=[line for line in (diagnosis.of_slices, diagnosis.outputs) if line],
        axes=diagnosis.axes or "",
    )


def last_words(ended: ProcessResult) -> list[str]:
    """Return the last lines that a rank wrote: they may explain why it ended."""
    lines: list[str] = []
    for stream, text in (("stderr", ended.stderr), ("stdout", ended.stdout)):
        if text and (not lines or ended.how == "finished"):
            lines.append(f"the last lines of {stream} of rank {ended.rank}:")
            lines += [f"  {line}" for line in text.splitlines()]
    return lines


def _not_finite(aligned: Aligned) -> str:
    step = aligned.reference.steps[aligned.compared]
    return next(
        f"{TENSORS[quantity].format(name)} is not finite (its norm is {summary.norm:g})"
        for quantity in QUANTITIES
        for name, summary in of_quantity(step, quantity).items()
        if summary is not None and not summary.finite
    )


def _drowned(aligned: Aligned, rounding: Rounding, steps: int) -> Iterator[str]:
    """Report the tensors that rounding masks within the first `steps` steps."""
    phrases: dict[Quantity, str] = {"gradient": "the gradients of", "parameter": "the updated values of"}
    for quantity, phrase in phrases.items():
        since = {name: rounding.drowned(steps, quantity, name) for name in aligned.whole_parameters}
        masked = [f"{name} (from step {step + 1} on)" for name, step in since.items() if step is not None]
        if masked:
            subject = f"rounding alone changes {phrase} {few(masked, 5)}"
            yield f"{subject} so much that it would hide even a factor of two: not compared"


def clause_of(difference: FirstDifference, ratio: float | None) -> str:
    main, world = difference.main, difference.aligned.world
    if difference.quantity is None:
        return f"all {world} ranks do the work of one device: each rank sees the whole batch"
    tensor = TENSORS[difference.quantity]
    if main is None:
        return f"{tensor.format(difference.differing[difference.quantity][0])} differs between ranks"
    location = named(main.ranks) if len(difference.aligned.ranks) > 1 else difference.aligned.where
    times = f"{ratio:.5g} times as large" if ratio and abs(ratio - 1) > 1e-3 else "different"
    agree = "agree with each other" if main.name not in difference.differing[difference.quantity] else "disagree"
    agree = f"; the ranks {agree}" if len(main.ranks) > 1 else ""
    return f"{tensor.format(main.name)} is {times} on {location} ({main.worst}){agree}"


def _todo(lines: Sequence[str]) -> list[str]:
    return [f"do: {line}" for line in lines]


def _agreed(aligned: Aligned, rounding: Rounding, useful: int) -> Iterator[str]:
    steps = range(aligned.compared)
    if useful < aligned.compared:
        yield f"after step {useful} rounding alone changes gradients so much that it would hide even a factor of two"
    yield from _drowned(aligned, rounding, useful)
    if reduced := first_difference.remark(aligned, rounding):
        yield reduced
    for event in aligned.ranks[0].of("cut"):
        subject = f"no gradient flows through {event['call']}, on ranks and on one device"
        yield f"{subject}: the loss takes the tensors of other ranks for constants"
    for step in steps:
        if options := other_options(aligned, step):
            yield f"at step {step + 1} {options[0]}, although gradients and parameters agree"
            break
    for step in steps:
        samples = aligned.samples(step)
        alike = samples.same or samples.hidden
        if samples.known and not alike and any(own != samples.reference for own in samples.ranks):
            yield (
                f"at step {step + 1} {samples.common} of the {samples.reference.total()} samples of one device are "
                "also on the ranks, although gradients and parameters agree: are some samples padded, or counted twice?"
            )
            break
    for step in steps:
        expected, mean, _ = aligned.losses(step)
        if expected is None or mean is None:
            continue
        # The script may divide gradients, and not losses, by the number of micro-batches.
        counts = {len(trace.steps[step].losses) for trace in aligned.ranks}
        count = max(counts) if len(counts) == 1 else 0
        times = (1.0, len(aligned.reference.steps[step].losses) / count) if count else (1.0,)
        if not any(abs(factor * mean - expected) <= rounding.of_loss(step) * abs(expected) for factor in times):
            yield (
                f"the mean loss of the ranks differs from the loss of one device from step {step + 1} on ({mean:.7g} "
                f"instead of {expected:.7g}), although gradients and parameters agree: the loss is scaled differently"
            )
            break
