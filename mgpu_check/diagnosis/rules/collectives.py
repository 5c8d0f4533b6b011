"""Detect wrong calls of collectives, mostly from the recorded calls themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgpu_check.diagnosis.left import is_held
from mgpu_check.diagnosis.observed import CallEvent, RankTrace
from mgpu_check.diagnosis.registry import Precedence, mistake, on_tensors
from mgpu_check.diagnosis.report import Finding
from mgpu_check.diagnosis.results import Result
from mgpu_check.processes.rank_lists import few
from mgpu_check.torch_hooks.collective_table import COLLECTIVES

if TYPE_CHECKING:
    from mgpu_check.diagnosis.tensors import Tensors

_WITHOUT_HISTORY = {
    "sync_params_and_buffers",
    *(name for name, known in COLLECTIVES.items() if known.kind == "message"),
}
"""Calls that autograd need not differentiate: a wrapper's first synchronization, and messages between stages."""
_TO_ROOT = {
    "gather_object",
    *(name for name, row in COLLECTIVES.items() if row.transfer is not None and row.transfer.takers == "root"),
}
"""Calls that give only their root a result."""

mistake(
    "uneven-gather",
    "tensors of different sizes are gathered as if they were alike",
    "gather the sizes first, pad to the longest, and cut the padding off again",
)
mistake(
    "not-waited",
    "the result of an asynchronous collective is used before it is there",
    "call wait() on the handle before the tensor is read, changed or freed",
)
mistake(
    "result-discarded",
    "a collective ran on a temporary copy, or its result was written over",
    "keep the contiguous copy, reduce it, and copy it back; add to what was reduced before, and do not write over it",
)
mistake(
    "gradient-cut-by-collective",
    "gradients do not flow through a collective",
    "use torch.distributed.nn.functional, which is differentiable, or put the rank's own tensor back into what "
    "all_gather gives",
)
mistake(
    "wrong-reduction",
    "values are combined by a different operation than on one device",
    "choose the op that matches: SUM of sums and counts, MAX of flags; the mean or norm of the parts is not that "
    "of the whole",
)


@on_tensors(Precedence.UNDEFINED + 10)
def not_waited(tensors: Tensors) -> Finding | None:
    """Detect a collective whose result is read too early, so that the step is right with a wait at once.

    A tensor that is written to before the wait is undefined. A handle without a wait proves nothing by itself: a
    future, a stream or the whole device may be waited for instead.
    """
    if (change := tensors.right_with("wait")) is not None:
        lines = few([f"{name} ({site})" for name, site in change.value])
        told = f"{lines} was called with async_op=True; with wait() right after the call the step is right"
        return Finding("not-waited", told, site=change.site)
    for _, event in tensors.events("collective"):
        if event.details.get("touched"):
            told = f"the tensor given to {event.where} with async_op=True was written to before wait()"
            return Finding("not-waited", told, site=event.site)
    return None


@on_tensors(Precedence.UNDEFINED + 40)
def uneven_tensors(tensors: Tensors) -> Finding | None:
    """Detect tensors of different shapes on different ranks in a collective that needs one shape."""
    calls = [trace.of("collective") for trace in tensors.traces]
    for same in zip(*calls, strict=False):
        known = COLLECTIVES.get(same[0].name)
        if known is None or known.kind != "parts" or len({(one.name, one.details.get("group")) for one in same}) > 1:
            continue
        # Only some ranks pass the tensors that a collective fills or scatters.
        shapes = [[tensor["shape"] for tensor in event.details.get("tensors", [])] for event in same]
        common = min(map(len, shapes))
        differ = any(shape[:common] != shapes[0][:common] for shape in shapes)
        if differ and (known.sizes == "equal" or not _has_room(same)):
            told = ", ".join(str(list(shape[0])) if shape else "none" for shape in shapes)
            told = f"{same[0].where} was given tensors of shapes {told}, rank by rank"
            return Finding("uneven-gather", told, site=same[0].site)
    return None


def _has_room(same: Sequence[CallEvent]) -> bool:
    """Return whether each list has a tensor for each rank, of the shape that this rank gives.

    Return True if no rank passes a list, as in all_to_all_single: there torch itself compares the sizes.
    """
    group = same[0].details.get("group", range(len(same)))
    own = [same[rank].details.get("tensors", [{}])[0].get("shape") for rank in group if rank < len(same)]
    lists = [[part["shape"] for part in event.details.get("list", [])] for event in same]
    return all(shapes == own for shapes in lists if shapes)


