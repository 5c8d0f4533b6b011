"""The calls of a process group's methods in one form: parse their arguments, run them on gloo, and deliver their
results late.

gloo supports less than NCCL. Lists of uneven tensors become broadcasts and reductions, a factor is multiplied in
before the sum, and tensors of a dtype that gloo lacks move as bytes.

gloo works on plain host memory, in which the tensors of a call are staged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.simulated.cuda.streams import Late, hold_outstanding, poison
from mgpu_check.simulated.distributed import ring_sums
from mgpu_check.simulated.tensor import SimulatedTensor, is_channels_last, raw
from mgpu_check.torch_hooks.collective_table import METHODS
from mgpu_check.torch_hooks.patches import temporarily


@dataclass
class Staging:
    """The plain tensors that gloo works on, and the tensors that receive its results.

    Each call of a process group makes one, or one for all calls that it coalesces. The functions that start them on
    gloo fill it. The end of a synchronous call, or the first wait for a late one, delivers the results.
    """

    late: bool
    device: torch.device | None = None
    results: list[torch.Tensor] = field(default_factory=list)
    joined: bool = False  # whether the future has the results in one tensor, as NCCL gathers lists
    _deliveries: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def read(self, value: torch.Tensor) -> torch.Tensor:
        """Return contiguous host memory with the present values of a tensor."""
        return self._copied(*self._bare(value))

    def write(self, value: torch.Tensor) -> torch.Tensor:
        """Return host memory for the new values of a tensor. In a late call the tensor is poison until the delivery."""
        bare, direct = self._bare(value)
        return self._returned(value, bare, bare if direct else torch.empty(bare.shape, dtype=bare.dtype, device="cpu"))

    def update(self, value: torch.Tensor) -> torch.Tensor:
        """Return host memory with the values of a tensor, for gloo to update; the delivery writes them back."""
        bare, direct = self._bare(value)
        return self._returned(value, bare, self._copied(bare, direct))

    def _bare(self, value: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the plain tensor of ``value``, and whether gloo may work on it without a copy."""
        if isinstance(value, SimulatedTensor):
            self.device = value.device
        elif not self.late:
            return value, True
        bare = raw(value).data  # autograd does not see the writes of NCCL either
        if is_channels_last(bare):
            bare = bare.movedim(1, -1)  # memory moves in its own order, like NCCL, even if other ranks use another
        return bare, not self.late and bare.device.type == "cpu" and bare.is_contiguous()

    @staticmethod
    def _copied(bare: torch.Tensor, direct: bool) -> torch.Tensor:
        return bare if direct else bare.to("cpu", copy=True, memory_format=torch.contiguous_format)

    def _returned(self, value: torch.Tensor, bare: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        self.results.append(value)
        if host is not bare and host is not value:
            self._deliveries.append((bare, host))
            if self.late:
                poison(bare)
        return host

    def deliver(self) -> None:
        with torch.no_grad():
            deliveries, self._deliveries = self._deliveries, []
            for target, host in deliveries:
                target.copy_(host.view(target.shape))


class LateFuture(torch.futures.Future):  # type: ignore[type-arg]
    """The future of a collective. Its callbacks run at once in the calling thread, as those of a CUDA future do.

    C++ does not call these methods: call `finish` before C++ gets the future. (A callback in gloo's thread can
    deadlock: gloo frees it under its own lock, and needs Python's lock to do so.)
    """

    def __init__(self, work: LateWork) -> None:
        super().__init__()
        self._work = work

    def finish(self) -> None:
        self._work.wait()
        if not super().done():
            self.set_result(self._work.values())

    def wait(self) -> object:
        self.finish()
        return super().wait()

    def value(self) -> object:
        self.finish()
        return super().value()

    def done(self) -> bool:
        return True  # a CUDA future is done for the host as soon as it exists

    def then(self, callback: Callable[[torch.futures.Future], object]) -> torch.futures.Future:  # type: ignore[type-arg]
        self.finish()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[torch.futures.Future], None]) -> None:  # type: ignore[type-arg]
        self.finish()
        super().add_done_callback(callback)


