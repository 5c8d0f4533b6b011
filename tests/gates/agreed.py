"""Configurations of one step that agree, and twins of them with a mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from mgpu_check import Rank
from tests.gates.divided import Reduced
from tests.gates.steps import variant

Batch = tuple[torch.Tensor, torch.Tensor]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()) * 1.0  # no view: fully_shard warns of one


def batch(n: int) -> Batch:
    return torch.randn(n, 8), torch.randn(n, 8)


class Replicated:
    """DistributedDataParallel, and the methods that other configurations override."""

    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = {}

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.rank = rank
        self.model = self.divided(model.to(rank.device))
        self.optimizer = self.kind(self.model.parameters(), lr=0.01, **self.options)

    def __call__(self, model: nn.Module, batch: Batch, rank: Rank) -> None:
        inputs, targets = (self.part(each).to(rank.device) for each in batch)
        self.optimizer.zero_grad()
        F.mse_loss(self.model(inputs), targets).backward()
        self.optimizer.step()

    def divided(self, model: nn.Module) -> nn.Module:
        return DDP(model)

    def part(self, samples: torch.Tensor) -> torch.Tensor:
        return samples.chunk(self.rank.size)[self.rank.index]


def stepping(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Any:
    return variant(Replicated, kind=kind, options=options)


class Sharded(Replicated):
    """FSDP2 along dp; not for one device."""

    def divided(self, model: nn.Module) -> nn.Module:
        assert self.rank.mesh is not None and self.rank.size > 1
        fully_shard(model, mesh=self.rank.mesh["dp"])
        return model

    def part(self, samples: torch.Tensor) -> torch.Tensor:
        dp = self.rank.mesh["dp"]
        return samples.chunk(dp.size())[dp.get_local_rank()]


class Cut(nn.Module):
    """The layers of an `Mlp`, cut by hand."""

    def __init__(self, model: Any, rank: Rank, wrong: bool) -> None:
        super().__init__()
        self.model, self.wrong = model, wrong
        for module, name, dim in ((model.up, "weight", 0), (model.up, "bias", 0), (model.down, "weight", 1)):
            whole = getattr(module, name).detach()
            setattr(module, name, nn.Parameter(whole.chunk(rank.size, dim)[rank.index].clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, down = self.model.up(x).relu(), self.model.down
        if self.wrong:
            return Reduced.apply(F.linear(hidden, down.weight, down.bias), None)
        return Reduced.apply(F.linear(hidden, down.weight), None) + down.bias


class TensorParallel(Replicated):
    wrong = False

    def divided(self, model: nn.Module) -> nn.Module:
        return Cut(model, self.rank, self.wrong)

    def part(self, samples: torch.Tensor) -> torch.Tensor:
        return samples


class Mixture(nn.Module):
    """Experts, each for the samples that it is chosen for."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, first: int = 0) -> torch.Tensor:
        chosen = (x[:, 0] > 0) * 2 + (x[:, 1] > 0) * 1
        mixed = [(chosen == first + e).unsqueeze(1) * expert(x) for e, expert in enumerate(self.experts)]
        return torch.stack(mixed).sum(0)


class Experts(TensorParallel):
    """Each rank has some of the experts, and all samples."""

    factor = 1.0

    def divided(self, model: nn.Module) -> nn.Module:
        experts: Any = model.experts
        share = len(experts) // self.rank.size
        self.first = self.rank.index * share
        model.experts = experts[self.first : self.first + share]
        for one in model.parameters():
            one.register_hook(lambda gradient: gradient * self.factor)
        return model

    def __call__(self, model: nn.Module, batch: Batch, rank: Rank) -> None:
        inputs, targets = (each.to(rank.device) for each in batch)
        self.optimizer.zero_grad()
        F.mse_loss(Reduced.apply(self.model(inputs, self.first), None), targets).backward()
        self.optimizer.step()
