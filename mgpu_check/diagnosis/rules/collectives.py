"""Detect wrong calls of collectives, and mistakes in the use of their results.

Most show in the recorded calls themselves. Calls may be over the wrong ranks, or on tensors whose memory a collective
cannot use: shared, with gaps, or in another order. A mistake in a single call is proved by a run with that call
changed, which gives the right results. If ranks hang, raise or die, the evidence is the collectives they entered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgpu_check.diagnosis.divergence import first_wrong_module
from mgpu_check.diagnosis.evidence import HashSeeds, UnfinishedCall
from mgpu_check.diagnosis.observations import CallEvent, Change, Result, is_held
from mgpu_check.diagnosis.report import Finding, on_calls, on_experiments, on_hash_seeds, on_tensors
from mgpu_check.diagnosis.rules import on_change, says
from mgpu_check.processes.collective_records import fewest
from mgpu_check.processes.rank_lists import few, grouped, intervals, named
from mgpu_check.torch_hooks.collective_table import COLLECTIVES

if TYPE_CHECKING:
    import torch

    from mgpu_check.diagnosis.tensors import Tensors

_WITHOUT_HISTORY = {"sync_params_and_buffers", *(name for name, row in COLLECTIVES.items() if row.kind == "message")}
"""Calls that autograd need not differentiate: a wrapper's first synchronization, and messages between stages."""
_TO_ROOT = {
    "gather_object",
    *(name for name, row in COLLECTIVES.items() if row.transfer is not None and row.transfer.takers == "root"),
}
"""Calls that give only their root a result."""


@on_experiments
def not_waited(tensors: Tensors) -> Finding | None:
    """Detect a collective whose result is read too early, so that the step is right with a wait at once.

    A tensor that is written to before the wait is undefined. A handle without a wait proves nothing by itself: a
    future, a stream or the whole device may be waited for instead.
    """
    if (change := tensors.right_with("wait")) is not None:
        lines = few([f"{name} ({site})" for name, site in change.value])
        summary = f"{lines} was called with async_op=True; with wait() right after the call the step is right"
        return Finding("not-waited", summary, site=change.site)
    for _, event in tensors.events("collective"):
        if event.details.get("touched"):
            summary = f"the tensor given to {event.where} with async_op=True was written to before wait()"
            return Finding("not-waited", summary, site=event.site)
    return None


@on_tensors
def uneven_tensors(tensors: Tensors) -> Finding | None:
    """Detect tensors of different shapes on different ranks in a collective that needs one shape."""
    for same in tensors.together("collective"):
        collective = COLLECTIVES.get(same[0].name)
        alike = len({(call.name, call.details.get("group")) for call in same}) == 1
        if collective is None or collective.kind != "parts" or not alike:
            continue
        # Only some ranks pass the tensors that a collective fills or scatters.
        shapes = [[tensor["shape"] for tensor in event.details.get("tensors", [])] for event in same]
        common = min(map(len, shapes))
        differ = any(shape[:common] != shapes[0][:common] for shape in shapes)
        if differ and (collective.sizes == "equal" or not _has_room(same)):
            summary = ", ".join(str(list(shape[0])) if shape else "none" for shape in shapes)
            summary = f"{same[0].where} was given tensors of shapes {summary}, rank by rank"
            return Finding("uneven-gather", summary, site=same[0].site)
    return None


def _has_room(same: Sequence[CallEvent]) -> bool:
    """Return whether each list has a tensor for each rank, of the shape that this rank gives.

    Return True if no rank passes a list, as in all_to_all_single: there torch itself compares the sizes.
    """
    group = same[0].details.get("group", range(len(same)))
    own = [same[rank].details.get("tensors", [{}])[0].get("shape") for rank in group if rank < len(same)]
    lists = [[tensor["shape"] for tensor in event.details.get("list", [])] for event in same]
    return all(shapes == own for shapes in lists if shapes)


@on_tensors
def delivers_to_one_rank(tensors: Tensors) -> Finding | None:
    """Detect a reduce or gather that leaves the right result on the destination rank only."""
    for _, event in tensors.events("collective") if tensors.relations.split else ():
        if event.name not in _TO_ROOT or "dst" not in event.details:
            continue
        destination = event.details["dst"]
        for name in tensors.relations.split:
            if destination in tensors.right_ranks(name):
                summary = f"{event.where} delivers to rank {destination} only: {name} is right there, and not elsewhere"
                return Finding("value-of-one-rank", summary, site=event.site)
    return None


