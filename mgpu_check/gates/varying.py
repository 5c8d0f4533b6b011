"""Run a step on its ranks in variations that show what rounding may change."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mgpu_check.diagnosis.observed import ObservedRun
from mgpu_check.diagnosis.results import Result
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.draws import DrawsOfFloat32
from mgpu_check.gates.observing import observe
from mgpu_check.gates.perturbing import ROUNDOFF, add_to, flip_of, generator_of, moved, perturbed
from mgpu_check.gates.program import Program
from mgpu_check.gates.scenario import Scenario
from mgpu_check.numerics.steps import full_precision, granted_at_least, with_roundings
from mgpu_check.torch_hooks.tensors import plain_copy

_Gradients = dict[tuple[int, Result], torch.Tensor]
"""The gradients of a rank by optimizer step and name: slices, where ranks hold slices."""


@dataclass(frozen=True)
class Variation:
    """One way to run a step.

    All ranks decide alike, because each of them gets the same variation: otherwise some would wait for the others.

    Attributes:
        spread: roundoffs that operators and batches are perturbed by, positive or negative; 0 for none.
        pair: the seed of the signs. Runs of the same seed and opposite spreads belong together.
        batch_only: perturb the batches, and not the operators.
        deep: keep the results of each optimizer step.
        nudged: flip the gradients whose sign rounding decides. Optimizers that divide by the size of a gradient take a
            whole step in the direction of its sign.
        roundoff: unit roundoff of a narrow dtype that the gradients may be rounded to, too.
    """

    spread: float = 0.0
    pair: int = 0
    batch_only: bool = False
    double: bool = False
    deep: bool = False
    nudged: bool = False
    roundoff: float = 0.0


def run_varied(rank: Rank, program: Program, scenario: Scenario, variation: Variation) -> ObservedRun:
    run = functools.partial(_run, rank, program, scenario)
    with full_precision():
        if not variation.nudged:
            return run(variation)
        seen: list[_Gradients] = []
        for spread in (0.0, variation.spread, -variation.spread):
            seen.append({})
            run(Variation(spread, variation.pair), nudge=functools.partial(_keep, seen[-1]))
        return run(Variation(), nudge=functools.partial(_flip, _undecided(variation, *seen)))


def _run(rank: Rank, program: Program, scenario: Scenario, how: Variation, **options: Any) -> ObservedRun:
    if how.spread:
        generator = generator_of(how.pair + 1)
        options["alter"] = functools.partial(moved, spread=how.spread, generator=generator)
        if not how.batch_only:
            options["around"] = functools.partial(
                perturbed, spread=how.spread, generator=generator, copies=False, fused=False
            )
    elif how.double:
        options["around"] = lambda model, batches: DrawsOfFloat32()
    seen = observe(rank, program, scenario, deep=how.deep, double=how.double, digests=False, **options)
    seen.initial = {}
    return seen


def _keep(into: _Gradients, step: int, name: Result, gradient: torch.Tensor) -> None:
    with _disable_current_modes():  # a mode would perturb the copy
        into[step, name] = plain_copy(gradient).float()


def _undecided(how: Variation, plain: _Gradients, *others: _Gradients) -> _Gradients:
    """Return the changes that flip each gradient whose sign rounding decides, and leave the others alone."""
    common: Mapping[tuple[int, Result], torch.Tensor] = {
        key: value for key, value in plain.items() if all(key in other for other in others)
    }
    granted = granted_at_least(common, others, ROUNDOFF, abs(how.spread))
    changes = {}
    for key, value in common.items():
        changes[key] = flip_of(value, with_roundings(granted[key], value, how.roundoff))
    return changes


def _flip(changes: _Gradients, step: int, name: Result, gradient: torch.Tensor) -> None:
    add_to(gradient, changes.get((step, name)))
