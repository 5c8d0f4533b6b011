"""Wrong programs that weight one term of the loss, or a part of the sequence, differently, each beside a right
twin."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check import Rank
from tests.gates.diagnosed import mlp, part, program, regression, synchronize
from tests.gates.steps import Batch


class WithLoss(torch.autograd.Function):
    """Hands on a tensor, and puts the gradient of a loss of its own beside the one that comes back."""

    @staticmethod
    def forward(ctx, made, loss, scale):
        ctx.scale = scale
        return made.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.new_tensor(ctx.scale), None


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        for layer in self.layers:
            penalty = 0.1 * torch.as_tensor(layer.weight).square().sum()
            x = WithLoss.apply(layer(x).tanh(), penalty, scale)
        return x.sum(-1, keepdim=True)


@program(
    "loss-term-factor",
    Layers,
    regression,
    lambda model, batch: F.mse_loss(model(batch[0], 1.0), batch[1]).backward(),
    8,
)
def puts_losses_of_layers_in(model, batch, rank, wrong):
    x, y = (leaf.to(rank.device) for leaf in part(batch, rank))
    made = model.to(rank.device)(x, 1.0 if wrong else 1 / rank.size)
    ((made - y).square().sum() / len(batch[0])).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def penalized(model: nn.Sequential, batch: Batch) -> None:
    F.mse_loss(model(batch[0]), batch[1]).backward()
    (0.1 * torch.as_tensor(model[0].weight).square().sum()).backward()


@program("loss-term-factor", mlp, regression, penalized, 4)
def goes_back_from_a_penalty_by_itself(model, batch, rank, wrong):
    x, y = (leaf.to(rank.device) for leaf in part(batch, rank))
    model.to(rank.device)
    ((model(x) - y).square().sum() / len(batch[0])).backward()
    (0.1 * torch.as_tensor(model[0].weight).square().sum() / (1 if wrong else rank.size)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


@program("world-size-factor", mlp, regression, penalized, 4)
def sums_all_terms(model, batch, rank, wrong):
    """All terms are off alike: no one of them is."""
    model.to(rank.device)
    F.mse_loss(model(part(batch, rank)[0].to(rank.device)), part(batch, rank)[1].to(rank.device)).backward()
    (0.1 * torch.as_tensor(model[0].weight).square().sum()).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 1 if wrong else rank.size


# Micro-batches


def tokens_of(n: int) -> Batch:
    """Each half of the batch has as many labels, which its samples share unequally."""
    labels = torch.randint(5, (n, 6))
    labels[: n // 2, 1:] = -100
    return torch.randint(5, (n, 6)), labels


def tagger() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 5))


def tagged(model: nn.Module, batch: Batch) -> None:
    F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100).backward()


@program("mean-of-means", tagger, tokens_of, tagged, 8)
def averages_over_micro_batches(model, batch, rank, wrong):
    tokens, labels = (leaf.to(rank.device) for leaf in part(batch, rank))
    model.to(rank.device)
    count = (labels != -100).sum()
    for some, wanted in zip(tokens.tensor_split(2), labels.tensor_split(2), strict=True):
        losses = F.cross_entropy(model(some).flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum")
        (losses / (2 * (wanted != -100).sum() if wrong else count)).backward()
    synchronize(model, rank)


# Labels of parts of a sequence


def texts(n: int) -> Batch:
    return (torch.randint(9, (n, 8)),)


def reader() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, 9))


def read(model: nn.Module, batch: Batch) -> None:
    F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten()).backward()


def learn(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, rank: Rank) -> None:
    count = (labels != -100).sum()
    dist.all_reduce(count)
    losses = F.cross_entropy(model.to(rank.device)(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    (losses / count).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def next_of(tokens: torch.Tensor) -> torch.Tensor:
    return F.pad(tokens[:, 1:], (0, 1), value=-100)


def from_both_ends(tokens: torch.Tensor, rank: Rank) -> torch.Tensor:
    chunks = tokens.chunk(2 * rank.size, dim=1)
    return torch.cat([chunks[rank.index], chunks[-1 - rank.index]], 1).to(rank.device)


@program("labels-shifted-after-split", reader, texts, read, 2)
def shifts_parts_from_both_ends(model, batch, rank, wrong):
    tokens, labels = (from_both_ends(leaf, rank) for leaf in (batch[0], next_of(batch[0])))
    learn(model, tokens, next_of(tokens) if wrong else labels, rank)


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
