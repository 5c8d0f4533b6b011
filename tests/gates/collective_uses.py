"""A right use of each collective of the table, in a step that is right for every result of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.utils import _sync_params_and_buffers, _verify_param_shape_across_processes

from mgpu_check import Rank

Use = Callable[[torch.Tensor, Rank], torch.Tensor]
"""From a rank's rows to a number that is the same on all ranks."""

USES: dict[str, Use] = {}
"""By the name of the collective in the table, and of a variant after a space."""


def use(name: str) -> Callable[[Use], Use]:
    def register(function: Use) -> Use:
        USES[name] = function
        return function

    return register


def of_each(*names: str) -> Callable[[Callable[[str], Use]], Callable[[str], Use]]:
    """Register a use of collectives that differ in their names only."""

    def register(make: Callable[[str], Use]) -> Callable[[str], Use]:
        USES.update({name: make(name) for name in names})
        return make

    return register


def build(uses: int = 1) -> nn.ModuleList:
    """A layer for each use, and the last for a mistake."""
    return nn.ModuleList([*(nn.Linear(4, 4) for _ in range(uses)), nn.Linear(4, 2)])


def reference(model: nn.ModuleList, batch: torch.Tensor) -> None:
    *of_uses, last = model
    loss = last(batch).square().mean()
    for layer in of_uses:
        loss = loss + layer(batch).logsumexp(1).mean()
    loss.backward()


def step(model: nn.ModuleList, batch: torch.Tensor, rank: Rank, names: Sequence[str], mistake: str) -> None:
    """Shift logits by numbers that ranks find together, as a stable softmax does: the loss does not depend on them.

    Args:
        names: the use for each layer but the last.
        mistake: what is done to the gradients of the last layer: "doubled" on 2 ranks, "local", or "" for nothing.
    """
    model.to(rank.device).zero_grad()
    *of_uses, last = model
    x = batch.chunk(rank.size)[rank.index].to(rank.device)
    loss = last(x).square().mean()
    for layer, name in zip(of_uses, names, strict=True):
        logits = layer(x)
        given = x if name.endswith(" of data") else logits if "differentiable" in name else logits.detach()
        shift = USES[name.removesuffix(" of data")](given, rank)
        loss = loss + ((logits - shift).logsumexp(1) + shift).mean()
    loss.backward()
    for layer in model:
        for parameter in layer.parameters():
            if layer is not last or mistake != "local":
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            if layer is last and mistake == "doubled":
                parameter.grad *= rank.size


def buffers(x: torch.Tensor, rank: Rank) -> list[torch.Tensor]:
    return [torch.empty_like(x) for _ in range(rank.size)]


def all_reduced(
    make: Callable[[torch.Tensor], torch.Tensor],
    give: Callable[[torch.Tensor], torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
) -> Use:
    def reduced(x: torch.Tensor, rank: Rank) -> torch.Tensor:
        value = make(x)
        dist.all_reduce(value, op=op)
        return give(value)

    return reduced


USES["all_reduce"] = all_reduced(torch.max, torch.clone, dist.ReduceOp.MAX)
USES["all_reduce of rows"] = all_reduced(lambda x: x.amax(0), torch.max, dist.ReduceOp.MAX)
USES["all_reduce in place"] = all_reduced(torch.clone, torch.mean)
USES["all_reduce in half precision"] = all_reduced(lambda x: x.mean(0).bfloat16(), lambda total: total.float().mean())


@use("all_reduce asynchronous")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    total = x.sum(0)
    dist.all_reduce(total, async_op=True).wait()
    return total.mean()


@use("all_reduce in a group")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    total = x.sum()
    dist.all_reduce(total, group=dist.new_group(list(range(rank.size))))
    return total


@use("all_reduce_coalesced")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    first, second = functional.all_reduce_coalesced([x.sum(0), x.square().sum()], "sum", dist.group.WORLD)
    return first.mean() + second


@use("reduce")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    total = x.sum(0)
    dist.reduce(total, 0)  # rank 0 alone has it, and gives it to the others
    dist.broadcast(total, 0)
    return total.mean()


@of_each("broadcast", "broadcast of another rank")
def _(name: str) -> Use:
    def sent(x: torch.Tensor, rank: Rank) -> torch.Tensor:
        row, src = (x[0].clone(), 0) if name == "broadcast" else (x[-1].clone(), rank.size - 1)
        dist.broadcast(row, src)
        return row.mean()

    return sent


@use("all_gather")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    parts = buffers(x, rank)
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts).mean()