@on_tensors
def result_discarded(tensors: Tensors) -> Finding | None:
    """Detect an all_reduce on a copy of a value that each rank keeps unreduced."""
    divided = {name for _, results in tensors.own_parts for name in results}
    of_rank_0 = tensors.seen[0].values
    own = [name for name in tensors.names if name in divided and name in of_rank_0 and name.kind != "buffers"]
    if not own or not tensors.traces:
        return None
    sizes = {tuple(tensors.expected.exact[name].shape) for name in own}
    total = sum(tensors.expected.exact[name].numel() for name in own)
    for event in tensors.traces[0].of("collective"):
        for tensor in event.tensors if event.name == "all_reduce" else ():
            if tensor["result"] is not None or not tensor["shape"]:
                continue  # it is a result itself, or one number, so it is no copy that can be recognized
            fits = tensor["shape"] in sizes or math.prod(tensor["shape"]) == total
            if fits and is_held(tensor.get("before", {}), [of_rank_0[name] for name in own], tensors.size):
                return Finding(
                    "result-discarded",
                    f"{event.where} ran on {_typed(tensor)}, a copy, and {own[0]} still differs between ranks",
                    site=event.site,
                )
    return None


@on_tensors
def gradient_cut(tensors: Tensors) -> Finding | None:
    """Detect a collective that autograd does not record, on a tensor that gradients should flow through."""
    if not tensors.wrong("grads") and not tensors.gradient_like:
        return None
    module = first_wrong_module(tensors)
    if module is not None and module.what == "output":
        return None  # the forward pass is wrong already
    # A tensor that is sent to another stage gets its gradient in a message back, not by autograd.
    forward = [
        (event, [tensor for tensor in event.tensors if _may_cut(tensors, tensor)])
        for trace in tensors.traces
        for event in itertools.takewhile(lambda event: event.kind != "backward", trace.events)
        if event.kind == "collective" and event.name not in _WITHOUT_HISTORY and not event.details.get("in_function")
    ]
    for event, operands in forward:
        if any(tensor.get("differentiable") and not tensor["result"] for tensor in operands):
            summary = f"{event.where} was given a tensor that requires gradients, and its result requires none"
            return Finding("gradient-cut-by-collective", summary, site=event.site)
    for event, operands in forward:
        # Gradients need not flow through a maximum: a stable softmax subtracts it before exp, so it cancels.
        if event.details.get("op") not in ("max", "min") and any(tensor.get("detached") for tensor in operands):
            summary = (
                f"{event.where} was given values that gradients flow to, detached or under no_grad, so no gradient "
                "flows through its result"
            )
            return Finding("gradient-cut-by-collective", summary, site=event.site)
    return None


def _may_cut(tensors: Tensors, tensor: Mapping[str, Any]) -> bool:
    """Return whether most gradients upstream of a tensor are wrong.

    Some gradients may be right after a cut: a softmax ignores some biases.
    """
    gradients = [Result("grads", name) for name in tensor.get("upstream", ())]
    judged = [name in tensors.relations.wrong for name in gradients if name in tensors.relations.held]
    return not judged or 2 * sum(judged) > len(judged)


@says("wrong-reduction", on_tensors)
def other_reduction(tensors: Tensors) -> str:
    """Detect results that are the maximum, the minimum or the root of the sum of squares of the parts' results."""
    for division in tensors.hypotheses.divisions:
        for how, name in (("max", "max"), ("min", "min"), ("norm", "root of sum of squares")):
            if tensors.is_combined(division, how):
                what = f"the {name} of what ranks have for {division.name}"
                return f"{tensors.names[0]} is {what}"
    return ""


_EXACT = 1e-4  # relative tolerance for sums and norms of values that were themselves summed in another order
_MOST_TOGETHER = 4  # most running sums that one loop may reduce in turn: losses and metrics need few
_MOST_SUMS = 16  # most elements whose quotients are all tried: the number of pairs grows as the square


