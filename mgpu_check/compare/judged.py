"""List the parameters, states of optimizers and buffers that were not compared, with the reasons."""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set

from mgpu_check.compare.alignment import Aligned, Kind, of_kind
from mgpu_check.compare.rounding import Rounding
from mgpu_check.compare.trace import TensorSummary, Trace
from mgpu_check.processes.rank_lists import few, named

_WIDE = 0.1
"""Relative to the values: a wider tolerance would accept a factor of 2, or a missing rank."""
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
    found: dict[str, str] = {}
    one = trained(aligned.one)
    for name in aligned.one.parameters:
        if name not in one:
            continue
        if name in aligned.missing:
            found[name] = aligned.reasons.get(name, _NOWHERE)
        elif not any(_found(aligned, name)):
            found[name] = aligned.reasons.get(name) or _shapes(aligned, name)
        elif not any(_tells(aligned, rounding, step, kind, name) for step, kind in _found(aligned, name)):
            found[name] = _DROWNED
    ranks: dict[str, list[int]] = defaultdict(list)
    for trace in aligned.ranks:
        for name in sorted(trained(trace) & set(aligned.extra)):
            ranks[name].append(trace.rank)
    found |= {f"{name} ({named(some)})": aligned.reasons.get(name, _OF_RANKS) for name, some in ranks.items()}
    judged = one - found.keys()
    return found | _states(aligned, rounding, judged) | _unread(aligned, judged)


def _unread(aligned: Aligned, judged: Set[str]) -> dict[str, str]:
    """Return the values that compare cannot read, each with its type: parameters, gradients, and states of parameters.

    If one device has none, those of ranks count.
    """
    here = [event for event in aligned.one.of("unread") if not event["of"] or event["of"] in judged]
    events = here or [event for trace in aligned.ranks for event in trace.of("unread")]
    states = "its type {} is neither a number nor a tensor that compare can read"
    return {
        event["name"]: (states if event["of"] else "compare cannot read the values of its type {}").format(
            event["type"]
        )
        for event in events
    }


def _states(aligned: Aligned, rounding: Rounding, judged: Set[str]) -> dict[str, str]:
    """Return the states of compared parameters, and the changing buffers, that were never compared."""
    found: dict[str, str] = {}
    for name, state in aligned.one.states.items():
        if state.of not in judged if state.key else state.constant:
            continue
        steps = list(_compared(aligned, name))
        if not steps:
            there = any(name in trace.states for trace in aligned.ranks)
            found[name] = aligned.reasons.get(name) or (_shapes(aligned, name) if there else _NOT_KEPT)
        elif not any(_is_measured(aligned, rounding, step, name) for step in steps):
            found[name] = _UNMEASURED
    for trace in aligned.ranks:
        for name, state in trace.states.items():
            if name in aligned.one.states or (state.of not in judged if state.key else state.constant):
                continue
            found[name] = aligned.reasons.get(name, _KEPT_BY_RANKS)
    return found


def _is_measured(aligned: Aligned, rounding: Rounding, step: int, name: str) -> bool:
    """Return whether a state has a tolerance, or is not finite on one device, which needs none."""
    expected, _ = aligned.found(step, "state", name)
    return (expected is not None and not expected.finite) or math.isfinite(rounding.tolerance(step, "state", name))


def _compared(aligned: Aligned, name: str) -> Iterator[int]:
    """Yield each step at which some rank's state was compared with one device."""
    for step in range(aligned.compared):
        expected, here = aligned.found(step, "state", name)
        if expected is not None and any(here.values()):
            yield step


def left_over(aligned: Aligned, left: Sequence[str]) -> str:
    """Describe how many trained parameters, states and buffers were not compared."""
    kept = {name for trace in (aligned.one, *aligned.ranks) for name in trace.states}
    unread = {event["name"]: event["of"] for trace in (aligned.one, *aligned.ranks) for event in trace.of("unread")}
    kept |= {name for name, of in unread.items() if of}
    names = [name for name in left if name not in kept]
    total = len(trained(aligned.one)) + sum(n in unread or n.partition(" (")[0] in aligned.extra for n in names)
    told = [f"{len(names)} of {total} trained parameters"] if names else []
    count = len(left) - len(names)
    told += [f"{count} state{'s' * (count > 1)} of optimizers or buffer{'s' * (count > 1)}"] if count else []
    return f"{' and '.join(told)} {'was' if len(left) == count == 1 else 'were'} not compared with one device"


def account(missed: Mapping[str, str], unjudged: Mapping[str, str]) -> tuple[list[str], list[str], list[str]]:
    """Separate the uncompared names that the user accepts from the others.

    Args:
        missed: see `not_compared`.
        unjudged: the user's patterns, each with its reason.

    Returns:
        The names that no pattern accepts; report lines, one for each reason and each used pattern; the unused patterns.
    """
    left: dict[str, list[str]] = defaultdict(list)
    accepted: dict[str, list[str]] = defaultdict(list)
    for name, reason in missed.items():
        patterns = [pattern for pattern in unjudged if fnmatch.fnmatchcase(name.partition(" (")[0], pattern)]
        for pattern in patterns:
            accepted[pattern].append(name)
        if not patterns:
            left[reason].append(name)
    lines = [f"not compared: {few(names, _SHOWN)}: {reason}" for reason, names in left.items()]
    lines += [
        f"not compared, accepted by --unjudged: {few(names, _SHOWN)}: {unjudged[pattern]}"
        for pattern, names in accepted.items()
    ]
    idle = [pattern for pattern in unjudged if pattern not in accepted]
    return [name for names in left.values() for name in names], lines, idle


def _found(aligned: Aligned, name: str) -> Iterator[tuple[int, Kind]]:
    """Yield each step and kind at which some rank's tensor was compared with one device."""
    kinds: tuple[Kind, ...] = ("gradient", "parameter")
    for step in range(aligned.compared):
        for kind in kinds:
            expected, here = aligned.found(step, kind, name)
            if expected is not None and any(here.values()):
                yield step, kind


def _tells(aligned: Aligned, rounding: Rounding, step: int, kind: Kind, name: str) -> bool:
    """Return whether the tolerance is narrow enough to detect a mistake."""
    here = of_kind(aligned.one.steps[step], kind)
    own = _size(here[name], aligned.parameter(name).count)
    largest = max((_size(value, aligned.parameter(other).count) for other, value in here.items()), default=0.0)
    width = rounding.tolerance(step, kind, name) * own
    return math.isfinite(width) and width <= _WIDE * max(own, _SMALL * largest)


def _size(summary: TensorSummary | None, count: int) -> float:
    """Return the root mean square of a tensor's elements."""
    return summary.norm / math.sqrt(max(count, 1)) if summary is not None and summary.finite else 0.0


def _shapes(aligned: Aligned, name: str) -> str:
    shapes = sorted({str(list(own.shape)) for t in aligned.ranks if (own := t.entry(name)) is not None})
    whole = list(aligned.parameter(name).shape)
    return f"its shape is {few(shapes, 3)} on ranks, and {whole} on one device"