@on_tensors(Precedence.SUMS + 60)
def delivers_to_one_rank(tensors: Tensors) -> Finding | None:
    """Detect a reduce or gather that leaves the right result on the destination rank only."""
    for _, event in tensors.events("collective") if tensors.relations.split else ():
        if event.name not in _TO_ROOT or "dst" not in event.details:
            continue
        right = event.details["dst"]
        for name in tensors.relations.split:
            if right in tensors.right_ranks(name):
                told = f"{event.where} delivers to rank {right} only: {name} is right there, and not elsewhere"
                return Finding("value-of-one-rank", told, site=event.site)
    return None


@on_tensors(Precedence.CALLS_AND_VALUES + 10)
def result_discarded(tensors: Tensors) -> Finding | None:
    """Detect an all_reduce on a copy of a value that each rank keeps unreduced."""
    held = {name for _, names in tensors.own_parts for name in names}
    first = tensors.seen[0].values
    own = [name for name in tensors.names if name in held and name in first and name.kind != "buffers"]
    if not own or not tensors.traces:
        return None
    sizes = {tuple(tensors.expected.exact[name].shape) for name in own}
    total = sum(tensors.expected.exact[name].numel() for name in own)
    for event in tensors.traces[0].of("collective"):
        for tensor in event.tensors if event.name == "all_reduce" else ():
            if tensor["result"] is not None or not tensor["shape"]:
                continue  # it is a result itself, or one number, so it is no copy that can be recognized
            fits = tensor["shape"] in sizes or math.prod(tensor["shape"]) == total
            if fits and is_held(tensor.get("before", {}), [first[name] for name in own], tensors.size):
                return Finding(
                    "result-discarded",
                    f"{event.where} ran on {tensor['dtype']}{list(tensor['shape'])}, a copy, and {own[0]} still "
                    "differs between ranks",
                    site=event.site,
                )
    return None


@on_tensors(Precedence.AMBIGUOUS + 70)
def gradient_cut(tensors: Tensors) -> Finding | None:
    """Detect a collective that autograd does not record, on a tensor that gradients should flow through."""
    if not tensors.wrong("grads") and not tensors.gradient_like:
        return None
    forward = [event for trace in tensors.traces for event in _before_backward(trace)]
    # A tensor that is sent to another stage gets its gradient in a message back, not by autograd.
    forward = [
        event for event in forward if event.name not in _WITHOUT_HISTORY and not event.details.get("in_function")
    ]
    for event in forward:
        given = [tensor for tensor in event.tensors if _may_cut(tensors, tensor)]
        if any(tensor.get("differentiable") and not tensor["result"] for tensor in given):
            told = f"{event.where} was given a tensor that requires gradients, and its result requires none"
            return Finding("gradient-cut-by-collective", told, site=event.site)
    for event in forward:
        # Gradients need not flow through a maximum: a stable softmax subtracts it before exp, so it cancels.
        given = [tensor for tensor in event.tensors if _may_cut(tensors, tensor)]
        if event.details.get("op") not in ("max", "min") and any(tensor.get("detached") for tensor in given):
            told = (
                f"{event.where} was given values that gradients flow to, detached or under no_grad, so no gradient "
                "flows through its result"
            )
            return Finding("gradient-cut-by-collective", told, site=event.site)
    return None


def _may_cut(tensors: Tensors, tensor: Mapping[str, Any]) -> bool:
    """Return whether most gradients upstream of a tensor are wrong.

    Some gradients may be right after a cut: a softmax ignores some biases.
    """
    relations = tensors.relations
    gradients = [Result("grads", name) for name in tensor.get("upstream", ())]
    judged = [name for name in gradients if name in relations.held]
    wrong = [name for name in judged if name in relations.wrong]
    return not judged or 2 * len(wrong) > len(judged)


def _before_backward(trace: RankTrace) -> list[CallEvent]:
    """Return the collectives before the first backward pass, or all collectives if no backward was recorded."""
    forward = itertools.takewhile(lambda event: event.kind != "backward", trace.events)
    return [event for event in forward if event.kind == "collective"]


@on_tensors(Precedence.AMBIGUOUS + 120)
def other_reduction(tensors: Tensors) -> Finding | None:
    """Detect results that are the maximum, the minimum or the root of the sum of squares of the parts' results."""
    for division in tensors.hypotheses.divisions:
        for how, name in (("max", "max"), ("min", "min"), ("norm", "root of sum of squares")):
            if tensors.is_combined(division, how):
                told = f"{tensors.names[0]} is the {name} of what ranks have for {division.name}"
                return Finding("wrong-reduction", told)
    return None
