"""Model parallelism by hand: parts of one model, or parts of its weights, on several devices or ranks.

- Parts of a model on several devices of a process. Between ranks this is pipeline parallelism: each rank holds a stage,
  and micro-batches pass through, as in *GPipe*.
- Linear layers, by columns and by rows. The four functions of autograd are those of *Megatron-LM* (Shoeybi et al.,
  arXiv:1909.08053): the backward pass of a copy is a sum, that of a gather is a division, and vice versa.
- Asynchronous tensor parallelism: products that overlap with the collective before or after them. `torch.compile`
  puts these operators in place of a gather before a product, and of a reduce-scatter after one. They need symmetric
  memory: each GPU reads and writes the memory of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
