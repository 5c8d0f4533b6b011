"""A model, batches and parts of steps for wrong programs, and the report of the gate for steps about one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check import Rank, assert_step_scales
from mgpu_check.gates.gate_arguments import RanksFixture
from tests.gates.steps import Batch, raised


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


@torch.no_grad()
def loss(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {"loss": F.mse_loss(model(batch[0]), batch[1])}


def report(ranks: RanksFixture, step: Any, gate: Callable[..., None] = assert_step_scales, **options: Any) -> Any:
    """The mismatch of a step on two ranks, by default of `mlp`."""
    of: dict[str, Any] = {"build": mlp, "batch": regression, "sizes": 4, "world_sizes": [2], "max_examples": 1}
    return raised(gate, ranks, step, **of | options)
