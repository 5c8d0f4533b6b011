"""Vocabulary parallelism by hand: each rank holds some rows of an embedding, and the logits of these classes.

The functions are those of *Megatron-LM* (Shoeybi et al., arXiv:1909.08053).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check.suite.recipes.allreduce import chunks
from mgpu_check.suite.recipes.tensor_parallel import copy_to_ranks, sum_over_ranks


def class_of(labels: torch.Tensor, own: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each label among this rank's classes, 0 for labels of others, and which ones are its own."""
    mine = (labels >= own.start) & (labels < own.stop)
    return (labels - own.start).where(mine, 0), mine


def largest(logits: torch.Tensor) -> torch.Tensor:
    """Return the largest logit of each row over the classes of all ranks: (rows, own) -> (rows, 1)."""
    found = logits.amax(-1, keepdim=True)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found


class _NegativeLogLikelihood(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, own: slice) -> torch.Tensor:
        shifted = logits - largest(logits)
        row, mine = class_of(labels, own)
        exponentials = shifted.exp()
        chosen = shifted.gather(1, row.unsqueeze(1)).squeeze(1) * mine
        both = torch.stack([exponentials.sum(-1), chosen])
        dist.all_reduce(both)
        ctx.save_for_backward(exponentials / both[0].unsqueeze(1), row, mine)
        return both[0].log() - both[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        probabilities, row, mine = ctx.saved_tensors
        target = torch.zeros_like(probabilities).scatter(1, row.unsqueeze(1), mine.unsqueeze(1).to(probabilities))
        return (probabilities - target) * grads[0].unsqueeze(1), None, None


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, own: slice, *, ignore_index: int = -100) -> torch.Tensor:
    """Return the mean cross entropy, (), on all ranks, of logits whose classes are divided among ranks.

    Args:
        logits: of this rank's classes, (rows, own).
        labels: classes of the whole vocabulary, (rows,), equal on all ranks.
        own: the classes of this rank.
        ignore_index: a label whose rows do not count.
    """
    kept = labels != ignore_index
    losses = _NegativeLogLikelihood.apply(logits, labels, own)
    return torch.where(kept, losses, 0).sum() / kept.sum()


class VocabularyParallel(nn.Module):
    """An embedding that is also the output layer, with its rows divided among the ranks in chunks: (own, features)."""

    def __init__(self, embedding: torch.Tensor, device: torch.device) -> None:
        super().__init__()
        self.own = chunks(len(embedding), dist.get_world_size())[dist.get_rank()]
        self.weight = nn.Parameter(embedding.detach()[self.own].to(device))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of all tokens, (tokens, features), on all ranks."""
        row, mine = class_of(tokens, self.own)
        return sum_over_ranks(self.weight[row] * mine.unsqueeze(1))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of this rank's classes for inputs that all ranks hold: (rows, features) -> (rows, own)."""
        return F.linear(copy_to_ranks(x), self.weight)
