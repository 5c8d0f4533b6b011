"""Find what cannot be compared, and why: obstacles of the whole comparison, and single tensors.

All obstacles that the runs show are reported at once. Of parameters, states of optimizers and buffers, those that were
not compared are listed with the reasons.
"""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from mgpu_check.compare.alignment import Aligned, Quantity, of_quantity
from mgpu_check.compare.rounding import Rounding
from mgpu_check.compare.trace import State, TensorSummary, Trace
from mgpu_check.processes.rank_lists import few, named

SEEDS = "set seeds: torch.manual_seed, random.seed, numpy.random.seed, generator= of loaders and splits"
SNAPSHOT = (
    "give each run its own directory with --fresh-directory, and save there; or remove that file, and save nothing"
)
DROPOUT = "set the probability of dropout to 0 for the comparison"
NUMBERS = (
    "for the comparison, draw no random numbers; or seed a generator for each sample with its index, so that ranks "
    "and one device draw the same numbers"
)
FLOAT32 = (
    "for the comparison, compute in float32: --float32, in a test float32=True, turns autocast and GradScaler off; the "
    "mistakes are the same there, and rounding does not mask them"
)
WEIGHTS32 = (
    "for the comparison, keep the parameters in float32: without .to(torch.bfloat16), .half() or dtype=; --float32 "
    "leaves their dtype alone"
)
LOSS = (
    "use a loss that depends on the parameters: a softmax over one class, as in cross_entropy with one output, is "
    "constant, and so is a detached loss"
)


@dataclass(frozen=True)
class Obstacle:
    """A reason why runs cannot be compared, and the remedy."""

    reason: str
    todo: str


OTHER_START = Obstacle(
    "the ranks agree with each other, but start from other parameters than one device",
    "set the same seed in every process, and build the model before other random numbers are drawn",
)


OTHER_START_OF_PARTS = Obstacle(
    "the ranks hold parts of the model, and start from other parameters than one device",
    "build the whole model from one seed in every process, and keep the part of the rank afterwards; or load one "
    "checkpoint in all runs",
)


def drawing(trace: Trace, until: int | None = None, event_name: str = "random") -> Obstacle | None:
    """Describe the parts of the model that draw random numbers in training, up to a step; None if no part does.

    `event_name`: "update" for optimizers instead.
    """
    events = [event for event in trace.events if until is None or event["after"] <= until]
    modules = [event for event in events if event["event"] == "module"] if event_name == "random" else []
    dropouts = sorted({name for event in modules for name in event["dropouts"]})
    draws = [event for event in events if event["event"] == event_name]
    if dropouts or (draws and not draws[0]["line"]):
        subject = ", ".join(dropouts) or draws[0]["what"]
        return Obstacle(f"{subject} drops different elements on ranks than on one device", DROPOUT)
    if not draws:
        return None
    subject, line = draws[0]["what"], draws[0]["line"]
    return Obstacle(f"{subject} ({line}) draws random numbers, which differ between ranks and one device", NUMBERS)


_NARROW = ("bfloat16", "float16")


def narrow(trace: Trace) -> str | None:
    """Name the first dtype narrower than float32 that the script computes in, as a clause; else None."""
    for event in trace.of("narrow"):
        return f"{event['module']} returns {event['dtype']}"
    dtypes = {p.dtype: p.name for p in trace.parameters.values() if p.dtype in _NARROW}
    return next((f"{name} is {dtype}" for dtype, name in dtypes.items()), None)


def remedy_of_narrow(trace: Trace) -> str:
    """Return how to compute in float32: parameters of a narrow dtype stay narrow without autocast."""
    narrow_weights = any(parameter.dtype in _NARROW for parameter in trace.parameters.values())
    return WEIGHTS32 if narrow_weights else FLOAT32