class LateWork(dist.Work):
    """The work of a collective, whose results are poison until the caller waits.

    A process group returns it for an asynchronous call. The first wait for it, for its future or for its device waits
    for gloo and delivers the results.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        staging: Staging,
        after: Sequence[Callable[[], None]] = (),
        title: str = "",
        delivered: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.title = title  # NCCL's name for the collective, or empty for another backend
        self.works, self._delivered, self._staging, self._after = works, delivered, staging, after
        self._late = Late(self._finish)
        if staging.device is not None:
            hold_outstanding(self._late, staging.device)

    def _finish(self) -> None:
        for work in self.works:
            work.wait()
        for then in self._after:
            then()
        self._staging.deliver()
        if self._delivered is not None:
            self._delivered()

    @property
    def results(self) -> list[torch.Tensor]:
        return self._staging.results

    def values(self) -> list[torch.Tensor]:
        return [torch.stack(self.results)] if self._staging.joined else self.results

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            begun = time.monotonic()
            try:
                for work in self.works:
                    work.wait(timeout)
            except RuntimeError as error:
                ran = 1000 * (time.monotonic() - begun)
                limit = 1000 * timeout.total_seconds()
                if not self.title or ran < limit:
                    raise
                raise dist.DistBackendError(
                    f"[Rank {dist.get_rank()}] Watchdog caught collective operation timeout: "
                    f"WorkNCCL(OpType={self.title}, Timeout(ms)={limit:.0f}) ran for {ran:.0f} milliseconds before "
                    "timing out."
                ) from error
        self._late.deliver()
        return True

    def synchronize(self) -> None:
        self._late.deliver()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        done = all(work.is_completed() for work in self.works)
        if done:
            self._late.deliver()
        return done

    def is_success(self) -> bool:
        return all(work.is_success() for work in self.works)

    def exception(self) -> object:
        return next((error for work in self.works if (error := work.exception()) is not None), None)

    def _source_rank(self) -> int:
        return self.works[0]._source_rank()

    def result(self) -> list[torch.Tensor]:
        self._late.deliver()
        return self._staging.results

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return LateFuture(self)


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

    def options(self, options_type: type, **fields: Any) -> Any:
        options = options_type()
        if self.timeout is not None and self.timeout > timedelta(0):
            options.timeout = self.timeout
        for name, value in fields.items():
            setattr(options, name, value)
        return options


def _on_gloo(call: TransferCall, method: str, pg: dist.ProcessGroup, *args: Any) -> dist.Work:
    """Start an operation of gloo, under NCCL's name in the profiler."""
    if not call.nccl or not hasattr(_c10d, "_set_comm_profiling_name"):
        return _gloo[method](pg, *args)
    with temporarily(_c10d._set_comm_profiling_name, f"nccl:{call.title}", _c10d._get_comm_profiling_name()):
        return _gloo[method](pg, *args)


def _movable(t: torch.Tensor) -> torch.Tensor:
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


def _operands_of_ranks(call: TransferCall, pg: dist.ProcessGroup, mine: torch.Tensor) -> tuple[dist.Work, Tensors]:
    """Start to gather the operands of a reduction; return them in the order of ranks, to be read after the work."""
    flat = ring_sums.operand(_prepared(mine, call.op)[0], call.op, pg.size())
    rows = torch.empty(pg.size() * flat.numel(), dtype=flat.dtype)
    work = _on_gloo(call, "_allgather_base", pg, _movable(rows), _movable(flat), call.options(_c10d.AllgatherOptions))
    return work, list(rows.view(pg.size(), -1))


