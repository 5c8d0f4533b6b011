"""Functions whose bits depend on what they should not depend on, from public reports, and right twins of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mgpu_check import Rank

Run = Callable[[torch.Tensor, Rank], Any]
_calls = itertools.count()


def batch() -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def images() -> torch.Tensor:
    return torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def weight(rank: Rank, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(rank.device)


def in_batch(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    return x.to(rank.device) @ weight(rank, 16, 32)


def one_by_one(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    return torch.cat([in_batch(row[None], rank) for row in x])


def combined(x: torch.Tensor, rank: Rank, add: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Add the samples that an expert has, as a combine of experts does."""
    experts = torch.arange(len(x), device=rank.device) % 2
    return add(x.to(rank.device).repeat(40, 1), experts.repeat(40))


def by_atomics(x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(2, 16).index_add(0, experts, x)


def by_scatter(x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(2, 16).scatter_add(0, experts[:, None].expand_as(x), x)


def by_product(x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return F.one_hot(experts, 2).T.to(x.dtype) @ x


def running_sum(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    return x.to(rank.device).repeat(1, 40).cumsum(1)


def gradient_of(x: torch.Tensor, rank: Rank, layer: Callable[..., torch.Tensor]) -> torch.Tensor | None:
    operand = x.to(rank.device).requires_grad_()
    layer(operand, rank).square().sum().backward()
    return operand.grad


def enlarged(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    return F.interpolate(x, 11, mode="bilinear")


def repeated_pixels(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    return x.repeat_interleave(2, 2)


def kernel_gradient(x: torch.Tensor, rank: Rank) -> torch.Tensor | None:
    kernel = weight(rank, 4, 3, 3, 3).requires_grad_()
    F.conv2d(x.to(rank.device), kernel).square().sum().backward()
    return kernel.grad


def deterministic(x: torch.Tensor, rank: Rank, run: Run) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return run(x, rank)
    finally:
        torch.use_deterministic_algorithms(False)


def dropped(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    return F.dropout(x.to(rank.device), 0.5)


def dropped_by_seeds(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    rows = []
    for row in x.to(rank.device):
        torch.cuda.manual_seed(int(row[0].abs() * 1e6))
        rows.append(F.dropout(row, 0.5))
    return torch.stack(rows)


def normalized(x: torch.Tensor, rank: Rank, training: bool) -> torch.Tensor:
    norm = nn.BatchNorm1d(16).to(rank.device).train(training)
    return norm(x.to(rank.device)).detach()


def quantized(x: torch.Tensor, rank: Rank, dim: int | None) -> torch.Tensor:
    """Quantize with one scale, or with one for each sample."""
    x = x.to(rank.device)
    scale = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    return (x / scale * 127).round() * scale


def routed(x: torch.Tensor, rank: Rank, capacity: int) -> torch.Tensor:
    """Send each sample to the expert 0 or 1; an expert takes `capacity` of them."""
    x = x.to(rank.device)
    chosen = (x[:, :1] > 0).long()
    place = F.one_hot(chosen[:, 0], 2).cumsum(0).gather(1, chosen)
    return torch.where(place <= capacity, x * (chosen + 1), torch.zeros_like(x))


def counted(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    return x.to(rank.device) + next(_calls) % 2


def counted_on_one_rank(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    total = x.to(rank.device).sum()
    dist.all_reduce(total)
    return total + (next(_calls) if rank.index == 1 else 0)


def reseeded(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    torch.seed()
    return x + torch.rand(16)


def drawn(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    return x + torch.rand(16)


def summed_over_ranks(x: torch.Tensor, rank: Rank, whole_numbers: bool = False) -> torch.Tensor:
    x = (x * 8).round() if whole_numbers else x
    mine = x.to(rank.device).chunk(rank.size)[rank.index].sum(0)
    dist.all_reduce(mine)
    return mine


def gathered(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    mine = x.to(rank.device).chunk(rank.size)[rank.index].contiguous()
    rows = [torch.empty_like(mine) for _ in range(rank.size)]
    dist.all_gather(rows, mine)
    return torch.cat(rows).sum(0)


def row_parallel(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    part = x.to(rank.device).chunk(rank.size, 1)[rank.index] @ weight(rank, 16, 32).chunk(rank.size)[rank.index]
    dist.all_reduce(part)
    return part


def rows_at_root(x: torch.Tensor, rank: Rank) -> torch.Tensor | None:
    return in_batch(x, rank) if rank.index == 0 else None


def trained(
    x: torch.Tensor, rank: Rank, micro_batches: int = 1, resumed: torch.dtype | None = None, steps: int = 3
) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1)).to(rank.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(steps):
        if step == 1 and resumed is not None:
            state = optimizer.state_dict()
            for moments in state["state"].values():
                moments.update({key: moments[key].to(resumed).float() for key in ("exp_avg", "exp_avg_sq")})
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        for part in x.to(rank.device).chunk(micro_batches):
            (model(part).square().mean() / micro_batches).backward()
        optimizer.step()
    return model


def recomputed(x: torch.Tensor, rank: Rank, preserve: bool | None) -> torch.Tensor | None:
    """Return a gradient through dropout, from a recomputation or, with None, without one."""
    operand = x.to(rank.device).requires_grad_()

    def block(t: torch.Tensor) -> torch.Tensor:
        return F.dropout(t.sin(), 0.5)

    if preserve is None:
        result = block(operand)
    else:
        result = checkpoint(block, operand, use_reentrant=False, preserve_rng_state=preserve)
    F.dropout(operand, 0.5)
    result.sum().backward()
    return operand.grad


@dataclass(frozen=True)
class Case:
    run: Run
    unchanged: tuple[str, ...] = ()
    others: dict[str, Run] = field(default_factory=dict)
    batch: Callable[[], torch.Tensor] = batch
    words: str = ""  # of the message, for a wrong function


partial = functools.partial
_FIRST = "the first operator with the same operands and other results is"
WRONG = {
    "a product depends on the size of the batch": Case(
        in_batch, ("batch_size",), words=f"{_FIRST} aten.mm*bit_programs"
    ),
    "a product depends on the order": Case(in_batch, ("order",), words=f"{_FIRST} aten.mm"),
    "experts combined by atomics": Case(
        partial(combined, add=by_atomics), ("repeated",), words=f"{_FIRST} aten.index_add"
    ),
    "experts combined by scatter": Case(
        partial(combined, add=by_scatter), ("repeated",), words=f"{_FIRST} aten.scatter_add"
    ),
    "running sum": Case(running_sum, ("repeated",), words=f"{_FIRST} aten.cumsum"),
    "gradient of an interpolation": Case(
        partial(gradient_of, layer=enlarged),
        ("repeated",),
        batch=images,
        words="upsample_bilinear2d_backward*in backward",
    ),
    "gradient of a kernel": Case(
        kernel_gradient, ("repeated",), batch=images, words="convolution_backward*in backward"
    ),
    "dropout by position": Case(dropped, ("position",), words=f"{_FIRST} aten."),
    "statistics of the batch": Case(partial(normalized, training=True), ("batch_size",), words="samples 0 to 3 alone"),
    "one scale for the batch": Case(partial(quantized, dim=None), ("batch_size",), words=f"{_FIRST} aten.max"),
    "capacity of experts": Case(partial(routed, capacity=3), ("position",), words="samples in reversed order"),
    "a counter between calls": Case(counted, ("repeated",), words="a second call with the same batch"),
    "a counter on one rank": Case(counted_on_one_rank, ("repeated",), words="ranks 1"),
    "a seed of its own": Case(reseeded, ("repeated",), words="a second call with the same batch"),
    "a sum over ranks": Case(summed_over_ranks, ("ranks",), words="world size 4 gives other bits than one device"),
    "a sum over ranks in another order": Case(summed_over_ranks, ("order",), words="another order of the additions"),
    "row parallel": Case(rows_at_root, others={"tp = 4": row_parallel}, words="the function 'tp = 4' of others"),
    "two micro-batches": Case(trained, others={"in two": partial(trained, micro_batches=2)}, words="0.weight[0, 0]"),
    "moments saved in bfloat16": Case(
        trained, others={"resumed": partial(trained, resumed=torch.bfloat16)}, words="resumed"
    ),
    "recomputed with other draws": Case(
        partial(recomputed, preserve=None),
        others={"recomputed": partial(recomputed, preserve=False)},
        words="recomputed",
    ),
    "one step less": Case(trained, others={"again": partial(trained, steps=2)}, words="0.weight[0, 0]"),
}
RIGHT = {
    "products one by one": Case(one_by_one, ("repeated", "batch_size", "position", "ranks")),
    "one by one in others": Case(one_by_one, others={"reversed": lambda x, rank: one_by_one(x.flip(0), rank).flip(0)}),
    "experts combined by a product": Case(partial(combined, add=by_product), ("repeated",)),
    "experts combined by deterministic atomics": Case(
        partial(deterministic, run=partial(combined, add=by_atomics)), ("repeated",)
    ),
    "pixels repeated": Case(partial(gradient_of, layer=repeated_pixels), ("repeated",), batch=images),
    "dropout by seeds": Case(dropped_by_seeds, ("repeated", "position", "batch_size")),
    "statistics of the training": Case(partial(normalized, training=False), ("batch_size", "position")),
    "a scale for each sample": Case(partial(quantized, dim=1), ("batch_size", "position", "order")),
    "no capacity": Case(partial(routed, capacity=8), ("position",)),
    "draws after the seed of the gate": Case(drawn, ("repeated", "order")),
    "whole numbers": Case(partial(summed_over_ranks, whole_numbers=True), ("ranks", "order", "repeated")),
    "gathered before the sum": Case(gathered, ("ranks", "repeated")),
    "training": Case(trained, ("repeated", "ranks")),
    "moments saved in float32": Case(trained, others={"resumed": partial(trained, resumed=torch.float32)}),
    "recomputed with the same draws": Case(
        partial(recomputed, preserve=None), others={"recomputed": partial(recomputed, preserve=True)}
    ),
}