def standing(reference: Trace, ranks: Sequence[Trace], own: Path | None) -> Iterator[Obstacle]:
    """Yield the obstacles that the run on one device shows, and those of the ranks if they have run.

    Report them only if the runs are not comparable for another reason: a script without seeds is comparable if it loads
    a checkpoint, and a script may check for a file without loading it.

    `own`: a directory of the run on one device alone.
    """
    if (random := drawing(reference)) is not None:
        yield random
    if low := narrow(reference):
        yield Obstacle(f"{low}: rounding may mask the differences", remedy_of_narrow(reference))
    gradients = [gradient for step in reference.steps for gradient in step.gradients.values()]
    if gradients and not any(gradient is not None and gradient.norm for gradient in gradients):
        yield Obstacle("the gradients of all parameters are zero on one device", LOSS)
    if not reference.of("seed"):
        yield Obstacle("torch.manual_seed was never called on one device", SEEDS)
    missed = (event["file"] for event in reference.of("save") if event["missed"])  # at first, and saved later
    if (file := next(missed, None)) and not (own and Path(file).is_relative_to(own)):
        yield Obstacle(
            f"the script checks for {file}, and saves it later: does each run resume the run before?", SNAPSHOT
        )
    batch = len(reference.steps[0].seen) if reference.steps else 0
    same_batches = all(trace.steps and len(trace.steps[0].seen) == batch for trace in ranks)
    parameters = [parameter for trace in ranks for parameter in trace.parameters.values()]
    in_parts = any(own.sharded or own.held or own.unplaced for own in parameters) or any(
        0 < len(trace.parameters) < len(reference.parameters) for trace in ranks
    )
    if batch and len(ranks) > 1 and same_batches and not in_parts:
        yield Obstacle(f"each rank has a batch as large as that of one device ({batch})", divided(batch))


def divided(batch: int) -> str:
    """Return the remedy if each rank takes a batch as large as that of one device."""
    return (
        "divide the global batch: batch_size=global_batch // world_size; or, if it is an argument of the script, "
        f"let compare divide it: --batch-size={{{batch}/W}}, where W is the number of processes"
    )


_WIDE = 0.1  # relative to the values: a wider tolerance would accept a factor of 2, or a missing rank
_SMALL = 1e-2
"""Relative to the largest tensor of its kind: a smaller tensor, such as the gradient of a bias before a norm, may
consist of rounding errors only."""
_SHOWN = 12  # more names would make a line too long
_NOWHERE = "no rank trains a parameter of its name and shape"
_OF_RANKS = "one device trains no parameter of its name and shape"
_NOT_KEPT = "no rank keeps it"
_KEPT_BY_RANKS = "one device keeps no state or buffer of this name"
_UNMEASURED = "runs on one device that differ by rounding alone do not agree whether it exists, so it has no tolerance"
_DROWNED = "rounding alone moves its gradient and its value so far that the measured tolerance proves nothing"


def trained(trace: Trace) -> set[str]:
    """Return the parameters that had a nonzero gradient at some step."""
    return {
        name
        for step in trace.steps
        for name, gradient in step.gradients.items()
        if gradient is not None and (gradient.norm or not gradient.finite)
    }


def not_compared(aligned: Aligned, rounding: Rounding) -> dict[str, str]:
    """Return the trained parameters, states and buffers that were never compared, each with the reason."""
    reasons: dict[str, str] = {}
    reference_trained = trained(aligned.reference)
    for name in (name for name in aligned.reference.parameters if name in reference_trained):
        compared = [*_found(aligned, "gradient", name), *_found(aligned, "parameter", name)]
        if name in aligned.missing:
            reasons[name] = aligned.reasons.get(name, _NOWHERE)
        elif not compared:
            reasons[name] = aligned.reasons.get(name) or _shapes(aligned, name)
        elif not any(_tells(aligned, rounding, step, quantity, name) for step, quantity in compared):
            reasons[name] = _DROWNED
    ranks: dict[str, list[int]] = defaultdict(list)
    for trace in aligned.ranks:
        for name in sorted(trained(trace) & set(aligned.extra)):
            ranks[name].append(trace.rank)
    reasons |= {f"{name} ({named(holders)})": aligned.reasons.get(name, _OF_RANKS) for name, holders in ranks.items()}
    judged = reference_trained - reasons.keys()
    return reasons | _states(aligned, rounding, judged) | _unread(aligned, judged)


def _unread(aligned: Aligned, judged: Set[str]) -> dict[str, str]:
    """Return the values that compare cannot read, each with its type: parameters, gradients, and states of parameters.
    If one device has none, those of ranks count."""
    on_reference = [event for event in aligned.reference.of("unread") if not event["of"] or event["of"] in judged]
    events = on_reference or [event for trace in aligned.ranks for event in trace.of("unread")]
    tensors = "compare cannot read the values of its type {}"
    states = "its type {} is neither a number nor a tensor that compare can read"
    return {event["name"]: (states if event["of"] else tensors).format(event["type"]) for event in events}


