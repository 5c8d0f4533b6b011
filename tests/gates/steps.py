"""Steps that scale, models and batches for them, and what tests of the gate for steps assert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from mgpu_check import Rank, ScalingMismatch, assert_step_scales
from mgpu_check.gates.gate_arguments import RanksFixture

Batch = tuple[torch.Tensor, ...]


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def linear() -> nn.Linear:
    return nn.Linear(6, 1)


def batch(n: int) -> Batch:
    return torch.randn(n, 6), torch.randint(0, 3, (n,))


def regression(n: int) -> Batch:
    return torch.randn(n, 6), torch.randn(n, 3)


def chunked(batch: Batch, rank: Rank) -> Batch:
    return tuple(leaf.chunk(rank.size)[rank.index].to(rank.device) for leaf in batch)


def mine(batch: Batch, rank: Rank) -> Batch:
    x, y = batch
    return x[rank.index :: rank.size].to(rank.device), y[rank.index :: rank.size].to(rank.device)


def summed(model: nn.Module, batch: Batch, rank: Rank) -> torch.Tensor:
    """A loss that is right for every number of samples."""
    x, y = mine(batch, rank)
    return F.cross_entropy(model(x), y, reduction="sum") * rank.size / len(batch[0])


def right(model: nn.Module, batch: Batch, rank: Rank) -> None:
    net = DDP(model.to(rank.device))  # kept: without it, nothing synchronizes
    summed(net, batch, rank).backward()


def tutorial(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """Right where the world size divides the number of samples."""
    x, y = mine(batch, rank)
    net = DDP(model.to(rank.device))
    F.cross_entropy(net(x), y).backward()


def total(model: nn.Module, batch: Batch, rank: Rank) -> dict[str, Any]:
    """Every rank's result for the whole batch, without training."""
    return {"sum": batch[0].sum()}


class Training:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.net = DDP(model.to(rank.device))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)

    def __call__(self, model: nn.Module, batch: Batch, rank: Rank) -> dict[str, Any]:
        self.optimizer.zero_grad()
        loss = summed(self.net, batch, rank)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        total = loss.detach() / rank.size
        dist.all_reduce(total)
        return {"loss": total}


def variant(step: type, **attributes: Any) -> Any:
    return type(step.__name__, (step,), attributes)


# One case of each kind, and not the default of 24 in all, on two ranks, and not four as well: more of them take longer,
# and show no more here. ALL world sizes are for what differs between them.
FEW: dict[str, Any] = {"build": build, "batch": batch, "max_examples": 8, "world_sizes": [2]}
ALL: dict[str, Any] = {"world_sizes": None}


def passes(ranks: RanksFixture, step: Any, gate: Callable[..., None] = assert_step_scales, **options: Any) -> None:
    gate(ranks, step, **{**FEW, **options})


def refuted(
    ranks: RanksFixture,
    step: Any,
    *mistakes: str,
    match: str = "",
    gate: Callable[..., None] = assert_step_scales,
    **options: Any,
) -> str:
    """The report of `step`, whose first mistakes are `mistakes`."""
    mismatch = raised(gate, ranks, step, match=match, **{**FEW, **options})
    assert mismatch.mistakes[: len(mistakes)] == mistakes, str(mismatch)
    return str(mismatch)


def raised(
    gate: Callable[..., None], ranks: RanksFixture, judged: Any, match: str = "", **options: Any
) -> ScalingMismatch:
    with pytest.raises(ScalingMismatch, match=match or None) as caught:
        gate(ranks, judged, **options)
    return caught.value


def raised_by(
    gate: Callable[..., None], ranks: RanksFixture, judged: Any, *mistakes: str, match: str = "", **options: Any
) -> ScalingMismatch:
    """The mismatch of a gate that names just these mistakes."""
    mismatch = raised(gate, ranks, judged, match, **options)
    assert mismatch.mistakes == mistakes, str(mismatch)
    return mismatch


def row(report: str, name: str) -> list[str]:
    """The words of the line of a report's table that begins with `name`."""
    return next(line for line in report.splitlines() if line.strip().startswith(name)).split()
