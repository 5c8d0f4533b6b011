"""Detect wrong calls of collectives, mostly from the recorded calls themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgpu_check.diagnosis.left import is_held
from mgpu_check.diagnosis.observed import CallEvent, RankTrace
from mgpu_check.diagnosis.report import Finding
from mgpu_check.diagnosis.results import Result
from mgpu_check.processes.rank_lists import grouped, named
from mgpu_check.torch_hooks.table import COLLECTIVES

if TYPE_CHECKING:
    from mgpu_check.diagnosis.tensors import Tensors

__all__ = [
    "aliased_list",
    "computes_in_narrow_dtype",
    "delivers_to_one_rank",
    "gradient_cut",
    "narrow_operand",
    "not_waited",
    "off_by_number_of_groups",
    "other_layouts",
    "other_reduction",
    "overflows",
    "parameters_of_other_layouts",
    "parted_by_group",
    "read_too_early",
    "reduces_by_other_operation",
    "result_discarded",
    "strided_view",
    "uneven_tensors",
]

_NARROW = ("float16", "bfloat16")
_ROUNDED = 2.0**-4
"""Relative error that rounding in a few sums may cause: bfloat16 has a precision of 8 bits."""
_WITHOUT_HISTORY = {
    "sync_params_and_buffers",
    *(name for name, known in COLLECTIVES.items() if known.kind == "message"),
}
"""Calls that autograd need not differentiate: a wrapper's first synchronization, and messages between stages."""
_NEAR = 2e-3
"""Relative tolerance of a ratio: the results and the hypothesis are summed in different orders."""


def not_waited(tensors: Tensors) -> Finding | None:
    """Detect a collective with async_op=True without a wait, or whose tensor is written to before the wait."""
    for _, event in tensors.events("collective"):
        if event.details.get("asynchronous") and not event.details.get("waited"):
            return Finding("not-waited", f"{event.where} was called with async_op=True, and wait() was never called")
        if event.details.get("touched"):
            told = f"the tensor given to {event.where} with async_op=True was written to before wait()"
            return Finding("not-waited", told)
    return None


def aliased_list(tensors: Tensors) -> Finding | None:
    """Detect a collective that fills a list whose tensors share memory."""
    for _, event in tensors.events("collective"):
        if event.details.get("aliased"):
            count = len(event.details["list"])
            told = f"the {count} tensors of the list given to {event.where} share memory"
            return Finding("aliased-gather-list", told)
    return None


def strided_view(tensors: Tensors) -> Finding | None:
    """Detect a collective on a view with gaps in memory."""
    for _, event in tensors.events("collective"):
        for tensor in event.tensors:
            if tensor["gaps"]:
                of = tensor["result"] or f"{tensor['dtype']}{list(tensor['shape'])}"
                return Finding("strided-view", f"{event.where} was given a view with gaps in memory, of {of}")
    return None


def other_layouts(tensors: Tensors) -> Finding | None:
    """Detect a collective whose tensors have different memory formats on different ranks, or in the list that it
    fills."""
    calls = [trace.of("collective") for trace in tensors.traces]
    for same in zip(*calls, strict=False):
        for given in zip(*(event.details.get("tensors", []) for event in same), strict=False):
            unlike = len({one["layout"] for one in given}) > 1 and len({one["shape"] for one in given}) == 1
            if unlike and len({event.name for event in same}) == 1:
                told = ", ".join(_in_memory(one["layout"], rank) for rank, one in enumerate(given))
                of = given[0]["result"] or f"{given[0]['dtype']}{list(given[0]['shape'])}"
                return Finding(
                    "memory-formats-differ",
                    f"{same[0].where} was given {of} with different memory orders of its dimensions on the ranks: "
                    f"{told}",
                )
    for _, event in tensors.events("collective"):
        if event.details.get("arrived"):
            continue  # the backend copies element by element, so memory formats may differ
        parts, own = event.details.get("list", []), event.details.get("tensors", [])
        for one in own[:1]:
            odd = next(
                (part for part in parts if part["shape"] == one["shape"] and part["layout"] != one["layout"]), None
            )
            if odd is not None:
                return Finding(
                    "memory-formats-differ",
                    f"{event.where} was given {one['dtype']}{list(one['shape'])} with the dimensions "
                    f"{_order(one['layout'])} from the outermost in memory to the innermost, and a list of tensors "
                    f"with {_order(odd['layout'])}",
                )
    return None


def _in_memory(layout: Sequence[int], rank: int) -> str:
    return f"{_order(layout)} on rank {rank}"


def _order(layout: Sequence[int]) -> str:
    return ">".join(map(str, layout)) or "any"


