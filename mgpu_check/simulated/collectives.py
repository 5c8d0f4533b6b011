"""Run the collectives of process groups on simulated tensors, with NCCL's errors and its late results.

gloo computes on the memory of the tensors. In an asynchronous call it computes on copies, and the results are poison
until ``wait()``, so that a missing wait shows every time. All functions of ``torch.distributed`` call these methods of
the group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from mgpu_check.simulated import hardware, wires
from mgpu_check.simulated.calls import TransferCall, without_self
from mgpu_check.simulated.functional import group_of, install_functional
from mgpu_check.simulated.groups import NO_CPU, NcclGroup, connect, install_groups, nccl_alone, nccl_of
from mgpu_check.simulated.late import LateWork, Staging, is_channels_last
from mgpu_check.simulated.nccl import UNTYPED
from mgpu_check.simulated.parsing import parser_of
from mgpu_check.simulated.state import active_node, device_index
from mgpu_check.simulated.tensor import SimulatedTensor, tensors_in
from mgpu_check.torch_hooks.patches import Patches, around
from mgpu_check.torch_hooks.table import METHODS
from mgpu_check.torch_hooks.values import is_pending

_VIEWS_COMPLEX = ("all_reduce", "broadcast", "reduce")
"""ProcessGroupNCCL views complex tensors as real ones in these.

In others `torch.distributed` does, or they are refused.
"""
_NO_NCCL_OP = ("BAND", "BOR", "BXOR")
_pg = torch._C._distributed_c10d.ProcessGroup
_c10d = torch._C._distributed_c10d

# Calls that are queued until their process group ends coalescing, by the name of the group.
_coalescing: dict[str, list[TransferCall]] = {}


def _refuse(call: TransferCall, group: NcclGroup) -> None:
    """Raise ProcessGroupNCCL's error for tensors or an operation that it refuses."""
    views = call.title in _VIEWS_COMPLEX
    for tensor in call.tensors():
        if not isinstance(tensor, SimulatedTensor):
            raise RuntimeError(NO_CPU if "cpu" not in group.backends else "Tensors must be CUDA and dense")
        if tensor.is_sparse:
            raise ValueError("Tensors must be CUDA and dense")
        if tensor.dtype in UNTYPED and not (views and tensor.is_complex()):
            raise RuntimeError(
                f"Input tensor data type is not supported for NCCL process group: {UNTYPED[tensor.dtype]}"
            )
        if call.peer:
            continue
        if call.listed(tensor):
            if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
                raise ValueError("Tensors must be non-overlapping and dense")
        elif not tensor.is_contiguous() and not is_channels_last(tensor):
            raise ValueError("Tensors must be contiguous")
    if call.op is not None:
        for name in _NO_NCCL_OP:
            if call.op == getattr(dist.ReduceOp, name):
                raise ValueError(f"Cannot use ReduceOp.{name} with NCCL")
        if call.op == dist.ReduceOp.AVG and any(t.dtype is torch.bool for t in call.tensors()):
            raise TypeError("Cannot use ReduceOp.AVG with boolean input")


def _carry_out(group: NcclGroup, asked: list[TransferCall]) -> LateWork | None:
    """Run calls as NCCL does, or queue them while the group coalesces."""
    for call in asked:
        _refuse(call, group)
        call.nccl = True
    first = next((t for call in asked for t in call.tensors()), None)
    # Messages do not connect the group: NCCL makes a separate communicator for each pair of ranks.
    if first is not None and not asked[0].peer:
        connect(group, first.get_device())
    queue = _coalescing.get(group.pg.group_name)
    if queue is not None:
        queue.extend(asked)
        return None
    return _run(group.pg, asked)


def _run(pg: dist.ProcessGroup, asked: list[TransferCall]) -> LateWork | None:
    late = any(call.late for call in asked)
    staging = Staging(late)
    delivered = None if hardware.present is None else wires.sent(hardware.present, nccl_of(pg), asked)
    works: list[dist.Work] = []
    after: list[Callable[[], None]] = []
    for call in without_self(pg, asked, staging):
        started, then = call.start(call, pg, staging)
        if not late:
            for work in started:
                work.wait()
            if then is not None:
                then()
            continue
        works.extend(started)
        if then is not None:
            after.append(then)
    if late:
        return LateWork(works, staging, after, asked[0].title.upper() if asked and asked[0].nccl else "", delivered)
    staging.deliver()
    if delivered is not None:
        delivered()
    return None


