"""Asynchronous tensor parallelism: products that overlap with the collective before or after them.

`torch.compile` puts these operators in place of a gather before a product, and of a reduce-scatter after one. They need
symmetric memory: each GPU reads and writes the memory of the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def _operators() -> Any:
    from torch.distributed import _symmetric_memory  # registers the operators

    assert _symmetric_memory.lib
    return torch.ops.symm_mem


def _group() -> str:
    assert dist.group.WORLD is not None
    name: str = dist.group.WORLD.group_name
    return name


def _gathered_product(part: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of all ranks, and their product with `factor`."""
    whole, products = _operators().fused_all_gather_matmul(part.contiguous(), [factor], 0, _group())
    return whole, products[0]


def _scattered_product(whole: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of the sum over the ranks of their products."""
    made: torch.Tensor = _operators().fused_matmul_reduce_scatter(whole.contiguous(), factor, "sum", 0, _group())
    return made


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        whole, made = _gathered_product(x, weight.t())
        ctx.save_for_backward(whole, weight)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole, weight = ctx.saved_tensors
        return _scattered_product(grads[0], weight), grads[0].t() @ whole


class _ScatteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _scattered_product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        whole, back = _gathered_product(grads[0], weight)
        return back, whole.t() @ x


def gathered_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Apply this rank's rows of a weight, (own, features), to the rows of all ranks: (rows, features) -> (all, own)."""
    return _GatheredLinear.apply(x, weight)  # type: ignore[no-any-return]


def scattered_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Apply this rank's columns of a weight, (features, own), and add up the ranks: (all, own) -> (rows, features)."""
    return _ScatteredLinear.apply(x, weight)  # type: ignore[no-any-return]
