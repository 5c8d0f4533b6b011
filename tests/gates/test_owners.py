"""Ranks that step only some parameters, or none: right programs pass, and their wrong twins do not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check import assert_step_scales
from tests.gates.diagnosed import mlp, regression
from tests.gates.steps import chunked, refuted

pytestmark = pytest.mark.gpus(4)


def grouped_by_name(named):
    """Matrices and vectors have rates of their own."""
    kinds = ([value for _, value in named if (value.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": values, "lr": lr} for values, lr in zip(kinds, (0.1, 0.3), strict=True)]
    return torch.optim.SGD([group for group in groups if group["params"]], momentum=0.9)


class OneDevice:
    def __init__(self, model):
        self.optimizer = grouped_by_name(list(model.named_parameters()))

    def __call__(self, model, batch):
        self.optimizer.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        self.optimizer.step()


class Owners:
    """Each parameter has an owner, which steps it and sends it to the others."""

    def __init__(self, model, rank, owners=None, by="name", sends=True):
        named = list(model.to(rank.device).named_parameters())
        ranks = min(rank.size, owners or rank.size)
        if by == "name":  # so some rank may have vectors only
            self.owners = [number % ranks for number in range(len(named))]
        else:
            self.owners = [(value.dim() > 1) % ranks for _, value in named]
        own = [pair for pair, owner in zip(named, self.owners, strict=True) if owner == rank.index]
        self.optimizer, self.sends = grouped_by_name(own) if own else None, sends

    def __call__(self, model, batch, rank):
        x, y = chunked(batch, rank)
        model.zero_grad()
        F.mse_loss(model(x), y).div(rank.size).backward()
        for parameter, owner in zip(model.parameters(), self.owners, strict=True):
            dist.reduce(parameter.grad, owner)
            if owner != rank.index:
                parameter.grad = None
        if self.optimizer is not None:
            self.optimizer.step()
        for parameter, owner in zip(model.parameters(), self.owners, strict=True):
            if self.sends:
                dist.broadcast(parameter.data, owner)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"owners": 1}, id="a parameter server"),
        pytest.param({"owners": 3}, id="a rank that owns nothing"),
        pytest.param({"by": "dimensions"}, id="a rank with another group"),
    ],
)
def test_parameters_have_owners(ranks, options):
    right: dict[str, Any] = {
        "build": mlp,
        "batch": regression,
        "reference": OneDevice,
        "sizes": "divisible",
        "max_examples": 3,
    }
    assert_step_scales(ranks, functools.partial(Owners, **options), **right)
    wrong = functools.partial(Owners, **options, sends=False)
    refuted(ranks, wrong, "value-of-one-rank", **right)


def layers():
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


def rows(n):
    return torch.randn(n, 6), torch.randn(n, 6)


class Stages:
    """A pipeline with a stage on each rank. Layers have rates of their own, and some may be frozen."""

    def __init__(self, model, rank, frozen=0, factor=1.0):
        share = 4 // rank.size
        numbers = range(rank.index * share, (rank.index + 1) * share)
        self.layers = model[numbers.start : numbers.stop].to(rank.device)
        model[:frozen].requires_grad_(False)
        rates = {number: 0.1 * (number + 1) * (factor if rank.index else 1.0) for number in numbers if number >= frozen}
        groups = [{"params": list(model[number].parameters()), "lr": rate} for number, rate in rates.items()]
        self.optimizer = torch.optim.SGD(groups, momentum=0.9) if groups else None

    def __call__(self, model, batch, rank):
        x, y = (leaf.to(rank.device) for leaf in batch)
        self.layers.zero_grad()
        if rank.index:
            x = torch.empty_like(x)
            dist.recv(x, rank.index - 1)
            x.requires_grad_()
        out = self.layers(x)
        if rank.index == rank.size - 1:
            F.mse_loss(out, y).backward()
        else:
            dist.send(out.detach(), rank.index + 1)
            gradient = torch.empty_like(out)
            dist.recv(gradient, rank.index + 1)
            if out.requires_grad:
                out.backward(gradient)
        if rank.index:
            dist.send(x.grad, rank.index - 1)
        if self.optimizer is not None:
            self.optimizer.step()


class AllStages:
    def __init__(self, model, frozen=0):
        for layer in model[:frozen]:
            layer.requires_grad_(False)
        groups = [{"params": list(layer.parameters()), "lr": 0.1 * number} for number, layer in enumerate(model, 1)]
        self.optimizer = torch.optim.SGD(groups[frozen:], momentum=0.9)

    def __call__(self, model, batch):
        self.optimizer.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        self.optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 3])
def test_stages_have_rates_of_their_own(ranks, frozen):
    reference = functools.partial(AllStages, frozen=frozen)
    right: dict[str, Any] = {
        "build": layers,
        "batch": rows,
        "reference": reference,
        "sizes": "divisible",
        "max_examples": 3,
    }
    assert_step_scales(ranks, functools.partial(Stages, frozen=frozen), **right)
    named = [] if frozen else ["optimizer-differs"]  # the steps of a rank without an optimizer are not on record
    refuted(ranks, functools.partial(Stages, frozen=frozen, factor=1.1), *named, **right)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 1) for _ in range(4))


class OwnExperts:
    """Each rank trains the experts that it owns; in some batches they get no samples."""

    def __init__(self, model, rank=None, left_out=None):
        first, step = (rank.index, rank.size) if rank is not None else (0, 1)
        self.own = [number for number in range(first, 4, step) if number != left_out]
        parameters = [value for number in self.own for value in model.experts[number].parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)

    def __call__(self, model, batch, rank=None):
        x, y = (leaf.to(rank.device) for leaf in batch) if rank is not None else batch
        if rank is not None:
            model.to(rank.device)
        chosen = x[:, :4].argmax(1)
        self.optimizer.zero_grad()
        for number in self.own:
            here = chosen == number
            if here.any():
                (model.experts[number](x[here]) - y[here]).square().sum().backward()
        self.optimizer.step()


@pytest.mark.slow
def test_experts_of_a_rank_may_get_no_samples(ranks):
    right: dict[str, Any] = {
        "build": Experts,
        "batch": regression,
        "reference": OwnExperts,
        "sizes": "divisible",
        "max_examples": 10,
    }
    assert_step_scales(ranks, OwnExperts, **right)
    refuted(ranks, functools.partial(OwnExperts, left_out=1), **right)
