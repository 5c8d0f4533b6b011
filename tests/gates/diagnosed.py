"""Wrong programs, each beside a right twin, whose mistakes are near others: which one it is shows in small things."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check import Rank, assert_step_scales
from mgpu_check.gates.gate_arguments import RanksFixture
from tests.gates.steps import Batch, raised


class Diagnosed(NamedTuple):
    step: Callable[..., Any]  # with `wrong` as an option
    mistake: str  # which it makes where `wrong` is set
    build: Callable[[], Any]
    batch: Callable[[int], Batch]
    reference: Callable[..., Any] | None
    samples: int
    parting: str = ""  # in what ranks first part, where they do


ALL: dict[str, Diagnosed] = {}


def program(*others: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a step with the other fields of `Diagnosed`."""

    def put(step: Callable[..., Any]) -> Callable[..., Any]:
        ALL[step.__name__] = Diagnosed(step, *others)
        return step

    return put


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def regression(n: int) -> Batch:
    x = torch.randn(n, 6)
    return x, 3 * x.sum(1, keepdim=True).sin()


def part(batch: Batch, rank: Rank) -> Batch:
    return tuple(leaf[rank.index :: rank.size] for leaf in batch)


def synchronize(model: nn.Module, rank: Rank) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.size


def backward(model: nn.Module, batch: Batch) -> None:
    F.mse_loss(model(batch[0]), batch[1]).backward()


@torch.no_grad()
def loss(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {"loss": F.mse_loss(model(batch[0]), batch[1])}


def report(ranks: RanksFixture, step: Any, gate: Callable[..., None] = assert_step_scales, **options: Any) -> Any:
    """The mismatch of a step on two ranks, by default of `mlp`."""
    of: dict[str, Any] = {"build": mlp, "batch": regression, "sizes": 4, "world_sizes": [2], "max_examples": 1}
    return raised(gate, ranks, step, **of | options)


# What one rank alone keeps


class Averaged:
    def __init__(self, model: nn.Module, rank: Rank, wrong: bool) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.average = copy.deepcopy(model)
        self.keeps = rank.index == 0 or not wrong

    def __call__(self, model, batch, rank):
        self.optimizer.zero_grad()
        x, y = part(batch, rank)
        F.mse_loss(model(x), y).backward()
        synchronize(model, rank)
        self.optimizer.step()
        with torch.no_grad():
            for old, new in zip(self.average.parameters(), model.parameters(), strict=True):
                if self.keeps:
                    old.lerp_(new, 0.5)
            total = F.mse_loss(self.average(x), y, reduction="sum")
        dist.all_reduce(total)
        return {"loss": total / len(batch[0])}


@program("value-of-one-rank", mlp, regression, None, 4, "in Sequential, the sum of 0.weight")
def averages_on_rank_0(wrong):
    return functools.partial(Averaged, wrong=wrong)


# Labels of parts of a sequence


def texts(n: int) -> Batch:
    return (torch.randint(9, (n, 8)),)


def reader() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, 9))


def read(model: nn.Module, batch: Batch) -> None:
    F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten()).backward()


def next_of(tokens: torch.Tensor) -> torch.Tensor:
    return F.pad(tokens[:, 1:], (0, 1), value=-100)


@program("labels-shifted-after-split", reader, texts, read, 2)
def picks_labels_by_gather(model, batch, rank, wrong):
    tokens, labels = (leaf.chunk(rank.size, 1)[rank.index].to(rank.device) for leaf in (batch[0], next_of(batch[0])))
    labels = next_of(tokens) if wrong else labels
    count = (labels >= 0).sum()
    dist.all_reduce(count)
    chances = model.to(rank.device)(tokens).log_softmax(-1)
    picked = chances.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    (-(picked * (labels >= 0)).sum() / count).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


# Steps whose ranks part before their end: the report gives the line


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
