"""Expert parallelism by hand: each rank holds some of the experts of a layer, and `all_to_all` carries tokens to them.

Capacity and the loss for balance are those of *Switch Transformers* (Fedus et al., arXiv:2101.03961).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from mgpu_check.oracles.training.gradient_exchange import chunks
from mgpu_check.suite.recipes.sequence_parallel import sum_gradients

Group = dist.ProcessGroup | None


class Experts(nn.Module):
    """Experts of one layer, stacked: `weight` is (experts, width, width), `bias` is (experts, width)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Apply expert e to the next `counts[e]` rows: (rows, width) -> (rows, width)."""
        layers = zip(rows.split(counts) if counts else (), self.weight, self.bias, strict=True)
        return torch.cat([rows[:0], *(F.silu(F.linear(own_rows, weight, bias)) for own_rows, weight, bias in layers)])


class Routing(NamedTuple):
    """The choices of each token that fit into the capacity; a token without one is dropped."""

    # token, expert: of each choice, (choices,)
    token: torch.Tensor
    expert: torch.Tensor
    weight: torch.Tensor  # factor of the expert's output, (choices,); the gradient of the router passes through it


def route(logits: torch.Tensor, top: int, capacity: int = 0) -> Routing:
    """Choose the `top` experts of each token: logits (tokens, experts).

    An expert takes the first `capacity` choices that fall on it; 0 is without limit. The weight of a single expert is
    its probability. The weights of several are the probabilities of the kept experts, divided by their sum.
    """
    chosen = logits.topk(top).indices
    running_counts = F.one_hot(chosen.flatten(), logits.shape[1]).cumsum(0)
    position = running_counts.gather(1, chosen.flatten().unsqueeze(1)).view_as(chosen)
    kept = position <= capacity if capacity else torch.ones_like(chosen, dtype=torch.bool)
    share = logits.softmax(-1).gather(1, chosen) * kept
    if top > 1:
        share = share / share.sum(-1, keepdim=True).clamp_min(torch.finfo(share.dtype).tiny)
    return Routing(kept.nonzero()[:, 0], chosen[kept], share[kept])


def balance_loss(logits: torch.Tensor, top: int, group: Group = None, *, of_all: bool = True) -> torch.Tensor:
    """Return this rank's part of the loss for balance; the sum of all parts is the loss.

    The loss is experts · Σ_e (fraction of the choices that fall on e, dropped ones included) · (mean probability of e).
    With `of_all`, fractions and means are over the tokens of all ranks. Otherwise each rank has a loss for its own
    tokens, and the mean over the ranks is the loss.
    """
    tokens, experts = logits.shape
    chosen = logits.topk(top).indices.flatten()
    load = torch.cat([chosen.bincount(minlength=experts), chosen.new_tensor([tokens])]).to(logits.dtype)
    if of_all:
        dist.all_reduce(load, group=group)
    fraction, mean = load[:-1] / (load[-1] * top).clamp_min(1), logits.softmax(-1).sum(0) / load[-1].clamp_min(1)
    return experts * (fraction * mean).sum() / (1 if of_all else dist.get_world_size(group))


class _ExchangedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: Group) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchange(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None


def exchange(rows: torch.Tensor, send: list[int], receive: list[int], group: Group = None) -> torch.Tensor:
    """Send the next `send[r]` rows to rank r of the group, and return `receive[r]` rows of each rank r, in order."""
    return _ExchangedRows.apply(rows, send, receive, group)  # type: ignore[no-any-return]


def by_expert(counts: torch.Tensor) -> torch.Tensor:
    """Return the order that sorts rows by expert: `counts`, (ranks, experts), are the rows of each rank, in order."""
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return experts.repeat_interleave(counts.flatten()).argsort(stable=True)


def combined(rows: torch.Tensor, routing: Routing, tokens: int) -> torch.Tensor:
    """Sum the weighted rows of each token: (choices, width) -> (tokens, width); 0 for a dropped token."""
    return rows.new_zeros(tokens, rows.shape[1]).index_add(0, routing.token, rows * routing.weight.unsqueeze(1))


class ExpertParallel(nn.Module):
    """A mixture of experts whose experts are divided among the ranks of a group, in chunks; each has the whole router.

    Call `sum_partial_gradients` after backward: a rank has the router's gradients for its own tokens only. Gradients of
    its experts are whole.
    """

    def __init__(
        self,
        router: nn.Linear,
        experts: Experts,
        device: torch.device,
        *,
        top: int,
        capacity: int = 0,
        group: Group = None,
    ) -> None:
        super().__init__()
        self.owned, self.place = chunks(len(experts.weight), dist.get_world_size(group)), dist.get_rank(group)
        own = self.owned[self.place]
        self.top, self.capacity, self.group = top, capacity, group
        self.router = router.to(device)
        self.experts = Experts(*(value.detach()[own].to(device) for value in (experts.weight, experts.bias)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs of this rank's tokens, (tokens, width), and their logits, (tokens, experts).
        `x` is (tokens, width); ranks may have different numbers of tokens, and none."""
        logits = self.router(x)
        routing = route(logits, self.top, self.capacity)
        order = routing.expert.argsort(stable=True)
        wanted = routing.expert.bincount(minlength=logits.shape[1])
        widths = [own.stop - own.start for own in self.owned]
        own_count = widths[self.place]
        counts = wanted.new_empty(len(widths) * own_count)
        dist.all_to_all_single(counts, wanted, [own_count] * len(widths), widths, group=self.group)
        counts = counts.view(len(widths), own_count)
        send, receive = [int(wanted[own].sum()) for own in self.owned], counts.sum(1).tolist()
        rows = exchange(x[routing.token[order]], send, receive, self.group)
        sort = by_expert(counts)
        products = self.experts(rows[sort], counts.sum(0).tolist())
        back = exchange(products[sort.argsort()], receive, send, self.group)
        return combined(back[order.argsort()], routing, len(x)), logits

    def sum_partial_gradients(self) -> None:
        """Sum the gradients of the router over the ranks."""
        sum_gradients(self.router.parameters(), self.group)


def shard(model: ExpertParallel, mesh: DeviceMesh) -> None:
    """Shard a model by `fully_shard`, for a loss that is a sum over the tokens of all ranks.

    Ranks along "experts" of the mesh hold different experts, ranks along "replicas" the same ones. So gradients of
    experts are reduced over the replicas, and all others over the whole mesh.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    fully_shard(model.experts, mesh=mesh["replicas"])
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
