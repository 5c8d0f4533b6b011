"""Compare programs of collectives with a model in one process that holds the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.collectives.findings import WrongResult, raise_findings
from mgpu_check.suite.collectives.program_cases import BUFFERS, LENGTH, OF_GROUPS, CollectiveStep

__all__ = ["assert_program_matches"]


def assert_program_matches(rank: Rank, steps: Sequence[CollectiveStep], dtype: str, place: str) -> None:
    """Assert after each of `steps` that the tensors of this rank equal those of the model bit for bit.

    Tensors of a collective that still runs are compared when it has ended.

    Args:
        dtype: the name of an integer dtype: sums wrap around, so no step rounds or overflows.

    Raises:
        CollectiveMismatch: names the step that last wrote the first tensor that differs.
    """
    __tracebackhide__ = True
    model = _Model(rank.size, getattr(torch, dtype))
    device = rank.device if place == "device" else torch.device("cpu")
    mine = _OfRank(rank, [tensor.to(device, copy=True) for tensor in model.held[rank.index]])
    findings: list[WrongResult] = []
    wrote: dict[int, str] = {}

    def compare() -> None:
        for name, (tensor, right) in enumerate(zip(mine.held, model.held[rank.index], strict=True)):
            got = None if name in mine.pending else tensor.cpu()
            if got is not None and not torch.equal(got, right) and not findings:
                what = f"{wrote.get(name, 'no step')}, tensor t{name}, {dtype}, {place} tensors"
                findings.append(WrongResult.of(what, got, right, got != right))

    for number, step in enumerate(steps):
        mine.take(step)
        model.take(step)
        if step.kind not in OF_GROUPS:
            wrote[step.target] = f"step {number + 1} of {len(steps)}, {step}"
        compare()
    mine.finish()
    compare()
    raise_findings(findings, len(steps), rank)


def _begun(rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    count = LENGTH * size
    return [((torch.arange(count) * 37 + rank * 11 + number * 5) % 101 + rank).to(dtype) for number in range(BUFFERS)]


def _members(step: CollectiveStep, size: int) -> list[int]:
    return sorted({member % size for member in step.members})


@dataclass(frozen=True)
class _Members:
    """The members of a group in ascending order, and its handle: None for all ranks."""

    members: list[int]
    handle: Any = None


@dataclass(frozen=True)
class _Pending:
    work: Any
    group: int
    after: Callable[[], object]
    """Called after the wait."""


class _OfRank:
    """The tensors and groups of this rank, and its collectives that still run.

    Attributes:
        pending: number of the tensor that a collective writes -> the collective.
    """

    def __init__(self, rank: Rank, held: list[torch.Tensor]) -> None:
        self._rank, self.held = rank, held
        self._groups = {0: _Members(list(range(rank.size)))}
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        self.pending: dict[int, _Pending] = {}

    def _view(self, name: int, size: int) -> torch.Tensor:
        """Return the part of a tensor that a group of `size` uses; the same object each time, as in training code."""
        return self._views.setdefault((name, size), self.held[name][: size * LENGTH])

    def take(self, step: CollectiveStep) -> None:
        if step.kind == "new_group":
            members = _members(step, self._rank.size)
            self._groups[step.group] = _Members(members, dist.new_group(members))
        elif step.kind == "destroy_group":
            self._wait([name for name, one in self.pending.items() if one.group == step.group])
            self._destroy(self._groups.pop(step.group))
        else:
            self._wait([step.target, step.source])
            if self._rank.index in self._groups[step.group].members:
                self._move(step, self._groups[step.group])

    def finish(self) -> None:
        """Wait for all collectives, and destroy the groups."""
        self._wait(list(self.pending))
        for group in self._groups.values():
            if group.handle is not None:
                self._destroy(group)

    def _destroy(self, group: _Members) -> None:
        # Gloo connects while it makes a group, so no rank may destroy the group while another still connects.
        dist.barrier(device_ids=[self._rank.device.index])
        dist.destroy_process_group(group.handle)

    def _wait(self, names: Sequence[int]) -> None:
        for name in names:
            pending = self.pending.pop(name, None)
            if pending is not None:
                pending.work.wait()
                pending.after()

    def _move(self, step: CollectiveStep, group: _Members) -> None:
        size, me = len(group.members), group.members.index(self._rank.index)
        target, source = (self._view(name, size) for name in (step.target, step.source))
        root = step.root % size
        part = slice(me * LENGTH, (me + 1) * LENGTH)
        named: dict[str, Any] = {"group": group.handle, "async_op": step.asynchronous}
        op, of_root = getattr(dist.ReduceOp, step.op), group.members[root]
        after: Callable[[], object] = bool  # does nothing
        work: Any = None
        if step.kind == "add":
            target.add_(source, alpha=me + 1)
        elif step.kind == "all_reduce":
            work = dist.all_reduce(target, op, **named)
        elif step.kind == "reduce":
            copy = target.clone()
            work = dist.reduce(copy, of_root, op, **named)
            after = (lambda: target.copy_(copy)) if me == root else after
        elif step.kind == "broadcast":
            work = dist.broadcast(target, of_root, **named)
        elif step.kind == "all_gather":
            work = dist.all_gather(list(target.chunk(size)), source[part].clone(), **named)
        elif step.kind == "reduce_scatter":
            work = dist.reduce_scatter(target[part], [chunk.clone() for chunk in source.chunk(size)], op, **named)
        elif step.kind == "all_to_all":
            work = dist.all_to_all_single(target, source.clone(), **named)
        elif step.kind == "scatter":
            given = [chunk.clone() for chunk in source.chunk(size)] if me == root else None
            work = dist.scatter(target[part], given, of_root, **named)
        elif step.kind == "gather":
            work = dist.gather(source[part].clone(), list(target.chunk(size)) if me == root else None, of_root, **named)
        elif step.kind == "shift" and root:
            self._shift(target, source.clone(), group, me, root)
        if work is None:
            after()
        else:
            self.pending[step.target] = _Pending(work, step.group, after)

    def _shift(self, target: torch.Tensor, given: torch.Tensor, group: _Members, me: int, by: int) -> None:
        to, of = (group.members[(me + step) % len(group.members)] for step in (by, -by))
        exchange = [
            dist.P2POp(dist.isend, given, to, group.handle),
            dist.P2POp(dist.irecv, target, of, group.handle),
        ]
        for one in dist.batch_isend_irecv(exchange):
            one.wait()


class _Model:
    """The tensors of all ranks in one process.

    Attributes:
        held: tensors, by rank and by number of the tensor.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.held = [_begun(rank, size, dtype) for rank in range(size)]
        self._groups = {0: list(range(size))}

    def take(self, step: CollectiveStep) -> None:
        if step.kind == "new_group":
            self._groups[step.group] = _members(step, len(self.held))
            return
        if step.kind == "destroy_group":
            del self._groups[step.group]
            return
        members = self._groups[step.group]
        length, root = len(members) * LENGTH, step.root % len(members)
        targets = [self.held[rank][step.target][:length] for rank in members]
        sources = [self.held[rank][step.source][:length].clone() for rank in members]
        for number, (target, right) in enumerate(zip(targets, _after(step, root, targets, sources), strict=True)):
            if step.kind in ("reduce", "gather") and number != root:
                continue
            if step.kind in ("reduce_scatter", "scatter"):
                part = slice(number * LENGTH, (number + 1) * LENGTH)
                target[part] = right[part]
            else:
                target.copy_(right)


def _after(
    step: CollectiveStep, root: int, targets: list[torch.Tensor], sources: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the result of a step for each rank, in new memory."""
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
