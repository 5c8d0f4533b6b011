"""Judge whether the calls of operators on one device follow from those of the ranks, by their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_EQUAL = 1e-5  # the relative difference that rounding explains
MOST = 2**12  # calls of a line and a micro-batch that are kept

Calls = dict[tuple[str, str, bool], list[tuple[float, ...]]]
"""Operator, line, and whether its result is in a graph -> the numbers of each call in a micro-batch."""


def follows(own: float, ranks: Sequence[float], world: int, computed: Iterable[float] = ()) -> bool:
    """Return whether a number of one device follows from those of the ranks.

    If the ranks agree, it may have the number of ranks as a factor, or its root: the script says so. If they do not, it
    is their sum or mean, or was computed from known tensors.
    """

    def near(value: float) -> bool:
        return math.isclose(own, value, rel_tol=_EQUAL) or (own != own and value != value)

    first = ranks[0]
    if own in computed:
        return True
    if all(value == first or (value != value and first != first) for value in ranks):
        return any(near(first * world**power) for power in (0, 1, -1, 0.5, -0.5))
    return near(sum(ranks)) or near(sum(ranks) / len(ranks))


def unexplained(
    operator: str,
    own: list[tuple[float, ...]] | None,
    ranks: Sequence[list[tuple[float, ...]] | None],
    world: int,
    computed: Iterable[float] = (),
) -> str:
    """Return why the calls of an operator on one device do not follow from those of the ranks; "" if they do."""
    known = [calls for calls in ranks if calls is not None]
    if not known or (own is None and len(known) == len(ranks)):
        return ""  # the code depends on the number of ranks
    if len(known) < len(ranks) or own is None:
        return "only some ranks run it"
    joined = [numbers for calls in known for numbers in calls]
    if own == joined or (len(own) >= MOST and all(len(calls) >= MOST for calls in known)):
        return ""
    if len({len(calls) for calls in known}) > 1:
        return f"ranks run it {', '.join(str(len(calls)) for calls in known)} times"
    for numbers, *parts in zip(own, *known, strict=False):
        if operator == "aten::slice" and len(numbers) > 1 and _covers(numbers, parts):
            continue
        for value, *values in zip(numbers, *parts, strict=False):
            if not follows(value, values, world, computed):
                shown = ", ".join(f"{number:g}" for number in values)
                return f"its number is {value:g} on one device, and {shown} on the ranks"
    return ""


def _covers(own: Sequence[float], ranks: Sequence[Sequence[float]]) -> bool:
    """Return whether the slices of the ranks, one after the other, are the slice of one device."""
    ends = [own[0], *(part[1] for part in ranks)]
    return [part[0] for part in ranks] == ends[:-1] and ends[-1] == own[1]
