"""Mistakes that one step, or one micro-batch, makes with what another has left."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from mgpu_check.gates.causes.values import same_values
from mgpu_check.gates.evidence import Evidence
from mgpu_check.gates.results import Result
from mgpu_check.mistakes.report import Finding

__all__ = ["causes"]

Values = Mapping[Result, torch.Tensor]


def causes(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Likely causes, each with how telling the evidence is, 0 to 100."""
    yield from _stale(evidence)
    yield from _windows_unlike(evidence)
    yield from _first_factor(evidence)


def _stale(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Right in the first step, and what was left then is in the second, too."""
    stages, exact = evidence.seen[0].snapshots, evidence.expected.snapshots
    for step in range(1, min(len(stages), len(exact))):
        for name, value in exact[step].items():
            if name.kind != "grads" or name not in stages[step] or int((value != 0).sum()) < 2:
                continue  # one number is some multiple of any other
            before, got = exact[step - 1][name].double(), stages[step][name].double()
            excess = got - value.double()
            share = float((excess * before).sum() / before.square().sum().clamp_min(1e-300))
            if abs(share) > 1e-3 and same_values(excess, share * before, got):
                added = "that" if abs(share - 1) < 1e-3 else f"{share:.4g} times that"
                seen = f"{name} in optimizer step {step + 1} is that of one device, and {added} of step {step} added"
                yield 83, Finding("stale-gradients", seen)
                return


def _windows_unlike(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """Micro-batches count unlike: an earlier one is reduced again with the later, or one is left out."""
    if not evidence.gradient_like or any(evidence.is_combined(each, "mean") for each in evidence.hypotheses.divisions):
        return  # all count alike
    for division in evidence.hypotheses.divisions:
        if division.windows < 2 or division.along:
            continue
        weights = evidence.weights_of_windows(division)
        if weights is None or max(weights) - min(weights) < 1e-2:
            continue
        told = ", ".join(f"{weight:.3g}" for weight in weights)
        name = evidence.names[0]
        if min(weights) < 1e-3:
            missed = f"{name} has the micro-batches of each rank with weights {told}: one of them is left out"
            yield 79.6, Finding("samples-missed", missed)
        else:
            counted = (
                f"{name} has the micro-batches of each rank with weights {told}: what was reduced is reduced again"
            )
            yield 79.6, Finding("stale-gradients", counted)
        return


def _first_factor(evidence: Evidence) -> Iterator[tuple[float, Finding]]:
    """In the first optimizer step that is wrong, the gradients, or what the step adds, are off by one factor."""
    before: Values = {
        Result("params", name): value.double() for name, value in evidence.expected.single.initial.items()
    }
    for step, right in enumerate(evidence.expected.snapshots):
        stages = [one.snapshots[step] for one in evidence.seen if step < len(one.snapshots)]
        if len(stages) < evidence.size or any(name not in stage for stage in stages for name in right):
            return
        allowed = evidence.expected.allowances[step]
        gradients = [name for name in right if name.kind == "grads"]
        parameters = [name for name in right if name in before]
        if _is_off(stages, right, allowed, gradients):
            factor = _one_factor([(stage[name], right[name]) for stage in stages for name in gradients])
            yield from _of_gradients(evidence, step, factor)
            return
        if _is_off(stages, right, allowed, parameters):
            pairs = [(stage[n].double() - before[n], right[n] - before[n]) for stage in stages for n in parameters]
            factor = _one_factor(pairs)
            if factor and factor > 0 and abs(abs(math.log(factor, evidence.size)) - 1) < 1e-3:
                yield (
                    81,
                    Finding(
                        "world-size-factor",
                        f"the gradients of optimizer step {step + 1} are right, and it changes the parameters {factor:.4g} times "
                        f"as much as on one device, on {evidence.size} ranks: the learning rate",
                    ),
                )
            return
        before = {name: right[name] for name in parameters}


def _of_gradients(evidence: Evidence, step: int, factor: float | None) -> Iterator[tuple[float, Finding]]:
    if factor is None or factor <= 0 or evidence.size < 2:
        return
    told = f"the gradients of optimizer step {step + 1} are {factor:.4g} times those of one device"
    inverse = max(factor, 1 / factor)
    if step == 0 and abs(abs(math.log(factor, evidence.size)) - 1) < 1e-3 and evidence.factor() is None:
        yield 81, Finding("world-size-factor", told)
    elif step and inverse > 1.5 and abs(inverse - round(inverse)) < 2e-3:
        yield 81, Finding("accumulation-factor", f"{told}, and those of the steps before are right")


def _is_off(stages: Sequence[Values], right: Values, allowed: Values, names: Sequence[Result]) -> bool:
    return any(
        bool(((stage[name].double() - right[name]).abs() > allowed[name]).any()) for stage in stages for name in names
    )


def _one_factor(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float | None:
    """The factor by which all of the first are off from all of the second; None where there is none."""
    if not pairs:
        return None
    got = torch.cat([one.double().flatten() for one, _ in pairs])
    right = torch.cat([other.double().flatten() for _, other in pairs])
    if int((right != 0).sum()) < 2:
        return None
    factor = float((got * right).sum() / right.square().sum())
    return factor if same_values(got, factor * right, got) else None