def all_reduce(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    works, factors, rings = [], [], []
    along_ring = call.nccl and all(ring_sums.differs(tensor, call.op) for tensor in call.both)
    for tensor in call.both:
        host = staging.update(tensor)
        if along_ring:
            if host.numel() == 1:  # may count the ranks of DDP's `join`, which C++ reads from gloo's own sum
                works.append(_on_gloo(call, "allreduce", pg, [host.clone()], call.options(_c10d.AllreduceOptions)))
            work, rows = _operands_of_ranks(call, pg, host)
            works.append(work)
            rings.append((host, rows))
            continue
        prepared, op = _prepared(host, call.op)
        works.append(_on_gloo(call, "allreduce", pg, [prepared], call.options(_c10d.AllreduceOptions, reduceOp=op)))
        if prepared.dtype is host.dtype and prepared is not host:
            factors.append((host, prepared))
    if rings:
        return works, lambda: _copy_back([(host, ring_sums.all_reduced(rows, call.op)) for host, rows in rings])
    return works, (lambda: _copy_back(factors)) if factors else None


def _copy_back(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source.view(target.shape))


def broadcast(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    is_root = pg.rank() == call.root
    hosts = [_movable(staging.read(t) if is_root else staging.write(t)) for t in call.both]
    if is_root:
        staging.results.extend(call.both)
    options = call.options(_c10d.BroadcastOptions, rootRank=call.root)
    return [_on_gloo(call, "broadcast", pg, [host], options) for host in hosts], None


def reduce(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    is_root = pg.rank() == call.root
    tensor = call.both[0]
    # gloo uses the tensors of the others as scratch memory; NCCL does not change them.
    host = staging.update(tensor) if is_root else staging.read(tensor).clone()
    if call.nccl and ring_sums.differs(tensor, call.op):
        work, rows = _operands_of_ranks(call, pg, host)
        return [work], (
            lambda: _copy_back([(host, ring_sums.reduced(rows, call.root + 1, call.op))])
        ) if is_root else None
    prepared, op = _prepared(host, call.op)
    options = call.options(_c10d.ReduceOptions, reduceOp=op, rootRank=call.root)
    work = _on_gloo(call, "reduce", pg, [prepared], options)
    copies_back = is_root and prepared is not host and prepared.dtype is host.dtype
    return [work], (lambda: _copy_back([(host, prepared)])) if copies_back else None


def all_gather(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    staging.joined = len({out.shape for out in call.outs}) == 1
    mine = _movable(staging.read(call.ins[0]))
    outs = [_movable(staging.write(t)) for t in call.outs]
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
    mine = _movable(staging.read(call.ins[0])).view(-1)
    out = _movable(staging.write(call.outs[0])).view(-1)
    return [_on_gloo(call, "_allgather_base", pg, out, mine, call.options(_c10d.AllgatherOptions))], None


def gather(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    mine = _movable(staging.read(call.ins[0]))
    outs = [_movable(staging.write(t)) for t in call.outs]
    options = call.options(_c10d.GatherOptions, rootRank=call.root)
    return [_on_gloo(call, "gather", pg, [outs] if outs else [], [mine], options)], None


def gather_single(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    mine = _movable(staging.read(call.ins[0])).view(-1)
    outs: list[torch.Tensor] = []
    if pg.rank() == call.root:  # elsewhere the output is a placeholder without elements
        outs = list(_movable(staging.write(call.outs[0])).view(pg.size(), mine.numel()).unbind())
    options = call.options(_c10d.GatherOptions, rootRank=call.root)
    return [_on_gloo(call, "gather", pg, [outs] if outs else [], [mine], options)], None


def scatter(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    inputs = [_movable(staging.read(t)) for t in call.ins]
    out = _movable(staging.write(call.outs[0]))
    options = call.options(_c10d.ScatterOptions, rootRank=call.root)
    return [_on_gloo(call, "scatter", pg, [out], [inputs] if inputs else [], options)], None


def _scattered_ring(call: TransferCall, pg: dist.ProcessGroup, mine: torch.Tensor, out: torch.Tensor) -> Started:
    work, rows = _operands_of_ranks(call, pg, mine)
    rank = pg.rank()
    parts = [row.view(pg.size(), -1)[rank] for row in rows]
    return [work], lambda: _copy_back([(out, ring_sums.reduced(parts, rank + 1, call.op))])


def reduce_scatter(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    inputs = [staging.read(t) for t in call.ins]
    out = staging.write(call.outs[0])
    even = len({t.numel() for t in call.ins}) == 1
    if call.nccl and even and ring_sums.differs(call.ins[0], call.op):
        return _scattered_ring(call, pg, torch.cat([t.reshape(-1) for t in inputs]), out)
    prepared = [_prepared(t, call.op) for t in inputs]
    op = prepared[0][1]
    target = out.view(torch.uint8) if out.dtype is torch.bool else out
    if even:
        options = call.options(_c10d.ReduceScatterOptions, reduceOp=op)
        return [_on_gloo(call, "reduce_scatter", pg, [target], [[t for t, _ in prepared]], options)], None
    works, mine = [], target
    for root, (shard, _) in enumerate(prepared):
        scratch = shard.clone()
        options = call.options(_c10d.ReduceOptions, reduceOp=op, rootRank=root)
        works.append(_on_gloo(call, "reduce", pg, [scratch], options))
        if root == pg.rank():
            mine = scratch
    return works, lambda: _copy_back([(target, mine)])


def reduce_scatter_single(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    mine = staging.read(call.ins[0])
    out = staging.write(call.outs[0])
    if call.nccl and ring_sums.differs(mine, call.op):
        return _scattered_ring(call, pg, mine, out)
    prepared, op = _prepared(mine, call.op)
    target = out.view(torch.uint8) if out.dtype is torch.bool else out
    options = call.options(_c10d.ReduceScatterOptions, reduceOp=op)
    return [_on_gloo(call, "_reduce_scatter_base", pg, target.view(-1), prepared.view(-1), options)], None


def all_to_all(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    inputs = [_movable(staging.read(t)).view(-1) for t in call.ins]
    outs = [_movable(staging.write(t)).view(-1) for t in call.outs]
    joined = torch.empty(sum(t.numel() for t in outs), dtype=outs[0].dtype)
    sizes = [t.numel() for t in outs], [t.numel() for t in inputs]
    options = call.options(_c10d.AllToAllOptions)
    work = _on_gloo(call, "alltoall_base", pg, joined, torch.cat(inputs), *sizes, options)
    return [work], lambda: _copy_back(list(zip(outs, joined.split(sizes[0]), strict=True)))


def all_to_all_single(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    source = staging.read(call.ins[0])
    out = staging.write(call.outs[0])
    outs, ins = (list(sizes) for sizes in call.splits)
    if source.dtype not in _MOVED_AS_IS:
        # Rows of bytes: splits count rows.
        source = source.reshape(source.size(0), -1).view(torch.uint8) if source.numel() else source.view(torch.uint8)
        out = out.view(out.size(0), -1).view(torch.uint8) if out.numel() else out.view(torch.uint8)
    options = call.options(_c10d.AllToAllOptions)
    return [_on_gloo(call, "alltoall_base", pg, out, source, outs, ins, options)], None


def _tag(call: TransferCall) -> int:
    return 0 if call.nccl else call.tag  # NCCL matches messages by their order alone


def send(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    return [_on_gloo(call, "send", pg, [staging.read(call.ins[0])], call.root, _tag(call))], None


def recv(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    return [_on_gloo(call, "recv", pg, [staging.write(call.outs[0])], call.root, _tag(call))], None


def recv_anysource(call: TransferCall, pg: dist.ProcessGroup, staging: Staging) -> Started:
    return [_on_gloo(call, "recv_anysource", pg, [staging.write(call.outs[0])], _tag(call))], None


def without_self(pg: dist.ProcessGroup, calls: list[TransferCall], staging: Staging) -> Iterator[TransferCall]:
    """Copy the messages that this rank sends to itself, and return the other calls: gloo cannot send to self."""
    mine = [call for call in calls if call.nccl and call.peer and call.root == pg.rank()]
    sent = [staging.read(call.ins[0]) for call in mine if call.ins]
    received = [call.outs[0] for call in mine if call.outs]
    for values, target in zip(sent, received, strict=False):
        staging.write(target).copy_(values.view(target.shape))
    return (call for call in calls if call not in mine)


def _operands(arguments: dict[str, Any], spellings: tuple[str, ...]) -> Tensors:
    """Return the tensors of the argument with one of these names: one, a list, or the only list in a list of lists."""
    value = next((arguments[name] for name in spellings if arguments.get(name) is not None), None)
    tensors = [value] if isinstance(value, torch.Tensor) else list(value or ())
    return list(tensors[0]) if tensors and isinstance(tensors[0], (list, tuple)) else tensors


@dataclass(frozen=True)
class _Parser:
    """How to read the arguments of the C++ overloads of one method."""

    title: str
    start: Callable[[TransferCall, dist.ProcessGroup, Staging], Started]
    parameters: str  # names of the positional parameters
    # outs, ins, both: names of the parameter for the tensors that are written, read, or both, with its other spelling
    outs: tuple[str, ...] = ()
    ins: tuple[str, ...] = ()
    both: tuple[str, ...] = ()
    lists: tuple[bool, bool] = (False, False)  # as in `TransferCall`
    reduces: bool = False
    peer: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> list[TransferCall]:
        positional = self.parameters.split()
        if len(args) > len(positional) or kwargs.keys() - {*positional, *self.outs, *self.ins, *self.both, *_KEYWORDS}:
            raise TypeError(f"{self.title}(): incompatible function arguments")
        arguments = {**dict(zip(positional, args, strict=False)), **kwargs}
        opts, op, root, timeout = (arguments.get(name) for name in ("opts", *_KEYWORDS))
        # In place of the options some overloads take the operation, the root or the time limit.
        if isinstance(opts, (_Op, _Op.RedOpType)):
            opts, op = None, opts
        elif isinstance(opts, int):
            opts, root = None, opts
        elif isinstance(opts, timedelta):
            opts, timeout = None, timeout or opts
        if self.reduces and op is None:
            op = _Op.SUM if opts is None else opts.reduceOp
        root = arguments.get("dstRank", arguments.get("srcRank", -1)) if self.peer else getattr(opts, "rootRank", root)
        return [
            TransferCall(
                self.title,
                self.start,
                late=bool(getattr(opts, "asyncOp", True)),
                outs=_operands(arguments, self.outs),
                ins=_operands(arguments, self.ins),
                both=_operands(arguments, self.both),
                op=op,
                root=int(root or 0),
                lists=self.lists,
                splits=(arguments.get("output_split_sizes", ()), arguments.get("input_split_sizes", ())),
                timeout=getattr(opts, "timeout", None) if timeout is None else timeout,
                peer=self.peer,
                tag=arguments.get("tag", 0),
            )
        ]


_KEYWORDS = ("op", "root", "timeout")
_TENSORS = ("tensors", "tensor")
_INPUTS = ("input_tensors", "input_tensor")
_LISTS = "output_tensors input_tensors opts timeout"
_GATHER_SINGLE = _Parser("_all_gather_base", all_gather_single, "output input opts", ("output",), ("input",))
_SCATTER_SINGLE = _Parser(
    "_reduce_scatter_base", reduce_scatter_single, "outputTensor inputTensor opts", ("outputTensor",),
    ("inputTensor",), reduces=True,
)  # fmt: skip
_ALL_GATHER = _Parser("all_gather", all_gather, _LISTS, ("output_tensors",), _INPUTS, lists=(True, False))
_COALESCED = _Parser("allreduce_coalesced", all_reduce, "tensors opts", both=("tensors",), reduces=True)


def _parse_allgather_coalesced(output_lists: Any, input_list: Any, opts: Any = None) -> list[TransferCall]:
    # One list per rank, with one output per input.
    pairs = zip(zip(*output_lists, strict=True), input_list, strict=True)
    return [call for outs, mine in pairs for call in _ALL_GATHER([list(outs)], [mine], opts)]


def _each(parse: _Parser) -> Callable[..., list[TransferCall]]:
    def parse_each(outputs: Any, inputs: Any, opts: Any = None) -> list[TransferCall]:
        return [call for pair in zip(outputs, inputs, strict=True) for call in parse(*pair, opts)]

    return parse_each


PARSERS: dict[str, Callable[..., list[TransferCall]]] = {
    "all_reduce": _Parser("all_reduce", all_reduce, "tensors opts timeout", both=_TENSORS, reduces=True),
    "all_reduce_coalesced": lambda tensors, opts=None: [call for t in tensors for call in _COALESCED([t], opts)],
    "broadcast": _Parser("broadcast", broadcast, "tensors opts timeout", both=_TENSORS),
    "reduce": _Parser("reduce", reduce, "tensors opts op timeout", both=_TENSORS, reduces=True),
    "all_gather": _ALL_GATHER,
    "all_gather_coalesced": _parse_allgather_coalesced,
    "all_gather_into_tensor": _GATHER_SINGLE,
    "all_gather_into_tensor_coalesced": _each(_GATHER_SINGLE),
    "gather": _Parser("gather", gather, _LISTS, ("output_tensors",), _INPUTS, lists=(True, False)),
    "gather_single": _Parser("gather", gather_single, "output input opts", ("output",), ("input",)),
    "scatter": _Parser(
        "scatter", scatter, _LISTS, ("output_tensors", "output_tensor"), ("input_tensors",), lists=(False, True)
    ),
    "reduce_scatter": _Parser(
        "reduce_scatter", reduce_scatter, _LISTS, ("output_tensors", "output"), ("input_tensors", "input"),
        lists=(False, True), reduces=True,
    ),
    "reduce_scatter_tensor": _SCATTER_SINGLE,
    "reduce_scatter_tensor_coalesced": _each(_SCATTER_SINGLE),
    "all_to_all": _Parser(
        "all_to_all", all_to_all, "output_tensors input_tensors opts", ("output_tensors",), ("input_tensors",),
        lists=(True, True),
    ),
    "all_to_all_single": _Parser(
        "all_to_all", all_to_all_single, "output input output_split_sizes input_split_sizes opts", ("output",),
        ("input",),
    ),
    "send": _Parser("send", send, "tensors dstRank tag", ins=("tensors",), peer=True),
    "recv": _Parser("recv", recv, "tensors srcRank tag", ("tensors",), peer=True),
    "recv_anysource": _Parser("recv", recv_anysource, "tensors tag", ("tensors",), peer=True),
}  # fmt: skip
"""Function of ``torch.distributed``, or method with other arguments -> the parser of its methods."""


def parser_of(method: str) -> Callable[..., list[TransferCall]] | None:
    """Return the parser for a method of process groups; None for a barrier, which has no tensors."""
    return PARSERS.get(method) or PARSERS.get(METHODS[method].function)