def _method(original: Callable[..., object], parse: Callable[..., list[TransferCall]]) -> Callable[..., object]:
    @functools.wraps(original)
    def method(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> object:
        tensors = list(tensors_in([*args, *kwargs.values()]))
        if active_node() is None:
            return original(self, *args, **kwargs)
        if any(map(is_pending, tensors)):
            args, kwargs = tree_map(lambda one: one.trigger_wait() if is_pending(one) else one, (args, kwargs))
            tensors = list(tensors_in([*args, *kwargs.values()]))
        group = nccl_of(self)
        if any(isinstance(t, SimulatedTensor) for t in tensors):
            asked = parse(*args, **kwargs)
            return _run(self, asked) if group is None else _carry_out(group, asked)
        if tensors and group is not None and "cpu" not in group.backends:
            raise RuntimeError(NO_CPU)
        if not tensors or any(t.layout is not torch.strided for t in tensors):
            return original(self, *args, **kwargs)
        asked = parse(*args, **kwargs)
        if not any(call.late for call in asked):
            return original(self, *args, **kwargs)
        return _run(self, asked)

    return method


@around
def _barrier(
    original: Callable[..., dist.Work], self: dist.ProcessGroup, opts: Any = None, timeout: timedelta | None = None
) -> object:
    """Run the barrier on gloo; connect the device where NCCL would run its all_reduce."""
    group = nccl_of(self)
    named = getattr(opts, "device", None)
    if group is not None and ("cpu" not in group.backends or (named is not None and named.type == "cuda")):
        connect(group, _barrier_device(group, opts))
    plain = _c10d.BarrierOptions()
    plain.device = torch.device("cpu")
    limit = timeout if timeout is not None else getattr(opts, "timeout", None)
    if limit is not None and limit > timedelta(0):
        plain.timeout = limit
    return original(self, plain)


def _barrier_device(group: NcclGroup, opts: Any) -> int:
    if opts is not None and opts.device_ids:
        return int(opts.device_ids[0])
    if group.pg.bound_device_id is not None:
        return device_index(group.pg.bound_device_id)
    if group.backend.used:
        return min(group.backend.used)
    node = active_node()
    return dist.get_rank() % (1 if node is None else node.n)


@around
def _start_coalescing(original: Callable[..., None], self: dist.ProcessGroup, device: torch.device) -> None:
    if nccl_of(self) is None or device.type != "cuda":
        original(self, device)
    else:
        _coalescing[self.group_name] = []


@around
def _end_coalescing(original: Callable[..., object], self: dist.ProcessGroup, device: torch.device) -> object:
    if nccl_of(self) is None or device.type != "cuda":
        return original(self, device)
    for call in (asked := _coalescing.pop(self.group_name, [])):
        call.late = True
    return _run(self, asked)


_recorded: Callable[[str, Callable[..., object]], Callable[..., object]] | None = None


def record() -> None:
    """Record each collective before it can wait for other ranks, in nodes that are entered from now on."""
    from mgpu_check.torch_hooks.collectives import recorded_method, recorded_wait  # late: only ranks record

    global _recorded
    _recorded = recorded_method
    Patches().wrap(LateWork, "wait", recorded_wait)


def _around(name: str, method: Callable[..., object]) -> Callable[..., object]:
    return method if _recorded is None else _recorded(name, method)


def _refuse_host(group: Any) -> None:
    if nccl_alone(group_of(group)):
        raise RuntimeError(NO_CPU)


def install_collectives(patches: Patches) -> None:
    """Replace the collectives of process groups, and allow groups with the backend NCCL."""
    install_groups(patches)
    patches.at_exit(_coalescing.clear)
    for name in METHODS:
        parse = parser_of(name)
        original = getattr(_pg, name, None)
        if original is not None and parse is not None:
            patches.set(_pg, name, _around(name, _method(original, parse)))
    install_functional(patches.replace, _refuse_host)
    patches.set(_pg, "barrier", _around("barrier", _barrier(_pg.barrier)))
    patches.wrap(_pg, "_start_coalescing", _start_coalescing)
    patches.wrap(_pg, "_end_coalescing", _end_coalescing)
