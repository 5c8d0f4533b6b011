"""The gate for configurations on two layouts of one mixture of experts, on eight ranks each.

FSDP keeps a slice of every expert on each rank. Expert parallel keeps some experts on each rank: its ranks exchange the
tokens. Experts are sharded among the ranks that have the same ones, and all else among all ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from mgpu_check import Configuration, Rank, ScalingMismatch, assert_steps_agree
from mgpu_check.gates.gate_arguments import RanksFixture

pytestmark = [pytest.mark.gpus(8), pytest.mark.slow]

EXPERTS, WIDTH, HIDDEN = 4, 8, 16


class Experts(nn.Module):
    up: Any
    down: Any

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the result of the chosen expert for each token."""
        each = torch.bmm(torch.bmm(x.expand(EXPERTS, *x.shape), self.up).relu(), self.down)
        return each[chosen, torch.arange(len(x), device=x.device)]


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.leave(self.enter(x).relu())
        weight, chosen = self.router(x).softmax(1).max(1)
        return x + self.experts(x, chosen) * weight.unsqueeze(1)


def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, WIDTH), torch.randn(n, WIDTH)


class Plain:
    """The step on one device."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)

    def __call__(self, model: nn.Module, batch: Any) -> None:
        self.optimizer.zero_grad()
        F.mse_loss(self.model(batch[0]), batch[1]).backward()
        self.optimizer.step()


class Divided(Plain):
    """The step on ranks, each of which has a share of the samples."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.mesh: Any = rank.mesh
        super().__init__(self.divided(model.to(rank.device)))

    def __call__(self, model: nn.Module, batch: Any, rank: Any = None) -> None:
        over = self.samples
        super().__call__(model, [one.chunk(over.size())[over.get_local_rank()].to(rank.device) for one in batch])

    samples: Any  # the mesh that they are divided over

    def divided(self, model: Any) -> nn.Module:
        raise NotImplementedError


class ShardedEverywhere(Divided):
    def divided(self, model: Any) -> nn.Module:
        self.samples = self.mesh["dp"]
        return fully_shard(model, mesh=self.samples)


class Exchanging(Experts):
    """Some of the experts, and the tokens of all ranks for them."""

    group: Any

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        own = EXPERTS // self.group.size()
        order = chosen.argsort(stable=True)
        send = (chosen // own).bincount(minlength=self.group.size())
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=self.group)
        there, here = send.tolist(), receive.tolist()
        of = torch.empty(sum(here), dtype=chosen.dtype, device=x.device)
        dist.all_to_all_single(of, chosen[order], here, there, group=self.group)
        tokens = all_to_all_single_autograd(x[order], here, there, self.group)
        up, down = self.up.to_local(), self.down.to_local()
        each = torch.bmm(torch.bmm(tokens.expand(own, *tokens.shape), up).relu(), down)
        mixed = each[of % own, torch.arange(len(tokens), device=x.device)]
        back = all_to_all_single_autograd(mixed, there, here, self.group)
        return torch.zeros_like(x).index_copy(0, order, back)


class ExchangedTokens(Divided):
    """Expert parallel along ep; experts are sharded along efsdp, all else over both axes."""

    def divided(self, model: Any) -> nn.Module:
        ep, experts = self.mesh["ep"], model.experts
        self.samples = self.mesh._flatten("all")
        experts.__class__, experts.group = Exchanging, ep.get_group()
        for name in ("up", "down"):
            whole = getattr(experts, name)
            setattr(experts, name, nn.Parameter(distribute_tensor(whole.detach(), ep, [Shard(0)])))
        fully_shard(experts, mesh=self.mesh["efsdp"], shard_placement_fn=lambda parameter: Shard(1))
        experts.set_gradient_divide_factor(self.divisor())
        return fully_shard(model, mesh=self.samples)

    def divisor(self) -> float:
        return float(self.mesh.size())  # tokens of all ranks are in the gradient of an expert


class DividedByShards(ExchangedTokens):
    def divisor(self) -> float:
        return float(self.mesh["efsdp"].size())


def test_gradients_of_experts_that_are_divided_by_all_ranks_agree_and_those_by_their_shards_do_not(
    ranks: RanksFixture,
) -> None:
    few: dict[str, Any] = {"build": Mixture, "batch": batch, "sizes": [8, 16], "max_examples": 2}
    fsdp, mesh = Configuration(ShardedEverywhere, {"dp": 8}), {"efsdp": 2, "ep": 4}
    steps = {"fsdp8": fsdp, "efsdp2 x ep4": Configuration(ExchangedTokens, mesh)}
    assert_steps_agree(ranks, steps, one_device=False, **few)
    steps["efsdp2 x ep4"] = Configuration(DividedByShards, mesh)
    with pytest.raises(ScalingMismatch) as caught:
        assert_steps_agree(ranks, steps, reference=Plain, **few)
    assert caught.value.mistakes[0] == "expert-gradients-factor", str(caught.value)
    assert "fails when ep > 1, for any efsdp" in str(caught.value)
