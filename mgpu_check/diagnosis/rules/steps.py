"""Detect gradients of an earlier step or micro-batch that a later one reuses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mgpu_check.diagnosis.observed import CallEvent
from mgpu_check.diagnosis.registry import Precedence, mistake, on_tensors
from mgpu_check.diagnosis.report import Finding

if TYPE_CHECKING:
    from mgpu_check.diagnosis.tensors import Tensors

_LEFT_OUT, _UNLIKE, _ONCE = 1e-3, 1e-2, 1e-3
"""Limits on weights: a smaller weight counts as 0, a larger difference as unequal, a smaller distance from 1 as 1."""

mistake(
    "stale-gradients",
    "gradients of an earlier step or micro-batch are added in",
    "call optimizer.zero_grad() on every rank before each window, and do not reduce what is reduced already",
)


@on_tensors(Precedence.SUMS + 80)
def adds_what_was_left(tensors: Tensors) -> Finding | None:
    """Detect stale gradients: the error of a step's gradient is a multiple of the gradient of the step before."""
    stages, exact = tensors.seen[0].snapshots, tensors.expected.snapshots
    for step in range(1, min(len(stages), len(exact))):
        for name, value in exact[step].items():
            if name.kind != "grads" or name not in stages[step] or int((value != 0).sum()) < 2:
                continue  # a single number is a multiple of any other
            got, before = stages[step][name].double(), exact[step - 1].get(name)
            if before is None or not before.shape == got.shape == value.shape:
                continue
            excess, before = got - value.double(), before.double()
            share = float((excess * before).sum() / before.square().sum().clamp_min(1e-300))
            if share > _LEFT_OUT and tensors.same(excess, share * before, got):
                added = "that" if abs(share - 1) < _ONCE else f"{share:.4g} times that"
                told = f"{name} in optimizer step {step + 1} is that of one device, and {added} of step {step} added"
                return Finding("stale-gradients", told)
    return None


@on_tensors(Precedence.SUMS + 230)
def counts_windows_unlike(tensors: Tensors) -> Finding | None:
    """Detect micro-batches with unequal weights: one is reduced again with a later one, or left out."""
    divisions = tensors.hypotheses.divisions
    if not tensors.gradient_like or any(tensors.is_combined(each, "mean") for each in divisions):
        return None  # all micro-batches have the same weight
    for division in divisions:
        if division.windows < 2 or division.along:
            continue
        weights = tensors.weights_of_windows(division)
        if weights is None or max(weights) - min(weights) < _UNLIKE or min(weights) < -_LEFT_OUT:
            continue
        told = ", ".join(f"{weight if abs(weight) > _LEFT_OUT else 0:.3g}" for weight in weights)
        seen = f"in {tensors.names[0]} the micro-batches of each rank count {told} times"
        left_out = any(abs(weight) <= _LEFT_OUT for weight in weights)
        if left_out and (reduced := _reduced_between(tensors)) is not None:
            again = f"{reduced.where} has reduced it, and its result was overwritten"
            return Finding("result-discarded", f"{seen}: one of them is left out, though {again}")
        if left_out:
            return Finding("samples-missed", f"{seen}: one of them is left out")
        return Finding("stale-gradients", f"{seen}: what was reduced already is reduced again")
    return None


def _reduced_between(tensors: Tensors) -> CallEvent | None:
    """Return the first collective on several numbers between two backward passes of rank 0."""
    passes = 0
    for event in tensors.traces[0].of("backward", "collective") if tensors.traces else ():
        passes += event.kind == "backward"
        found = event.kind == "collective" and any(math.prod(tensor["shape"]) > 1 for tensor in event.tensors)
        if found and 0 < passes < len(tensors.traces[0].of("backward")):
            return event
    return None