@on_tensors
def written_over(tensors: Tensors) -> Finding | None:
    """Detect a lost result: a collective gave the values of one device, and the final result is no multiple of them."""
    if not tensors.gradient_like or tensors.right_when_small or not tensors.traces:
        return None
    # A result is not lost if it is as near to one device as `_has_given` requires of a collective.
    exact, of_rank_0 = tensors.expected.exact, tensors.seen[0].values
    everywhere = [
        name
        for name in tensors.names
        if len(tensors.relations.wrong[name]) == tensors.size
        and (name not in of_rank_0 or not _is_near(_sums([of_rank_0[name]]), _sums([exact[name]]), 1))
    ]
    lost = [(name, [name]) for name in everywhere if exact[name].numel() > 1 and tensors.factor_here([name]) is None]
    if everywhere and len(tensors.names) > 1 and tensors.factor_here() is None:
        lost.append((everywhere[0], tensors.names))  # all results in one flat buffer
    lost = [(result, results) for result, results in lost if not _are_older(tensors, results)]
    for same in tensors.together("collective"):
        for result, results in lost if len({event.name for event in same}) == 1 else ():
            if _has_given(same, [tensors.expected.exact[name] for name in results], tensors.size):
                summary = f"{same[0].where} gives the right {few(results)}, but {result} is wrong at the end"
                summary = f"{summary}: the result was discarded, or overwritten later"
                return Finding("result-discarded", summary, site=same[0].site)
    return None


def _are_older(tensors: Tensors, results: Sequence[Result]) -> bool:
    """Return whether the model had the right values before its last step, as if the step leaves a parameter unchanged.

    Then each collective that copies the model gives them: nothing was computed that could be lost.
    """
    initial, stages = tensors.expected.single.initial, tensors.expected.snapshots[:-1]
    earlier = [{name: initial[name.of] for name in results if name.kind != "grads" and name.of in initial}, *stages]
    expected = _sums([tensors.expected.exact[name] for name in results])
    recorded = [[values[name] for name in results if name in values] for values in earlier]
    return any(len(values) == len(results) and _is_near(_sums(values), expected, 1) for values in recorded)


def _sums(values: Sequence[torch.Tensor]) -> tuple[float, float]:
    wide = [value.double() for value in values]
    return math.fsum(float(value.sum()) for value in wide), math.hypot(*(float(value.norm()) for value in wide))


def _has_given(same: Sequence[CallEvent], exact: Sequence[torch.Tensor], size: int) -> bool:
    """Return whether a collective gives these values, as mean or sum, to a rank or in shares to all."""
    expected = _sums(exact)
    for digests in zip(*(event.details.get("after", ()) for event in same), strict=False):
        shares = math.fsum(sums["sum"] for sums in digests), math.hypot(*(sums["norm"] for sums in digests))
        candidates = [shares, *((sums["sum"], sums["norm"]) for sums in digests)]
        if expected[1] and any(_is_near(sums, expected, factor) for sums in candidates for factor in (1, size)):
            return True
    return False


def _is_near(sums: tuple[float, float], expected: tuple[float, float], factor: int) -> bool:
    slack = _EXACT * factor * expected[1]
    return all(abs(value - factor * goal) <= slack for value, goal in zip(sums, expected, strict=True))


@on_tensors
def reduces_again(tensors: Tensors) -> Finding | None:
    """Detect a running sum that is reduced after each batch although it already contains reduced values.

    The evidence is a returned value that follows from these sums, and that would be right with only the new values
    reduced.
    """
    sums = [running for sums in range(1, _MOST_TOGETHER + 1) for running in _running(tensors, sums)]
    for name, expected, got in tensors.returned() if sums else ():
        for site, calls, repeated, should in sums:
            if _explained(got.double().flatten().tolist(), expected.double().flatten().tolist(), repeated, should):
                return Finding(
                    "reduced-again",
                    f"all_reduce ({site}) was called {calls} times on one sum that still contained its earlier "
                    f"results: {name} follows from this sum, and would be right if only new values were reduced each "
                    "time",
                    site=site,
                )
    return None


