"""Single calls of a wrong step are changed: the change that makes it right names the mistake and the line."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_check import Rank
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.torch_hooks.collectives import own_groups
from tests.gates.diagnosed import mlp, report, synchronize
from tests.gates.single_cases import failure
from tests.gates.steps import chunked

pytestmark = pytest.mark.gpus(4)


def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 6), 2 * torch.randn(n, 1) + 3


def trains(model, rank, x, y) -> None:
    nn.functional.mse_loss(model.to(rank.device)(x), y).backward()
    synchronize(model, rank)


def centered(model, batch, rank, group):
    """Targets are centered by the mean over a group, whose statistics travel together."""
    x, y = chunked(batch, rank)
    statistics = torch.stack([torch.tensor(float(len(y)), device=rank.device), y.sum()])
    dist.all_reduce(statistics, group=group)
    trains(model, rank, x, y - statistics[1] / statistics[0])


def named(ranks, step, of=mlp, **options) -> Any:
    return report(ranks, step, **{"build": of, "batch": batch, "sizes": 8, **options})


def test_groups_of_other_ranks_are_not_among_those_of_a_rank(ranks):
    def groups(rank):
        for other in range(rank.size):
            dist.new_group([other])
        return [dist.get_process_group_ranks(group) for group in own_groups()]

    assert ranks.run(groups, size=2) == [[[0, 1], [0]], [[0, 1], [1]]]


@pytest.mark.slow
def test_a_wrong_step_that_no_change_puts_right_is_named_by_none(ranks):
    def step(model, batch, rank):
        centered(model, batch, rank, None)
        if rank.size > 1:
            for parameter in model.parameters():
                parameter.grad += 0.1 * torch.linspace(1, 2, parameter.numel(), device=rank.device).view_as(parameter)

    found = named(ranks, step)
    assert "the step is right" not in str(found)


# Each change makes a planted mistake right; the twin passes.


def reduced(value: torch.Tensor, rank: Rank, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    dist.all_reduce(value, op)
    return value


def scaled_by(model, batch, rank, scale) -> None:
    """Targets are divided by a number that depends on all samples."""
    x, y = chunked(batch, rank)
    trains(model, rank, x, y / scale(y))


def by_a_mean_for_a_sum(model, batch, rank, wrong):
    scaled_by(model, batch, rank, lambda y: 1 + reduced(y.abs().sum(), rank) / (rank.size if wrong else 1))


def by_its_own_number(model, batch, rank, wrong):
    """Each rank's samples are weighed by where they are in the batch; that is each rank's own."""
    x, y = chunked(batch, rank)
    first = torch.tensor(float(rank.index * len(x)), device=rank.device)
    if wrong:
        dist.all_reduce(first)
    weights = (torch.linspace(0, len(x) - 1, len(x), device=rank.device) + first).sin().unsqueeze(1)
    nn.functional.mse_loss(weights * model.to(rank.device)(x), y).backward()
    synchronize(model, rank)


def by_a_sum_of_norms(model, batch, rank, wrong):
    def total(y):
        squares = reduced(y.norm() ** (1 if wrong else 2), rank)
        return 1 + (squares if wrong else squares.sqrt())

    scaled_by(model, batch, rank, total)


def by_gradients_that_are_reduced_already(model, batch, rank, wrong):
    x, y = chunked(batch, rank)
    trains(model, rank, x, y)
    for parameter in model.parameters() if wrong else ():
        dist.all_reduce(parameter.grad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "mistake", "evidence"),
    [
        (by_a_mean_for_a_sum, "world-size-factor", "multiplied by 2, the size of its group, the step is right"),
        (by_its_own_number, "wrong-reduction", "each rank needs its own value"),
        (by_a_sum_of_norms, "wrong-reduction", "with the root of the sum of squares makes the step right"),
        (by_gradients_that_are_reduced_already, "reduced-again", "has reduced already; without it the step is right"),
    ],
)
def test_the_change_that_makes_a_step_right_names_its_mistake(ranks, program, mistake, evidence):
    found = named(ranks, functools.partial(program, wrong=True))
    assert found.mistakes[0] == mistake, str(found)
    assert evidence in str(found)
    assert failure(ranks, Program(functools.partial(program, wrong=False), mlp, batch), 2, 4) is None
