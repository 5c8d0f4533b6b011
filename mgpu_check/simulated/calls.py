"""Run collectives and messages of a process group on gloo, in one form for all of the group's methods.

gloo supports less than NCCL. Lists of uneven tensors become broadcasts and reductions, a factor is multiplied in before
the sum, and tensors of a dtype that gloo lacks move as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.simulated.late import Staging

Tensors = list[torch.Tensor]
Started = tuple[list[dist.Work], Callable[[], None] | None]

_c10d = torch._C._distributed_c10d
_pg = _c10d.ProcessGroup
_Op = dist.ReduceOp
# The original methods, because a simulation replaces those of the class.
_gloo = {
    name: getattr(_pg, name)
    for name in (
        "allreduce", "broadcast", "reduce", "allgather", "_allgather_base", "gather", "scatter", "reduce_scatter",
        "_reduce_scatter_base", "alltoall_base", "send", "recv", "recv_anysource",
    )
}  # fmt: skip
_MOVED_AS_IS = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64}
)
_TRANSFER_OF_TITLE = {
    "allreduce_coalesced": "all_reduce",
    "_all_gather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
}
"""NCCL's title in the profiler -> name of the transfer, where they differ."""


@dataclass(eq=False)
class TransferCall:
    """One collective or message, with the tensors that it reads, writes, or both."""

    title: str
    start: Callable[[TransferCall, dist.ProcessGroup, Staging], Started]
    late: bool
    outs: Tensors = field(default_factory=list)
    ins: Tensors = field(default_factory=list)
    both: Tensors = field(default_factory=list)
    op: Any = None
    root: int = 0  # of the group; the other end of a message
    lists: tuple[bool, bool] = (False, False)  # whether outs, ins are a list by rank, whose tensors may have gaps
    splits: tuple[Sequence[int], Sequence[int]] = ((), ())
    timeout: timedelta | None = None
    peer: bool = False
    tag: int = 0
    nccl: bool = False  # whether the user asked for NCCL

    @property
    def name(self) -> str:
        return _TRANSFER_OF_TITLE.get(self.title, self.title)

    def tensors(self) -> Tensors:
        return [*self.both, *self.ins, *self.outs]

    def listed(self, tensor: torch.Tensor) -> bool:
        outs, ins = self.lists
        return (outs and any(t is tensor for t in self.outs)) or (ins and any(t is tensor for t in self.ins))

    def options(self, kind: type, **given: Any) -> Any:
        made = kind()
        if self.timeout is not None and self.timeout > timedelta(0):
            made.timeout = self.timeout
        for name, value in given.items():
            setattr(made, name, value)
        return made


def _title(name: str) -> Callable[[], None]:
    """Show gloo's next operation in the profiler under NCCL's name; return the function that ends this."""
    name_next = getattr(_c10d, "_set_comm_profiling_name", None)
    if name_next is None:
        return lambda: None
    before = _c10d._get_comm_profiling_name()
    name_next(f"nccl:{name}")
    return lambda: name_next(before)


def _on_gloo(call: TransferCall, method: str, pg: dist.ProcessGroup, *args: Any) -> dist.Work:
    untitled = _title(call.title) if call.nccl else lambda: None
    try:
        work: dist.Work = _gloo[method](pg, *args)
        return work
    finally:
        untitled()


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor in a dtype that gloo can move."""
    return t if t.dtype in _MOVED_AS_IS else t.view(-1).view(torch.uint8)


def _prepared(t: torch.Tensor, op: Any) -> tuple[torch.Tensor, Any]:
    """Return the tensor and the operation that make gloo compute NCCL's result."""
    if op == _Op.PREMUL_SUM:
        factor = op.__getstate__()[1]
        if isinstance(factor, torch.Tensor):
            factor = factor.item()
        return (t * factor).to(t.dtype), _Op.SUM
    if t.dtype is torch.bool:
        return t.view(torch.uint8), _Op.MAX if op == _Op.SUM else op
    return t, op


def all_reduce(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    works, factors = [], []
    for tensor in call.both:
        host = staging.update(tensor)
        given, op = _prepared(host, call.op)
        works.append(_on_gloo(call, "allreduce", pg, [given], call.options(_c10d.AllreduceOptions, reduceOp=op)))
        if given.dtype is host.dtype and given is not host:
            factors.append((host, given))
    return works, (lambda: _copy(factors)) if factors else None


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source.view(target.shape))