def parameters_of_other_layouts(tensors: Tensors) -> Finding | None:
    """Detect parameters whose memory formats differ between ranks, if the step communicates at all."""
    firsts = [next(iter(trace.of("backward")), None) for trace in tensors.traces]
    held = [event.details["layouts"] for event in firsts if event is not None and "layouts" in event.details]
    if len(held) < max(2, len(firsts)) or tensors.first("collective", "wrap") is None:
        return None
    for name, order in held[0].items():
        if tensors.is_whole(name) and any(other.get(name) != order for other in held):
            told = ", ".join(_in_memory(other.get(name, ()), rank) for rank, other in enumerate(held))
            return Finding(
                "memory-formats-differ", f"{name} has different memory orders of its dimensions on the ranks: {told}"
            )
    return None


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
            return Finding("uneven-gather", f"{same[0].where} was given tensors of shapes {told}, rank by rank")
    return None


def _has_room(same: Sequence[CallEvent]) -> bool:
    """Return whether each list has a tensor for each rank, of the shape that this rank gives.

    Return True if no rank passes a list, as in all_to_all_single: there torch itself compares the sizes.
    """
    group = same[0].details.get("group", range(len(same)))
    own = [same[rank].details.get("tensors", [{}])[0].get("shape") for rank in group if rank < len(same)]
    lists = [[part["shape"] for part in event.details.get("list", [])] for event in same]
    return all(shapes == own for shapes in lists if shapes)


def overflows(tensors: Tensors) -> Finding | None:
    """Detect an overflow of a sum over ranks: a non-finite result, or an integer that is off by a multiple of
    2^bits."""
    broken = tensors.broken
    for _, event in tensors.events("collective") if broken else ():
        narrow = [tensor["dtype"] for tensor in event.tensors if tensor["dtype"] in _NARROW]
        if narrow and event.details.get("op", "sum") == "sum":
            return Finding(
                "low-precision-overflow",
                f"{event.where} adds up {narrow[0]} tensors, and {broken[0]} is not finite on {tensors.size} ranks, "
                "where it is on one device",
            )
    for name in tensors.wrong("returned"):
        right, got = tensors.expected.single.values.get(name), tensors.seen[0].values.get(name)
        if right is None or got is None or right.shape != got.shape or right.dtype.is_floating_point:
            continue
        off = got.long() - right.long()
        for bits in (8, 16, 32):
            if bool((off != 0).any()) and bool((off % 2**bits == 0).all()):
                told = f"{name} is off by a multiple of 2^{bits}, as an int{bits} that overflows"
                return Finding("low-precision-overflow", told)
    return None


def computes_in_narrow_dtype(tensors: Tensors) -> Finding | None:
    """Detect an overflow by a non-finite result of a step that computes in a narrow dtype."""
    if not tensors.broken or not tensors.expected.narrow:
        return None
    told = f"the step computes in {', '.join(tensors.expected.narrow)}, and {tensors.broken[0]} is not finite"
    return Finding("low-precision-overflow", told)


def narrow_operand(tensors: Tensors) -> Finding | None:
    """Detect a collective that communicates a narrow dtype, if rounding can explain the wrong results."""
    for _, event in tensors.events("collective"):
        narrow = [tensor["dtype"] for tensor in event.details.get("tensors", []) if tensor["dtype"] in _NARROW]
        if narrow and _may_be_rounding(tensors):
            return Finding("low-precision-arithmetic", f"{event.where} communicates {narrow[0]} tensors")
    return None


def _may_be_rounding(tensors: Tensors) -> bool:
    """Return whether rounding in a narrow dtype can explain all differences from one device."""
    for name in tensors.names:
        exact = tensors.expected.exact[name]
        for value in (one.values.get(name) for one in tensors.seen):
            if value is None or value.shape != exact.shape:
                continue
            off = float((value.double() - exact).norm())
            if not off <= _ROUNDED * float(exact.norm()):
                return False
    return True


def delivers_to_one_rank(tensors: Tensors) -> Finding | None:
    """Detect a reduce or gather that leaves the right result on the destination rank only."""
    for _, event in tensors.events("collective") if tensors.relations.split else ():
        if event.name not in ("reduce", "gather", "gather_object") or "dst" not in event.details:
            continue
        right = event.details["dst"]
        for name in tensors.relations.split:
            if right not in tensors.relations.wrong.get(name, []):
                told = f"{event.where} delivers to rank {right} only: {name} is right there, and not elsewhere"
                return Finding("value-of-one-rank", told)
    return None


