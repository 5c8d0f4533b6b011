"""A right use of each kind of collective, in a step that is right for every result of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import nn

from mgpu_check import Rank

Use = Callable[[torch.Tensor, Rank], torch.Tensor]
"""From a rank's rows to a number that is the same on all ranks."""

USES: dict[str, Use] = {}
"""By the name of the collective, and of a variant after a space."""


def use(name: str) -> Callable[[Use], Use]:
    def register(function: Use) -> Use:
        USES[name] = function
        return function

    return register


def build(uses: int = 1) -> nn.ModuleList:
    """A layer for each use, and the last for a mistake."""
    return nn.ModuleList([*(nn.Linear(4, 4) for _ in range(uses)), nn.Linear(4, 2)])


def reference(model: nn.ModuleList, batch: torch.Tensor) -> None:
    *of_uses, last = model
    loss = last(batch).square().mean()
    for layer in of_uses:
        loss = loss + layer(batch).logsumexp(1).mean()
    loss.backward()


def step(model: nn.ModuleList, batch: torch.Tensor, rank: Rank, names: Sequence[str], mistake: str) -> None:
    """Shift logits by numbers that ranks find together, as a stable softmax does: the loss does not depend on them.

    Args:
        names: the use for each layer but the last.
        mistake: what is done to the gradients of the last layer: "doubled" on 2 ranks, "local", or "" for nothing.
    """
    model.to(rank.device).zero_grad()
    *of_uses, last = model
    x = batch.chunk(rank.size)[rank.index].to(rank.device)
    loss = last(x).square().mean()
    for layer, name in zip(of_uses, names, strict=True):
        logits = layer(x)
        given = x if name.endswith(" of data") else logits if "differentiable" in name else logits.detach()
        shift = USES[name.removesuffix(" of data")](given, rank)
        loss = loss + ((logits - shift).logsumexp(1) + shift).mean()
    loss.backward()
    for layer in model:
        for parameter in layer.parameters():
            if layer is not last or mistake != "local":
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            if layer is last and mistake == "doubled":
                parameter.grad *= rank.size


@use("all_reduce")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    largest = x.max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


@use("all_gather uneven")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    counts = [len(x) * (index + 1) for index in range(rank.size)]
    parts = [x.new_empty(count, 4) for count in counts]
    dist.all_gather(parts, x.repeat(rank.index + 1, 1))
    return torch.cat(parts).max()


@use("reduce_scatter")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    part = x.new_empty(4)
    dist.reduce_scatter(part, [x.sum(0) for _ in range(rank.size)])
    return part.mean()


def together(x: torch.Tensor) -> torch.Tensor:
    total = x.sum()
    dist.all_reduce(total)
    return total


@use("all_to_all_single")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    taken = x.new_empty(rank.size)
    dist.all_to_all_single(taken, x.mean().repeat(rank.size))
    return together(taken)


def exchange(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    """Exchange rows with neighbours that have different numbers of them."""
    after, before = (rank.index + 1) % rank.size, (rank.index - 1) % rank.size
    given = x.mean(0).repeat(rank.index + 1, 1)
    taken = x.new_empty(before + 1, 4)
    for work in dist.batch_isend_irecv([
        dist.P2POp(dist.isend, given, after),
        dist.P2POp(dist.irecv, taken, before),
    ]):  # fmt: skip
        work.wait()
    return together(taken)


USES["isend"] = exchange


def pipeline(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    """Ranks send and receive at other lines, and the last gives what comes out to all."""
    number = x.max()
    if rank.size == 1:
        return number
    if rank.index == 0:
        dist.isend(number, 1).wait()
    elif rank.index == 1:
        dist.irecv(number, 0).wait()
    dist.broadcast(number, 1)
    return number


USES["isend of a pipeline"] = pipeline


USES |= {
    "all_reduce differentiable": lambda x, rank: differentiable.all_reduce(x.sum()),
    "all_gather differentiable": lambda x, rank: torch.cat(differentiable.all_gather(x)).mean(),
    "all_gather_tensor": lambda x, rank: functional.all_gather_tensor(x.contiguous(), 0, dist.group.WORLD).mean(),
}
