"""Mistakes in what becomes of what collectives have given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mgpu_check.mistakes.observed import Event
from mgpu_check.mistakes.report import Finding
from mgpu_check.processes.rank_lists import few

if TYPE_CHECKING:
    import torch

    from mgpu_check.mistakes.results import Result
    from mgpu_check.mistakes.tensors import Tensors

__all__ = ["reduces_again", "written_over"]

_EXACT = 1e-4
"""Relative: sums and norms of values that went through sums of their own."""
_MOST_TOGETHER = 4
"""Sums that are reduced one after the other, again and again."""
_MOST_SUMS = 16
"""Numbers of which quotients are looked at."""


def written_over(tensors: Tensors) -> Finding | None:
    """Name a collective that has given what one device has, where that is not there in the end, nor a multiple of it."""
    if not tensors.gradient_like or tensors.right_when_small or not tensors.traces:
        return None
    # What is as near to one device as a collective's result has to be is not lost.
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
        lost.append((everywhere[0], tensors.names))  # all in one buffer
    calls = [trace.of("collective") for trace in tensors.traces]
    for same in zip(*calls, strict=False):
        if len({event.name for event in same}) > 1:
            continue
        for first, names in lost:
            if _has_given(same, [tensors.expected.exact[name] for name in names], tensors.size):
                told = f"{same[0].where} has given what one device has for {few(names)}, and {first} is not that in the end"
                return Finding("result-discarded", f"{told}: it was not kept, or written over")
    return None


def _is_near_in_the_end(tensors: Tensors, name: Result) -> bool:
    value, right = tensors.seen[0].values.get(name), tensors.expected.exact[name]
    if value is None:
        return False
    of = [(float(one.double().sum()), float(one.double().norm())) for one in (value, right)]
    return _is_near(of[0], of[1], 1)


def _has_given(same: Sequence[Event], exact: Sequence[torch.Tensor], size: int) -> bool:
    """Return whether a collective leaves these values on a rank, or each rank's share of them, as a sum or a mean."""
    right = (
        math.fsum(float(value.sum()) for value in exact),
        math.sqrt(math.fsum(float(value.norm()) ** 2 for value in exact)),
    )
    for given in zip(*(event.details.get("after", ()) for event in same), strict=False):
        shares = (math.fsum(one["sum"] for one in given), math.sqrt(math.fsum(one["norm"] ** 2 for one in given)))
        seen = [shares, *((one["sum"], one["norm"]) for one in given)]
        if right[1] and any(_is_near(one, right, factor) for one in seen for factor in (1, size)):
            return True
    return False


def _is_near(one: tuple[float, float], right: tuple[float, float], factor: int) -> bool:
    slack = _EXACT * factor * right[1]
    return all(abs(value - factor * other) <= slack for value, other in zip(one, right, strict=True))


def reduces_again(tensors: Tensors) -> Finding | None:
    """Name a sum that is reduced after each batch, with what was reduced before still in it, where a returned value is
    made of it, and would be right of what was new.
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
                    f"all_reduce ({site}) was called {calls} times on one sum, with what it had given before still in it: "
                    f"{name} is made of what came of that, and would be right of what was new each time",
                )
    return None


def _running(tensors: Tensors, sums: int) -> list[tuple[str, int, list[float], list[float]]]:
    """Take all_reduce for that of so many running sums in turn. For each round from the second on: the line, how many rounds
    there were, what the sums hold, and what they would hold if only what was new had been added.
    """
    per_rank = [[event for event in trace.of("collective") if event.name == "all_reduce"] for trace in tensors.traces]
    calls = [
        [values for event in same if (values := _values(event)) is not None]
        for same in zip(*per_rank, strict=False)
        if all(event.details.get("op", "sum") == "sum" for event in same)
    ]
    lengths = [{len(part) for values in called for part in values} for called in calls]
    if not calls or any(len(called) < tensors.size for called in calls) or any(len(each) > 1 for each in lengths):
        return []  # as where several groups reduce different tensors
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


def _values(event: Event) -> tuple[list[float], list[float]] | None:
    """Return what an operand of few elements was before, and after."""
    before, after = (event.tensors or [{}])[0].get("before", {}), (event.details.get("after") or [{}])[0]
    return (before["values"], after["values"]) if "values" in before and "values" in after else None


def _explained(got: list[float], right: list[float], here: list[float], should: list[float]) -> bool:
    """Return whether the value is a sum, or the quotient of two, that is right if the sums are."""
    if not got or got == right or len(here) != len(should):
        return False
    count = len(got)
    for start in range(len(here) - count + 1):
        if _equal(got, here[start : start + count]) and _equal(right, should[start : start + count]):
            return True
    if count > 1 or len(here) > _MOST_SUMS:
        return False
    # Divided by a number that is right.
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
