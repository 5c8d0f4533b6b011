"""Tensor parallelism by hand: linear layers with weights divided among ranks, by columns and by rows.

The four autograd functions are those of *Megatron-LM* (Shoeybi et al., arXiv:1909.08053): the backward pass of a copy
is a sum, that of a gather is a division, and vice versa.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check.suite.recipes.allreduce import chunks


def _own(width: int) -> slice:
    return chunks(width, dist.get_world_size())[dist.get_rank()]


def _gathered(part: torch.Tensor, width: int) -> torch.Tensor:
    """Concatenate the ranks' parts along the last dimension; their widths may differ by one."""
    pieces = chunks(width, dist.get_world_size())
    widest = pieces[0].stop
    padded = F.pad(part, (0, widest - part.shape[-1])).contiguous()
    gathered = [torch.empty_like(padded) for _ in pieces]
    dist.all_gather(gathered, padded)
    return torch.cat(
        [whole[..., : piece.stop - piece.start] for whole, piece in zip(gathered, pieces, strict=True)], -1
    )


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _summed(grads[0])


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _summed(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: int) -> torch.Tensor:
        return _gathered(x, width)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0][..., _own(grads[0].shape[-1])], None


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.width = x.shape[-1]
        return x[..., _own(ctx.width)].clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _gathered(grads[0], ctx.width)


def copy_to_ranks(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, which is equal on all ranks; backward, sum the gradient over the ranks."""
    return _CopyToRanks.apply(x)  # type: ignore[no-any-return]


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of `x` over the ranks; backward, pass the gradient on unchanged."""
    return _Sum.apply(x)  # type: ignore[no-any-return]


def gather_from_ranks(x: torch.Tensor, width: int) -> torch.Tensor:
    """Join the ranks' chunks of the last dimension to `width`; backward, take this rank's chunk of the gradient."""
    return _Gather.apply(x, width)  # type: ignore[no-any-return]


def divide_among_ranks(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's chunk of the last dimension of `x`; backward, join the ranks' chunks of the gradient."""
    return _Divide.apply(x)  # type: ignore[no-any-return]


class ColumnLinear(nn.Module):
    """A linear layer with divided outputs: each rank holds the rows of `weight`, (out, in), of its outputs."""

    def __init__(self, layer: nn.Linear, device: torch.device, *, gather: bool = False) -> None:
        super().__init__()
        own = _own(layer.out_features)
        self.width, self.gather = layer.out_features, gather
        self.weight = nn.Parameter(layer.weight.detach()[own].to(device, copy=True))
        self.bias = nn.Parameter(layer.bias.detach()[own].to(device, copy=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs, (…, own), or all if `gather`; the inputs, (…, in), are equal on all ranks."""
        own = F.linear(copy_to_ranks(x), self.weight, self.bias)
        return gather_from_ranks(own, self.width) if self.gather else own


class RowLinear(nn.Module):
    """A linear layer with divided inputs: each rank holds the columns of `weight`, (out, in), for its inputs.

    Each rank holds the whole bias, which is added once, after the sum.
    """

    def __init__(self, layer: nn.Linear, device: torch.device, *, divide: bool = False) -> None:
        super().__init__()
        self.divide = divide
        self.weight = nn.Parameter(layer.weight.detach()[:, _own(layer.in_features)].to(device, copy=True))
        self.bias = nn.Parameter(layer.bias.detach().to(device, copy=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return all outputs, (…, out), for this rank's inputs, (…, own); if `divide`, for all inputs, (…, in)."""
        own = divide_among_ranks(x) if self.divide else x
        return sum_over_ranks(F.linear(own, self.weight)) + self.bias
