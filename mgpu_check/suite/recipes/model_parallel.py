"""Model parallelism by hand: parts of one model, or parts of its weights, on several devices or ranks.

- Parts of a model on several devices of a process.
- Asynchronous tensor parallelism: products that overlap with the collective before or after them. `torch.compile`
  puts these operators in place of a gather before a product, and of a reduce-scatter after one. They need symmetric
  memory: each GPU reads and writes the memory of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Staged(nn.Module):
    """A sequence of modules, each on its own device; activations are copied between the devices."""

    def __init__(self, stages: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.devices = list(devices)
        self.stages = nn.ModuleList(stage.to(device) for stage, device in zip(stages, devices, strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last stage, on its device; `x` may be on any device."""
        for stage, device in zip(self.stages, self.devices, strict=True):
            x = stage(x.to(device))
        return x


class Branched(nn.Module):
    """Parallel modules with one input, each on its own device; their outputs are summed on the last device."""

    def __init__(self, branches: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.devices = list(devices)
        self.branches = nn.ModuleList(branch.to(device) for branch, device in zip(branches, devices, strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the outputs, on the last device; `x` may be on any device."""
        end = self.devices[-1]
        outputs = [branch(x.to(device)) for branch, device in zip(self.branches, self.devices, strict=True)]
        total: torch.Tensor = outputs[-1]
        for output in outputs[:-1]:
            total = total + output.to(end)
        return total


def _operators() -> Any:
    from torch.distributed import _symmetric_memory  # registers the operators

    assert _symmetric_memory.lib
    return torch.ops.symm_mem


def _group() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def _gathered_product(rows: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    all_rows, products = _operators().fused_all_gather_matmul(rows.contiguous(), [factor], 0, _group())
    return all_rows, products[0]


def _scattered_product(rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return _operators().fused_matmul_reduce_scatter(rows.contiguous(), factor, "sum", 0, _group())


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        all_rows, product = _gathered_product(x, weight.t())
        ctx.save_for_backward(all_rows, weight)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        all_rows, weight = ctx.saved_tensors
        return _scattered_product(grads[0], weight), grads[0].t() @ all_rows


class _ScatteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _scattered_product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        all_rows, back = _gathered_product(grads[0], weight)
        return back, all_rows.t() @ x


def gathered_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Apply this rank's rows of a weight, (own, features), to the rows of all ranks: (rows, features) -> (all, own)."""
    return _GatheredLinear.apply(x, weight)


def scattered_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Apply this rank's columns of a weight, (features, own), and add up the ranks: (all, own) -> (rows, features)."""
    return _ScatteredLinear.apply(x, weight)
