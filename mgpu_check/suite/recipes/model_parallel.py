"""Model parallelism by hand: parts of one model, or parts of its weights, on several devices or ranks.

- Parts of a model on several devices of a process. Between ranks this is pipeline parallelism: each rank holds a stage,
  and micro-batches pass through, as in *GPipe*.
- Linear layers, by columns and by rows. The four autograd functions are those of *Megatron-LM* (Shoeybi et al.,
  arXiv:1909.08053): the backward pass of a copy is a sum, that of a gather is a division, and vice versa.
- Vocabulary parallelism: each rank holds some rows of an embedding, and the logits of these classes. The functions
  are those of *Megatron-LM*, too.
- Attention divided by heads, from one fused weight of queries, keys and values. Several query heads share a head of
  keys and values (*GQA*, Ainslie et al., arXiv:2305.13245). If there are fewer of these than ranks, some ranks hold
  the same one, and each has a part of its gradient.
- Asynchronous tensor parallelism: products that overlap with the collective before or after them. `torch.compile`
  puts these operators in place of a gather before a product, and of a reduce-scatter after one. They need symmetric
  memory: each GPU reads and writes the memory of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check.oracles.training.gradient_exchange import chunks


class Staged(nn.Module):
    """A sequence of modules, each on its own device; activations are copied between the devices."""

    def __init__(self, stages: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.devices = list(devices)
        self.stages = nn.ModuleList(stage.to(device) for stage, device in zip(stages, devices, strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last stage, on its device; `x` may be on any device."""
        for stage, device in zip(self.stages, self.devices, strict=True):
            x = stage(x.to(device))
        return x