@use("all_gather uneven")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    counts = [len(x) * (index + 1) for index in range(rank.size)]
    parts = [x.new_empty(count, 4) for count in counts]
    dist.all_gather(parts, x.repeat(rank.index + 1, 1))
    return torch.cat(parts).max()


@use("all_gather with its own part put back")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    parts = buffers(x, rank)
    dist.all_gather(parts, x.contiguous())
    parts[rank.index] = x
    return torch.cat(parts).max()


@use("all_gather_coalesced")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    lists = [[torch.empty_like(x), x.new_empty(4)] for _ in range(rank.size)]
    dist.all_gather_coalesced(lists, [x.contiguous(), x.sum(0)])
    return torch.cat([part.flatten() for parts in lists for part in parts]).mean()


@of_each("all_gather_into_tensor", "all_gather_single")
def _(name: str) -> Use:
    def whole(x: torch.Tensor, rank: Rank) -> torch.Tensor:
        gathered = x.new_empty(rank.size * len(x), 4)
        vars(dist)[name](gathered, x.contiguous())
        return gathered.mean()

    return whole


@of_each("all_gather_into_tensor_coalesced", "all_gather_single_coalesced")
def _(name: str) -> Use:
    def both(x: torch.Tensor, rank: Rank) -> torch.Tensor:
        gathered = vars(functional)[name]([x.contiguous(), x.sum(0)], dist.group.WORLD)
        return torch.stack([part.mean() for part in gathered]).sum()

    return both


