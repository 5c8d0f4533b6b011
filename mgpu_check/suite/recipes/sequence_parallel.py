"""Sequence and context parallelism by hand: each rank has a part of the sequence.

In sequence parallelism this is so between layers that are divided among ranks. The two functions are those of
*Reducing Activation Recomputation in Large Transformer Models* (Korthikanti et al., arXiv:2205.05198): the backward
pass of a gather is a reduce-scatter, and vice versa.

In context parallelism the queries of a rank see keys of all ranks. Either all keys and values are gathered, or they
pass around a ring, as in *Ring Attention with Blockwise Transformers for Near-Infinite Context* (Liu et al.,
arXiv:2310.01889). Later tokens see more keys, so the zigzag order gives each rank an early and a late piece of the
sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check.oracles.training.gradient_exchange import chunks

_Way = Callable[[torch.Tensor, int], torch.Tensor]


def _gathered(shard: torch.Tensor, dim: int) -> torch.Tensor:
    shard = shard.movedim(dim, 0).contiguous()
    full_tensor = shard.new_empty(dist.get_world_size() * len(shard), *shard.shape[1:])
    dist.all_gather_into_tensor(full_tensor, shard)
    return full_tensor.movedim(0, dim)


def _scattered(full_tensor: torch.Tensor, dim: int) -> torch.Tensor:
    full_tensor = full_tensor.movedim(dim, 0).contiguous()
    shard = full_tensor.new_empty(len(full_tensor) // dist.get_world_size(), *full_tensor.shape[1:])
    dist.reduce_scatter_tensor(shard, full_tensor)
    return shard.movedim(0, dim)


class _SequenceExchange(torch.autograd.Function):
    """Exchange parts of dimension `dim` by one function forward, and by its counterpart backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, exchange: _Way, back: _Way) -> torch.Tensor:
        ctx.dim, ctx.back = dim, back
        return exchange(x, dim)

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
    Call `sum_partial_gradients` after backward: each rank has only those of its part of the sequence."""

    def __init__(self, norm: nn.LayerNorm, up: nn.Linear, down: nn.Linear, device: torch.device) -> None:
        super().__init__()
        own = chunks(up.out_features, dist.get_world_size())[dist.get_rank()]
        self.norm = norm.to(device)
        self.up_weight, self.up_bias = (
            nn.Parameter(parameter.detach()[own].to(device)) for parameter in (up.weight, up.bias)
        )
        self.down_weight = nn.Parameter(down.weight.detach()[:, own].to(device))
        self.down_bias = nn.Parameter(down.bias.detach().to(device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs for this rank's part of the sequence: (own, batch, features), both."""
        hidden = F.gelu(F.linear(gather_sequence(self.norm(x)), self.up_weight, self.up_bias))
        return x + scatter_sequence(F.linear(hidden, self.down_weight)) + self.down_bias

    def sum_partial_gradients(self) -> None:
        """Sum the gradients of the parameters that all ranks hold, and apply to their part of the sequence."""
        sum_gradients([*self.norm.parameters(), self.down_bias])


Positions = Sequence[torch.Tensor]  # for each rank the positions of its tokens in the sequence, (own,), int64


def positions_of(length: int, ranks: int, *, zigzag: bool) -> list[torch.Tensor]:
    """Return the positions of each rank: its chunk of the sequence, or with `zigzag` chunks r and 2·ranks - 1 - r."""
    if not zigzag:
        return list(torch.arange(length).chunk(ranks))
    pieces = torch.arange(length).chunk(2 * ranks)
    return [torch.cat([pieces[rank], pieces[-1 - rank]]) for rank in range(ranks)]


def visible(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return which keys a query sees by their positions in the sequence: (queries, keys), bool."""
    return keys <= queries.unsqueeze(1)


def in_order(sequence: torch.Tensor, positions: Positions, dim: int) -> torch.Tensor:
    """Put the concatenated parts of all ranks into the order of the sequence."""
    return sequence.index_select(dim, torch.cat(list(positions)).argsort().to(sequence.device))


def restored(shard: torch.Tensor, positions: Positions, dim: int) -> torch.Tensor:
    """Gather the parts of all ranks, in the order of the sequence."""
    return in_order(gather_sequence(shard, dim), positions, dim)


def _scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores: torch.Tensor = q @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask.to(q.device), -torch.inf)


def gathered_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: Positions, rank: int
) -> torch.Tensor:
    """Return causal attention of this rank's queries, with the keys and values of all ranks gathered.
    All tensors are (batch, heads, own, width)."""
    scores = _scores(q, gather_sequence(k, 2), visible(positions[rank], torch.cat(list(positions))))
    return scores.softmax(-1) @ gather_sequence(v, 2)


def _passed_on(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Send tensors to the next rank of the ring, and return those of the rank before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, received = [tensor.contiguous() for tensor in tensors], [torch.empty_like(tensor) for tensor in tensors]
    if size == 1:
        return sent
    calls = [dist.P2POp(dist.isend, tensor, (rank + 1) % size) for tensor in sent]
    calls += [dist.P2POp(dist.irecv, tensor, (rank - 1) % size) for tensor in received]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return received


def merged(
    out: torch.Tensor, total: torch.Tensor, block: torch.Tensor, of_block: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two sets of keys, each with the logarithm of its sum of exponentials, (…, own, 1)."""
    both = torch.logaddexp(total, of_block)
    return out * (total - both).exp() + block * (of_block - both).exp(), both


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: Positions, rank: int
    ) -> torch.Tensor:
        keys, values = k, v
        out, total = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
        for step in range(len(positions)):
            scores = _scores(q, keys, visible(positions[rank], positions[rank - step]))
            sums = scores.logsumexp(-1, keepdim=True)
            # A query that sees no key of this block has -inf, which must not be subtracted from -inf.
            block = (scores - sums.clamp_min(torch.finfo(sums.dtype).min)).exp() @ values
            out, total = merged(out, total, block, sums)
            if step < len(positions) - 1:
                keys, values = _passed_on([keys, values])
        ctx.save_for_backward(q, k, v, out, total)
        ctx.positions, ctx.rank = positions, rank
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, keys, values, out, total = ctx.saved_tensors
        gradient, scale = grads[0], q.shape[-1] ** -0.5
        mean = (gradient * out).sum(-1, keepdim=True)
        of_q, of_keys, of_values = torch.zeros_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        for step in range(len(ctx.positions)):
            weights = (_scores(q, keys, visible(ctx.positions[ctx.rank], ctx.positions[ctx.rank - step])) - total).exp()
            of_scores = weights * (gradient @ values.mT - mean) * scale
            of_q = of_q + of_scores @ keys
            of_keys, of_values = of_keys + of_scores.mT @ q, of_values + weights.mT @ gradient
            # After as many steps as there are ranks, the gradients are back at the rank that has the keys.
            keys, values, of_keys, of_values = _passed_on([keys, values, of_keys, of_values])
        return of_q, of_keys, of_values, None, None


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: Positions, rank: int) -> torch.Tensor:
    """Return causal attention of this rank's queries, while keys and values pass around the ring of ranks.
    All tensors are (batch, heads, own, width), equally long on all ranks."""
    return _Ring.apply(q, k, v, positions, rank)  # type: ignore[no-any-return]
