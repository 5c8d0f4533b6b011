"""Attention divided among ranks by heads, from one fused weight of queries, keys and values.

Several query heads share a head of keys and values (*GQA*, Ainslie et al., arXiv:2305.13245). If there are fewer of
these than ranks, some ranks hold the same one, and each has a part of its gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check.suite.recipes.tensor_parallel import copy_to_ranks, sum_over_ranks


class FusedHeads(NamedTuple):
    """The heads of an attention.

    Attributes:
        queries, shared: numbers of heads of queries, and of keys and values.
        width: features of a head.
        interleaved: each head of keys and values follows the queries that share it: q q k v q q k v, as in Megatron.
            Otherwise all queries come first, then all keys, then all values.
    """

    queries: int
    shared: int
    width: int
    interleaved: bool


def _places(heads: FusedHeads) -> tuple[list[int], list[int], list[int]]:
    """Return the place of each head of queries, keys and values in the fused weight, in heads."""
    if not heads.interleaved:
        ends = [heads.queries, heads.queries + heads.shared, heads.queries + 2 * heads.shared]
        return list(range(ends[0])), list(range(ends[0], ends[1])), list(range(ends[1], ends[2]))
    each = heads.queries // heads.shared
    starts = [group * (each + 2) for group in range(heads.shared)]
    queries = [start + one for start in starts for one in range(each)]
    return queries, [start + each for start in starts], [start + each + 1 for start in starts]


def rows_of(heads: FusedHeads, rank: int, ranks: int) -> tuple[list[int], FusedHeads]:
    """Return the rows of the fused weight that a rank holds, and its heads.

    The number of query heads must be a multiple of `ranks`; one of `ranks` and `heads.shared`, a multiple of the other.
    """
    own, kept = heads.queries // ranks, max(heads.shared // ranks, 1)
    first = rank * heads.shared // ranks
    mine = heads._replace(queries=own, shared=kept)
    whole, local = _places(heads), _places(mine)
    chosen = (whole[0][rank * own : (rank + 1) * own], whole[1][first : first + kept], whole[2][first : first + kept])
    held = {
        place: head
        for places, found in zip(local, chosen, strict=True)
        for place, head in zip(places, found, strict=True)
    }
    rows = [held[place] * heads.width + row for place in sorted(held) for row in range(heads.width)]
    return rows, mine


def split(fused: torch.Tensor, heads: FusedHeads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values: (batch, length, rows) -> (batch, heads, length, width) each."""
    by_head = fused.unflatten(-1, (-1, heads.width)).transpose(1, 2)
    q, k, v = (by_head[:, places] for places in _places(heads))
    return q, k, v


class GroupedQueryAttention(nn.Module):
    """Causal attention whose query heads are divided among the ranks; `fused` holds the rows of this rank.

    Call `sum_partial_gradients` after backward.
    """

    def __init__(self, fused: torch.Tensor, out: torch.Tensor, heads: FusedHeads, device: torch.device) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.rows, self.heads = rows_of(heads, rank, ranks)
        self.fused = nn.Parameter(fused.detach()[self.rows].to(device))
        width = self.heads.queries * heads.width
        self.out = nn.Parameter(out.detach()[:, rank * width : (rank + 1) * width].to(device))
        self.holders: dist.ProcessGroup | None = None
        alike = ranks // min(heads.shared, ranks)
        if 1 < alike < ranks:
            members = [list(range(first, first + alike)) for first in range(0, ranks, alike)]
            self.holders = dist.new_subgroups_by_enumeration(members)[0]
        self.alike = alike

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs, equal on all ranks, as the inputs are: (batch, length, features), both."""
        q, k, v = split(F.linear(copy_to_ranks(x), self.fused), self.heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return sum_over_ranks(F.linear(attended.transpose(1, 2).flatten(2), self.out))

    def sum_partial_gradients(self) -> None:
        """Sum the gradients of keys and values over the ranks that hold the same heads."""
        if self.alike == 1:
            return
        assert self.fused.grad is not None, "call backward first"
        by_head = self.fused.grad.unflatten(0, (-1, self.heads.width))
        _, keys, values = _places(self.heads)
        part = by_head[keys + values].contiguous()
        dist.all_reduce(part, group=self.holders)
        by_head[keys + values] = part
