"""Find the call that leaves a gradient with a wrong factor."""

from __future__ import annotations

from mgpu_check.compare.first_difference import FirstDifference

__all__ = ["call_at_fault"]

_NEAR = 1e-3
"""Relative deviation of two norms of the same gradient: sums in another order differ by less."""


def call_at_fault(difference: FirstDifference) -> str:
    """Name the call that gave the most wrong gradient its final norm, or the call that left it right; "" if unknown."""
    main = difference.main
    trace = next((t for t in difference.aligned.ranks if main is not None and t.rank == main.worst_rank), None)
    if main is None or trace is None or difference.kind != "gradient":
        return ""
    expected, here = difference.aligned.found(difference.step, "gradient", main.name)
    got, calls = here[main.worst_rank], trace.steps[difference.step].calls
    known = [(index, told, norms[main.name]) for index, (told, norms) in enumerate(calls) if main.name in norms]
    if got is None or expected is None or not known:
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
    if _near(norm, expected.norm):
        return f"{told} leaves the gradient of one device, and a later operation changes it"
    return ""


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= _NEAR * max(abs(one), abs(other))
