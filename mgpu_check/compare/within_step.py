"""Judge optimizers that reduce gradients within their step, and whose ranks keep states of other rows (ZeRO-2, Muon).

The gradients before such a step are those of each rank. They are right if their mean over the ranks is the gradient of
one device, and if the ranks agree about the parameters and states after the step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from mgpu_check.compare.alignment import Aligned, deviation
from mgpu_check.compare.partial import mean_of
from mgpu_check.compare.rounding import Rounding
from mgpu_check.compare.trace import TensorSummary, Trace
from mgpu_check.numerics.factors import common_factor

_NEAR = 1e-2
"""Relative deviation of a state's norm and sum: other rows than supposed almost always cause more."""


def reduced_within(aligned: Aligned, rounding: Rounding, step: int, apart: Collection[str]) -> list[str]:
    """Return the parameters whose gradients differ between ranks, but that the step changes alike.

    Args:
        apart: parameters and states that differ between ranks after the step.
    """
    states = {name: aligned.one.states[name] for name in aligned.states}
    off = {states[name].of if name in states else name for name in apart}
    in_states = {state.of for state in states.values() if state.count > 1}
    return [
        name
        for name in aligned.names
        if name not in off
        and _is_mean(aligned, rounding, step, name)  # first, because most gradients are equal on all ranks
        and _alike(aligned, step, name)
        and (name in in_states or _changed(aligned, step, name))
    ]


def factor_within(
    aligned: Aligned, step: int, apart: Collection[str], *, least: float, of_largest: float
) -> float | None:
    """Return the factor of the mean gradient over the ranks, relative to one device; None without a common factor.

    It is also None if the ranks do not reduce these gradients within the step.

    Args:
        apart: parameters whose gradients differ between ranks.
        least, of_largest: see `mgpu_check.numerics.factors.common_factor`.
    """
    pairs: list[tuple[float, float]] = []
    for name in apart:
        expected, here = aligned.found(step, "gradient", name)
        known = [value for value in here.values() if value is not None]
        if expected is None or len(known) < aligned.world or not _alike(aligned, step, name):
            return None
        if not _changed(aligned, step, name):
            return None
        mean = mean_of(known, [1 / len(known)] * len(known))
        if expected.norm:
            pairs += [
                (g / expected.norm, e / expected.norm) for g, e in zip(mean.samples, expected.samples, strict=True)
            ]
    return common_factor(pairs, least=least, of_largest=of_largest)


def _alike(aligned: Aligned, step: int, name: str) -> bool:
    """Return whether ranks have a parameter of equal bits, as a reduction leaves it.

    A step smaller than the tolerance of the parameter would hide gradients that stay on each rank.
    """
    _, here = aligned.found(step, "parameter", name)
    return len({value.bits for value in here.values() if value is not None}) == 1


def _changed(aligned: Aligned, step: int, name: str) -> bool:
    """Return whether a step changed a parameter, so that its result shows the gradient as a state would."""
    trace = aligned.one
    kinds = [trace.steps[step].before, *(earlier.parameters for earlier in reversed(trace.steps[:step]))]
    before = next((values[name] for values in kinds if name in values), None)
    after = trace.steps[step].parameters.get(name)
    return before is not None and after is not None and before.bits != after.bits


def _is_mean(aligned: Aligned, rounding: Rounding, step: int, name: str) -> bool:
    """Return whether ranks have different gradients, whose mean is the gradient of one device."""
    expected, here = aligned.found(step, "gradient", name)
    known = [value for value in here.values() if value is not None]
    if expected is None or len(known) < max(aligned.world, 2) or all(value == known[0] for value in known):
        return False
    mean = replace(mean_of(known, [1 / len(known)] * len(known)), norm=expected.norm)
    # Parts that cancel have larger rounding errors than their mean.
    cancelled = max(value.norm for value in known) / (expected.norm or math.inf)
    tolerance = rounding.tolerance(step, "gradient", name) * max(cancelled, 1.0)
    return deviation(mean, expected, aligned.parameter(name).shape).size <= tolerance


def with_rows_together(one: Trace, ranks: Sequence[Trace]) -> list[Trace]:
    """Return the ranks with the states of all rows, in place of states that each rank keeps of its own rows.

    The rows of a rank follow those of the rank before; the last rank may pad its rows with zeros. The norm and the sum
    of all rows are known. The other numbers of the summary are those of one device.
    """
    whole = {name: found for name in one.states if (found := _rows(one, ranks, name))}
    if not whole:
        return list(ranks)
    return [
        replace(
            trace,
            states={
                name: replace(one.states[name], dtype=own.dtype, device=own.device) if name in whole else own
                for name, own in trace.states.items()
            },
            steps=[
                replace(
                    step,
                    states={name: value for name, value in step.states.items() if name not in whole}
                    # If some rank lacks a state at a step, the others have only rows of it.
                    | {name: found[i] for name, found in whole.items() if i in found},
                )
                for i, step in enumerate(trace.steps)
            ],
        )
        for trace in ranks
    ]


def _rows(one: Trace, ranks: Sequence[Trace], name: str) -> dict[int, TensorSummary]:
    """Return a state of all rows by step; empty if ranks do not keep it in this way.

    A single row is on one rank. The others keep zeros, as padding.
    """
    whole, own = one.states[name], [trace.states.get(name) for trace in ranks]
    if len(ranks) < 2 or not whole.key or not whole.shape:
        return {}
    shape = (-(-whole.shape[0] // len(ranks)), *whole.shape[1:])
    if any(state is None or state.shape != shape for state in own):
        return {}
    values = [[step.states.get(name) for step in trace.steps] for trace in ranks]
    if shape == whole.shape and sum(any(v is not None and v.norm for v in some) for some in values) != 1:
        return {}
    steps = range(min(len(one.steps), *(len(some) for some in values)))
    # A state whose gradient is off by the number of ranks still has these rows.
    for factor in (1.0, float(len(ranks)), 1 / len(ranks)):
        expected = {i: _times(one.steps[i].states[name], factor) for i in steps if name in one.steps[i].states}
        rows = {
            i: _together(expected[i], parts) for i in expected if None not in (parts := [some[i] for some in values])
        }
        first = min(rows, default=None)
        if first is not None and deviation(rows[first], expected[first], whole.shape).size <= _NEAR:
            return rows
    return {}


def _together(expected: TensorSummary, parts: Sequence[TensorSummary | None]) -> TensorSummary:
    known = [part for part in parts if part is not None]
    off = math.fsum(sum(part.sums) for part in known) - math.fsum(expected.sums)
    sums = tuple(value + off / len(expected.sums) for value in expected.sums)
    return TensorSummary(0, math.hypot(*(part.norm for part in known)), sums, expected.samples)


def _times(value: TensorSummary, factor: float) -> TensorSummary:
    if factor == 1:
        return value
    sums, samples = (tuple(number * factor for number in some) for some in (value.sums, value.samples))
    return TensorSummary(0, value.norm * factor, sums, samples)


def remark(aligned: Aligned, rounding: Rounding) -> str:
    """Report gradients that are reduced within the step; "" without such gradients."""
    found = next(filter(None, (reduced_within(aligned, rounding, s, ()) for s in range(aligned.compared))), [])
    if not found:
        return ""
    return (
        f"the gradients of {len(found)} parameters differ between ranks before the step, and their mean is that of one "
        "device: the optimizer reduces them"
    )
