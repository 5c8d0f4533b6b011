"""Mistakes that are near each other get their own names, and the report says where ranks first part."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_check import Rank
from mgpu_check.gates.gate_arguments import Program
from tests.gates.diagnosed import backward, loss, mlp, part, regression, report, synchronize
from tests.gates.pages import program_of
from tests.gates.single_cases import failure
from tests.gates.steps import Batch, refuted

pytestmark = pytest.mark.gpus(2)


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def trains(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(model, batch)
    optimizer.step()


def trains_together(model: nn.Module, batch: Batch, rank: Rank, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(model, part(batch, rank))
    synchronize(model, rank)
    optimizer.step()


def train_sgd(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    trains(model, batch, torch.optim.SGD(model.parameters(), lr=0.1))
    return parameters(model)


def freezes_on_rank_1(model, batch, rank, wrong):
    model[0].requires_grad_(not (wrong and rank.index == 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    backward(model, part(batch, rank))
    for value in model.parameters():
        total = torch.zeros_like(value) if value.grad is None else value.grad
        dist.all_reduce(total)
        if value.grad is not None:
            value.grad = total / rank.size
    optimizer.step()
    return parameters(model)


def adam_of(model: nn.Module) -> tuple[torch.optim.Adam, dict[str, Any]]:
    """A fresh optimizer, and the state of one that has stepped."""
    other = copy.deepcopy(model)
    stepped = torch.optim.Adam(other.parameters(), lr=0.01)
    for number, value in enumerate(other.parameters()):
        value.grad = torch.linspace(-1, number, value.numel()).view_as(value)
    stepped.step()
    return torch.optim.Adam(model.parameters(), lr=0.01), stepped.state_dict()


def resume(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    optimizer, state = adam_of(model)
    optimizer.load_state_dict(state)
    trains(model, batch, optimizer)
    return parameters(model)


def restores_the_optimizer_on_rank_0(model, batch, rank, wrong):
    optimizer, state = adam_of(model)
    if rank.index == 0 or not wrong:
        optimizer.load_state_dict(state)
    trains_together(model, batch, rank, optimizer)
    return parameters(model)


def weigh(model: nn.Module, batch: Batch) -> dict[str, Any]:
    running = 0.5 + 0.5 * loss(model, batch)["loss"]
    return train_sgd(model, batch) | {"running": running}


def keeps_a_running_loss(model, batch, rank, wrong):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    mine = part(batch, rank)
    backward(model, mine)
    synchronize(model, rank)
    running = loss(model, mine)["loss"]
    optimizer.step()
    if not wrong:
        dist.all_reduce(running)
        running /= rank.size
    return parameters(model) | {"running": 0.5 + 0.5 * running}


PROGRAMS = [  # a step, what one device does, the mistake, and in what ranks first part
    (freezes_on_rank_1, train_sgd, "decision-per-rank", "which parameters require gradients"),
    (restores_the_optimizer_on_rank_0, resume, "restored-on-one-rank", "in what they call: Optimizer.load_state_dict"),
    (keeps_a_running_loss, weigh, "value-of-one-rank", "returned running"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "reference", "mistake", "parting"), PROGRAMS)
def test_a_program_is_named_by_its_mistake(ranks, step, reference, mistake, parting):
    found = report(ranks, functools.partial(step, wrong=True), reference=reference)
    assert found.mistakes[0] == mistake, str(found)
    where = re.search(r"ranks first part (?:at|after) tests/gates/\w+\.py:\d+, (.*)", str(found))
    assert where is not None and parting in where[1], str(found)


@pytest.mark.parametrize(("step", "reference"), [(step, reference) for step, reference, *_ in PROGRAMS])
def test_its_twin_is_right(ranks, step, reference):
    assert failure(ranks, Program(functools.partial(step, wrong=False), mlp, regression, reference), 2, 4) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "head"])
def test_only_what_ranks_divide_are_experts(ranks, name):
    """The page's program with another gradient, of what all ranks hold, off by the size of the group."""
    page, _ = program_of("expert-gradients-factor", "right")

    def step(model, batch, rank):
        page.step(model, batch, rank)
        for parameter in getattr(model, name).parameters():
            if parameter.grad is not None:
                parameter.grad *= rank.size

    mistake = "expert-gradients-factor" if name == "experts" else "world-size-factor"
    refuted(ranks, step, mistake, build=page.build, batch=page.batch, sizes=8, max_examples=1)
