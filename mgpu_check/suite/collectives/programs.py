"""Compare programs of collectives with a model in one process that holds the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.oracles.collectives.cases import BUFFERS, LENGTH, OF_GROUPS, CollectiveStep, WrongResult, raise_findings
from mgpu_check.oracles.collectives.repeated_calls import called, parts_of
from mgpu_check.suite.collectives.functional import REDUCTIONS
from mgpu_check.torch_hooks.collective_table import COLLECTIVES, TRANSFERS

_FORMS = {"all_to_all": "all_to_all_single"}
"""Transfer -> the function to call, where it has another name: older versions of gloo have no `all_to_all` of lists."""


def assert_program_matches(rank: Rank, steps: Sequence[CollectiveStep], dtype: str, placement: str) -> None:
    """Assert after each of `steps` that the tensors of this rank equal those of the model bit for bit.

    Tensors of a collective that still runs are compared when it has ended. `dtype` is an integer dtype: sums wrap
    around, so no step rounds or overflows.
    """
    model = _Model(rank.size, getattr(torch, dtype))
    device = rank.device if placement == "device" else torch.device("cpu")
    mine = _OfRank(rank, [tensor.to(device, copy=True) for tensor in model.tensors[rank.index]])
    findings: list[WrongResult] = []
    wrote: dict[int, str] = {}

    def compare() -> None:
        for name, (tensor, expected) in enumerate(zip(mine.tensors, model.tensors[rank.index], strict=True)):
            got = None if name in mine.pending else tensor.cpu()
            if got is not None and not torch.equal(got, expected) and not findings:
                label = f"{wrote.get(name, 'no step')}, tensor t{name}, {dtype}, {placement} tensors"
                findings.append(WrongResult.of(label, got, expected, got != expected))

    for number, step in enumerate(steps):
        mine.take(step)
        model.take(step)
        if step.operation not in OF_GROUPS:
            wrote[step.target] = f"step {number + 1} of {len(steps)}, {step}"
        compare()
    mine.finish()
    compare()
    raise_findings(findings, len(steps), rank)


def _members(step: CollectiveStep, size: int) -> list[int]:
    return sorted({member % size for member in step.members})


class _Members(NamedTuple):
    """The members of a group in ascending order, and its handle: None for all ranks."""

    members: list[int]
    handle: Any = None


class _Pending(NamedTuple):
    """A collective that still runs, the number of its group, and what to call after the wait."""

    work: Any
    group: int
    after: Callable[[], object]


class _OfRank:
    """The tensors and groups of this rank, and by the numbers of their tensors the collectives that still run."""

    def __init__(self, rank: Rank, tensors: list[torch.Tensor]) -> None:
        self._rank, self.tensors = rank, tensors
        self._groups = {0: _Members(list(range(rank.size)))}
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        self.pending: dict[int, _Pending] = {}

    def _view(self, name: int, size: int) -> torch.Tensor:
        """Return the part of a tensor that a group of `size` uses; the same object each time, as in training code."""
        return self._views.setdefault((name, size), self.tensors[name][: size * LENGTH])

    def take(self, step: CollectiveStep) -> None:
        if step.operation == "new_group":
            members = _members(step, self._rank.size)
            self._groups[step.group] = _Members(members, dist.new_group(members))
        elif step.operation == "destroy_group":
            self._wait([name for name, pending in self.pending.items() if pending.group == step.group])
            self._destroy(self._groups.pop(step.group))
        else:
            self._wait([step.target, step.source])
            if self._rank.index in self._groups[step.group].members:
                self._move(step, self._groups[step.group])

    def finish(self) -> None:
        self._wait(list(self.pending))
        for group in self._groups.values():
            if group.handle is not None:
                self._destroy(group)

    def _destroy(self, group: _Members) -> None:
        # Gloo connects while it makes a group, so no rank may destroy the group while another still connects.
        dist.barrier(device_ids=[self._rank.device.index])
        dist.destroy_process_group(group.handle)

    def _wait(self, tensor_names: Sequence[int]) -> None:
        for name in tensor_names:
            pending = self.pending.pop(name, None)
            if pending is not None:
                pending.work.wait()
                pending.after()

    def _move(self, step: CollectiveStep, group: _Members) -> None:
        size, me = len(group.members), group.members.index(self._rank.index)
        target, source = (self._view(name, size) for name in (step.target, step.source))
        root = step.root % size
        after: Callable[[], object] = bool  # does nothing
        work: Any = None
        if step.operation == "add":
            target.add_(source, alpha=me + 1)
        elif step.operation == "shift":
            if root:
                self._shift(target, source.clone(), group, me, root)
        else:
            work, after = self._transfer(step, group, target, source)
        if work is None:
            after()
        else:
            self.pending[step.target] = _Pending(work, step.group, after)

    def _transfer(
        self, step: CollectiveStep, group: _Members, target: torch.Tensor, source: torch.Tensor
    ) -> tuple[Any, Callable[[], object]]:
        """Call a collective; return its work, and what to do when it is done."""
        transfer, name = TRANSFERS[step.operation], _FORMS.get(step.operation, step.operation)
        size, me, root = len(group.members), group.members.index(self._rank.index), step.root % len(group.members)
        options: dict[str, Any] = {"group": group.handle, "async_op": step.asynchronous}
        if transfer.root:
            options[transfer.root] = group.members[root]
        if transfer.reduces:
            options["op"] = getattr(dist.ReduceOp, step.op)
        row = COLLECTIVES[name]
        if row.in_place:
            # Backends may use the tensor of a rank that gets no result as scratch memory.
            buffer = target if transfer.takers == "all" else target.clone()
            work = called(name, [buffer], [buffer], **options)
            return work, (lambda: target.copy_(buffer)) if buffer is not target and me == root else bool
        own_slice = slice(me * LENGTH, (me + 1) * LENGTH)
        given = source if transfer.divides else source[own_slice]
        inputs = [chunk.clone() for chunk in parts_of(row.given, given, size)]
        outputs = parts_of(row.taken, target if transfer.joins else target[own_slice], size)
        gives, takes = transfer.gives(me, root), transfer.takes(me, root)
        return called(name, inputs if gives else [], outputs if takes else [], **options), bool

    def _shift(self, target: torch.Tensor, sent: torch.Tensor, group: _Members, me: int, by: int) -> None:
        to, sender = (group.members[(me + step) % len(group.members)] for step in (by, -by))
        sending = dist.P2POp(dist.isend, sent, to, group.handle)
        receiving = dist.P2POp(dist.irecv, target, sender, group.handle)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()


class _Model:
    """The tensors of all ranks in one process, by rank and by number of the tensor."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        numbers = torch.arange(LENGTH * size) * 37
        self.tensors = [
            [((numbers + rank * 11 + buffer * 5) % 101 + rank).to(dtype) for buffer in range(BUFFERS)]
            for rank in range(size)
        ]
        self._groups = {0: list(range(size))}

    def take(self, step: CollectiveStep) -> None:
        if step.operation == "new_group":
            self._groups[step.group] = _members(step, len(self.tensors))
            return
        if step.operation == "destroy_group":
            del self._groups[step.group]
            return
        members = self._groups[step.group]
        length, root = len(members) * LENGTH, step.root % len(members)
        targets = [self.tensors[rank][step.target][:length] for rank in members]
        sources = [self.tensors[rank][step.source][:length].clone() for rank in members]
        for written, expected in list(_after(step, root, targets, sources)):
            written.copy_(expected)


def _after(
    step: CollectiveStep, root: int, targets: list[torch.Tensor], sources: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    size = len(targets)
    slices = [slice(rank * LENGTH, (rank + 1) * LENGTH) for rank in range(size)]
    transfer = TRANSFERS.get(step.operation)
    for rank, target in enumerate(targets):
        if step.operation == "add":
            yield target, torch.add(target, sources[rank], alpha=rank + 1)
        elif transfer is None:
            yield target, sources[(rank - root) % size] if root else target.clone()
        elif givers := transfer.sources(rank, size, root):
            in_place = COLLECTIVES[step.operation].in_place
            inputs = [
                targets[giver] if in_place else sources[giver][slices[rank if transfer.divides else giver]]
                for giver in givers
            ]
            result = REDUCTIONS[step.op](torch.stack(inputs)) if transfer.reduces else torch.cat(inputs)
            yield target if in_place or transfer.joins else target[slices[rank]], result
