"""Experts that are divided among ranks, with a router that all ranks hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from mgpu_check.asserts.gradients import gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.common.meshes import near_square
from mgpu_check.suite.parallelism.mechanisms.driver import DividedStep, Portion, Results, total
from mgpu_check.suite.recipes import experts as recipe
from mgpu_check.suite.recipes.allreduce import chunks
from mgpu_check.suite.recipes.training import weighted

_WIDTH = 4
_OF_BALANCE = 0.5


class ExpertsByHand(DividedStep):
    """`recipes.experts`: tokens in uneven parts, experts in chunks, capacity for each rank's tokens."""

    @property
    def experts(self) -> int:
        return self["experts"]

    def routing(self) -> tuple[int, int, bool]:
        """Return the experts of a token, the capacity, and whether balance is over the tokens of all ranks."""
        return self["top"], self["capacity"], self.case.sizes["balance"] == "all ranks"

    def model(self, dtype: torch.dtype) -> tuple[nn.Linear, recipe.Experts]:
        """Return router and experts, whole."""
        count = self.experts
        router = nn.Linear(_WIDTH, count, dtype=dtype, device="cpu")
        with torch.no_grad():
            router.weight.copy_(self.numbers(1, count, _WIDTH))
            # Products are multiples of 1/64, so no two logits of a token are equal, and no choice depends on rounding.
            router.bias.copy_(torch.arange(count, device="cpu") / 1024)
        return router, recipe.Experts(
            self.numbers(2, count, _WIDTH, _WIDTH).to(dtype), self.numbers(3, count, _WIDTH).to(dtype)
        )

    def data(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens, and the factors of their outputs in the loss."""
        shape = self["tokens"], _WIDTH
        return self.numbers(4, *shape).to(dtype), self.numbers(5, *shape).to(dtype)

    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        (router, experts), (x, factors) = self.model(dtype), self.data(dtype)
        x.requires_grad_()
        logits = router(x)
        of_each = F.silu(torch.einsum("ti,eoi->teo", x, experts.weight) + experts.bias)
        outputs = (self._shares(logits).unsqueeze(-1) * of_each).sum(1)
        owned = [slice(None)] if self.routing()[2] else chunks(len(x), self.ranks)
        balance = torch.stack([self._balance(logits[own]) for own in owned]).mean()
        loss = weighted(outputs, factors) + _OF_BALANCE * balance
        loss.backward()
        found = {"outputs": outputs.detach(), "balance": balance.detach(), "loss": loss.detach()}
        return found | _gradients(x, router, experts)

    def _shares(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the factor of each expert for each token: 0 unless it is chosen and takes the token."""
        top, capacity, _ = self.routing()
        kept = torch.zeros(logits.shape, dtype=torch.bool, device="cpu")
        for own in chunks(len(logits), self.ranks):
            taken = [0] * self.experts
            for token in range(own.start, own.stop):
                for expert in logits[token].argsort(descending=True)[:top].tolist():
                    taken[expert] += 1
                    kept[token, expert] = not capacity or taken[expert] <= capacity
        share = logits.softmax(1) * kept
        return share if top == 1 else share / share.sum(1, keepdim=True).where(kept.any(1, keepdim=True), 1)

    def _balance(self, logits: torch.Tensor) -> torch.Tensor:
        if not len(logits):
            return logits.sum()
        top = self.routing()[0]
        chosen = torch.zeros_like(logits).scatter(1, logits.topk(top).indices, 1.0)
        return self.experts * (chosen.mean(0) / top * logits.softmax(1).mean(0)).sum()

    def divided(self, rank: Rank) -> Results:
        (router, experts), (x, factors) = self.model(self.dtype), self.data(self.dtype)
        top, capacity, of_all = self.routing()
        held, finish = self.parallel(router, experts, rank, top=top, capacity=capacity)
        own = chunks(len(x), rank.size)[rank.index]
        x = x[own].to(rank.device).requires_grad_()
        outputs, logits = held(x)
        balance = recipe.balance_loss(logits, top, of_all=of_all)
        loss = weighted(outputs, factors[own].to(rank.device)) + _OF_BALANCE * balance
        loss.backward()
        finish()
        found: Results = {"outputs": Portion(outputs.detach(), 0, own), "balance": total(balance), "loss": total(loss)}
        at = {"tokens": own, "expert": held.owned[held.place]}
        for name, value in _gradients(x, held.router, held.experts).items():
            place = next((where for word, where in at.items() if word in name), None)
            found[name] = value if place is None else Portion(value, 0, place)
        return found

    def parallel(self, router: nn.Linear, experts: recipe.Experts, rank: Rank, **options: Any) -> Any:
        """Return the divided model, and a function to call after backward."""
        held = recipe.ExpertParallel(router, experts, rank.device, **options)
        return held, held.sum_partial_gradients


def _gradients(x: torch.Tensor, router: nn.Module, experts: nn.Module) -> dict[str, torch.Tensor]:
    found = {"gradient of tokens": gradient_or_zeros(x)}
    for part, module in (("router", router), ("experts", experts)):
        for name, value in module.named_parameters():
            gradient = gradient_or_zeros(value)
            found[f"gradient of {part}: {name}"] = getattr(gradient, "full_tensor", lambda one=gradient: one)()
    return found


class ShardedExperts(ExpertsByHand):
    """`recipes.experts` under `fully_shard`: experts over the ranks that hold them, the router over all (HSDP)."""

    @property
    def expert_ranks(self) -> int:
        """The number of ranks that have all experts together: a divisor of the world size."""
        few, many = near_square(self.ranks)
        return {"few": few, "many": many, "all": self.ranks}[str(self.case.sizes["expert ranks"])]

    @property
    def experts(self) -> int:
        return self["experts"] * self.expert_ranks

    def routing(self) -> tuple[int, int, bool]:
        return 1, 0, True

    def parallel(self, router: nn.Linear, experts: recipe.Experts, rank: Rank, **options: Any) -> Any:
        shape = self.ranks // self.expert_ranks, self.expert_ranks
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicas", "experts"))
        held = recipe.ExpertParallel(router, experts, rank.device, group=mesh["experts"].get_group(), **options)
        recipe.shard(held, mesh)
        return held, lambda: None
