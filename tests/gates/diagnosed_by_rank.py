"""Wrong programs whose ranks part before the end of the step: the report gives the line where they part."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from mgpu_check import Rank
from tests.gates.diagnosed import backward, gradients, loss, mlp, part, program, regression, synchronize
from tests.gates.steps import Batch


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


# Ranks that start apart


class Seeded(nn.Sequential):
    def __init__(self, offset: int) -> None:
        torch.manual_seed(100 + offset)  # where builds_apart parts
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def seeded_by_rank() -> nn.Module:
    return Seeded(dist.get_rank())


def count(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {"samples": len(batch[0])}


@program("different-initialization", seeded_by_rank, regression, count, 4, "in manual_seed, the seed")
def builds_apart(model, batch, rank, wrong):
    for value in model.parameters() if not wrong else ():
        dist.broadcast(value.data, src=0)
    trains_together(model, batch, rank, torch.optim.SGD(model.parameters(), lr=0.1))
    return count(model, batch)


# What ranks decide


@program("decision-per-rank", mlp, regression, train_sgd, 4, "which parameters require gradients")
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


def train_twice(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        trains(model, batch, optimizer)
    return parameters(model)


@program("decision-per-rank", mlp, regression, train_twice, 4, "of gradient of 0.weight")
def scales_down_by_itself(model, batch, rank, wrong):
    optimizer, scale = torch.optim.SGD(model.parameters(), lr=0.1), 8.0
    x, y = part(batch, rank)
    for _ in range(2):
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) * scale).backward()
        synchronize(model, rank)
        for value in model.parameters():
            value.grad /= scale
        optimizer.step()
        scale *= 0.5 if wrong and rank.index == 1 else 1.0
    return parameters(model)


def normalized() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def evaluated(model: nn.Module, batch: Batch) -> None:
    backward(model.eval(), batch)


@program("value-of-one-rank", normalized, regression, evaluated, 4, "in Sequential, whether it is in training mode")
def evaluates_on_rank_0(model, batch, rank, wrong):
    model.train(wrong and rank.index > 0)
    x, y = part(batch, rank)
    F.mse_loss(model(x), y).backward()  # where evaluates_on_rank_0 parts
    synchronize(model, rank)


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


@program("restored-on-one-rank", mlp, regression, resume, 4, "in what they call: Optimizer.load_state_dict")
def restores_the_optimizer_on_rank_0(model, batch, rank, wrong):
    optimizer, state = adam_of(model)
    if rank.index == 0 or not wrong:
        optimizer.load_state_dict(state)  # where restores_the_optimizer_on_rank_0 parts
    trains_together(model, batch, rank, optimizer)
    return parameters(model)


# Gradients that stay each rank's own until an optimizer steps


@program("gradients-not-synchronized", mlp, regression, train_sgd, 8, "in backward, the norm of gradient of 0.weight")
def ends_under_no_sync(model, batch, rank, wrong):
    net = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    first, last = zip(*(leaf.chunk(2) for leaf in part(batch, rank)), strict=True)
    if not wrong:
        first, last = last, first
        with net.no_sync():
            (F.mse_loss(net(first[0]), first[1]) / 2).backward()
        (F.mse_loss(net(last[0]), last[1]) / 2).backward()
    else:
        (F.mse_loss(net(first[0]), first[1]) / 2).backward()
        with net.no_sync():
            (F.mse_loss(net(last[0]), last[1]) / 2).backward()  # where ends_under_no_sync parts
    optimizer.step()
    return parameters(model)


def train_adam(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    trains(model, batch, torch.optim.Adam(model.parameters(), lr=0.01))
    return parameters(model)


@program("gradients-not-synchronized", mlp, regression, train_adam, 4, "in backward, the norm of gradient of 0.weight")
def averages_what_adam_has_made(model, batch, rank, wrong):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer.zero_grad()
    x, y = part(batch, rank)
    F.mse_loss(model(x), y).backward()  # where averages_what_adam_has_made parts
    if not wrong:
        synchronize(model, rank)
    optimizer.step()
    for value in model.parameters() if wrong else ():
        dist.all_reduce(value.data)
        value.data /= rank.size
    return parameters(model)


# What is each rank's own, and no gradient


def weigh(model: nn.Module, batch: Batch) -> dict[str, Any]:
    running = 0.5 + 0.5 * loss(model, batch)["loss"]
    return train_sgd(model, batch) | {"running": running}


@program("value-of-one-rank", mlp, regression, weigh, 4, "returned running")
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


# Sums over ranks, where no rank parts from another


def near_one(n: int) -> Batch:
    return 1 + 0.1 * torch.randn(n, 6), torch.zeros(n)


def clip_mean(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    model(batch[0]).mean().backward()  # of a norm near 0.9
    nn.utils.clip_grad_norm_(model.parameters(), 1.2)
    return gradients(model)


@program("world-size-factor", lambda: nn.Linear(6, 8), near_one, clip_mean, 4)
def clips_a_sum(model, batch, rank, wrong):
    model(part(batch, rank)[0]).mean().backward()
    for value in model.parameters():
        dist.all_reduce(value.grad)
        value.grad /= 1 if wrong else rank.size
    nn.utils.clip_grad_norm_(model.parameters(), 1.2)
    return gradients(model)