def _running(tensors: Tensors, sums: int) -> list[tuple[str, int, list[float], list[float]]]:
    """Simulate right running sums, on the assumption that all_reduce was called on `sums` of them in turn.

    Returns, for each round from the second on, the line of the calls, the number of rounds, the values of the sums, and
    their values if only new values had been reduced.
    """
    per_rank = [[event for event in trace.of("collective") if event.name == "all_reduce"] for trace in tensors.traces]
    calls = [
        [values for event in same if (values := _values(event)) is not None]
        for same in zip(*per_rank, strict=False)
        if all(event.details.get("op", "sum") == "sum" for event in same)
    ]
    lengths = [{len(summand) for values in called for summand in values} for called in calls]
    if not calls or any(len(called) < tensors.size for called in calls) or any(len(each) > 1 for each in lengths):
        return []  # groups that reduce different tensors, for example
    running = []
    for rounds in range(2, len(calls) // sums + 1):
        repeated: list[float] = []
        should: list[float] = []
        for offset in range(sums):
            total = before = [0.0] * len(calls[offset][0][0])
            for called in calls[offset : rounds * sums : sums]:
                if len(called[0][0]) != len(total):
                    return []
                for inputs, _ in called:
                    total = [sum_ + value - old for sum_, value, old in zip(total, inputs, before, strict=True)]
                before = called[0][1]
            repeated += before
            should += total
        running.append((per_rank[0][0].site, rounds, repeated, should))
    return running


def _values(event: CallEvent) -> tuple[list[float], list[float]] | None:
    """Return the operand before and after the call; None if it has too many elements to be recorded."""
    before, after = (event.tensors or [{}])[0].get("before", {}), (event.details.get("after") or [{}])[0]
    return (before["values"], after["values"]) if "values" in before and "values" in after else None


def _explained(got: list[float], expected: list[float], repeated: list[float], should: list[float]) -> bool:
    """Return whether a value is a sum or a quotient of two sums, and right if the sums are right."""
    if not got or got == expected or len(repeated) != len(should):
        return False
    count = len(got)
    slices = [slice(start, start + count) for start in range(len(repeated) - count + 1)]
    if any(_equal(got, repeated[part]) and _equal(expected, should[part]) for part in slices):
        return True
    if count > 1 or len(repeated) > _MOST_SUMS:
        return False
    # A sum divided by a right number.
    for total, also in zip(repeated, should, strict=True):
        if also and expected[0] and not _equal([total], [also]) and _equal([got[0] / expected[0]], [total / also]):
            return True
    return any(
        below and below_right and _equal(got, [total / below]) and _equal(expected, [right / below_right])
        for (total, right), (below, below_right) in itertools.permutations(zip(repeated, should, strict=True), 2)
    )


def _equal(values: Sequence[float], expected: Sequence[float]) -> bool:
    return all(abs(value - also) <= _EXACT * abs(also) for value, also in zip(values, expected, strict=True))


_COMPUTED: tuple[Callable[[Sequence[float], int], float], ...] = (
    lambda row, size: row[0],
    lambda row, size: row[0] / size,
    lambda row, size: row[0] / row[1] if row[1] else row[0],  # a count of 0 goes with a sum of 0
)
"""The values that a step may compute from the sum of a row of numbers, for a number of ranks."""


@on_tensors
def combines_other_values(tensors: Tensors) -> Finding | None:
    """Detect rows of numbers that ranks sum in orders of their own: returned names are in other orders, too.

    The sums of the rows with equal names give the results of one device.
    """
    names = [[name for name, value in run.values.items() if name.kind == "returned"] for run in tensors.seen]
    if not all(names) or all(own == names[0] for own in names):
        return None
    for site, rows, sums in _rows_summed(tensors, [len(own) for own in names]):
        if any(len(own) != len(numbers) for own, numbers in zip(names, rows, strict=True)):
            continue
        together: dict[Result, list[float]] = {}
        for own, numbers in zip(names, rows, strict=True):
            for name, row in zip(own, numbers, strict=True):
                together[name] = [a + b for a, b in zip(together.get(name, [0.0] * len(row)), row, strict=True)]
        if any(_gives(compute, tensors, names, sums, together) for compute in _COMPUTED):
            orders = "; ".join(f"{few([own.label for own in labels])} on rank {r}" for r, labels in enumerate(names))
            summary = f"{site} adds up numbers in the order of each rank's own names: {orders}"
            return Finding("other-values-combined", summary, site=site)
    return None


def _rows_summed(
    tensors: Tensors, counts: Sequence[int]
) -> Iterator[tuple[str, list[list[list[float]]], list[list[float]]]]:
    """Yield the lines that sum a row of numbers for each name, with the rows of each rank, and the sums.

    The rows are in one call, or each has its own. `counts`: the number of names on each rank.
    """
    calls: dict[str, list[tuple[CallEvent, ...]]] = {}
    for same in tensors.together("collective"):
        if len({(event.name, event.site) for event in same}) == 1 and same[0].details.get("op", "sum") == "sum":
            calls.setdefault(same[0].site, []).append(same)
    for site, several in calls.items():
        operands = [[_values(event) for event in same] for same in several]
        if any(pair is None for same in operands for pair in same):
            continue
        flat = [[pair for pair in same if pair is not None] for same in operands]
        if len(several) == 1 and len(set(counts)) == 1 and len(flat[0][0][0]) % counts[0] == 0:
            width = len(flat[0][0][0]) // counts[0]
            yield site, [_cut(before, width) for before, _ in flat[0]], _cut(flat[0][0][1], width)
        elif set(counts) == {len(several)}:
            ranks = [[same[rank][0] for same in flat] for rank in range(len(counts))]
            yield site, ranks, [same[0][1] for same in flat]


def _cut(values: Sequence[float], width: int) -> list[list[float]]:
    return [list(values[start : start + width]) for start in range(0, len(values), width)]


def _gives(
    compute: Callable[[Sequence[float], int], float],
    tensors: Tensors,
    names: Sequence[Sequence[Result]],
    sums: Sequence[Sequence[float]],
    together: Mapping[Result, Sequence[float]],
) -> bool:
    """Return whether ranks compute their values from the sums in this way, and one device those of equal names."""
    try:
        for run, own in zip(tensors.seen, names, strict=True):
            for name, row in zip(own, sums, strict=True):
                if not _equal([float(run.values[name])], [compute(row, tensors.size)]):
                    return False
        expected = tensors.expected.exact
        return all(
            name in expected and _equal([float(expected[name])], [compute(row, tensors.size)])
            for name, row in together.items()
        )
    except (IndexError, ValueError, RuntimeError, ZeroDivisionError):  # not a row of the right length, or no number
        return False


_NEAR = 2e-3  # relative tolerance of a ratio: the results and the hypothesis are summed in different orders


@on_tensors
def off_by_number_of_groups(tensors: Tensors) -> Finding | None:
    """Detect a result that is off by the number of process groups, its root, or the inverse of either."""
    groups = [event.details["group"] for _, event in tensors.events("collective") if "group" in event.details]
    sizes = {len(group) for group in groups if len(group) < tensors.size}
    creation = tensors.first("group")
    if creation is None or not sizes:
        return None
    existing = {len(ranks) for trace in tensors.traces for ranks in trace.groups[1:]} or set(range(1, tensors.size))
    factor = tensors.factor()
    factors = {name: tensors.factor([name]) if factor is None else factor for name in tensors.names}
    divisors = [size for size in range(1, tensors.size) if tensors.size % size == 0 and size in existing]
    powers = ((1.0, ""), (-1.0, "1 / "), (0.5, "the root of "), (-0.5, "1 / the root of "))
    for (name, ratio), size, (exponent, words) in itertools.product(factors.items(), divisors, powers):
        number = tensors.size / size
        if ratio and abs(ratio - number**exponent) < _NEAR * number**exponent:
            ran = " and ".join(map(str, sorted(sizes)))
            return Finding(
                "wrong-process-group",
                f"groups were made ({creation.site}), collectives ran over {ran} ranks, and {name} is {ratio:.4g} "
                f"times what it should be: {words}{number:g}, the number of groups of {size}",
                site=creation.site,
            )
    return None


@says("wrong-process-group", on_tensors)
def parted_by_group(tensors: Tensors) -> str:
    """Detect a wrong process group: ranks agree within groups of one size, and differ between the groups."""
    split = [name for name in tensors.relations.split if len(tensors.holders(name)) == tensors.size]
    if not split or len(split) < len(tensors.relations.split) or tensors.size < 4:
        return ""
    partitions = [grouped((run.digests.get(name), rank) for rank, run in enumerate(tensors.seen)) for name in split]
    groups = [ranks for _, ranks in partitions[0]]
    sizes = {len(ranks) for ranks in groups}
    same = all([ranks for _, ranks in partition] == groups for partition in partitions)
    # A metric with few possible values may agree on some ranks by chance, but not on the same ranks in every case.
    each = itertools.product(tensors.further, split, groups)
    always = all(len({case.seen[rank].digests.get(name) for rank in ranks}) == 1 for case, name, ranks in each)
    differs = any(len({run.digests.get(name) for run in case.seen}) > 1 for case in tensors.further for name in split)
    always &= differs or not tensors.further
    if len(sizes) != 1 or not 1 < min(sizes) < tensors.size or not same or not always:
        return ""
    together = " and ".join(named(ranks) for ranks in groups)
    return f"{split[0]} is the same within each of {together}, and differs between them"


@on_tensors
def aliased_list(tensors: Tensors) -> Finding | None:
    """Detect a collective that fills a list whose tensors share memory."""
    for _, event in tensors.events("collective"):
        if event.details.get("aliased"):
            summary = f"the {len(event.details['list'])} tensors of the list given to {event.where} share memory"
            return Finding("aliased-gather-list", summary, site=event.site)
    return None


@on_tensors
def strided_view(tensors: Tensors) -> Finding | None:
    """Detect a collective on a view with gaps in memory."""
    for _, event in tensors.events("collective"):
        for tensor in event.tensors:
            if tensor["gaps"]:
                summary = f"{event.where} was given a view with gaps in memory, of {tensor['result'] or _typed(tensor)}"
                return Finding("strided-view", summary, site=event.site)
    return None


@on_tensors
def other_layouts(tensors: Tensors) -> Finding | None:
    """Detect a collective whose tensors have other memory formats on some ranks, or in the list that it fills."""
    for same in tensors.together("collective"):
        for operands in zip(*(event.details.get("tensors", []) for event in same), strict=False):
            unlike = len({operand["layout"] for operand in operands}) > 1
            if unlike and len({operand["shape"] for operand in operands}) == 1 == len({event.name for event in same}):
                subject = operands[0]["result"] or _typed(operands[0])
                return Finding(
                    "memory-formats-differ",
                    f"{same[0].where} was given {subject} with different memory orders of its dimensions on the ranks: "
                    f"{_by_rank([operand['layout'] for operand in operands])}",
                    site=same[0].site,
                )
    for _, event in tensors.events("collective"):
        if event.details.get("arrived"):
            continue  # the backend copies element by element, so memory formats may differ
        operands = event.details.get("tensors", [])[:1]
        for operand, entry in itertools.product(operands, event.details.get("list", [])):
            if entry["shape"] == operand["shape"] and entry["layout"] != operand["layout"]:
                return Finding(
                    "memory-formats-differ",
                    f"{event.where} was given {_typed(operand)} with the dimensions {_order(operand['layout'])} from "
                    f"the outermost in memory to the innermost, and a list of tensors with {_order(entry['layout'])}",
                    site=event.site,
                )
    return None


def _typed(tensor: Mapping[str, Any]) -> str:
    return f"{tensor['dtype']}{list(tensor['shape'])}"


def _by_rank(layouts: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{_order(layout)} on rank {rank}" for rank, layout in enumerate(layouts))


def _order(layout: Sequence[int]) -> str:
    return ">".join(map(str, layout)) or "any"


@says("memory-formats-differ", on_tensors)
def parameters_of_other_layouts(tensors: Tensors) -> str:
    """Detect parameters whose memory formats differ between ranks, if the step communicates at all."""
    firsts = [next(iter(trace.of("backward")), None) for trace in tensors.traces]
    layouts = [event.details["layouts"] for event in firsts if event is not None and "layouts" in event.details]
    if len(layouts) < max(2, len(firsts)) or tensors.first("collective", "wrap") is None:
        return ""
    for name, order in layouts[0].items():
        orders = [layout[name] for layout in layouts if name in layout]  # a stage of a pipeline has its own parameters
        if tensors.is_whole(name) and len(orders) == len(layouts) and any(layout != order for layout in orders):
            return f"{name} has different memory orders of its dimensions on the ranks: {_by_rank(orders)}"
    return ""


@on_change("group")
def right_in_another_group(change: Change) -> Finding:
    """Detect a collective that runs over the wrong ranks."""
    summary = f"{change.where} runs over {_groups(change.was)}; over {_groups(change.now)} the step is right"
    return Finding("wrong-process-group", summary, site=change.site)


@on_change("divide", "multiply")
def right_by_the_size_of_a_group(change: Change) -> Finding:
    """Detect a result of a collective that is off by the size of the group."""
    how = "divided" if change.kind == "divide" else "multiplied"
    summary = f"with the result of {change.where} {how} by {change.size}, the size of its group, the step is right"
    return Finding("world-size-factor", summary, site=change.site)


@on_change("op")
def right_by_another_operation(change: Change) -> Finding:
    """Detect a reduction with the wrong operation."""
    by = "the root of the sum of squares" if change.value == "norm" else str(change.value).upper()
    summary = f"{change.where} with {by} makes the step right"
    return Finding("wrong-reduction", summary, site=change.site)


@on_change("skip", "new")
def right_without_a_collective(change: Change) -> Finding:
    """Detect a superfluous reduction: of a value that was reduced already, or that each rank needs unreduced."""
    if change.kind == "new":
        new = "with only new values reduced each time, the step is right"
        summary = f"{change.where} reduces its earlier results again; {new}"
        return Finding("reduced-again", summary, site=change.site)
    if change.value is not None:
        summary = f"{change.where} reduces what {change.value} has reduced already; without it the step is right"
        return Finding("reduced-again", summary, site=change.site)
    # If all ranks hold the same value, dividing the sum has the same effect as skipping it, and was tried first.
    summary = f"without {change.where} the step is right: each rank needs its own value, not the combined one"
    return Finding("wrong-reduction", summary, site=change.site)


@on_change("reorder")
def right_in_another_order(change: Change) -> Finding:
    """Detect gathered rows that are in the wrong order."""
    summary = (
        f"{change.where} returns the rows rank by rank; with the rows of each rank in {change.value} pieces, and the "
        "first pieces of all ranks before the next ones, the step is right"
    )
    return Finding("gathered-in-other-order", summary, site=change.site)


@on_experiments
def right_with_a_term_scaled(tensors: Tensors) -> Finding | None:
    """Detect one term of the loss that is off by the size of a group; the other terms are right."""
    change = tensors.right_with("term")
    if change is None:
        return None
    term, times = change.value
    line = (term.paths[0] and term.line) or term.backward
    subject = f"the term that {line} computes" if term.paths[0] else f"the loss of {line}"
    how = "multiplied" if times > 1 else "divided"
    size = "the number of ranks" if change.size == tensors.size else "the size of a group"
    depends = f"; it affects the gradients of {few(list(term.parameters))}" if term.parameters else ""
    summary = f"with {subject} {how} by {change.size}, {size}, and nothing else, gradients are right{depends}"
    return Finding("loss-term-factor", summary, site=line)


@on_change("shift")
def right_where_positions_go_on(change: Change) -> Finding:
    """Detect positions that start at 0 on each rank."""
    begins = "counts" if change.name == "arange" else "takes the rows of a parameter"
    right = f"if it continues over the {change.size} parts, the step is right"
    summary = f"{change.where} {begins} from 0 on each rank; {right}"
    return Finding("positions-restart", summary, site=change.site)


def _groups(groups: tuple[tuple[int, ...], ...]) -> str:
    return few([f"ranks {intervals(ranks)}" for ranks in groups], 2)


_LONGEST = 240  # characters of a quoted error: about three lines of a terminal
_WORDS_OF_TORCH = (
    ("Expected to have finished reduction in the prior iteration", "gradients-not-synchronized"),
    ("Expected to mark a variable ready only once", "gradients-not-synchronized"),
    ("must be contiguous", "strided-view"),
    ("Tensors must be contiguous", "strided-view"),
    ("op.preamble.length <= op.nbytes", "uneven-gather"),
    ("Expected more than 1 value per channel when training", "batch-statistics-per-rank"),
    ("same number of elements", "uneven-gather"),
    ("Sizes of tensors must match", "uneven-gather"),
    ("Default process group has not been initialized", "wrong-process-group"),
)
"""Parts of error messages of torch, with the only class of mistakes that causes each."""


@on_calls
def other_sizes(calls: UnfinishedCall) -> Finding | None:
    """Detect tensors of different sizes that ranks gave to one collective."""
    if calls.unmatched:
        return None
    if calls.parted:
        collectives = {entered.name for entered in calls.parted.values()}
        if len(collectives) > 1 or len({entered.operand for entered in calls.parted.values()}) < 2:
            return None
        fills = any(name in COLLECTIVES and COLLECTIVES[name].kind == "parts" for name in collectives)
        return Finding("uneven-gather", calls.parting) if fills else None
    same = {(call.name, call.group_name, call.number, call.file, call.line) for call in calls.last.values()}
    if len(same) == 1 and len({entered.operand for entered in calls.last.values()}) > 1:
        return Finding("uneven-gather", "ranks gave tensors of different sizes: " + _short(calls.told))
    return None


@on_calls
def uneven_steps(calls: UnfinishedCall) -> Finding | None:
    """Detect uneven numbers of steps: ranks part ways, and the world size does not divide the number of samples."""
    parted = part_ways(calls)
    if parted is None or calls.samples % calls.size == 0:
        return None
    uneven = f"{calls.samples} samples are not divisible by {calls.size} ranks"
    also = "; with divisible numbers the step terminates" if calls.hung else f"; {parted.evidence}"
    return Finding("uneven-steps", uneven + also)


@on_calls
def waits_for_its_own_group(calls: UnfinishedCall) -> Finding | None:
    """Detect a too wide group: a member waits for a message from a rank in the group's collective."""
    for rank, collective in calls.last.items():
        if not collective.unfinished or collective.cut:
            continue
        members = set(map(int, collective.group.split(","))) if collective.group else set(range(calls.size))
        for peer, message in calls.messages.items():
            if peer in members and message.options == f"src={rank}":
                return Finding(
                    "wrong-process-group",
                    f"rank {rank} waits in {collective} for rank {peer}, and rank {peer} waits in {message} for "
                    f"what rank {rank} sends after it: does the collective run over more ranks than call it?",
                )
    return None


@on_calls
def part_ways(calls: UnfinishedCall) -> Finding | None:
    """Detect a decision of each rank's own: ranks entered different collectives, or some entered fewer."""
    if other_sizes(calls):
        return None
    if calls.unmatched:
        return Finding("decision-per-rank", calls.unmatched)
    sites = {(entered.name, entered.file, entered.line) for entered in calls.last.values()}
    if calls.parted or len(sites) > 1 or (sites and calls.some_finished):
        summary = calls.parting or "ranks do not take part in the same collectives: " + _short(calls.told)
    elif waits := _waits(calls):
        summary = f"{calls.hung}: {waits}"
    else:
        return None
    return Finding("decision-per-rank", summary)


def _waits(calls: UnfinishedCall) -> str:
    """Return which ranks of a hang wait, and which ranks are elsewhere or finished; "" if that is unknown."""
    waiting = grouped((call, rank) for rank, call in calls.waiting.items())
    clauses = [f"{named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} {call}" for call, ranks in waiting]
    if waiting and (calls.elsewhere or calls.finished):
        if calls.elsewhere:
            clauses.append(f"{named(calls.elsewhere)} {'is' if len(calls.elsewhere) == 1 else 'are'} elsewhere")
        if calls.finished:
            clauses.append(f"{named(calls.finished)} finished")
        return "; ".join(clauses)
    if len(waiting) > 1 and calls.last:
        return f"all of them wait, in different calls; {'; '.join(clauses)}"
    # A collective on a device returns at once, so no rank is seen to wait in it.
    counts = {rank: entered.number for rank, entered in calls.last.items()}
    groups = {entered.group_name for entered in calls.last.values()}
    if not waiting and len(groups) == 1 < len(set(counts.values())):
        return f"{named(fewest(counts))} entered fewer collectives than others"
    return ""


@on_calls
def known_words(calls: UnfinishedCall) -> Finding | None:
    """Detect a mistake by an error of torch that only this mistake causes."""
    for words, name in _WORDS_OF_TORCH:
        for of_torch, line in calls.raised:
            if words in of_torch:
                return Finding(name, _short(line))
    return None


@on_calls
def aborted_in_gather(calls: UnfinishedCall) -> Finding | None:
    """Detect tensors of different sizes: gloo aborted a rank inside all_gather."""
    entered = any(call.name.startswith("all_gather") for call in calls.last.values())
    if not any(entered or "all_gather" in stacks for stacks in calls.aborted):
        return None
    return Finding("uneven-gather", "a rank was aborted inside all_gather, as by tensors of different sizes")


@on_hash_seeds
def set_order(seeds: HashSeeds) -> Finding | None:
    """Detect iteration over a set: the case fails only if ranks have different hash seeds."""
    return Finding("set-order", seeds.told)


def _short(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]