def off_by_number_of_groups(tensors: Tensors) -> Finding | None:
    """Detect a result that is off by the number of process groups, its root, or the inverse of either."""
    groups = [event.details["group"] for _, event in tensors.events("collective") if "group" in event.details]
    sizes = {len(group) for group in groups if len(group) < tensors.size}
    made = tensors.first("group")
    if made is None or not sizes:
        return None
    existing = {len(ranks) for trace in tensors.traces for ranks in trace.groups[1:]} or set(range(1, tensors.size))
    factor = tensors.factor()
    factors = {name: tensors.factor([name]) if factor is None else factor for name in tensors.names}
    for name, ratio in factors.items():
        for size in (size for size in range(1, tensors.size) if tensors.size % size == 0 and size in existing):
            if (power := _as_power(ratio, tensors.size / size)) is not None:
                ran = " and ".join(map(str, sorted(sizes)))
                return Finding(
                    "wrong-process-group",
                    f"groups were made ({made.site}), collectives ran over {ran} ranks, and {name} is {ratio:.4g} "
                    f"times what it should be: {power}, the number of groups of {size}",
                )
    return None


def _as_power(ratio: float | None, number: float) -> str | None:
    """Return in words which power of `number` a ratio is: 1, -1, 1/2 or -1/2; None if it is another."""
    for exponent, words in ((1.0, ""), (-1.0, "1 / "), (0.5, "the root of "), (-0.5, "1 / the root of ")):
        if ratio and abs(ratio - number**exponent) < _NEAR * number**exponent:
            return f"{words}{number:g}"
    return None


def parted_by_group(tensors: Tensors) -> Finding | None:
    """Detect a wrong process group: ranks agree within groups of one size, and differ between the groups."""
    split = tensors.relations.split
    if not split or tensors.size < 4:
        return None
    parts = [grouped((one.digests.get(name), rank) for rank, one in enumerate(tensors.seen)) for name in split]
    groups = [ranks for _, ranks in parts[0]]
    sizes = {len(ranks) for ranks in groups}
    same = all([ranks for _, ranks in part] == groups for part in parts)
    # A metric with few possible values may agree on some ranks by chance, but not on the same ranks in every case.
    always = all(
        len({other.seen[rank].digests.get(name) for rank in ranks}) == 1
        for other in tensors.further
        for name in split
        for ranks in groups
    )
    if len(sizes) != 1 or not 1 < min(sizes) < tensors.size or not same or not always:
        return None
    together = " and ".join(named(ranks) for ranks in groups)
    return Finding("wrong-process-group", f"{split[0]} is the same within each of {together}, and differs between them")


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
                )
    return None


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
            return Finding("gradient-cut-by-collective", told)
    for event in forward:
        # Gradients need not flow through a maximum: a stable softmax subtracts it before exp, so it cancels.
        given = [tensor for tensor in event.tensors if _may_cut(tensors, tensor)]
        if event.details.get("op") not in ("max", "min") and any(tensor.get("detached") for tensor in given):
            told = (
                f"{event.where} was given values that gradients flow to, detached or under no_grad, so no gradient "
                "flows through its result"
            )
            return Finding("gradient-cut-by-collective", told)
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


def read_too_early(tensors: Tensors) -> Finding | None:
    """Detect a result that is read before wait(): it is not finite, or it differs when the step is repeated.

    The simulated node fills the result of an asynchronous collective with non-finite values until the wait.
    """
    broken = tensors.broken
    waited = [event for _, event in tensors.events("collective") if event.details.get("asynchronous")]
    unsteady = [name for name, held in tensors.relations.held.items() if held.get("repeats") is False]
    if not waited or not (broken or unsteady):
        return None
    seen = "not finite, as what is read before wait()" if broken else "different in a second run"
    told = f"{waited[0].where} was called with async_op=True, and {(broken or unsteady)[0]} is {seen}"
    return Finding("not-waited", told)


def other_reduction(tensors: Tensors) -> Finding | None:
    """Detect results that are the maximum, the minimum or the root of the sum of squares of the parts' results."""
    for division in tensors.hypotheses.divisions:
        for how, name in (("max", "max"), ("min", "min"), ("norm", "root of sum of squares")):
            if tensors.is_combined(division, how):
                told = f"{tensors.names[0]} is the {name} of what ranks have for {division.name}"
                return Finding("wrong-reduction", told)
    return None


def reduces_by_other_operation(tensors: Tensors) -> Finding | None:
    """Detect a collective with max, min or product whose operand or result is a wrong result of the step."""
    wrong = [value for name in tensors.wrong() if (value := tensors.seen[0].values.get(name)) is not None]
    for _, event in tensors.events("collective"):
        given = [one for one in event.details.get("after", ()) if any(is_held(one, [value], 1) for value in wrong)]
        on_wrong = any(tensor["result"] in tensors.relations.wrong for tensor in event.tensors)
        if event.details.get("op") in ("max", "min", "product") and (given or on_wrong):
            return Finding("wrong-reduction", f"{event.where} combines by {event.details['op']}")
    return None