def broadcast(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    here = pg.rank() == call.root
    hosts = [_bytes(staging.read(t) if here else staging.write(t)) for t in call.both]
    if here:
        staging.results.extend(call.both)
    options = call.options(_c10d.BroadcastOptions, rootRank=call.root)
    return [_on_gloo(call, "broadcast", pg, [host], options) for host in hosts], None


def reduce(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    here = pg.rank() == call.root
    tensor = call.both[0]
    # gloo uses the tensors of the others as scratch memory; NCCL does not change them.
    host = staging.update(tensor) if here else staging.read(tensor).clone()
    given, op = _prepared(host, call.op)
    options = call.options(_c10d.ReduceOptions, reduceOp=op, rootRank=call.root)
    work = _on_gloo(call, "reduce", pg, [given], options)
    again = here and given is not host and given.dtype is host.dtype
    return [work], (lambda: _copy([(host, given)])) if again else None


def all_gather(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    staging.joined = len({out.shape for out in call.outs}) == 1
    mine = _bytes(staging.read(call.ins[0]))
    outs = [_bytes(staging.write(t)) for t in call.outs]
    if len({t.numel() for t in call.outs}) == 1:
        if any(t.shape != mine.shape for t in outs):
            outs, mine = [t.view(-1) for t in outs], mine.view(-1)
        return [_on_gloo(call, "allgather", pg, [outs], [mine], call.options(_c10d.AllgatherOptions))], None
    works = []
    for root, out in enumerate(outs):
        if root == pg.rank():
            out.copy_(mine.view(out.shape))
        options = call.options(_c10d.BroadcastOptions, rootRank=root)
        works.append(_on_gloo(call, "broadcast", pg, [out], options))
    return works, None


def all_gather_single(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    mine = _bytes(staging.read(call.ins[0])).view(-1)
    out = _bytes(staging.write(call.outs[0])).view(-1)
    return [_on_gloo(call, "_allgather_base", pg, out, mine, call.options(_c10d.AllgatherOptions))], None


def gather(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    mine = _bytes(staging.read(call.ins[0]))
    outs = [_bytes(staging.write(t)) for t in call.outs]
    options = call.options(_c10d.GatherOptions, rootRank=call.root)
    return [_on_gloo(call, "gather", pg, [outs] if outs else [], [mine], options)], None


def gather_single(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    mine = _bytes(staging.read(call.ins[0])).view(-1)
    outs: list[torch.Tensor] = []
    if pg.rank() == call.root:  # elsewhere the output is a placeholder without elements
        outs = list(_bytes(staging.write(call.outs[0])).view(pg.size(), mine.numel()).unbind())
    options = call.options(_c10d.GatherOptions, rootRank=call.root)
    return [_on_gloo(call, "gather", pg, [outs] if outs else [], [mine], options)], None


def scatter(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    given = [_bytes(staging.read(t)) for t in call.ins]
    out = _bytes(staging.write(call.outs[0]))
    options = call.options(_c10d.ScatterOptions, rootRank=call.root)
    return [_on_gloo(call, "scatter", pg, [out], [given] if given else [], options)], None


def reduce_scatter(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    given = [staging.read(t) for t in call.ins]
    out = staging.write(call.outs[0])
    prepared = [_prepared(t, call.op) for t in given]
    op = prepared[0][1]
    target = out.view(torch.uint8) if out.dtype is torch.bool else out
    if len({t.numel() for t in call.ins}) == 1:
        options = call.options(_c10d.ReduceScatterOptions, reduceOp=op)
        return [_on_gloo(call, "reduce_scatter", pg, [target], [[t for t, _ in prepared]], options)], None
    works, mine = [], target
    for root, (part, _) in enumerate(prepared):
        scratch = part.clone()
        options = call.options(_c10d.ReduceOptions, reduceOp=op, rootRank=root)
        works.append(_on_gloo(call, "reduce", pg, [scratch], options))
        if root == pg.rank():
            mine = scratch
    return works, lambda: _copy([(target, mine)])


def reduce_scatter_single(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    given, op = _prepared(staging.read(call.ins[0]), call.op)
    out = staging.write(call.outs[0])
    target = out.view(torch.uint8) if out.dtype is torch.bool else out
    options = call.options(_c10d.ReduceScatterOptions, reduceOp=op)
    return [_on_gloo(call, "_reduce_scatter_base", pg, target.view(-1), given.view(-1), options)], None


def all_to_all(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    given = [_bytes(staging.read(t)).view(-1) for t in call.ins]
    outs = [_bytes(staging.write(t)).view(-1) for t in call.outs]
    joined = torch.empty(sum(t.numel() for t in outs), dtype=outs[0].dtype)
    sizes = [t.numel() for t in outs], [t.numel() for t in given]
    options = call.options(_c10d.AllToAllOptions)
    work = _on_gloo(call, "alltoall_base", pg, joined, torch.cat(given), *sizes, options)
    return [work], lambda: _copy(list(zip(outs, joined.split(sizes[0]), strict=True)))


def all_to_all_single(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    given = staging.read(call.ins[0])
    out = staging.write(call.outs[0])
    outs, ins = (list(sizes) for sizes in call.splits)
    if given.dtype not in _MOVED_AS_IS:
        # Rows of bytes: splits count rows.
        given = given.reshape(given.size(0), -1).view(torch.uint8) if given.numel() else given.view(torch.uint8)
        out = out.view(out.size(0), -1).view(torch.uint8) if out.numel() else out.view(torch.uint8)
    options = call.options(_c10d.AllToAllOptions)
    return [_on_gloo(call, "alltoall_base", pg, out, given, outs, ins, options)], None


def _tag(call: TransferCall) -> int:
    return 0 if call.nccl else call.tag  # NCCL matches messages by their order alone


def send(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    return [_on_gloo(call, "send", pg, [staging.read(call.ins[0])], call.root, _tag(call))], None


def recv(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    return [_on_gloo(call, "recv", pg, [staging.write(call.outs[0])], call.root, _tag(call))], None


def recv_anysource(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    return [_on_gloo(call, "recv_anysource", pg, [staging.write(call.outs[0])], _tag(call))], None


def without_self(pg: dist.ProcessGroup, asked: list[TransferCall], staging: Staging) -> Iterator[TransferCall]:
    """Copy the messages that this rank sends to itself, and return the other calls: gloo cannot send to self."""
    mine = [call for call in asked if call.nccl and call.peer and call.root == pg.rank()]
    sent = [staging.read(call.ins[0]) for call in mine if call.ins]
    received = [call.outs[0] for call in mine if call.outs]
    for values, target in zip(sent, received, strict=False):
        staging.write(target).copy_(values.view(target.shape))
    return (call for call in asked if call not in mine)
