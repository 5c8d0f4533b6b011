"""Training in float8 and narrower formats, as published recipes do it, on matrices that processors multiply.

A recipe rounds both operands of each product, and returns them in float32. `Recipe` trains with it on ranks, and has
the mistakes that such code makes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check import Rank

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TINY = 1e-12
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def cast(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-largest(dtype), largest(dtype)).to(dtype).float() * scale


def largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def blocks_of(x: torch.Tensor, axis: int, size: int = 2) -> torch.Tensor:
    return x.movedim(axis, -1).unflatten(-1, (-1, size))


def joined(blocks: torch.Tensor, axis: int) -> torch.Tensor:
    return blocks.flatten(-2).movedim(-1, axis)


def per_tensor(x: torch.Tensor, dtype: torch.dtype, axis: int) -> torch.Tensor:
    return cast(x, dtype, x.abs().amax().clamp_min(TINY) / largest(dtype))


def per_row(x: torch.Tensor, dtype: torch.dtype, axis: int) -> torch.Tensor:
    return cast(x, dtype, x.abs().amax(axis, keepdim=True).clamp_min(TINY) / largest(dtype))


def mxfp8(x: torch.Tensor, dtype: torch.dtype, axis: int) -> torch.Tensor:
    """A power of two as the scale of each block, in float8_e8m0fnu."""
    blocks = blocks_of(x, axis)
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp_min(TINY) / largest(dtype)))
    return joined(cast(blocks, dtype, torch.exp2(exponent + 1).to(torch.float8_e8m0fnu).float()), axis)


def nvfp4(x: torch.Tensor, dtype: torch.dtype, axis: int) -> torch.Tensor:
    """FP4 with a scale in float8 for each block, and one in float32 for the tensor."""
    blocks, whole = blocks_of(x, axis), x.abs().amax().clamp_min(TINY) / (6 * largest(E4M3))
    scale = (blocks.abs().amax(-1, keepdim=True) / 6 / whole).clamp_min(2**-9).to(E4M3).float() * whole
    sizes, table = (blocks / scale).abs().contiguous(), FP4.to(x.device, x.dtype)
    nearest = torch.bucketize(sizes, (table[1:] + table[:-1]) / 2)
    return joined(table[nearest] * blocks.sign() * scale, axis)


def stochastic(x: torch.Tensor, dtype: torch.dtype, axis: int) -> torch.Tensor:
    """Eight bits, rounded up or down at random."""
    scale = x.abs().amax().clamp_min(TINY) / 127
    return (x / scale + torch.rand_like(x) - 0.5).round() * scale


RECIPES = {recipe.__name__: recipe for recipe in (per_tensor, per_row, mxfp8, nvfp4, stochastic)}


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        return RECIPES[recipe](x, E4M3, -1) @ RECIPES[recipe](weight, E4M3, -1).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        rounded = RECIPES[ctx.recipe]
        of_x = rounded(gradient, E5M2, -1) @ rounded(weight, E4M3, 0)
        return of_x, rounded(gradient, E5M2, 0).t() @ rounded(x, E4M3, 0), None


class NarrowLinear(nn.Linear):
    recipe = "per_tensor"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight, self.recipe) + self.bias


class Delayed(nn.Linear):
    """Scales its input by the largest magnitude of the steps before, which all ranks share."""

    def __init__(self, inputs: int, outputs: int, *, shared: bool = True) -> None:
        super().__init__(inputs, outputs)
        self.shared = shared
        self.amax: torch.Tensor
        self.register_buffer("amax", torch.tensor(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = x + (cast(x, E4M3, self.amax / largest(E4M3)) - x).detach()
        with torch.no_grad():
            amax = x.abs().amax()
            if self.shared:
                dist.all_reduce(amax, op=dist.ReduceOp.MAX)
            self.amax.copy_(amax)
        return F.linear(rounded, self.weight, self.bias)


def model_of(recipe: str, activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    linear = type("Linear", (NarrowLinear,), {"recipe": recipe})
    return nn.Sequential(linear(16, 32), activation(), linear(32, 8))


def delayed(shared: bool = True) -> nn.Module:
    return nn.Sequential(Delayed(16, 32, shared=shared), nn.Tanh(), nn.Linear(32, 8))


def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 16), torch.randn(n, 8)


class Training:
    """SGD on ranks, with the sum of gradients in `wire`, and one mistake on several ranks: a `factor`."""

    factor = 1.0
    wire = torch.float32

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.optimizer = torch.optim.SGD(model.to(rank.device).parameters(), lr=0.1)

    def __call__(self, model: nn.Module, samples: tuple[torch.Tensor, torch.Tensor], rank: Rank) -> None:
        self.optimizer.zero_grad()
        x, y = (leaf.tensor_split(rank.size)[rank.index].to(rank.device) for leaf in samples)
        (F.mse_loss(model(x), y, reduction="sum") / samples[1].numel()).backward()
        for parameter in model.parameters():
            gradient = parameter.grad.to(self.wire)
            dist.all_reduce(gradient)
            parameter.grad.copy_(gradient)
            if rank.size > 1:
                parameter.grad *= self.factor
        self.optimizer.step()


class Sharded(Training):
    """The first weight is divided among ranks by rows, rounded to float8 before it is gathered, with its scale."""

    shared_scale = True
    narrow = True

    def __call__(self, model: nn.Module, samples: tuple[torch.Tensor, torch.Tensor], rank: Rank) -> None:
        self.optimizer.zero_grad()
        assert isinstance(model, nn.Sequential) and isinstance(model[0], nn.Linear)
        first, rest = model[0], model[1:]
        x, y = (leaf.to(rank.device) for leaf in samples)
        part = first.weight.chunk(rank.size)[rank.index].detach()
        scale = part.abs().amax() / largest(E4M3)
        if self.shared_scale:
            dist.all_reduce(scale, op=dist.ReduceOp.MAX)
        message = (part / scale).to(E4M3) if self.narrow else (part / scale).to(E4M3).float()
        whole = torch.empty(first.weight.shape, dtype=message.dtype, device=message.device)
        dist.all_gather(list(whole.chunk(rank.size)), message)
        weight = first.weight + (whole.float() * scale - first.weight).detach()
        (F.mse_loss(rest(F.linear(x, weight, first.bias)), y, reduction="sum") / y.numel()).backward()
        self.optimizer.step()
