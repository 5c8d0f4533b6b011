"""Find the call that leaves a gradient with a wrong factor, and the factor of a wrong slice."""

from __future__ import annotations

from mgpu_check.compare.first_difference import FirstDifference
from mgpu_check.numerics.factors import common_factor
from mgpu_check.processes.rank_lists import named

_NEAR = 1e-3
"""Relative deviation of two norms of the same gradient: sums in another order differ by less."""
_LEAST = 1e-2
"""Smallest distance of a factor from 1 that counts."""
_FEWEST = 2
"""Elements that must show the factor of a slice: any one element has a factor."""


def call_at_fault(difference: FirstDifference) -> str:
    """Name the call that gave the most wrong gradient its final norm, or the call that left it right; "" if unknown."""
    main = difference.main
    if main is None or difference.kind != "gradient":
        return ""
    expected, _ = difference.aligned.found(difference.step, "gradient", main.name)
    return "" if expected is None else _call(difference, main.name, main.worst_rank, expected.norm)


def told_slice(difference: FirstDifference) -> str:
    """Describe the factor of the most wrong gradient if only slices have it, with the call; else "".

    The other slices are the control: their elements are those of one device.
    """
    main = difference.main
    holders = difference.aligned.holders.get(main.name) if main is not None else None
    if main is None or holders is None or difference.kind != "gradient":
        return ""
    expected, here = difference.aligned.found(difference.step, "gradient", main.name)
    rank = main.ranks[0]
    got = here.get(rank)
    wrong = [any(holder in main.ranks for holder in ranks) for ranks in holders]
    if got is None or expected is None or all(wrong):
        return ""
    elements = zip(wrong, got.samples, expected.samples, strict=True)
    pairs = [(g, e) for is_wrong, g, e in elements if is_wrong and e]
    factor = common_factor(pairs, least=_LEAST, of_largest=_NEAR) if len(pairs) >= _FEWEST else None
    if factor is None:
        return ""
    where = _call(difference, main.name, rank, got.norm / factor)
    told = f"on {named(main.ranks)} the slice of the gradient of {main.name} is {factor:.4g} times that of one device"
    return f"{told}, and the other slices are right{f'; {where}' if where else ''}"


def _call(difference: FirstDifference, name: str, rank: int, expected: float) -> str:
    """Name the call that gave a gradient its final norm on a rank, or the call that left it with the expected norm."""
    trace = next((trace for trace in difference.aligned.ranks if trace.rank == rank), None)
    got = difference.aligned.found(difference.step, "gradient", name)[1].get(rank)
    calls = [] if trace is None else trace.steps[difference.step].calls
    known = [(index, told, norms[name]) for index, (told, norms) in enumerate(calls) if name in norms]
    if got is None or not known:
        return ""
    if _near(known[-1][2], got.norm):
        first = len(known) - 1
        while first and _near(known[first - 1][2], got.norm):
            first -= 1
        return f"{known[first][1]} leaves it so"
    last, told, norm = known[-1]
    later = list(dict.fromkeys(told for told, _ in calls[last + 1 :]))
    if len(later) == 1:
        return f"{later[0]} runs between {told} and the step of the optimizer"
    if _near(norm, expected):
        return f"{told} leaves the gradient of one device, and a later operation changes it"
    return ""


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= _NEAR * max(abs(one), abs(other))
