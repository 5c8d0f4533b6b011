"""The measurements of a gate: few for steps that are right, all for those that may be wrong."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

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
    measure_slightly_moved,
    of_parts,
    rounding_seen,
)
from mgpu_check.gates.search.scenarios import Scenario
from mgpu_check.gates.search.trials import Trials
from mgpu_check.numerics.steps import granted_with
from tests.gates.steps import Training, batch, build, right, summed, tutorial

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


@pytest.mark.slow
def test_right_steps_are_told_without_float64(ranks):
    for step in (right, Training):
        trials, counted = _trials(ranks, step)
        assert all(
            trials.run(Scenario(2, 6, seed=seed, change=change)) is None for seed, change in ((0, ""), (1, "sorted"))
        )
        assert counted.ran["measure_provisionally"] == 2
        assert not counted.ran["measure"]


class Narrow(Counted):
    """Ranks whose first measurement grants no tolerance, as if operators rounded much more than their results."""

    def run(self, fn: Any, /, *args: Any, **how: Any) -> list[Any]:
        found = super().run(fn, *args, **how)
        if fn.__name__ == "measure_provisionally":
            found[0].tolerance = {name: torch.zeros_like(value) for name, value in found[0].tolerance.items()}
        elif fn.__name__ == "measure_slightly_moved":
            found[0].values = {
                name: value * (1 + 2e-5) if value.is_floating_point() else value
                for name, value in found[0].values.items()
            }
        return found


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
        seen = ranks.run(_observed, moved, scenario, size=1)
        assert relations_of(provisional, seen, KINDS, None).holds is holds
        assert relations_of(full, seen, KINDS, None).holds is holds
    assert all((allowed_for(full, name, None) >= provisional.tolerance[name] * 0.9).all() for name in parts)


def test_rounding_within_operators_is_granted_in_full_too(ranks):
    program, scenario = Program(Training, build, batch), Scenario(2, 6)
    provisional, full = (ranks.run(way, program, scenario, size=1)[0] for way in (measure_provisionally, measure))
    errors = rounding_seen(provisional.single, ranks.run(measure_slightly_moved, program, scenario, size=1)[0])
    assert errors.keys() == provisional.tolerance.keys()
    assert any(errors.values())
    wider = granted_with(provisional.tolerance, provisional.exact, errors)
    for name, value in wider.items():
        assert (value >= provisional.tolerance[name]).all()
        if name.kind == "grads":
            # Each element is an estimate from one pair of perturbations: it exceeds the one from three pairs now and
            # then.
            assert (allowed_for(full, name, None) >= value * 0.8).all()


def _observed(rank, program, scenario):
    from mgpu_check.gates.run.step_runs import run_step

    return run_step(rank, program, scenario, True)


def _unstable(model: nn.Module, batch: Any, rank: Any) -> None:
    (summed(DDP(model.to(rank.device)), batch, rank) * torch.finfo(torch.float32).max).backward()


_WIDE = LARGE // 20
"""Neurons of a layer whose model, with its gradients, is large."""


def _large() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, _WIDE), nn.Tanh(), nn.Linear(_WIDE, 3))


@pytest.mark.slow
def test_ranks_do_a_large_step_once_whatever_has_to_be_measured(ranks):
    """If all ranks have the same, one of them sends it."""
    trials, narrow = _trials(ranks, kind=Narrow, of=_large)
    trials._expectations._elements = 0  # one rank does all that is measured, which is what `Narrow` changes
    for seed in range(3):
        assert trials.run(Scenario(2, 6, seed=seed)) is None
    assert narrow.ran["measure_slightly_moved"] == 3
    assert narrow.ran["run_step"] == 3 + 1  # the first case is repeated


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


class Adaptive:
    """A step with an optimizer that is not linear in the gradient: it is measured by more runs, and each needs
    others."""

    def __call__(self, model: nn.Module, batch: Any, rank: Any) -> None:
        right(model, batch, rank)
        torch.optim.Adam(model.parameters(), lr=0.01).step()


class Unstable:
    """A step whose results are not finite for the second of several seeds."""

    def __call__(self, model: nn.Module, batch: Any, rank: Any) -> Any:
        right(model, batch, rank)
        return {"size": batch[0].new_tensor(torch.inf if torch.initial_seed() == 2 else 1.0)}


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


PARTS = "measure_in_parts apart"
COSTS: dict[str, tuple[Any, Any, Any, Sequence[int], bool | None, dict[str, int]]] = {
    "rounding within operators": (
        *(right, Narrow, build, (6, 6, 6), False),
        {"measure_provisionally": 3, "measure_slightly_moved": 3, "measure": 0},
    ),
    "not finite": (_unstable, Counted, build, (6,), None, {"measure_provisionally": 1, "measure": 1}),
    "large and wrong": (tutorial, Counted, _large, (5, 5), True, {PARTS: 1}),
    "large, of more runs": (Adaptive(), Counted, _large, (5, 5), False, {"measure_provisionally": 2, PARTS: 0}),
    # What ranks cannot tell together, or die of, is measured by one, and it is not tried again.
    "large, not finite": (
        *(Unstable(), Counted, _large, (5, 5, 5), None),
        {PARTS: 1, "measure_provisionally": 3, "measure": 1},
    ),
    "large, of which ranks die": (
        *(right, Crowded, _large, (5, 5, 5), False),
        {"_dies apart": 1, "measure_provisionally": 3},
    ),
    # All but the first, by which it is known to be large.
    "large, refused by one device": (even_only, Counted, _large, (6, 5, 6), False, {PARTS: 2, "measure": 0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COSTS)
def test_each_case_is_measured_no_more_than_it_needs(ranks, name):
    step, kind, model, samples, wrong, ran = COSTS[name]
    trials, counted = _trials(ranks, step, kind=kind, of=model)
    failed = [trials.run(Scenario(2, number, seed=seed)) for seed, number in enumerate(samples)]
    assert {call: counted.ran[call] for call in ran} == ran
    if wrong is None:
        return
    assert all((trial is not None and not trial.expected.provisional) if wrong else trial is None for trial in failed)
    refused = step is even_only
    assert trials.completed[2, ()] == len(samples) - refused and trials._refusals.keys() == (
        {(2, ())} if refused else set()
    )