def _states(aligned: Aligned, rounding: Rounding, judged: Set[str]) -> dict[str, str]:
    def is_measured(step: int, name: str) -> bool:
        """Return whether a state has a tolerance, or is not finite on one device, which needs none."""
        expected, _ = aligned.values_of(step, "state", name)
        return (expected is not None and not expected.finite) or math.isfinite(rounding.tolerance(step, "state", name))

    def is_judged(state: State) -> bool:
        return state.of in judged if state.key else not state.constant

    reasons: dict[str, str] = {}
    for name in (name for name, state in aligned.reference.states.items() if is_judged(state)):
        steps = [step for step, _ in _found(aligned, "state", name)]
        if not steps:
            on_ranks = any(name in trace.states for trace in aligned.ranks)
            reasons[name] = aligned.reasons.get(name) or (_shapes(aligned, name) if on_ranks else _NOT_KEPT)
        elif not any(is_measured(step, name) for step in steps):
            reasons[name] = _UNMEASURED
    for trace in aligned.ranks:
        for name, state in trace.states.items():
            if name not in aligned.reference.states and is_judged(state):
                reasons[name] = aligned.reasons.get(name, _KEPT_BY_RANKS)
    return reasons


def left_over(aligned: Aligned, missed: Sequence[str]) -> str:
    """Describe how many trained parameters, states and buffers were not compared."""
    reference, traces = aligned.reference, [aligned.reference, *aligned.ranks]
    kept = {name for trace in traces for name in trace.states}
    unread = {event["name"]: event["of"] for trace in traces for event in trace.of("unread")}
    kept |= {name for name, owner in unread.items() if owner}
    parameters = [name for name in missed if name not in kept]
    total = len(trained(reference)) + sum(n in unread or n.partition(" (")[0] in aligned.extra for n in parameters)
    clauses = [f"{len(parameters)} of {total} trained parameters"] if parameters else []
    count = len(missed) - len(parameters)
    clauses += [f"{count} state{'s' * (count > 1)} of optimizers or buffer{'s' * (count > 1)}"] if count else []
    return f"{' and '.join(clauses)} {'was' if len(missed) == count == 1 else 'were'} not compared with one device"


def account(missed: Mapping[str, str], unjudged: Mapping[str, str]) -> tuple[list[str], list[str], list[str]]:
    """Separate the uncompared names that the user accepts from the others.
    `missed` is that of `not_compared`, and `unjudged` has the user's patterns, each with its reason. Return the names
    that no pattern accepts; report lines, one for each reason and each used pattern; the unused patterns."""
    remaining: dict[str, list[str]] = defaultdict(list)
    accepted: dict[str, list[str]] = defaultdict(list)
    for name, reason in missed.items():
        patterns = [pattern for pattern in unjudged if fnmatch.fnmatchcase(name.partition(" (")[0], pattern)]
        for pattern in patterns:
            accepted[pattern].append(name)
        if not patterns:
            remaining[reason].append(name)
    groups = [("not compared", group, reason) for reason, group in remaining.items()]
    groups += [("not compared, accepted by --unjudged", group, unjudged[own]) for own, group in accepted.items()]
    lines = [f"{outcome}: {few(group, _SHOWN)}: {reason}" for outcome, group, reason in groups]
    idle = [pattern for pattern in unjudged if pattern not in accepted]
    return [name for group in remaining.values() for name in group], lines, idle


def _found(aligned: Aligned, quantity: Quantity, name: str) -> Iterator[tuple[int, Quantity]]:
    """Yield each step at which some rank's tensor was compared with one device, with the quantity."""
    for step in range(aligned.compared):
        expected, by_rank = aligned.values_of(step, quantity, name)
        if expected is not None and any(by_rank.values()):
            yield step, quantity


def _tells(aligned: Aligned, rounding: Rounding, step: int, quantity: Quantity, name: str) -> bool:
    def size(summary: TensorSummary | None, name: str) -> float:
        if summary is None or not summary.finite:
            return 0.0
        return summary.norm / math.sqrt(max(aligned.parameter(name).count, 1))

    tensors = of_quantity(aligned.reference.steps[step], quantity)
    own = size(tensors[name], name)
    largest = max((size(value, label) for label, value in tensors.items()), default=0.0)
    width = rounding.tolerance(step, quantity, name) * own
    return math.isfinite(width) and width <= _WIDE * max(own, _SMALL * largest)


def _shapes(aligned: Aligned, name: str) -> str:
    shapes = sorted({str(list(own.shape)) for t in aligned.ranks if (own := t.entry(name)) is not None})
    return f"its shape is {few(shapes, 3)} on ranks, and {list(aligned.parameter(name).shape)} on one device"
