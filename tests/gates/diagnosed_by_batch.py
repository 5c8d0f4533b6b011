"""Wrong programs whose ranks take their own shard for the whole batch, each beside a right twin."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check import Rank
from tests.gates.diagnosed import mlp, part, program, regression, synchronize
from tests.gates.steps import Batch


def weighed(model: nn.Module, batch: Batch, rank: Rank | None) -> None:
    """Weigh each sample by how far its target is above the mean, in standard deviations, as advantages are."""
    x, y = batch
    moments = torch.stack([y.mean(), y.square().mean()])
    if rank is not None:
        dist.all_reduce(moments)
        moments /= rank.size
    deviation = (moments[1] - moments[0] ** 2).clamp(min=1e-2).sqrt()
    ((y - moments[0]) / deviation * model(x)).mean().backward()


@program("batch-statistics-per-rank", mlp, regression, lambda model, batch: weighed(model, batch, None), 8)
def weighs_by_its_own_mean(model, batch, rank, wrong):
    weighed(model, part(batch, rank), None if wrong else rank)
    synchronize(model, rank)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(12, 6)
        self.place = nn.Embedding(8, 6)
        self.head = nn.Linear(6, 12)

    def forward(self, tokens: torch.Tensor, first: int) -> torch.Tensor:
        places = torch.arange(first, first + tokens.shape[1])
        return self.head(torch.tanh(self.token(tokens) + self.place(places)))


def sequences(n: int) -> Batch:
    tokens = torch.randint(12, (n, 9))
    return tokens[:, :-1], tokens[:, 1:]


def predicts(model: nn.Module, batch: Batch) -> None:
    F.cross_entropy(model(batch[0], 0).flatten(0, 1), batch[1].flatten()).backward()


def numbers_positions_anew(model, batch, rank, wrong):
    """Each rank has a block of positions. All blocks are of one size, so that their means do count as they should."""
    tokens, following = (leaf.chunk(rank.size, dim=1)[rank.index] for leaf in batch)
    first = 0 if wrong else rank.index * tokens.shape[1]
    F.cross_entropy(model(tokens, first).flatten(0, 1), following.flatten()).backward()
    synchronize(model, rank)


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(12, 6), nn.Parameter(torch.randn(1, 8, 6))
        self.head = nn.Linear(6, 12)

    def forward(self, tokens: torch.Tensor, first: int) -> torch.Tensor:
        places = self.place[:, first : first + tokens.shape[1]]
        return self.head(torch.tanh(self.token(tokens) + places))


@program("positions-restart", Places, sequences, predicts, 4)
def takes_places_anew(model, batch, rank, wrong):
    numbers_positions_anew(model, batch, rank, wrong)


# What each rank computes of its own shard


def normed(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    F.mse_loss(model(batch[0]), batch[1]).backward()
    return {"norm": nn.utils.clip_grad_norm_(model.parameters(), 100.0)}


@program("wrong-reduction", mlp, regression, normed, 4)
def adds_up_norms_of_shards(model, batch, rank, wrong):
    x, y = (leaf.to(rank.device) for leaf in part(batch, rank))
    F.mse_loss(model.to(rank.device)(x), y).backward()
    synchronize(model, rank)
    norm = nn.utils.parameters_to_vector([p.grad for p in model.parameters()]).chunk(rank.size)[rank.index].norm()
    norm = norm if wrong else norm.square()
    dist.all_reduce(norm)
    return {"norm": norm if wrong else norm.sqrt()}


class Codes(nn.Module):
    """Keeps the mean of the inputs that are nearest to each code."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)
        self.codes = nn.Buffer(torch.randn(3, 6))
        self.sums = nn.Buffer(torch.randn(3, 6))

    def learn(self, x: torch.Tensor, alone: bool) -> None:
        nearest = torch.cdist(x, self.codes).argmin(1)
        sums = F.one_hot(nearest, 3).to(x.dtype).T @ x
        if not alone:
            dist.all_reduce(sums)
        self.sums.lerp_(sums, 0.2)


def codes(model: Codes, batch: Batch) -> None:
    model.learn(batch[0], alone=True)
    F.mse_loss(model.head(batch[0]), batch[1]).backward()


@program("batch-statistics-per-rank", Codes, regression, codes, 8)
def hands_out_sums_of_the_samples_of_rank_0(model, batch, rank, wrong):
    x, y = (leaf.to(rank.device) for leaf in part(batch, rank))
    model.to(rank.device).learn(x, alone=wrong)
    dist.broadcast(model.sums, 0)  # as DistributedDataParallel does before each forward
    F.mse_loss(model.head(x), y).backward()
    synchronize(model, rank)
