"""Programs that communicate by hand: gradients, shards of the optimizer, parts of layers, metrics."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from programs.models import (
    CLASSES,
    Parallel,
    convnet,
    images,
    mlp,
    numbers,
    regressor,
    vectors,
)
from programs.setting import averaged, placed, program, shard


@program(lambda: convnet(lambda channels: nn.GroupNorm(2, channels)), images)
def group_norm_by_hand(model, batch, rank):
    placed(model, rank)
    inputs, labels = shard(batch, rank)
    (F.cross_entropy(model(inputs), labels, reduction="sum") * rank.size / len(batch[0])).backward()
    averaged(model, rank.size)
    torch.optim.Adam(model.parameters(), lr=1e-3).step()


@program(regressor, numbers)
def clipped_after_synchronization(model, batch, rank):
    placed(model, rank).zero_grad()
    inputs, targets = shard(batch, rank)
    (F.mse_loss(model(inputs), targets, reduction="sum") * rank.size / len(batch[0])).backward()
    averaged(model, rank.size)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {"norm": norm}


@program(mlp, vectors)
def buckets(model, batch, rank):
    """Gradients flattened into buckets, reduced asynchronously, and waited for."""
    placed(model, rank).zero_grad()
    inputs, labels = shard(batch, rank)
    F.cross_entropy(model(inputs), labels, reduction="sum").backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    pending = []
    for start in range(0, len(gradients), 4):
        flat = torch.cat([gradient.flatten() for gradient in gradients[start : start + 4]]) / len(batch[0])
        pending.append((flat, gradients[start : start + 4], dist.all_reduce(flat, async_op=True)))
    for flat, bucket, work in pending:
        work.wait()
        for gradient, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


@program(mlp, vectors, narrow=True)
def float16_compressed(model, batch, rank):
    """Divided first, so that the sum over ranks overflows no more than the mean does."""
    placed(model, rank).zero_grad()
    inputs, labels = shard(batch, rank)
    (F.cross_entropy(model(inputs), labels, reduction="sum") / len(batch[0])).backward()
    for parameter in model.parameters():
        half = parameter.grad.half()
        dist.all_reduce(half)
        parameter.grad.copy_(half)


@program(regressor, numbers)
class ShardedOptimizer:
    """ZeRO: each rank gets its part of the summed gradients, updates its part of the parameters, and gathers the
    rest."""

    def __init__(self, model, rank):
        placed(model, rank)
        self.momentum = None

    def __call__(self, model, batch, rank):
        model.zero_grad()
        inputs, targets = shard(batch, rank)
        (F.mse_loss(model(inputs), targets, reduction="sum") / len(batch[0])).backward()
        parameters = list(model.parameters())
        length = sum(one.numel() for one in parameters)
        pad = -length % rank.size
        flat = F.pad(torch.cat([one.grad.flatten() for one in parameters]), (0, pad))
        own = torch.empty_like(flat[: len(flat) // rank.size])
        dist.reduce_scatter(own, list(flat.chunk(rank.size)))
        self.momentum = own.clone() if self.momentum is None else 0.9 * self.momentum + own
        values = F.pad(torch.cat([one.detach().flatten() for one in parameters]), (0, pad))
        dist.all_gather(list(values.chunk(rank.size)), values.chunk(rank.size)[rank.index] - 0.05 * self.momentum)
        gathered = torch.empty_like(flat)
        dist.all_gather(list(gathered.chunk(rank.size)), own)
        sizes = [one.numel() for one in parameters]
        with torch.no_grad():
            new, total = values[:length].split(sizes), gathered[:length].split(sizes)
            for one, value, gradient in zip(parameters, new, total, strict=True):
                one.copy_(value.view_as(one))
                one.grad.copy_(gradient.view_as(one))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


@program(Parallel, vectors)
def tensor_parallel(model, batch, rank):
    """The first layer by columns, the second by rows; all ranks have all samples."""
    placed(model, rank).zero_grad()
    inputs, labels = (part.to(rank.device) for part in batch)
    mine = [part.chunk(rank.size)[rank.index] for part in (model.column.weight, model.column.bias)]
    hidden = F.gelu(F.linear(inputs, *mine))
    part = F.linear(hidden, model.row.weight.chunk(rank.size, 1)[rank.index])
    F.cross_entropy(_Sum.apply(part) + model.row.bias, labels).backward()
    for parameter in (model.column.weight, model.column.bias, model.row.weight):
        dist.all_reduce(parameter.grad)  # each rank has its own columns or rows, and zeros elsewhere
    return {"bias": model.row.bias.grad}


class _Gather(torch.autograd.Function):
    """All ranks' rows; the gradient of this rank's own is the sum of what all ranks have for them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: Any) -> torch.Tensor:
        ctx.rank, ctx.rows = rank, len(x)
        parts = [torch.empty_like(x) for _ in range(rank.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].contiguous()
        dist.all_reduce(total)
        return total[ctx.rank.index * ctx.rows :][: ctx.rows], None


@program(regressor, numbers, divisible=True)
def contrast_with_all(model, batch, rank):
    """Contrast each sample with those of all ranks."""
    placed(model, rank).zero_grad()
    inputs = batch[0].to(rank.device).chunk(rank.size)[rank.index]
    one, other = (F.normalize(model[:3](x), dim=1) for x in (inputs, inputs.flip(1)))
    logits = one @ _Gather.apply(other, rank).T / 0.5
    own = rank.index * len(inputs) + torch.arange(len(inputs), device=rank.device)
    (F.cross_entropy(logits, own, reduction="sum") / len(batch[0])).backward()
    for parameter in model[:3].parameters():
        dist.all_reduce(parameter.grad)


@program(mlp, vectors, observes_gradients=False)
def metrics(model, batch, rank):
    placed(model, rank)
    inputs, labels = shard(batch, rank)
    with torch.no_grad():
        logits = model(inputs)
        found = torch.zeros(CLASSES, CLASSES, device=rank.device, dtype=torch.int64)
        found.index_put_((labels, logits.argmax(1)), torch.ones_like(labels), accumulate=True)
        total = F.cross_entropy(logits, labels, reduction="sum")
    dist.all_reduce(found)
    dist.all_reduce(total)
    return {"confusion": found, "accuracy": found.trace() / found.sum(), "loss": total / found.sum()}
