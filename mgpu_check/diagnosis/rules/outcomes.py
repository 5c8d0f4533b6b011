"""Detect mistakes in the use of the results of collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mgpu_check.diagnosis.observed import CallEvent
from mgpu_check.diagnosis.registry import Precedence, mistake, on_tensors
from mgpu_check.diagnosis.report import Finding
from mgpu_check.processes.rank_lists import few

if TYPE_CHECKING:
    import torch

    from mgpu_check.diagnosis.results import Result
    from mgpu_check.diagnosis.tensors import Tensors

_EXACT = 1e-4
"""Relative tolerance for sums and norms of values that were themselves summed in another order."""
_MOST_TOGETHER = 4
"""Most running sums that one loop may reduce in turn: losses and metrics need few."""
_MOST_SUMS = 16
"""Most elements whose quotients are all tried: the number of pairs grows as the square."""

mistake(
    "reduced-again",
    "a running sum is reduced after each batch although it already contains reduced values",
    "keep each rank's own sum, and reduce it once, at the end; or reduce only the new values, and add the result",
)


@on_tensors(Precedence.SUMS + 220)
def written_over(tensors: Tensors) -> Finding | None:
    """Detect a lost result: a collective gave the values of one device, and the final result is no multiple of them."""
    if not tensors.gradient_like or tensors.right_when_small or not tensors.traces:
        return None
    # A result is not lost if it is as near to one device as `_has_given` requires of a collective.
    everywhere = [
        name
        for name in tensors.names
        if len(tensors.relations.wrong[name]) == tensors.size and not _is_near_in_the_end(tensors, name)
    ]
    lost = [
        (name, [name])
        for name in everywhere
        if tensors.expected.exact[name].numel() > 1 and tensors.factor_here([name]) is None
    ]
    if everywhere and len(tensors.names) > 1 and tensors.factor_here() is None:
        lost.append((everywhere[0], tensors.names))  # all results in one flat buffer
    lost = [(first, names) for first, names in lost if not _are_older(tensors, names)]
    calls = [trace.of("collective") for trace in tensors.traces]
    for same in zip(*calls, strict=False):
        if len({event.name for event in same}) > 1:
            continue
        for first, names in lost:
            if _has_given(same, [tensors.expected.exact[name] for name in names], tensors.size):
                told = f"{same[0].where} gives the right {few(names)}, but {first} is wrong at the end"
                return Finding(
                    "result-discarded", f"{told}: the result was discarded, or overwritten later", site=same[0].site
                )
    return None


def _are_older(tensors: Tensors, names: Sequence[Result]) -> bool:
    """Return whether the model had the right values before its last step, as if the step leaves a parameter unchanged.

    Then each collective that copies the model gives them: nothing was computed that could be lost.
    """
    initial, stages = tensors.expected.single.initial, tensors.expected.snapshots[:-1]
    earlier = [{name: initial[name.of] for name in names if name.kind != "grads" and name.of in initial}, *stages]
    right = _sums([tensors.expected.exact[name] for name in names])
    known = [[values[name] for name in names if name in values] for values in earlier]
    return any(len(values) == len(names) and _is_near(_sums(values), right, 1) for values in known)


def _sums(values: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Return the sum and the norm of several tensors together."""
    wide = [value.double() for value in values]
    return math.fsum(float(value.sum()) for value in wide), math.hypot(*(float(value.norm()) for value in wide))


def _is_near_in_the_end(tensors: Tensors, name: Result) -> bool:
    value, right = tensors.seen[0].values.get(name), tensors.expected.exact[name]
    if value is None:
        return False
    return _is_near(_sums([value]), _sums([right]), 1)


def _has_given(same: Sequence[CallEvent], exact: Sequence[torch.Tensor], size: int) -> bool:
    """Return whether a collective gives these values, as mean or sum, to a rank or in shares to all."""
    right = _sums(exact)
    for given in zip(*(event.details.get("after", ()) for event in same), strict=False):
        shares = (math.fsum(one["sum"] for one in given), math.sqrt(math.fsum(one["norm"] ** 2 for one in given)))
        seen = [shares, *((one["sum"], one["norm"]) for one in given)]
        if right[1] and any(_is_near(one, right, factor) for one in seen for factor in (1, size)):
            return True
    return False


def _is_near(one: tuple[float, float], right: tuple[float, float], factor: int) -> bool:
    slack = _EXACT * factor * right[1]
    return all(abs(value - factor * other) <= slack for value, other in zip(one, right, strict=True))


@on_tensors(Precedence.CALLS_AND_VALUES + 40)
def reduces_again(tensors: Tensors) -> Finding | None:
    """Detect a running sum that is reduced after each batch although it already contains reduced values.

    The evidence is a returned value that follows from these sums, and that would be right with only the new values
    reduced.
    """
    sums = [found for sums in range(1, _MOST_TOGETHER + 1) for found in _running(tensors, sums)]
    for name in tensors.wrong("returned") if sums else ():
        right, got = tensors.expected.single.values.get(name), tensors.seen[0].values.get(name)
        if right is None or got is None or right.shape != got.shape:
            continue
        for site, calls, here, should in sums:
            if _explained(got.double().flatten().tolist(), right.double().flatten().tolist(), here, should):
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
    lengths = [{len(part) for values in called for part in values} for called in calls]
    if not calls or any(len(called) < tensors.size for called in calls) or any(len(each) > 1 for each in lengths):
        return []  # groups that reduce different tensors, for example
    found = []
    for rounds in range(2, len(calls) // sums + 1):
        here: list[float] = []
        should: list[float] = []
        for first in range(sums):
            total = before = [0.0] * len(calls[first][0][0])
            for called in calls[first : rounds * sums : sums]:
                if len(called[0][0]) != len(total):
                    return []
                for given, _ in called:
                    total = [sum_ + value - old for sum_, value, old in zip(total, given, before, strict=True)]
                before = called[0][1]
            here += before
            should += total
        found.append((per_rank[0][0].site, rounds, here, should))
    return found


def _values(event: CallEvent) -> tuple[list[float], list[float]] | None:
    """Return the operand before and after the call; None if it has too many elements to be recorded."""
    before, after = (event.tensors or [{}])[0].get("before", {}), (event.details.get("after") or [{}])[0]
    return (before["values"], after["values"]) if "values" in before and "values" in after else None


def _explained(got: list[float], right: list[float], here: list[float], should: list[float]) -> bool:
    """Return whether a value is a sum or a quotient of two sums, and right if the sums are right."""
    if not got or got == right or len(here) != len(should):
        return False
    count = len(got)
    for start in range(len(here) - count + 1):
        if _equal(got, here[start : start + count]) and _equal(right, should[start : start + count]):
            return True
    if count > 1 or len(here) > _MOST_SUMS:
        return False
    # A sum divided by a right number.
    for one, also in zip(here, should, strict=True):
        if also and right[0] and not _equal([one], [also]) and _equal([got[0] / right[0]], [one / also]):
            return True
    return any(
        here[j] and should[j] and _equal(got, [here[i] / here[j]]) and _equal(right, [should[i] / should[j]])
        for i in range(len(here))
        for j in range(len(here))
        if i != j
    )


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(value - also) <= _EXACT * abs(also) for value, also in zip(one, other, strict=True))
