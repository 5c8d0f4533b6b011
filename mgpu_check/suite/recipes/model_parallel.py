"""Model parallelism by hand: parts of one model, or parts of its weights, on several devices or ranks.

- Parts of a model on several devices of a process. Between ranks this is pipeline parallelism: each rank holds a stage,
  and micro-batches pass through, as in *GPipe*.
- Linear layers, by columns and by rows. The four functions of autograd are those of *Megatron-LM* (Shoeybi et al.,
  arXiv:1909.08053): the backward pass of a copy is a sum, that of a gather is a division, and vice versa.
- Vocabulary parallelism: each rank holds some rows of an embedding, and the logits of these classes. The functions
  are those of *Megatron-LM*, too.
- Attention divided by heads, from one fused weight of queries, keys and values. Several query heads share a head of
  keys and values (*GQA*, Ainslie et al., arXiv:2305.13245). If there are fewer of these than ranks, some ranks hold
  the same one, and each has a part of its gradient.
- Asynchronous tensor parallelism: products that overlap with the collective before or after them. `torch.compile`
  puts these operators in place of a gather before a product, and of a reduce-scatter after one. They need symmetric
  memory: each GPU reads and writes the memory of the others.
- Experts: each rank holds some of the experts of a layer, and `all_to_all` carries tokens to them. Capacity and the
  loss for balance are those of *Switch Transformers* (Fedus et al., arXiv:2101.03961).
- Sequence parallelism between divided layers. The two functions are those of *Reducing Activation Recomputation in
  Large Transformer Models* (Korthikanti et al., arXiv:2205.05198): the backward pass of a gather is a reduce-scatter,
  and vice versa.
- Context parallelism: the queries of a rank see keys of all ranks. Either all keys and values are gathered, or they
  pass around a ring, as in *Ring Attention with Blockwise Transformers for Near-Infinite Context* (Liu et al.,
  arXiv:2310.01889). Later tokens see more keys, so the zigzag order gives each rank an early and a late piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
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


_Way = Callable[[torch.Tensor], torch.Tensor]


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


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: _Way, back: _Way) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def _exchanged(x: torch.Tensor, there: _Way, back: _Way) -> torch.Tensor:
    """Exchange data of ranks by one function forward, and their gradient by its counterpart backward."""
    return _Exchanged.apply(x, there, back)  # type: ignore[no-any-return]


def copy_to_ranks(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, which is equal on all ranks; backward, sum the gradient over the ranks."""
    return _exchanged(x, lambda x: x.view_as(x), _summed)


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of `x` over the ranks; backward, pass the gradient on unchanged."""
    return _exchanged(x, _summed, lambda gradient: gradient)


def gather_from_ranks(x: torch.Tensor, width: int) -> torch.Tensor:
    """Join the ranks' chunks of the last dimension to `width`; backward, take this rank's chunk of the gradient."""
    return _exchanged(x, lambda x: _gathered(x, width), lambda gradient: gradient[..., _own(width)])


def divide_among_ranks(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's chunk of the last dimension of `x`; backward, join the ranks' chunks of the gradient."""
    width = x.shape[-1]
    return _exchanged(x, lambda x: x[..., _own(width)].clone(), lambda gradient: _gathered(gradient, width))


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


def exchange(rows: torch.Tensor, send: list[int], receive: list[int], group: Group = None) -> torch.Tensor:
    """Send the next `send[r]` rows to rank r of the group, and return `receive[r]` rows of each rank r, in order."""

    def there(rows: torch.Tensor) -> torch.Tensor:
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
        return received

    return _exchanged(rows, there, lambda gradient: exchange(gradient, receive, send, group))


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


def _gathered_parts(shard: torch.Tensor, dim: int) -> torch.Tensor:
    shard = shard.movedim(dim, 0).contiguous()
    full_tensor = shard.new_empty(dist.get_world_size() * len(shard), *shard.shape[1:])
    dist.all_gather_into_tensor(full_tensor, shard)
    return full_tensor.movedim(0, dim)


def _scattered(full_tensor: torch.Tensor, dim: int) -> torch.Tensor:
    full_tensor = full_tensor.movedim(dim, 0).contiguous()
    shard = full_tensor.new_empty(len(full_tensor) // dist.get_world_size(), *full_tensor.shape[1:])
    dist.reduce_scatter_tensor(shard, full_tensor)
    return shard.movedim(0, dim)


def gather_sequence(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Concatenate the ranks' parts of dimension `dim`; backward, sum the gradient, and take this rank's part."""
    return _exchanged(x, lambda x: _gathered_parts(x, dim), lambda gradient: _scattered(gradient, dim))


def scatter_sequence(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Sum `x` over the ranks, and return this rank's part of dimension `dim`; backward, concatenate the parts."""
    return _exchanged(x, lambda x: _scattered(x, dim), lambda gradient: _gathered_parts(gradient, dim))


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
