"""A step that rounds more on ranks than one device does: its own rounding is no difference, and hides no other one."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_check import Rank
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.search import trials
from mgpu_check.gates.search.scenarios import Scenario
from tests.gates.single_cases import failures

pytestmark = pytest.mark.gpus(2)


def build() -> nn.Module:
    return nn.Linear(4, 4)


def reference(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).logsumexp(1).mean().backward()


def step(model: nn.Module, batch: torch.Tensor, rank: Rank, shift: float, factor: float = 1.0) -> None:
    """Shift the logits, which changes only their rounding."""
    model.to(rank.device)
    x = batch.chunk(rank.size)[rank.index].to(rank.device)
    ((model(x) - shift).logsumexp(1) + shift).mean().mul(factor).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def batch(n: int) -> torch.Tensor:
    return torch.randn(n, 4)


def refused(ranks, **options):
    program = Program(functools.partial(step, **options), build, batch, reference)
    return failures(ranks, program, *(Scenario(2, 4, seed=seed) for seed in range(4)))


def test_the_rounding_of_the_step_itself_is_no_difference(ranks, monkeypatch):
    assert refused(ranks, shift=47.0) == []
    monkeypatch.setattr(trials, "_OWN_ROUNDING", 0.0)
    assert refused(ranks, shift=47.0) != []


@pytest.mark.parametrize(
    "options", [{"shift": 500.0}, {"shift": 0.0, "factor": 1.00001}, {"shift": 47.0, "factor": 1.001}]
)
def test_other_differences_stay_refused(ranks, options):
    assert refused(ranks, **options) != []
