"""Steps that the gate must not pass: without values to compare, with too few, or with values that only look right."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from mgpu_check import ScalingMismatch
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.run.measurement import measure
from mgpu_check.gates.search.scenarios import Scenario
from tests.gates.single_cases import failures
from tests.gates.steps import ALL, batch, build, mine, passes, refuted, summed, total

pytestmark = pytest.mark.gpus(4)


ONE: dict[str, Any] = {"sizes": [2], "max_examples": 1}  # one size, and so nothing to make smaller


def test_a_step_on_a_copy(ranks):
    def step(model, batch, rank):
        summed(copy.deepcopy(model).to(rank.device), batch, rank).backward()

    with pytest.raises(ValueError, match="leaves no gradient, changes no parameter or buffer, and returns nothing"):
        passes(ranks, step, **ONE)


def unsynchronized(model, batch, rank):
    summed(model.to(rank.device), batch, rank).backward()


@pytest.mark.slow
def test_large_results_do_not_stand_for_gradients(ranks):
    def step(model, batch, rank):
        unsynchronized(model, batch, rank)
        return {"inputs": batch[0].repeat(20, 1)}

    refuted(ranks, step, "gradients-not-synchronized", sizes=[4], max_examples=1)


def test_a_reference_alone_decides_how_exact_a_count_must_be(ranks):
    def step(model, batch, rank):  # float16 has no odd numbers above 2048
        return {"tokens": torch.tensor(2051.0 * len(batch[0]), device=rank.device).half().float()}

    def reference(model, batch):
        return {"tokens": torch.tensor(2051.0 * len(batch[0]))}

    (trial,) = failures(ranks, Program(step, build, batch, reference), Scenario(2, 3))
    assert trial.relations is not None and [str(name) for name in trial.relations.wrong] == ["returned tokens"]


def test_a_class_draws_the_same_numbers_when_it_is_measured_in_float64(ranks):
    class Step:
        def __init__(self, model, rank):
            with torch.no_grad():
                for parameter in model.to(rank.device).parameters():
                    nn.init.normal_(parameter, std=0.3)

        def __call__(self, model, batch, rank):
            summed(model, batch, rank).backward()

    (expected,) = ranks.run(measure, Program(Step, build, batch), Scenario(2, 4), size=1)
    for name, allowed in expected.tolerance.items():
        assert allowed.max() <= 1e-4 * expected.exact[name].abs().max(), name


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, dtype=torch.complex64))


@pytest.mark.slow
def test_complex_numbers(ranks):
    def step(model, batch, rank, factor=1.0):
        loss = (mine(batch, rank)[0].cpu() * model.weight).abs().square().sum() / len(batch[0])
        loss.backward()
        dist.all_reduce(model.weight.grad)
        model.weight.grad *= factor ** (rank.size - 1)

    assert failures(ranks, Program(step, Turn, batch), Scenario(2, 5)) == []
    refuted(ranks, functools.partial(step, factor=2.0), build=Turn, **ONE)


def test_names_that_only_one_side_returns(ranks):
    def step(model, batch, rank):
        return {"loss": batch[0].sum()}

    for reference in (lambda model, batch: None, lambda model, batch: {"los": 0.0}):
        with pytest.raises(ValueError, match=r"step returns 'loss', and the reference (nothing|'los')"):
            passes(ranks, step, reference=reference)


def test_texts(ranks):
    def step(model, batch, rank, odd=lambda rank: False):
        return {"sum": batch[0].sum(), "name": "b" if odd(rank) else "a"}

    assert failures(ranks, Program(step, build, batch), Scenario(2, 2)) == []
    odd = functools.partial(step, odd=lambda rank: rank.index == 1)
    refuted(ranks, odd, match="got 'b', expected 'a', rank 1", **ONE)

    def none(model, batch, rank):
        return {"sum": batch[0].sum(), **({"name": "a"} if rank.size == 1 else {})}

    (trial,) = failures(ranks, Program(none, build, batch), Scenario(2, 2))
    assert trial.relations is not None and "got None, expected 'a'" in str(trial.relations.details)


@pytest.mark.slow
def test_each_world_size_is_tried(ranks):
    def step(model, batch, rank):
        return {"sum": batch[0].sum() + (rank.size == 4)}

    refuted(ranks, step, match="world size 4", **ONE, **ALL)


def test_a_reference_that_cannot_do_one_world_size(ranks):
    def reference(model, batch, world_size):
        if world_size == 4:
            raise RuntimeError("not yet")
        return {"sum": batch[0].sum()}

    with pytest.raises(ValueError, match=r"nothing was compared at world size 4.*not yet"):
        passes(ranks, total, reference=reference, sizes=[4], max_examples=1, **ALL)


@dataclasses.dataclass
class Result:
    half: complex
    large: int
    pair: tuple[Any, ...]


@pytest.mark.slow
def test_numbers_of_other_kinds(ranks):
    def step(model, batch, rank, off=0):
        total = float(batch[0].sum())
        return Result(complex(total, 1.0), 2**70 + off * (rank.size - 1), (total, [torch.ones(2), off * rank.size]))

    assert failures(ranks, Program(step, build, batch), Scenario(2, 2)) == []
    text = refuted(ranks, functools.partial(step, off=1), **ONE)
    assert "returned large" in text and "returned pair.1.1" in text, text
    with pytest.raises(ValueError, match="returned thing of type object; return tensors, numbers or texts"):
        passes(ranks, lambda model, batch, rank: {"thing": object()})


@dataclasses.dataclass
class Named:
    x: torch.Tensor
    names: list[str]


@pytest.mark.slow
def test_batches_of_other_kinds(ranks):
    def step(model, batch, rank, split=True):
        x = batch.x[rank.index :: rank.size] if split else batch.x
        return {"norm": x.norm()}

    def made(n):
        return Named(torch.randn(n, 3), ["a"] * n)

    assert failures(ranks, Program(functools.partial(step, split=False), build, made), Scenario(2, 2)) == []
    refuted(ranks, step, batch=made, **ONE)


def test_a_step_that_fails_now_and_then(ranks):
    def step(model, batch, rank):
        if rank.size > 1 and batch[0].sum() > 0 and int.from_bytes(os.urandom(1), "little") < 128:
            raise IndexError("now and then")
        return {"sum": batch[0].sum()}

    drawn = st.builds(lambda n: batch(n), st.integers(1, 9))
    with pytest.raises(ScalingMismatch, match=r"now and then|first returned|does not scale"):
        passes(ranks, step, batch=drawn, max_examples=40)


class Narrow:
    def __init__(self, model, rank):
        self.net = DDP(model.to(rank.device))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)

    def __call__(self, model, batch, rank):
        x, y = mine(batch, rank)
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.net(x), y, reduction="sum") * rank.size / len(batch[0])
        loss.backward()
        self.optimizer.step()


class Mislabelled(Narrow):
    def __call__(self, model, batch, rank):
        super().__call__(model, (batch[0], batch[1].flip(0) if rank.size > 1 else batch[1]), rank)


def wide():
    return nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 3))


@pytest.mark.slow
def test_rounding_that_decides_the_sign_of_a_step(ranks):
    """Adam takes a whole step in the direction of a gradient that is nothing but rounding errors."""
    cases = [Scenario(2, 4), Scenario(2, 8, seed=1), Scenario(2, 4, steps=2)]
    assert failures(ranks, Program(Narrow, wide, batch), *cases) == []
    assert failures(ranks, Program(Mislabelled, build, batch), Scenario(2, 4)) != []
