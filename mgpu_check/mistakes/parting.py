"""Where ranks first part: the first line of the user's code at which something differs that all ranks should have alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mgpu_check.mistakes.observed import Event
from mgpu_check.processes.rank_lists import few, grouped, named

if TYPE_CHECKING:
    import torch

    from mgpu_check.mistakes.tensors import Tensors

__all__ = ["Parting", "first_parting"]

_SHOWN = 8
"""Ranks, or groups of them, whose values are told."""
_VALUES = 4
"""Elements that are told of a tensor of few."""
_GIVES_ALL = ("all_reduce", "broadcast", "all_gather_into_tensor")
"""Collectives after which all ranks of the group hold the same in the tensor that they were given first."""


@dataclass(frozen=True)
class Parting:
    """A line at which ranks part.

    Attributes:
        site: "train.py:40"; "" where no line is known.
        after: they part after that line, where they had still called the same, with the same.
        what: what is not the same on all ranks there.
        values: rank by rank, in text.
    """

    site: str
    what: str
    values: Sequence[str]
    after: bool = False

    def __str__(self) -> str:
        at = f" {'after' if self.after else 'at'} {self.site}" if self.site else ""
        each = [f"{value} on {named(ranks)}" for value, ranks in grouped((v, r) for r, v in enumerate(self.values))]
        return f"ranks first part{at}, in {self.what}: {few(each, _SHOWN)}"


def first_parting(tensors: Tensors) -> Parting | None:
    """Return where ranks first part; None where all that was seen of them is alike, or only one rank was.

    Calls are compared in their order, as long as ranks call the same at the same lines.
    """
    if len(tensors.traces) < 2:
        return None
    steps = 0
    divided = any(name.kind == "params" for name in tensors.relations.skipped)  # each rank holds its own part
    longest = max(len(trace.events) for trace in tensors.traces)
    for number in range(longest):
        same = [trace.events[number] if number < len(trace.events) else None for trace in tensors.traces]
        known = [event for event in same if event is not None]
        if len(known) < len(same) or len({(event.kind, event.name, event.site) for event in known}) > 1:
            return Parting(_line(known), "what they call", [_called(event) for event in same])
        first = known[0]
        looks = () if divided and first.kind in ("backward", "model") else _LOOKS.get(first.kind, ())
        found = next(filter(None, (look(known) for look in looks)), None)
        if found is None and first.kind == "step":
            found = _of_step(tensors, steps)
            steps += 1
        if found is None and first.kind == "backward" and number == _last_backward(tensors):
            found = _of_last_backward(tensors, known)
        if found is not None:
            what, values = found
            return Parting(first.site, f"{first.name}, {what}", values)
    return _in_the_end(tensors)


Found = tuple[str, list[str]]
"""What differs, and the values by rank."""


def _line(known: Sequence[Event]) -> str:
    return next((event.site for event in known if event.site), "")


def _called(event: Event | None) -> str:
    if event is None:
        return "nothing more"
    return event.where if event.site else event.name


def _detail(key: str, what: str) -> Callable[[Sequence[Event]], Found | None]:
    """Return what looks at one detail of a call, which is a number or a tuple of them."""

    def look(same: Sequence[Event]) -> Found | None:
        values = [event.details.get(key) for event in same]
        if any(value is None for value in values) or _same(values):
            return None
        return what, [_shown(value) for value in values]

    return look


def _parameters(same: Sequence[Event]) -> Found | None:
    held = [event.details.get("parameters", {}) for event in same]
    for name in held[0]:
        values = [one.get(name) for one in held]
        if not _same(values) and None not in values:
            return f"the sum of {name}", [_shown(value) for value in values]
    return None


def _operands(same: Sequence[Event]) -> Found | None:
    """Look at what a collective is given: how many tensors, of which dtypes, shapes and memory formats, and its root."""
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


def _results(same: Sequence[Event]) -> Found | None:
    """Look at what a collective has given, where that is the same for all."""
    if same[0].name not in _GIVES_ALL or len({event.details.get("group") for event in same}) > 1:
        return None
    whole = same[0].details.get("group")
    after = [event.details.get("after") for event in same]
    if any(not one for one in after) or (whole is not None and len(whole) != len(same)):
        return None
    return _unlike("its result", [one[0] for one in after if one])


def _unlike(what: str, contents: Sequence[dict[str, Any]]) -> Found | None:
    """Look at tensors by their sums and norms; NaN is the same as NaN."""
    if all(_alike(one, contents[0]) for one in contents):
        return None
    values = [one.get("values", ()) for one in contents]
    if all(0 < len(one) <= _VALUES for one in values):
        return what, [_shown(one[0] if len(one) == 1 else tuple(one)) for one in values]
    return f"the norm of {what}", [_shown(one["norm"]) for one in contents]


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return str((one["sum"], one["norm"])) == str((other["sum"], other["norm"]))


_LOOKS: dict[str, tuple[Callable[[Sequence[Event]], Found | None], ...]] = {
    "backward": (_parameters,),
    "model": (_parameters,),
    "collective": (_operands, _results),
    "clip": (_detail("norm", "the norm that it finds"),),
    "scale": (_detail("scale", "the scale"),),
    "schedule": (_detail("metric", "the metric that it is given"),),
    "sampler": (_detail("seed", "the seed"), _detail("samples", "the number of samples")),
    "iterate": (_detail("epoch", "the epoch"),),
    "step": (_detail("rates", "the learning rate"),),
}


def _of_step(tensors: Tensors, step: int) -> Found | None:
    """Look at the gradients that the optimizer finds in its step, of results that differ in the end."""
    stages = [one.snapshots[step] for one in tensors.seen if step < len(one.snapshots)]
    if len(stages) < tensors.size:
        return None
    parted = {name.of for name in tensors.relations.split}
    for name in stages[0]:
        values = [stage[name].double() for stage in stages if name in stage]
        if name.of in parted and len(values) == tensors.size and (found := _element(name, values)) is not None:
            return found
    return None


def _element(name: object, values: Sequence[torch.Tensor]) -> Found | None:
    """Return the element in which values of one shape are furthest apart; None where they are the same."""
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


def _of_last_backward(tensors: Tensors, same: Sequence[Event]) -> Found | None:
    """Look at the gradients that the last backward pass has left, of those that nothing has changed since."""
    left = [event.details.get("left", {}) for event in same]
    for name in tensors.relations.split:
        if name.kind == "grads" and tensors.stays_as_left(name, left):
            norms = [_shown(one[name.of]["norm"]) for one in left]
            return f"the norm of {name}, which nothing changes after it", norms
    return None


def _in_the_end(tensors: Tensors) -> Parting | None:
    """Name the first result that differs, where ranks have called the same, with the same."""
    for name in tensors.relations.split:
        values = [one.values[name].double() for one in tensors.seen if name in one.values]
        if len(values) == tensors.size and (found := _element(name, values)) is not None:
            last = next((event.site for event in reversed(tensors.traces[0].events) if event.site), "")
            return Parting(last, *found, after=True)
    return None


def _same(values: Sequence[object]) -> bool:
    """Return whether values are the same, as text: NaN is the same as NaN."""
    return len({str(value) for value in values}) == 1


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_shown, value))})"
    return str(value)
