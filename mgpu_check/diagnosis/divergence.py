"""Find where ranks diverge: the first line of the user's code, and the first module.

At the line, ranks differ in a value that should be the same on all ranks. The output or gradient of the module differs
from one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from mgpu_check.diagnosis.observations import CallEvent, Left, RankTrace, Result, is_clipped, is_left
from mgpu_check.torch_hooks.collective_table import COLLECTIVES, TRANSFERS

if TYPE_CHECKING:
    import torch

    from mgpu_check.diagnosis.tensors import Tensors


_VALUES = 4  # largest number of elements of a tensor that a report shows in full
_GIVES_ALL = tuple(
    name
    for name, row in COLLECTIVES.items()
    if row.taken and not row.lists and (how := TRANSFERS[row.does]).takers == "all" and not how.divides
)
"""Collectives that leave the same values in their first tensor on all ranks of the group."""


@dataclass(frozen=True)
class Parting:
    """The line where ranks part, that is, where a value first differs between them."""

    site: str  # "train.py:40"; "" if no line is known
    what: str  # the name of the value that differs
    values: Sequence[str]  # the value of each rank, as text
    after: bool = False  # whether ranks part after that line. At the line their calls and values were still equal.


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
    last = max((n for n, event in enumerate(tensors.traces[0].events) if event.kind == "backward"), default=-1)
    for number in range(max(len(trace.events) for trace in tensors.traces)):
        same = [trace.events[number] if number < len(trace.events) else None for trace in tensors.traces]
        events = [event for event in same if event is not None]
        if len(events) < len(same) or len({(event.kind, event.name, event.site) for event in events}) > 1:
            odd = _extra(tensors, number) or next((event.site for event in events if event.site), "")
            return Parting(odd, "what they call", [_called(event) for event in same])
        first_event = events[0]
        looks = () if divided and first_event.kind in ("backward", "model") else _LOOKS.get(first_event.kind, seeds)
        difference = next(filter(None, (look(events) for look in looks)), None)
        if difference is None and first_event.kind == "step":
            of_step = _of_step(tensors, steps, _LOCAL in mistakes)
            if of_step is not None:
                return _of_backward_before(tensors, number, steps, of_step[0]) or _at(first_event, of_step[1])
            steps += 1
        if difference is None and first_event.kind == "backward" and number == last:
            difference = _of_last_backward(tensors, events)
        if difference is not None and first_event.kind == "clip":
            return _of_backward_clipped(tensors, number) or _at(first_event, difference)
        if difference is not None:
            return _at(first_event, difference)
    return _in_the_end(tensors)


_LOCAL = "gradients-not-synchronized"
_FROM_THE_START = "different-initialization"
_BY_SEEDS = {_FROM_THE_START, "random-numbers-per-rank"}


def _of_build(tensors: Tensors) -> Parting | None:
    """Return the line where ranks set different seeds while they build the model."""
    for same in zip(*(run.built for run in tensors.seen), strict=False):
        if len({event.site for event in same}) == 1 and (difference := _of_seeds(same)) is not None:
            return _at(same[0], difference)
    return None


def _extra(tensors: Tensors, number: int) -> str:
    """Return the line of a call that only some ranks make; the other ranks make the calls that follow it."""
    rest = [[(event.kind, event.name, event.site) for event in trace.events[number:]] for trace in tensors.traces]
    heads = sorted({calls[0] for calls in rest if calls})
    later = {
        head: min((calls.index(head) for calls in rest if calls and calls[0] != head and head in calls), default=None)
        for head in heads
    }
    distances = {head: distance for head, distance in later.items() if distance is not None}
    if not distances:
        return ""
    common = min(distances, key=lambda head: distances[head])
    extra = [head for head in heads if head != common]
    return extra[0][2] if extra else ""


def _divided(tensors: Tensors) -> bool:
    """Return whether each rank may hold its own parts of the parameters, so that values may differ between ranks."""
    if any(name.kind == "params" for run in tensors.seen for name in run.own):
        return True
    skipped = {name.of for name in tensors.relations.skipped if name.kind == "params"}
    return bool(skipped) and not any(name.of in skipped for name in tensors.relations.split)


def _at(event: CallEvent, difference: Found) -> Parting:
    subject, values = difference
    return Parting(event.site, f"{event.name}, {subject}", values)


Found = tuple[str, list[str]]  # the name of the value that differs, and the values by rank


def _called(event: CallEvent | None) -> str:
    if event is None:
        return "nothing more"
    return event.where if event.site else event.name


def _detail(key: str, subject: str, same: Sequence[CallEvent]) -> Found | None:
    """Compare one detail of a call, a number or a tuple, between ranks."""
    values = [event.details.get(key) for event in same]
    return None if None in values or _same(values) else (subject, [_shown(value) for value in values])


def _by_name(key: str, subject: str, same: Sequence[CallEvent]) -> Found | None:
    """Compare a detail of a call, a value for each of several names, between ranks."""
    entries = [event.details.get(key, {}) for event in same]
    for name in entries[0]:
        values = [entry.get(name) for entry in entries]
        if not _same(values) and None not in values:
            return subject.format(name or "it"), [_shown(value) for value in values]
    return None


def _parameters(same: Sequence[CallEvent]) -> Found | None:
    if len({event.details.get("owns") for event in same}) > 1:
        return None  # ranks call different parts of the model, so their sums are not comparable
    return _by_name("parameters", "the sum of {}", same)


def _operands(same: Sequence[CallEvent]) -> Found | None:
    for key, subject in (("op", "its operation"), ("src", "its source"), ("dst", "its destination")):
        if (difference := _detail(key, subject, same)) is not None:
            return difference
    operands = [event.details.get("tensors", []) for event in same]
    for tensors in zip(*operands, strict=False):
        in_memory = "the order of dimensions in memory"
        for key, subject in (("dtype", "the dtype"), ("shape", "the shape"), ("layout", in_memory)):
            values = [tensor[key] for tensor in tensors]
            if not _same(values):
                return f"{subject} of its tensor", [_shown(value) for value in values]
    return None


def _results(same: Sequence[CallEvent]) -> Found | None:
    """Compare the results of a collective that gives all ranks the same values."""
    if same[0].name not in _GIVES_ALL or len({event.details.get("group") for event in same}) > 1:
        return None
    group = same[0].details.get("group")
    after = [event.details.get("after") for event in same]
    if any(not tensors_after for tensors_after in after) or (group is not None and len(group) != len(same)):
        return None
    return _unlike("its result", [tensors_after[0] for tensors_after in after if tensors_after])


def has_unlike_results(traces: Sequence[RankTrace]) -> bool:
    """Return whether a collective that gives all ranks the same values left different ones, as a broken link does."""
    calls = [trace.of("collective") for trace in traces]
    together = zip(*calls, strict=False)
    return any(len({event.name for event in same}) == 1 and _results(same) is not None for same in together)


def _unlike(subject: str, contents: Sequence[dict[str, Any]]) -> Found | None:
    """Compare tensors by their sums and norms; NaN equals NaN."""
    if _same([(content["sum"], content["norm"]) for content in contents]):
        return None
    values = [content.get("values", ()) for content in contents]
    if all(0 < len(content) <= _VALUES for content in values):
        return subject, [_shown(content[0] if len(content) == 1 else tuple(content)) for content in values]
    return f"the norm of {subject}", [_shown(content["norm"]) for content in contents]


_of_seeds = partial(_detail, "seed", "the seed that it is given")

_LOOKS: dict[str, tuple[Callable[[Sequence[CallEvent]], Found | None], ...]] = {
    "backward": (partial(_detail, "trained", "which parameters require gradients"), _parameters),
    "model": (partial(_by_name, "training", "whether {} is in training mode"), _parameters),
    "collective": (_operands, _results),
    "clip": (partial(_detail, "norm", "the norm that it finds"),),
    "scale": (partial(_detail, "scale", "the scale"),),
    "schedule": (partial(_detail, "metric", "the metric that it is given"),),
    "sampler": (partial(_detail, "seed", "the seed"), partial(_detail, "samples", "the number of samples")),
    "iterate": (partial(_detail, "epoch", "the epoch"),),
    "step": (partial(_detail, "rates", "the learning rate"),),
}


def _of_step(tensors: Tensors, step: int, all_of_them: bool) -> tuple[Result, Found] | None:
    """Compare the gradients and parameters at an optimizer step, for results that differ in the end, or for all."""
    stages = [run.snapshots[step] for run in tensors.seen if step < len(run.snapshots)]
    if len(stages) < tensors.size:
        return None
    parted = {name.of for name in tensors.relations.split}
    for name in stages[0]:
        values = [stage[name].double() for stage in stages if name in stage]
        wanted = all_of_them or name.of in parted
        if wanted and len(values) == tensors.size and (difference := _element(name, values)) is not None:
            return name, difference
    return None


def _of_backward_before(tensors: Tensors, number: int, step: int, name: Result) -> Parting | None:
    """Return the backward pass that left a gradient as the optimizer finds it; None if another call changed it.

    `number`: index of the optimizer step among the events; ranks made the same calls before it. `step`: number of the
    optimizer step, from 0.
    """
    before = [event for event in tensors.traces[0].events[:number] if event.kind in ("backward", "step")]
    if name.kind != "grads" or not before or before[-1].kind != "backward":
        return None
    which = sum(event.kind == "backward" for event in before) - 1
    same = [trace.of("backward")[which] for trace in tensors.traces]
    gradients = [event.details.get("left", {}) for event in same]
    if not is_left(name, gradients, [run.snapshots[step][name] for run in tensors.seen]):
        return None
    return _at(same[0], _left(name, gradients))


def _of_backward_clipped(tensors: Tensors, number: int) -> Parting | None:
    """Return the backward pass that left the gradients as clipping finds them; None if another call changed them."""
    before = [[event for event in trace.events[:number] if event.kind == "backward"][-1:] for trace in tensors.traces]
    gradients = [event.details.get("left", {}) for events in before for event in events]
    if not is_clipped(gradients, [trace.events[number].details.get("norm") for trace in tensors.traces]):
        return None
    everywhere = [Result("grads", name) for name in gradients[0] if all(name in own for own in gradients)]
    split = [name for name in everywhere if name in tensors.relations.split]  # no later call combines them
    return _at(before[0][0], _left(split[0], gradients)) if split else None


def _element(name: object, values: Sequence[torch.Tensor]) -> Found | None:
    """Return the element where values of one shape differ most; None if they are equal."""
    head = values[0]
    if any(value.shape != head.shape for value in values):
        return f"the shape of {name}", [str(list(value.shape)) for value in values]
    if not head.numel():
        return None
    deviation = max(((value - head).nan_to_num(math.inf).abs() for value in values), key=lambda gap: float(gap.max()))
    if not float(deviation.max()):
        return None
    worst = int(deviation.flatten().argmax())
    index = []
    for size in reversed(head.shape):
        worst, rest = divmod(worst, size)
        index.append(rest)
    position = f"element {index[::-1]} of " if index else ""
    return f"{position}{name}", [_shown(float(value[tuple(index[::-1])])) for value in values]


def _of_last_backward(tensors: Tensors, same: Sequence[CallEvent]) -> Found | None:
    """Compare the gradients that the last backward pass left and that no later call changed."""
    gradients = [event.details.get("left", {}) for event in same]
    for name in tensors.relations.split:
        if name.kind in ("grads", "returned") and tensors.stays_as_left(name, gradients):
            return _left(name, gradients)
    return None


def _left(name: Result, gradients: Sequence[Left]) -> Found:
    return f"the norm of {name}, which nothing combines after it", [_shown(own[name.of]["norm"]) for own in gradients]


def _in_the_end(tensors: Tensors) -> Parting | None:
    """Return the first result that differs, after equal calls with equal values on all ranks."""
    for name in tensors.relations.split:
        values = [run.values[name].double() for run in tensors.seen if name in run.values]
        if len(values) == tensors.size and (difference := _element(name, values)) is not None:
            last = next((event.site for event in reversed(tensors.traces[0].events) if event.site), "")
            return Parting(last, *difference, after=True)
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


_CLOSE = 1e-3  # tolerance, as a fraction of the largest magnitude, for rows that were summed in another order
_MOST_ROWS = 512


@dataclass(frozen=True)
class WrongModule:
    """A module whose output, or the gradient of its output, differs from one device."""

    name: str
    ranks: tuple[int, ...]  # the ranks where it differs
    what: Literal["output", "gradient"]  # what differs; "gradient" implies that all outputs are right


def first_wrong_module(tensors: Tensors) -> WrongModule | None:
    """Return the first module whose output differs from one device, else the first whose gradient does, else None.

    Ranks have parts of the batch or of the sequence, so each of their rows must equal a row on one device. The size of
    gradients is ignored, because a loss is averaged over other numbers of samples. Modules that ranks divide are left
    out, and so are outputs whose rows have another length.
    """
    alone = tensors.alone
    if alone is None or not tensors.traces or tensors.wrong_alone:
        return None
    divided = {name.of.rpartition(".")[0] for run in tensors.seen for name in run.own if name.kind == "params"}
    if difference := _first(alone.outputs, [trace.outputs for trace in tensors.traces], divided, scaled=False):
        return WrongModule(*difference, "output")
    if difference := _first(alone.gradients, [trace.gradients for trace in tensors.traces], divided, scaled=True):
        return WrongModule(*difference, "gradient")
    return None


def module_of_partial_gradients(tensors: Tensors) -> tuple[str, tuple[int, ...]] | None:
    """Return a module where each rank has a part of the gradient of the output, and the ranks whose parts add up to it.

    The gradients of parameters of this module must be wrong, and differ between these ranks: a right program may add
    them up later. The parts must be no multiples of the whole: ranks may share out a loss.
    """
    alone = tensors.alone
    if alone is None or not tensors.traces or tensors.wrong_alone:
        return None
    groups = dict.fromkeys(tuple(ranks) for trace in tensors.traces for ranks in trace.groups if len(ranks) > 1)
    split = [name.of for name in tensors.wrong("grads") if name in tensors.relations.split]
    for name, expected in alone.gradients.items():
        if not any(parameter.startswith(f"{name}.") for parameter in split):
            continue
        for ranks in groups:
            terms = [tensors.traces[rank].gradients.get(name) for rank in ranks if rank < len(tensors.traces)]
            shaped = [term for term in terms if term is not None and term.shape == expected.shape]
            if len(shaped) < len(ranks) or all(_are_rows_of(term, expected, scaled=True) for term in shaped):
                continue
            off = sum((term.double() for term in shaped), -expected.double()).abs()
            if expected.numel() > 1 and bool((off <= _CLOSE * float(expected.abs().max())).all()):
                return name, ranks
    return None


def _first(
    alone: Mapping[str, torch.Tensor], ranks: Sequence[Mapping[str, torch.Tensor]], divided: set[str], scaled: bool
) -> tuple[str, tuple[int, ...]] | None:
    for name in alone:
        if any(name == module or module.startswith(f"{name}.") for module in divided):
            continue
        differing = tuple(
            rank
            for rank, values in enumerate(ranks)
            if (got := values.get(name)) is not None and not _are_rows_of(got, alone[name], scaled)
        )
        if differing:
            return name, differing
    return None


def _are_rows_of(got: torch.Tensor, expected: torch.Tensor, scaled: bool) -> bool:
    """Return whether each row of `got` equals a row of `expected`; True if the tensors are not comparable."""
    import torch

    if got.shape[-1] != expected.shape[-1]:
        return True
    rows, expected_rows = (value.reshape(-1, value.shape[-1]).double() for value in (got, expected))
    finite = rows.isfinite().all() and expected_rows.isfinite().all()
    if max(len(rows), len(expected_rows)) > _MOST_ROWS or not finite:
        return True
    if scaled:
        rows, expected_rows = (value[value.norm(dim=1) > 0] for value in (rows, expected_rows))
        if rows.shape[-1] < 2 or not len(rows) or not len(expected_rows):
            return True
        rows, expected_rows = (value / value.norm(dim=1, keepdim=True) for value in (rows, expected_rows))
    largest = float(expected_rows.abs().max()) if expected_rows.numel() else 0.0
    return bool((torch.cdist(rows, expected_rows).amin(1) <= _CLOSE * largest * rows.shape[-1] ** 0.5).all())