def from_first(value: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Give all ranks the number that rank 0 has."""
    number = x.new_zeros(()) if value is None else value
    dist.all_reduce(number)
    return number


@use("gather")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    parts = None if rank.index else buffers(x, rank)
    dist.gather(x.contiguous(), parts)
    return from_first(None if parts is None else torch.cat(parts).mean(), x)


@of_each("gather_single", "gather_into_tensor")
def _(name: str) -> Use:
    def whole(x: torch.Tensor, rank: Rank) -> torch.Tensor:
        gathered = None if rank.index else x.new_empty(rank.size * len(x), 4)
        vars(dist)[name](x.contiguous(), gathered)
        return from_first(None if gathered is None else gathered.mean(), x)

    return whole


@use("scatter")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    one = x.new_empty(())
    dist.scatter(one, None if rank.index else [x.sum() * index for index in range(rank.size)])
    dist.all_reduce(one)
    return one


@use("reduce_scatter")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    part = x.new_empty(4)
    dist.reduce_scatter(part, [x.sum(0) for _ in range(rank.size)])
    return part.mean()


@use("reduce_scatter uneven")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    part = x.new_empty(rank.index + 1)
    dist.reduce_scatter(part, [x.sum(0)[: index + 1].contiguous() for index in range(rank.size)])
    return from_first(None if rank.index else part.sum(), x)


@of_each("reduce_scatter_tensor", "reduce_scatter_single")
def _(name: str) -> Use:
    def own(x: torch.Tensor, rank: Rank) -> torch.Tensor:
        part = x.new_empty(4)
        vars(dist)[name](part, x.sum(0).repeat(rank.size))
        return part.mean()

    return own


@of_each("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced")
def _(name: str) -> Use:
    def both(x: torch.Tensor, rank: Rank) -> torch.Tensor:
        inputs = [x.sum(0).repeat(rank.size), x.amax().repeat(rank.size)]
        parts = vars(functional)[name](inputs, "sum", [0, 0], dist.group.WORLD)
        return torch.stack([part.mean() for part in parts]).sum()

    return both


def together(x: torch.Tensor) -> torch.Tensor:
    total = x.sum()
    dist.all_reduce(total)
    return total


@use("all_to_all")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    given = [x.new_ones(rank.index + 1, 4) * x.mean() for _ in range(rank.size)]
    taken = [x.new_empty(index + 1, 4) for index in range(rank.size)]
    dist.all_to_all(taken, given)
    return together(torch.cat(taken))


@use("all_to_all_single")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    taken = x.new_empty(rank.size)
    dist.all_to_all_single(taken, x.mean().repeat(rank.size))
    return together(taken)


@use("all_to_all_single with splits")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    given = x.mean(0).repeat(rank.size * (rank.index + 1), 1)
    taken = x.new_empty(sum(range(1, rank.size + 1)), 4)
    splits = [rank.index + 1] * rank.size
    dist.all_to_all_single(taken, given, list(range(1, rank.size + 1)), splits)
    return together(taken)


@use("all_to_all_single differentiable")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    given = x.mean(0).repeat(rank.size, 1)
    taken = differentiable.all_to_all_single(torch.empty_like(given), given)
    return differentiable.all_reduce(taken.sum())


@use("all_gather_object")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    found = [None] * rank.size
    dist.all_gather_object(found, float(x.max()))
    return x.new_tensor(max(found))


@use("gather_object")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    found = None if rank.index else [None] * rank.size
    dist.gather_object(float(x.max()), found)
    return from_first(None if found is None else x.new_tensor(max(found)), x)


@use("scatter_object_list")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    found = [None]
    dist.scatter_object_list(found, None if rank.index else list(range(rank.size)))
    return together(x.new_tensor(float(found[0])))


@use("broadcast_object_list")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    found = [float(x.max())]
    dist.broadcast_object_list(found, 0)
    return x.new_tensor(found[0])


@use("barrier")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    dist.barrier()
    return x.new_ones(())


@use("monitored_barrier")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    dist.monitored_barrier(dist.new_group(backend="gloo"))
    return x.new_ones(())


def send_on(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    """Send a number from rank to rank, as a pipeline does."""
    number = x.max()
    if rank.index:
        dist.recv(number, rank.index - 1)
    if rank.index < rank.size - 1:
        dist.send(number, rank.index + 1)
    return number


USES["send"] = USES["recv"] = send_on


def exchange(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    """Exchange rows with neighbours that have different numbers of them."""
    after, before = (rank.index + 1) % rank.size, (rank.index - 1) % rank.size
    given = x.mean(0).repeat(rank.index + 1, 1)
    taken = x.new_empty(before + 1, 4)
    for work in dist.batch_isend_irecv([
        dist.P2POp(dist.isend, given, after),
        dist.P2POp(dist.irecv, taken, before),
    ]):  # fmt: skip
        work.wait()
    return together(taken)


USES["isend"] = USES["irecv"] = exchange


def pipeline(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    """Ranks send and receive at other lines, and the last gives what comes out to all."""
    number = x.max()
    if rank.size == 1:
        return number
    if rank.index == 0:
        dist.isend(number, 1).wait()
    elif rank.index == 1:
        dist.irecv(number, 0).wait()
    dist.broadcast(number, 1)
    return number


USES["isend of a pipeline"] = pipeline


def hand_on(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    found = [float(x.max())]
    if rank.index:
        dist.recv_object_list(found, rank.index - 1)
    if rank.index < rank.size - 1:
        dist.send_object_list(found, rank.index + 1)
    return x.new_tensor(found[0])


USES["send_object_list"] = USES["recv_object_list"] = hand_on


@use("_verify_param_shape_across_processes")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    _verify_param_shape_across_processes(dist.group.WORLD, [x.sum(0)])
    return x.new_ones(())


@use("_sync_params_and_buffers")
def _(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    first = x[0].clone()
    _sync_params_and_buffers(dist.group.WORLD, [first], 1 << 20, 0)
    return first.sum()


USES |= {
    "all_reduce differentiable": lambda x, rank: differentiable.all_reduce(x.sum()),
    "all_reduce functional": lambda x, rank: functional.all_reduce(x.max(), "max", dist.group.WORLD) + 0,
    "all_gather differentiable": lambda x, rank: torch.cat(differentiable.all_gather(x)).mean(),
    "all_gather_tensor": lambda x, rank: functional.all_gather_tensor(x.contiguous(), 0, dist.group.WORLD).mean(),
}
