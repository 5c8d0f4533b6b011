"""The measurements of a gate: few for steps that are right, all for those that may be wrong."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from mgpu_check.diagnosis.observations import KINDS, Result
from mgpu_check.errors import RankHang
from mgpu_check.gates.comparison.relations import allowed_for, relations_of
from mgpu_check.gates.gate_arguments import Program, RanksFixture
from mgpu_check.gates.run.measurement import (
    LARGE,
    RUNS,
    measure,
    measure_in_parts,
    measure_provisionally,
    of_parts,
)
from mgpu_check.gates.run.step_runs import run_step
from mgpu_check.gates.search.scenarios import Scenario
from mgpu_check.gates.search.trials import Trials
from tests.gates.steps import batch, build, right, tutorial

pytestmark = pytest.mark.gpus(2)


class Counted:
    """Ranks that count what they run."""

    def __init__(self, ranks: RanksFixture) -> None:
        self._ranks = ranks
        self.size = ranks.size
        self.ran: Counter[str] = Counter()

    def run(self, fn: Any, /, *args: Any, **how: Any) -> list[Any]:
        self.ran[fn.__name__] += 1
        return self._ranks.run(fn, *args, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def _run_apart(self, fn: Any, arguments: Any) -> list[Any]:
        self.ran[f"{fn.__name__} apart"] += 1
        return self._ranks._run_apart(fn, arguments)


def _trials(
    ranks: RanksFixture, step: Any = right, kind: Any = None, tolerance: float | None = None, of: Any = build
) -> tuple[Trials, Counted]:
    counted: Any = (kind or Counted)(ranks)
    return Trials(counted, Program(step, of, batch), frozenset(KINDS), tolerance, "step"), counted


class Racing(Counted):
    """Ranks that take a wrong step the second time that they are given a right one, and never again."""

    def run(self, fn: Any, /, *args: Any, **how: Any) -> list[Any]:
        if fn.__name__ == "run_step" and self.ran["run_step"] == 1:
            program, *others = args
            args = (dataclasses.replace(program, step=tutorial), *others)
        return super().run(fn, *args, **how)


def test_what_a_second_run_leaves_is_judged_by_what_is_measured_in_full(ranks):
    failed = _trials(ranks, kind=Racing)[0].run(Scenario(2, 5))
    assert failed is not None and failed.relations is not None
    assert not failed.expected.provisional
    assert "a second run gives other values, rank" in failed.relations.details[Result("grads", "0.bias")]


@pytest.mark.slow
def test_wrong_steps_are_refuted_by_what_is_measured_in_full(ranks):
    trials, counted = _trials(ranks, tutorial)
    failed = trials.run(Scenario(2, 5))
    assert failed is not None
    assert not failed.expected.provisional
    assert failed.expected.exact[Result("grads", "0.bias")].dtype == torch.float64
    assert counted.ran["measure"] == counted.ran["measure_slightly_moved"] == 1
    # It is not tried any longer after several undecided cases.
    for seed in range(1, 4):
        trials.run(Scenario(2, 5, seed=seed))
    assert counted.ran["measure_provisionally"] == counted.ran["measure_slightly_moved"] == 2
    assert counted.ran["measure"] == 4


def test_a_tolerance_of_the_user_is_not_widened(ranks):
    """A difference by rounding is refuted with a tolerance of 0, and passes with half of the measured tolerance."""
    for allowed, holds in ((1e-3, True), (1e-9, False)):
        trials, counted = _trials(ranks, tolerance=allowed)
        assert (trials.run(Scenario(2, 6)) is None) is holds
        assert bool(counted.ran["measure"]) is not holds


class Alone(Counted):
    """Ranks that hang where one is alone and looks for the largest factor, as code for several ranks may."""

    def run(self, fn: Any, /, *args: Any, **how: Any) -> list[Any]:
        if fn.__name__ == "largest_factor":
            raise RankHang("rank 0 of 1 did not finish", ranks=[0])
        return super().run(fn, *args, **how)


def test_a_step_that_hangs_alone_is_scaled_all_the_same(ranks):
    trials, _ = _trials(ranks, kind=Alone)
    assert trials.run(Scenario(2, 6, change="scaled")) is None
    assert trials.completed[2, ()] == 1


class TooLarge:
    """A gradient that is off by a share of what rounding is granted."""

    def __init__(self, off: dict[str, torch.Tensor]) -> None:
        self._off = off

    def __call__(self, model: nn.Module, batch: Any, rank: Any) -> None:
        right(model, batch, rank)
        for name, parameter in model.named_parameters():
            parameter.grad.add_(self._off[name].to(rank.device))


def test_what_is_granted_provisionally_is_granted_in_full(ranks):
    program, scenario = Program(right, build, batch), Scenario(2, 6)
    provisional, full = (ranks.run(way, program, scenario, size=1)[0] for way in (measure_provisionally, measure))
    parts = [name for name in provisional.tolerance if name.kind == "grads"]
    off = {name.of: provisional.tolerance[name] * 0.8 for name in parts}
    for factor, holds in ((1, True), (-1, True), (40, False)):
        moved = dataclasses.replace(program, step=TooLarge({name: factor * value for name, value in off.items()}))
        # The step alone on one device, so that its own rounding is that of the reference.
        seen = ranks.run(run_step, moved, scenario, True, size=1)
        assert relations_of(provisional, seen, KINDS, None).holds is holds
        assert relations_of(full, seen, KINDS, None).holds is holds
    assert all((allowed_for(full, name, None) >= provisional.tolerance[name] * 0.9).all() for name in parts)


_WIDE = LARGE // 20
"""Neurons of a layer whose model, with its gradients, is large."""


def _large() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, _WIDE), nn.Tanh(), nn.Linear(_WIDE, 3))


def _with_one_thread(rank, program, scenario):
    torch.set_num_threads(1)  # as many as there are, sums are added up in another order
    return measure_provisionally(rank, program, scenario)


@pytest.mark.slow
def test_what_ranks_measure_together_is_what_one_measures(ranks):
    program, scenario = Program(right, _large, batch), Scenario(2, 5, seed=3)
    alone = ranks.run(_with_one_thread, program, scenario, size=1)[0]
    elements = sum(value.numel() for value in alone.single.values.values())
    done = ranks._run_apart(measure_in_parts, [(program, scenario, [run], elements) for run in RUNS[:2]])
    done += ranks._run_apart(measure_in_parts, [(program, scenario, RUNS[2:], elements)])
    together = of_parts(program, [part for parts in done for part in parts], elements)
    assert together.provisional and together.drawn == alone.drawn and together.narrow == alone.narrow
    assert together.single.rng == alone.single.rng and together.single.touched == alone.single.touched
    assert together.tolerance.keys() == alone.tolerance.keys()
    for name, value in alone.tolerance.items():
        assert torch.equal(together.exact[name], alone.exact[name])
        assert torch.allclose(together.tolerance[name], value, rtol=1e-3), name
    # Without one of the runs the case is undecided.
    assert of_parts(program, [*(part for parts in done[:2] for part in parts)], elements) is None


def _dies(*arguments: Any) -> None:
    os._exit(9)


class Crowded(Counted):
    """Ranks of a machine with memory for one computation: one dies if several compute apart."""

    def _run_apart(self, fn: Any, arguments: Any) -> list[Any]:
        super()._run_apart(_dies, arguments[:1])
        raise AssertionError("it has not died")


def even_only(model: nn.Module, batch: Any, rank: Any) -> None:
    if len(batch[0]) % 2:
        raise ValueError("batches of this step are even")
    right(model, batch, rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "kind", "samples", "wrong", "ran"),
    [
        (tutorial, Counted, (5, 5), True, {"measure_in_parts apart": 1}),
        # Ranks die if they measure together. Then one measures, and they do not try again.
        (right, Crowded, (5, 5, 5), False, {"_dies apart": 1, "measure_provisionally": 3}),
        # All but the first, by which it is known to be large.
        (even_only, Counted, (6, 5, 6), False, {"measure_in_parts apart": 2, "measure": 0}),
    ],
    ids=["wrong", "ranks die", "refused by one device"],
)
def test_a_large_case_is_measured_by_ranks_together_and_otherwise_by_one(ranks, step, kind, samples, wrong, ran):
    trials, counted = _trials(ranks, step, kind=kind, of=_large)
    failed = [trials.run(Scenario(2, number, seed=seed)) for seed, number in enumerate(samples)]
    assert {call: counted.ran[call] for call in ran} == ran
    assert all((trial is not None and not trial.expected.provisional) if wrong else trial is None for trial in failed)
    refused = step is even_only
    assert trials.completed[2, ()] == len(samples) - refused and trials._refusals.keys() == (
        {(2, ())} if refused else set()
    )
