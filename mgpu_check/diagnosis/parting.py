"""Find the first line of the user's code where ranks differ in a value that should be the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mgpu_check.diagnosis.left import Left, is_clipped, is_left
from mgpu_check.diagnosis.observed import CallEvent, RankTrace
from mgpu_check.diagnosis.results import Result
from mgpu_check.torch_hooks.collective_table import COLLECTIVES, TRANSFERS

if TYPE_CHECKING:
    import torch

    from mgpu_check.diagnosis.tensors import Tensors

_VALUES = 4
"""Largest number of elements of a tensor that a report shows in full."""
_GIVES_ALL = tuple(
    name
    for name, row in COLLECTIVES.items()
    if row.taken and not row.lists and (how := TRANSFERS[row.does]).takers == "all" and not how.divides
)
"""Collectives that leave the same values in their first tensor on all ranks of the group."""


@dataclass(frozen=True)
class Parting:
    """The line where ranks part, that is, where a value first differs between them.

    Attributes:
        site: "train.py:40"; "" if no line is known.
        what: the name of the value that differs.
        values: the value of each rank, as text.
        after: whether ranks part after that line. At the line their calls and values were still equal.
    """

    site: str
    what: str
    values: Sequence[str]
    after: bool = False


def first_parting(tensors: Tensors, mistakes: Collection[str] = ()) -> Parting | None:
    """Return where ranks first part; None if no recorded value differs, or if fewer than two ranks were recorded.

    Calls are compared in order, as long as ranks make the same calls at the same lines.

    Args:
        mistakes: the mistakes that were found. Seeds may differ on purpose, so they are compared only if the mistake is
            about random numbers.
    """
    if len(tensors.traces) < 2:
        return None
    if _FROM_THE_START in mistakes and (built := _of_build(tensors)) is not None:
        return built
    seeds = (_of_seeds,) if _BY_SEEDS & set(mistakes) else ()
    steps = 0
    divided = _divided(tensors)
    longest = max(len(trace.events) for trace in tensors.traces)
    for number in range(longest):
        same = [trace.events[number] if number < len(trace.events) else None for trace in tensors.traces]
        known = [event for event in same if event is not None]
        if len(known) < len(same) or len({(event.kind, event.name, event.site) for event in known}) > 1:
            odd = _extra(tensors, number) or _line(known)
            return Parting(odd, "what they call", [_called(event) for event in same])
        first = known[0]
        looks = () if divided and first.kind in ("backward", "model") else _LOOKS.get(first.kind, seeds)
        found = next(filter(None, (look(known) for look in looks)), None)
        if found is None and first.kind == "step":
            of_step = _of_step(tensors, steps, _LOCAL in mistakes)
            if of_step is not None:
                return _of_backward_before(tensors, number, steps, of_step[0]) or _at(first, of_step[1])
            steps += 1
        if found is None and first.kind == "backward" and number == _last_backward(tensors):
            found = _of_last_backward(tensors, known)
        if found is not None and first.kind == "clip":
            return _of_backward_clipped(tensors, number) or _at(first, found)
        if found is not None:
            return _at(first, found)
    return _in_the_end(tensors)


_LOCAL = "gradients-not-synchronized"
_FROM_THE_START = "different-initialization"
_BY_SEEDS = {_FROM_THE_START, "random-numbers-per-rank"}


def _of_build(tensors: Tensors) -> Parting | None:
    """Return the line where ranks set different seeds while they build the model."""
    for same in zip(*(one.built for one in tensors.seen), strict=False):
        if len({event.site for event in same}) == 1 and (found := _of_seeds(same)) is not None:
            return _at(same[0], found)
    return None


def _extra(tensors: Tensors, number: int) -> str:
    """Return the line of a call that only some ranks make; the other ranks make the calls that follow it."""
    rest = [[(event.kind, event.name, event.site) for event in trace.events[number:]] for trace in tensors.traces]
    heads = sorted({calls[0] for calls in rest if calls})
    later = {
        head: min((calls.index(head) for calls in rest if calls and calls[0] != head and head in calls), default=None)
        for head in heads
    }
    found = {head: distance for head, distance in later.items() if distance is not None}
    if not found:
        return ""
    common = min(found, key=lambda head: found[head])
    extra = [head for head in heads if head != common]
    return extra[0][2] if extra else ""


def _divided(tensors: Tensors) -> bool:
    """Return whether each rank may hold its own parts of the parameters, so that values may differ between ranks."""
    if any(name.kind == "params" for one in tensors.seen for name in one.own):
        return True
    skipped = {name.of for name in tensors.relations.skipped if name.kind == "params"}
    return bool(skipped) and not any(name.of in skipped for name in tensors.relations.split)


def _at(event: CallEvent, found: Found) -> Parting:
    what, values = found
    return Parting(event.site, f"{event.name}, {what}", values)


Found = tuple[str, list[str]]
"""The name of the value that differs, and the values by rank."""


def _line(known: Sequence[CallEvent]) -> str:
    return next((event.site for event in known if event.site), "")


def _called(event: CallEvent | None) -> str:
    if event is None:
        return "nothing more"
    return event.where if event.site else event.name


def _detail(key: str, what: str) -> Callable[[Sequence[CallEvent]], Found | None]:
    """Return a function that compares one detail of a call, a number or a tuple, between ranks."""

    def look(same: Sequence[CallEvent]) -> Found | None:
        values = [event.details.get(key) for event in same]
        if any(value is None for value in values) or _same(values):
            return None
        return what, [_shown(value) for value in values]

    return look


def _by_name(key: str, what: str) -> Callable[[Sequence[CallEvent]], Found | None]:
    """Return a function that compares a detail of a call, a value for each of several names, between ranks."""

    def look(same: Sequence[CallEvent]) -> Found | None:
        given = [event.details.get(key, {}) for event in same]
        for name in given[0]:
            values = [one.get(name) for one in given]
            if not _same(values) and None not in values:
                return what.format(name or "it"), [_shown(value) for value in values]
        return None

    return look


_sums = _by_name("parameters", "the sum of {}")


def _parameters(same: Sequence[CallEvent]) -> Found | None:
    if len({event.details.get("owns") for event in same}) > 1:
        return None  # ranks call different parts of the model, so their sums are not comparable
    return _sums(same)


def _operands(same: Sequence[CallEvent]) -> Found | None:
    """Compare the operands of a collective: operation, root, dtypes, shapes and memory formats."""
    for key, what in (("op", "its operation"), ("src", "its source"), ("dst", "its destination")):
        if (found := _detail(key, what)(same)) is not None:
            return found
    given = [event.details.get("tensors", []) for event in same]
    for tensors in zip(*given, strict=False):
        for key, what in (
            ("dtype", "the dtype"),
            ("shape", "the shape"),
            ("layout", "the order of dimensions in memory"),
        ):
            values = [tensor[key] for tensor in tensors]
            if not _same(values):
                return f"{what} of its tensor", [_shown(value) for value in values]
    return None


def _results(same: Sequence[CallEvent]) -> Found | None:
    """Compare the results of a collective that gives all ranks the same values."""
    if same[0].name not in _GIVES_ALL or len({event.details.get("group") for event in same}) > 1:
        return None
    whole = same[0].details.get("group")
    after = [event.details.get("after") for event in same]
    if any(not one for one in after) or (whole is not None and len(whole) != len(same)):
        return None
    return _unlike("its result", [one[0] for one in after if one])


def has_unlike_results(traces: Sequence[RankTrace]) -> bool:
    """Return whether a collective that gives all ranks the same values left different ones, as a broken link does."""
    calls = [trace.of("collective") for trace in traces]
    return any(
        len({event.name for event in same}) == 1 and _results(same) is not None for same in zip(*calls, strict=False)
    )


def _unlike(what: str, contents: Sequence[dict[str, Any]]) -> Found | None:
    """Compare tensors by their sums and norms; NaN equals NaN."""
    if all(_alike(one, contents[0]) for one in contents):
        return None
    values = [one.get("values", ()) for one in contents]
    if all(0 < len(one) <= _VALUES for one in values):
        return what, [_shown(one[0] if len(one) == 1 else tuple(one)) for one in values]
    return f"the norm of {what}", [_shown(one["norm"]) for one in contents]


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return str((one["sum"], one["norm"])) == str((other["sum"], other["norm"]))


_of_seeds = _detail("seed", "the seed that it is given")

_LOOKS: dict[str, tuple[Callable[[Sequence[CallEvent]], Found | None], ...]] = {
    "backward": (_detail("trained", "which parameters require gradients"), _parameters),
    "model": (_by_name("training", "whether {} is in training mode"), _parameters),
    "collective": (_operands, _results),
    "clip": (_detail("norm", "the norm that it finds"),),
    "scale": (_detail("scale", "the scale"),),
    "schedule": (_detail("metric", "the metric that it is given"),),
    "sampler": (_detail("seed", "the seed"), _detail("samples", "the number of samples")),
    "iterate": (_detail("epoch", "the epoch"),),
    "step": (_detail("rates", "the learning rate"),),
}


def _of_step(tensors: Tensors, step: int, all_of_them: bool) -> tuple[Result, Found] | None:
    """Compare the gradients and parameters at an optimizer step, for results that differ in the end, or for all."""
    stages = [one.snapshots[step] for one in tensors.seen if step < len(one.snapshots)]
    if len(stages) < tensors.size:
        return None
    parted = {name.of for name in tensors.relations.split}
    for name in stages[0]:
        values = [stage[name].double() for stage in stages if name in stage]
        wanted = all_of_them or name.of in parted
        if wanted and len(values) == tensors.size and (found := _element(name, values)) is not None:
            return name, found
    return None


def _of_backward_before(tensors: Tensors, number: int, step: int, name: Result) -> Parting | None:
    """Return the backward pass that left a gradient as the optimizer finds it; None if another call changed it.

    Args:
        number: index of the optimizer step among the events; ranks made the same calls before it.
        step: number of the optimizer step, from 0.
    """
    before = [event for event in tensors.traces[0].events[:number] if event.kind in ("backward", "step")]
    if name.kind != "grads" or not before or before[-1].kind != "backward":
        return None
    which = sum(event.kind == "backward" for event in before) - 1
    same = [trace.of("backward")[which] for trace in tensors.traces]
    left = [event.details.get("left", {}) for event in same]
    if not is_left(name, left, [one.snapshots[step][name] for one in tensors.seen]):
        return None
    return _at(same[0], _left(name, left))


def _of_backward_clipped(tensors: Tensors, number: int) -> Parting | None:
    """Return the backward pass that left the gradients as clipping finds them; None if another call changed them."""
    before = [[event for event in trace.events[:number] if event.kind == "backward"][-1:] for trace in tensors.traces]
    left = [event.details.get("left", {}) for events in before for event in events]
    if not is_clipped(left, [trace.events[number].details.get("norm") for trace in tensors.traces]):
        return None
    everywhere = [Result("grads", name) for name in left[0] if all(name in one for one in left)]
    split = [name for name in everywhere if name in tensors.relations.split]  # no later call combines them
    return _at(before[0][0], _left(split[0], left)) if split else None


def _element(name: object, values: Sequence[torch.Tensor]) -> Found | None:
    """Return the element where values of one shape differ most; None if they are equal."""
    first = values[0]
    if any(value.shape != first.shape for value in values):
        return f"the shape of {name}", [str(list(value.shape)) for value in values]
    apart = _widest([(value - first).nan_to_num(math.inf).abs() for value in values])
    if apart is None or not float(apart.max()):
        return None
    worst = int(apart.flatten().argmax())
    index = []
    for size in reversed(first.shape):
        worst, rest = divmod(worst, size)
        index.append(rest)
    where = f"element {index[::-1]} of " if index else ""
    return f"{where}{name}", [_shown(float(value[tuple(index[::-1])])) for value in values]


def _widest(gaps: Sequence[torch.Tensor]) -> torch.Tensor | None:
    return max(gaps, key=lambda gap: float(gap.max())) if gaps[0].numel() else None


def _last_backward(tensors: Tensors) -> int:
    """Return the index of the last backward pass among the events of rank 0."""
    return max(
        (number for number, event in enumerate(tensors.traces[0].events) if event.kind == "backward"), default=-1
    )


def _of_last_backward(tensors: Tensors, same: Sequence[CallEvent]) -> Found | None:
    """Compare the gradients that the last backward pass left and that no later call changed."""
    left = [event.details.get("left", {}) for event in same]
    for name in tensors.relations.split:
        if name.kind in ("grads", "returned") and tensors.stays_as_left(name, left):
            return _left(name, left)
    return None


def _left(name: Result, left: Sequence[Left]) -> Found:
    return f"the norm of {name}, which nothing combines after it", [_shown(one[name.of]["norm"]) for one in left]


def _in_the_end(tensors: Tensors) -> Parting | None:
    """Return the first result that differs, after equal calls with equal values on all ranks."""
    for name in tensors.relations.split:
        values = [one.values[name].double() for one in tensors.seen if name in one.values]
        if len(values) == tensors.size and (found := _element(name, values)) is not None:
            last = next((event.site for event in reversed(tensors.traces[0].events) if event.site), "")
            return Parting(last, *found, after=True)
    return None


def _same(values: Sequence[object]) -> bool:
    """Return whether values are equal as text, so that NaN equals NaN."""
    return len({str(value) for value in values}) == 1


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_shown, value))})"
    return str(value)
