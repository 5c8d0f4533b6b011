"""Measure rounding again before a difference counts that one perturbed run may have missed.

By chance, a perturbed run moves some numbers less than rounding does. A step of Adam divides each element of a gradient
by its size, so the step of an element near zero may turn its sign. So a difference counts only if further perturbed
runs do not explain it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mgpu_check.compare.alignment import Aligned
from mgpu_check.compare.first_difference import FirstDifference, first_difference
from mgpu_check.compare.processes import ScriptRun
from mgpu_check.compare.rounding import Rounding
from mgpu_check.compare.trace import Trace

SEED = 1  # any fixed seed of the perturbations, so that a comparison can be repeated
FURTHER = range(SEED + 1, SEED + 4)
"""Seeds of the further runs: the largest of four movements is rarely far below the rounding error."""
_SURE = 1000.0
"""Times its tolerance: a larger deviation is no rounding error that a perturbed run has missed. If only few parameters
differ, no deviation is: Adam may have turned their steps."""


def measured(aligned: Aligned, others: Sequence[Trace], further: Callable[[int], ScriptRun]) -> Rounding:
    """Return the tolerances, from further runs if they may explain a difference.

    Args:
        others: see `Rounding`.
        further: runs the script on one device, perturbed with a seed.
    """
    found = [*others]
    for seed in FURTHER:
        rounding = Rounding(aligned.one, found)
        difference = first_difference(aligned, rounding)
        if difference is None or not _is_doubtful(difference):
            return rounding
        run = further(seed)
        if run.failed or len(run.traces[0].steps) < len(aligned.one.steps):
            return rounding
        found.append(run.traces[0])
    return Rounding(aligned.one, found)


def _is_doubtful(difference: FirstDifference) -> bool:
    kind = difference.kind
    if kind is None or kind == "before":
        return False
    wrong = difference.wrong[kind]
    excess = [entry.worst.size / difference.rounding.tolerance(difference.step, kind, entry.name) for entry in wrong]
    if not all(map(math.isfinite, excess)):
        return False
    named = {*difference.apart[kind], *(entry.name for entry in wrong)}
    few = 2 * len(named) < len(difference.aligned.named(kind))
    return (few and kind == "parameter") or max(excess, default=0.0) < _SURE