class Branched(nn.Module):
    """Parallel modules with one input, each on its own device; their outputs are summed on the last device."""

    def __init__(self, branches: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.devices = list(devices)
        self.branches = nn.ModuleList(branch.to(device) for branch, device in zip(branches, devices, strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the outputs, on the last device; `x` may be on any device."""
        end = self.devices[-1]
        outputs = [branch(x.to(device)) for branch, device in zip(self.branches, self.devices, strict=True)]
        total: torch.Tensor = outputs[-1]
        for output in outputs[:-1]:
            total = total + output.to(end)
        return total


Loss = Callable[[torch.Tensor, int], torch.Tensor]
"""Takes the outputs of a micro-batch and its number, and returns a scalar."""


def gpipe_step(
    stage: nn.Module,
    index: int,
    stages: int,
    micro_batches: Sequence[torch.Tensor],
    loss: Loss,
    *,
    width: int,
    device: torch.device,
) -> list[torch.Tensor]:
    """Run all micro-batches forward through the stages, then all gradients backward. Fills the gradients of parameters.

    Ranks 0 to `stages` - 1 hold the stages in order, and call this together.

    Args:
        stage: this rank's part of the model.
        index: index of the stage.
        micro_batches: the inputs of the first stage, (samples, …) each; other stages use only their number of samples.
        loss: called on the last stage.
        width: width of the inputs of this stage: (samples, width).

    Returns:
        On the last stage, its output for each micro-batch; elsewhere an empty list.
    """
    last = index == stages - 1
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    outputs: list[torch.Tensor] = []
    for micro_batch in micro_batches:
        if index == 0:
            x = micro_batch.to(device)
        else:
            x = torch.empty(len(micro_batch), width, device=device)
            dist.recv(x, index - 1)
            x.requires_grad_()
        y = stage(x)
        kept.append((x, y))
        if last:
            outputs.append(y.detach())
        else:
            dist.send(y.detach().contiguous(), index + 1)
    for number, (x, y) in enumerate(kept):
        if last:
            loss(y, number).backward()
        else:
            gradient = torch.empty_like(y)
            dist.recv(gradient, index + 1)
            y.backward(gradient)
        if index > 0:
            assert x.grad is not None, "the loss does not depend on the inputs of this stage"
            dist.send(x.grad.contiguous(), index - 1)
    return outputs


def _own(width: int) -> slice:
    return chunks(width, dist.get_world_size())[dist.get_rank()]


def _gathered(shard: torch.Tensor, width: int) -> torch.Tensor:
    """Concatenate the ranks' parts along the last dimension; their widths may differ by one."""
    pieces = chunks(width, dist.get_world_size())
    widest = pieces[0].stop
    padded = F.pad(shard, (0, widest - shard.shape[-1])).contiguous()
    gathered = [torch.empty_like(padded) for _ in pieces]
    dist.all_gather(gathered, padded)
    return torch.cat(
        [columns[..., : piece.stop - piece.start] for columns, piece in zip(gathered, pieces, strict=True)], -1
    )


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _summed(grads[0])


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _summed(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: int) -> torch.Tensor:
        return _gathered(x, width)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0][..., _own(grads[0].shape[-1])], None


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.width = x.shape[-1]
        return x[..., _own(ctx.width)].clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _gathered(grads[0], ctx.width)


def copy_to_ranks(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, which is equal on all ranks; backward, sum the gradient over the ranks."""
    return _CopyToRanks.apply(x)  # type: ignore[no-any-return]


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of `x` over the ranks; backward, pass the gradient on unchanged."""
    return _Sum.apply(x)  # type: ignore[no-any-return]


def gather_from_ranks(x: torch.Tensor, width: int) -> torch.Tensor:
    """Join the ranks' chunks of the last dimension to `width`; backward, take this rank's chunk of the gradient."""
    return _Gather.apply(x, width)  # type: ignore[no-any-return]


def divide_among_ranks(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's chunk of the last dimension of `x`; backward, join the ranks' chunks of the gradient."""
    return _Divide.apply(x)  # type: ignore[no-any-return]


class ColumnLinear(nn.Module):
    """A linear layer with divided outputs: each rank holds the rows of `weight`, (out, in), of its outputs."""

    def __init__(self, layer: nn.Linear, device: torch.device, *, gather: bool = False) -> None:
        super().__init__()
        own = _own(layer.out_features)
        self.width, self.gather = layer.out_features, gather
        self.weight = nn.Parameter(layer.weight.detach()[own].to(device, copy=True))
        self.bias = nn.Parameter(layer.bias.detach()[own].to(device, copy=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs, (…, own), or all if `gather`; the inputs, (…, in), are equal on all ranks."""
        own = F.linear(copy_to_ranks(x), self.weight, self.bias)
        return gather_from_ranks(own, self.width) if self.gather else own


class RowLinear(nn.Module):
    """A linear layer with divided inputs: each rank holds the columns of `weight`, (out, in), for its inputs.
    Each rank holds the whole bias, which is added once, after the sum."""

    def __init__(self, layer: nn.Linear, device: torch.device, *, divide: bool = False) -> None:
        super().__init__()
        self.divide = divide
        self.weight = nn.Parameter(layer.weight.detach()[:, _own(layer.in_features)].to(device, copy=True))
        self.bias = nn.Parameter(layer.bias.detach().to(device, copy=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return all outputs, (…, out), for this rank's inputs, (…, own); if `divide`, for all inputs, (…, in)."""
        return sum_over_ranks(F.linear(divide_among_ranks(x) if self.divide else x, self.weight)) + self.bias


def class_of(labels: torch.Tensor, own: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each label among this rank's classes, 0 for labels of others, and which ones are its own."""
    mine = (labels >= own.start) & (labels < own.stop)
    return (labels - own.start).where(mine, 0), mine


def largest(logits: torch.Tensor) -> torch.Tensor:
    """Return the largest logit of each row over the classes of all ranks: (rows, own) -> (rows, 1)."""
    maximum = logits.amax(-1, keepdim=True)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX)
    return maximum


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
    return torch.where(kept, _NegativeLogLikelihood.apply(logits, labels, own), 0).sum() / kept.sum()


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


class FusedHeads(NamedTuple):
    """The heads of an attention."""

    # queries, shared: numbers of heads of queries, and of keys and values
    queries: int
    shared: int
    width: int  # features of a head
    # each head of keys and values follows the queries that share it: q q k v q q k v, as in Megatron. Otherwise all
    # queries come first, then all keys, then all values.
    interleaved: bool


def _places(heads: FusedHeads) -> tuple[list[int], list[int], list[int]]:
    """Return the place of each head of queries, keys and values in the fused weight, in heads."""
    if not heads.interleaved:
        ends = [heads.queries, heads.queries + heads.shared, heads.queries + 2 * heads.shared]
        return list(range(ends[0])), list(range(ends[0], ends[1])), list(range(ends[1], ends[2]))
    each = heads.queries // heads.shared
    starts = [group * (each + 2) for group in range(heads.shared)]
    queries = [start + index for start in starts for index in range(each)]
    return queries, [start + each for start in starts], [start + each + 1 for start in starts]


def rows_of(heads: FusedHeads, rank: int, ranks: int) -> tuple[list[int], FusedHeads]:
    """Return the rows of the fused weight that a rank holds, and its heads. The number of query heads must be a
    multiple of `ranks`; one of `ranks` and `heads.shared`, a multiple of the other."""
    own, kept = heads.queries // ranks, max(heads.shared // ranks, 1)
    start = rank * heads.shared // ranks
    mine = heads._replace(queries=own, shared=kept)
    fused, local = _places(heads), _places(mine)
    chosen = (fused[0][rank * own : (rank + 1) * own], fused[1][start : start + kept], fused[2][start : start + kept])
    head_at = {
        position: head
        for places, sources in zip(local, chosen, strict=True)
        for position, head in zip(places, sources, strict=True)
    }
    return [head_at[position] * heads.width + row for position in sorted(head_at) for row in range(heads.width)], mine


def split(fused: torch.Tensor, heads: FusedHeads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values: (batch, length, rows) -> (batch, heads, length, width) each."""
    by_head = fused.unflatten(-1, (-1, heads.width)).transpose(1, 2)
    q, k, v = (by_head[:, places] for places in _places(heads))
    return q, k, v


class GroupedQueryAttention(nn.Module):
    """Causal attention whose query heads are divided among the ranks; `fused` holds the rows of this rank.
    Call `sum_partial_gradients` after backward."""

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
            members = [list(range(start, start + alike)) for start in range(0, ranks, alike)]
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
        gradients = by_head[keys + values].contiguous()
        dist.all_reduce(gradients, group=self.holders)
        by_head[keys + values] = gradients


def _operators() -> Any:
    from torch.distributed import _symmetric_memory  # registers the operators

    assert _symmetric_memory.lib
    return torch.ops.symm_mem


def _group() -> str:
    assert dist.group.WORLD is not None
    name: str = dist.group.WORLD.group_name
    return name


def _gathered_product(rows: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    all_rows, products = _operators().fused_all_gather_matmul(rows.contiguous(), [factor], 0, _group())
    return all_rows, products[0]


def _scattered_product(rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = _operators().fused_matmul_reduce_scatter(rows.contiguous(), factor, "sum", 0, _group())
    return product


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        all_rows, product = _gathered_product(x, weight.t())
        ctx.save_for_backward(all_rows, weight)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        all_rows, weight = ctx.saved_tensors
        return _scattered_product(grads[0], weight), grads[0].t() @ all_rows


class _ScatteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _scattered_product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        all_rows, back = _gathered_product(grads[0], weight)
        return back, all_rows.t() @ x


def gathered_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Apply this rank's rows of a weight, (own, features), to the rows of all ranks: (rows, features) -> (all, own)."""
    return _GatheredLinear.apply(x, weight)  # type: ignore[no-any-return]


def scattered_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Apply this rank's columns of a weight, (features, own), and add up the ranks: (all, own) -> (rows, features)."""
    return _ScatteredLinear.apply(x, weight)  # type: ignore[no-any-return]
