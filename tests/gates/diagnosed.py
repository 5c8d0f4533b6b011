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


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@torch.no_grad()
def loss(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {"loss": F.mse_loss(model(batch[0]), batch[1])}


def report(ranks: RanksFixture, step: Any, gate: Callable[..., None] = assert_step_scales, **options: Any) -> Any:
    """The mismatch of a step on two ranks, by default of `mlp`."""
    of: dict[str, Any] = {"build": mlp, "batch": regression, "sizes": 4, "world_sizes": [2], "max_examples": 1}
    return raised(gate, ranks, step, **of | options)


# Norms


def clipped(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    F.mse_loss(model(batch[0]), batch[1].expand(-1, 8)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return gradients(model)


@program("clipped-before-synchronization", lambda: nn.Linear(6, 8), regression, clipped, 4)
def clips_by_the_norm_of_its_columns(model, batch, rank, wrong):
    x, y = batch
    own = {name: value.detach().chunk(rank.size)[rank.index].clone() for name, value in model.named_parameters()}
    for value in own.values():
        value.requires_grad_()
    F.mse_loss(F.linear(x, own["weight"], own["bias"]), y.expand(-1, 8 // rank.size)).div(rank.size).backward()
    total = sum(value.grad.square().sum() for value in own.values())
    if not wrong:
        dist.all_reduce(total)
    scale = (0.1 / (total.sqrt() + 1e-6)).clamp(max=1.0)
    return {name: torch.cat(gathered(value.grad * scale, rank)) for name, value in own.items()}


def gathered(value: torch.Tensor, rank: Rank) -> list[torch.Tensor]:
    parts = [torch.empty_like(value) for _ in range(rank.size)]
    dist.all_gather(parts, value)
    return parts


# Scales


@program("decision-per-rank", mlp, regression, backward, 4)
def takes_off_the_mean_of_scales(model, batch, rank, wrong):
    x, y = part(batch, rank)
    value = F.mse_loss(model(x), y)
    scale = 1 / value.detach()
    mean = scale.clone()
    dist.all_reduce(mean)
    mean /= rank.size
    (value * (scale if wrong else mean)).backward()
    synchronize(model, rank)
    for parameter in model.parameters():
        parameter.grad /= mean


# Counts


def floors() -> Callable[..., Any]:
    return lambda model, batch: {"length": batch[0].sum() / len(batch[0])}


@program("integer-division", mlp, lambda n: (torch.randint(1, 50, (n,)),), floors(), 6)
def drops_the_fraction_of_a_mean(model, batch, rank, wrong):
    (x,) = part(batch, rank)
    total = torch.stack([x.sum(), torch.tensor(len(x))])
    dist.all_reduce(total)
    return {"length": (total[0] // total[1]).float() if wrong else total[0] / total[1]}


# Collectives that autograd does not see


def pairs(n: int) -> Batch:
    x = torch.randn(n, 6)
    return x, x + 0.3 * torch.randn(n, 6)


def contrastive(model: nn.Module, batch: Batch) -> None:
    one, other = model(batch[0]), model(batch[1])
    F.cross_entropy(F.normalize(one) @ F.normalize(other).t(), torch.arange(len(one))).backward()


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, rank):
        ctx.rank = rank
        return torch.cat(gathered(own, rank))

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient)
        return gradient.chunk(ctx.rank.size)[ctx.rank.index], None


@program("gradient-cut-by-collective", lambda: nn.Linear(6, 4), pairs, contrastive, 4)
def gathers_what_is_detached(model, batch, rank, wrong):
    one, other = (model(leaf.chunk(rank.size)[rank.index]) for leaf in batch)
    if wrong:
        parts = gathered(other.detach(), rank)
        parts[rank.index] = other
        others = torch.cat(parts)
    else:
        others = Gathered.apply(other, rank)
    labels = torch.arange(len(one)) + len(one) * rank.index
    F.cross_entropy(F.normalize(one) @ F.normalize(others).t(), labels).backward()
    synchronize(model, rank)


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


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@program("value-of-one-rank", Centered, regression, None, 4, "of buffer mean")
def keeps_a_buffer_on_rank_0(model, batch, rank, wrong):
    x, y = part(batch, rank)
    mean = x.sum(0)
    dist.all_reduce(mean)
    if rank.index == 0 or not wrong:
        model.mean.lerp_(mean / len(batch[0]), 0.1)
    F.mse_loss(model(x), y).backward()
    synchronize(model, rank)


# Memory


def convolution() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 1))


def images(n: int) -> Batch:
    return torch.randn(n, 3, 4, 4), torch.randn(n, 1)


@program("memory-formats-differ", convolution, images, backward, 4, "of gradient of 0.weight")
def reduces_by_places_in_memory(model, batch, rank, wrong):
    if rank.index and wrong:
        model.to(memory_format=torch.channels_last)
    backward(model, part(batch, rank))
    for parameter in model.parameters():
        flat = parameter.grad.as_strided((parameter.numel(),), (1,))
        dist.all_reduce(flat)
        flat /= rank.size


# Results that do not stay


@program("result-discarded", mlp, regression, backward, 8)
def writes_over_the_shard_of_a_micro_batch(model, batch, rank, wrong):
    x, y = part(batch, rank)
    shard: Any = 0
    for some, right in zip(x.chunk(2), y.chunk(2), strict=True):
        model.zero_grad()
        (F.mse_loss(model(some), right, reduction="sum") / len(batch[0])).backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()] + [torch.zeros(1)])
        dist.all_reduce(flat)  # what reduce_scatter does, on backends that lack it
        mine = flat[: len(flat) // rank.size * rank.size].chunk(rank.size)[rank.index].clone()
        shard = mine if wrong else shard + mine
    whole = torch.cat(gathered(shard, rank))
    start = 0
    for parameter in model.parameters():
        parameter.grad = whole[start : start + parameter.numel()].view_as(parameter).clone()
        start += parameter.numel()


@program("result-discarded", mlp, regression, backward, 4)
def writes_over_a_bucket(model, batch, rank, wrong):
    backward(model, part(batch, rank))
    bucket, reduced = torch.zeros(64), []
    for parameter in model.parameters():
        flat = bucket[: parameter.numel()] if wrong else torch.zeros(parameter.numel())
        flat.copy_(parameter.grad.flatten())
        dist.all_reduce(flat)
        reduced.append(flat)
    for parameter, flat in zip(model.parameters(), reduced, strict=True):
        parameter.grad.copy_(flat.view_as(parameter) / rank.size)
