"""Programs of collectives against a model: one process that holds the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.checks.collective_findings import WrongResult, raise_findings
from mgpu_check.rank_side.rank import Rank
from mgpu_check.specs.collective_steps import BUFFERS, LENGTH, CollectiveStep

__all__ = ["assert_program_matches"]

State = list[list[torch.Tensor]]
"""By rank, by number of the tensor."""


def assert_program_matches(rank: Rank, steps: Sequence[CollectiveStep], dtype: torch.dtype, place: str) -> None:
    """Assert that after each of `steps` the tensors of this rank are those of the model, bit for bit.

    The dtype is one of integers, whose sums wrap around: no step rounds, and no number of steps leaves what it can hold.

    Raises:
        CollectiveMismatch: with the first step after which a tensor differs.
    """
    __tracebackhide__ = True
    model = [_begun(other, rank.size, dtype) for other in range(rank.size)]
    device = rank.device if place == "device" else torch.device("cpu")
    held = [tensor.to(device, copy=True) for tensor in model[rank.index]]
    findings: list[WrongResult] = []
    for number, step in enumerate(steps):
        _take(rank, step, held)
        _follow(model, step)
        for name, (tensor, right) in enumerate(zip(held, model[rank.index], strict=True)):
            got = tensor.cpu()
            if not torch.equal(got, right) and not findings:
                what = f"step {number + 1} of {len(steps)}, {step}, tensor t{name}, {dtype}, {place} tensors"
                findings.append(WrongResult.of(what, got, right, got != right))
    raise_findings(findings, len(steps), rank)


def _begun(rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    count = LENGTH * size
    return [((torch.arange(count) * 37 + rank * 11 + number * 5) % 101 + rank).to(dtype) for number in range(BUFFERS)]


def _take(rank: Rank, step: CollectiveStep, held: list[torch.Tensor]) -> None:
    """Take a step, with the tensors of this rank."""
    size, me = rank.size, rank.index
    target, source, root = held[step.target], held[step.source], step.root % size
    part = slice(me * LENGTH, (me + 1) * LENGTH)
    late: dict[str, Any] = {"async_op": step.asynchronous}
    op = getattr(dist.ReduceOp, step.op)
    work: Any = None
    if step.kind == "add":
        target.add_(source, alpha=me + 1)
    elif step.kind == "all_reduce":
        work = dist.all_reduce(target, op, **late)
    elif step.kind == "reduce":
        copy = target.clone()
        work = dist.reduce(copy, root, op, **late)
    elif step.kind == "broadcast":
        work = dist.broadcast(target, root, **late)
    elif step.kind == "all_gather":
        work = dist.all_gather(list(target.chunk(size)), source[part].clone(), **late)
    elif step.kind == "reduce_scatter":
        work = dist.reduce_scatter(target[part], [chunk.clone() for chunk in source.chunk(size)], op, **late)
    elif step.kind == "all_to_all":
        work = dist.all_to_all_single(target, source.clone(), **late)
    elif step.kind == "scatter":
        work = dist.scatter(
            target[part], [chunk.clone() for chunk in source.chunk(size)] if me == root else None, root, **late
        )
    elif step.kind == "gather":
        work = dist.gather(source[part].clone(), list(target.chunk(size)) if me == root else None, root, **late)
    elif step.kind == "shift" and root:
        given = source.clone()
        exchange = [
            dist.P2POp(dist.isend, given, (me + root) % size),
            dist.P2POp(dist.irecv, target, (me - root) % size),
        ]
        for one in dist.batch_isend_irecv(exchange):
            one.wait()
    if work is not None:
        work.wait()
    if step.kind == "reduce" and me == root:
        target.copy_(copy)


def _follow(model: State, step: CollectiveStep) -> None:
    """Take a step, with the tensors of all ranks."""
    root = step.root % len(model)
    targets = [tensors[step.target] for tensors in model]
    sources = [tensors[step.source].clone() for tensors in model]
    for rank, (target, right) in enumerate(zip(targets, _after(step, root, targets, sources), strict=True)):
        if step.kind in ("reduce", "gather") and rank != root:
            continue
        if step.kind in ("reduce_scatter", "scatter"):
            part = slice(rank * LENGTH, (rank + 1) * LENGTH)
            target[part] = right[part]
        else:
            target.copy_(right)


def _after(
    step: CollectiveStep, root: int, targets: list[torch.Tensor], sources: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return what each rank gets of a step, in new memory."""
    size = len(targets)
    ranks, parts = range(size), [slice(rank * LENGTH, (rank + 1) * LENGTH) for rank in range(size)]
    if step.kind == "add":
        return [torch.add(targets[rank], sources[rank], alpha=rank + 1) for rank in ranks]
    if step.kind in ("all_reduce", "reduce"):
        return [_reduced(targets, step.op)] * size
    if step.kind == "broadcast":
        return [targets[root].clone()] * size
    if step.kind in ("all_gather", "gather"):
        return [torch.cat([sources[rank][parts[rank]] for rank in ranks])] * size
    if step.kind == "reduce_scatter":
        return [_reduced(sources, step.op)] * size
    if step.kind == "all_to_all":
        return [torch.cat([sources[other][parts[rank]] for other in ranks]) for rank in ranks]
    if step.kind == "scatter":
        return [sources[root]] * size
    return [sources[(rank - root) % size] if root else targets[rank].clone() for rank in ranks]


def _reduced(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    stacked = torch.stack(list(tensors))
    if op == "SUM":
        return stacked.sum(0, dtype=stacked.dtype)
    return stacked.amin(0) if op == "MIN" else stacked.amax(0)
