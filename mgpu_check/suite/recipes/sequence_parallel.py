"""Sequence parallelism by hand: between layers that are divided among ranks, each rank has a part of the sequence.

The two functions are those of *Reducing Activation Recomputation in Large Transformer Models* (Korthikanti et al.,
arXiv:2205.05198): the backward pass of a gather is a reduce-scatter, and vice versa.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check.suite.recipes.allreduce import chunks

_Way = Callable[[torch.Tensor, int], torch.Tensor]


def _gathered(part: torch.Tensor, dim: int) -> torch.Tensor:
    part = part.movedim(dim, 0).contiguous()
    whole = part.new_empty(dist.get_world_size() * len(part), *part.shape[1:])
    dist.all_gather_into_tensor(whole, part)
    return whole.movedim(0, dim)


def _scattered(whole: torch.Tensor, dim: int) -> torch.Tensor:
    whole = whole.movedim(dim, 0).contiguous()
    part = whole.new_empty(len(whole) // dist.get_world_size(), *whole.shape[1:])
    dist.reduce_scatter_tensor(part, whole)
    return part.movedim(0, dim)


class _SequenceExchange(torch.autograd.Function):
    """Exchange parts of dimension `dim` by one function forward, and by its counterpart backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, there: _Way, back: _Way) -> torch.Tensor:
        ctx.dim, ctx.back = dim, back
        return there(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(grads[0], ctx.dim), None, None, None


def gather_sequence(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Concatenate the ranks' parts of dimension `dim`; backward, sum the gradient, and take this rank's part."""
    return _SequenceExchange.apply(x, dim, _gathered, _scattered)  # type: ignore[no-any-return]


def scatter_sequence(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Sum `x` over the ranks, and return this rank's part of dimension `dim`; backward, concatenate the parts."""
    return _SequenceExchange.apply(x, dim, _scattered, _gathered)  # type: ignore[no-any-return]


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Sum over the ranks the gradients of parameters that each rank has applied to its own part of the data."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=group)


class SequenceParallelMlp(nn.Module):
    """A norm and two linear layers: the norm has a part of the sequence, the layers have a part of the hidden features.

    Call `sum_partial_gradients` after backward: each rank has only those of its part of the sequence.
    """

    def __init__(self, norm: nn.LayerNorm, up: nn.Linear, down: nn.Linear, device: torch.device) -> None:
        super().__init__()
        own = chunks(up.out_features, dist.get_world_size())[dist.get_rank()]
        self.norm = norm.to(device)
        self.up_weight, self.up_bias = (nn.Parameter(one.detach()[own].to(device)) for one in (up.weight, up.bias))
        self.down_weight = nn.Parameter(down.weight.detach()[:, own].to(device))
        self.down_bias = nn.Parameter(down.bias.detach().to(device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs for this rank's part of the sequence: (own, batch, features), both."""
        hidden = F.gelu(F.linear(gather_sequence(self.norm(x)), self.up_weight, self.up_bias))
        return x + scatter_sequence(F.linear(hidden, self.down_weight)) + self.down_bias

    def sum_partial_gradients(self) -> None:
        """Sum the gradients of the parameters that all ranks hold, and apply to their part of the sequence."""
        sum_gradients([*self.norm.parameters(), self.down_bias])
