"""Run collectives on simulated tensors through the methods of the process group, with NCCL's errors and its late
results.

gloo computes on the memory of the tensors. In an asynchronous call it computes on copies, and the results are
poison until ``wait()``, so that a missing wait shows every time. All functions of ``torch.distributed`` call these
methods of the group.

C++ would send the operators of functional collectives to gloo. Through the group they raise NCCL's errors, and a
result is poison until the caller waits for it. Products fused with a collective, which CUDA does in symmetric
memory, call the same methods.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as public
from torch.utils._pytree import tree_map

from mgpu_check.simulated import hardware
from mgpu_check.simulated.distributed.collective_calls import (
    LateWork,
    Staging,
    TransferCall,
    parser_of,
    without_self,
)
from mgpu_check.simulated.distributed.process_groups import (
    NO_CPU,
    UNTYPED,
    NcclGroup,
    connect,
    install_groups,
    nccl_alone,
    nccl_of,
)
from mgpu_check.simulated.node import active_node, device_index
from mgpu_check.simulated.tensor import SimulatedTensor, is_channels_last, tensors_in
from mgpu_check.torch_hooks.collective_table import METHODS
from mgpu_check.torch_hooks.patches import Patches, around
from mgpu_check.torch_hooks.tensors import is_pending

_WORK = "_mgpu_check_work"
_c10d = torch._C._distributed_c10d
Tensors = list[torch.Tensor]


def _group(name: Any) -> Any:
    if isinstance(name, str):
        return _c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return name if isinstance(name, dist.ProcessGroup) else _c10d.ProcessGroup.unbox(name)


def _reduction(options_type: type, name: str) -> Any:
    opts = options_type()
    opts.reduceOp = getattr(dist.ReduceOp, name.upper())
    return opts


def _pending(work: Any, results: Any) -> Any:
    """Return the results of a collective, a tensor or a list, whose memory holds the work until `wait_pending`."""
    for result in tensors_in(results):
        result.untyped_storage().__dict__[_WORK] = work
    return results


def wait_pending(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the pending collective whose result is ``tensor``, if any, and return the tensor."""
    work = tensor.untyped_storage().__dict__.pop(_WORK, None) if tensor.layout is torch.strided else None
    if work is not None:
        work.wait()
    return tensor


def _dense(t: torch.Tensor) -> torch.Tensor:
    return t if t.is_contiguous() else t.contiguous()


def _real(t: torch.Tensor) -> torch.Tensor:
    """View complex numbers as real ones, as torch's operators on one tensor do, except all_to_all_single."""
    return torch.view_as_real(t) if t.is_complex() else t


def _all_reduce_(input: torch.Tensor, reduce_op: str, group_name: Any) -> Any:
    return _pending(_group(group_name).allreduce([input], _reduction(_c10d.AllreduceOptions, reduce_op)), input)


def _all_reduce_coalesced_(inputs: Tensors, reduce_op: str, group_name: Any) -> Any:
    opts = _reduction(_c10d.AllreduceCoalescedOptions, reduce_op)
    return _pending(_group(group_name).allreduce_coalesced(inputs, opts), inputs)


def _gathered(input: torch.Tensor, size: int) -> torch.Tensor:
    shape = (input.size(0) * size, *input.shape[1:]) if input.dim() else (size,)
    return input.new_empty(shape)


def _all_gather_into_tensor_out(input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor) -> Any:
    group = _group(group_name)
    return _pending(group._allgather_base(_real(out), _real(_dense(input)), _c10d.AllgatherOptions()), out)


def _all_gather_into_tensor(input: torch.Tensor, group_size: int, group_name: Any) -> Any:
    return _all_gather_into_tensor_out(input, group_size, group_name, out=_gathered(input, group_size))


def _all_gather_into_tensor_coalesced(inputs: Tensors, group_size: int, group_name: Any) -> Any:
    outs, dense = [_gathered(t, group_size) for t in inputs], [_dense(t) for t in inputs]
    group = _group(group_name)
    return _pending(group.allgather_into_tensor_coalesced(outs, dense, _c10d.AllgatherOptions()), outs)


def _scattered(input: torch.Tensor, size: int) -> torch.Tensor:
    if input.size(0) % size:
        raise RuntimeError("input dimension 0 must be a multiple of the group size")
    return input.new_empty((input.size(0) // size, *input.shape[1:]))


def _reduce_scatter_tensor_out(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: Any, *, out: torch.Tensor
) -> Any:
    opts = _reduction(_c10d.ReduceScatterOptions, reduce_op)
    return _pending(_group(group_name)._reduce_scatter_base(_real(out), _real(_dense(input)), opts), out)


def _reduce_scatter_tensor(input: torch.Tensor, reduce_op: str, group_size: int, group_name: Any) -> Any:
    return _reduce_scatter_tensor_out(input, reduce_op, group_size, group_name, out=_scattered(input, group_size))


def _reduce_scatter_tensor_coalesced(inputs: Tensors, reduce_op: str, group_size: int, group_name: Any) -> Any:
    outs, dense = [_scattered(t, group_size) for t in inputs], [_dense(t) for t in inputs]
    opts = _reduction(_c10d.ReduceScatterOptions, reduce_op)
    return _pending(_group(group_name).reduce_scatter_tensor_coalesced(outs, dense, opts), outs)


def _all_to_all_single(
    input: torch.Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int], group_name: Any
) -> Any:
    outs, ins = list(output_split_sizes), list(input_split_sizes)
    out = input.new_empty((sum(outs), *input.shape[1:]) if outs else input.shape)
    return _pending(_group(group_name).alltoall_base(out, _dense(input), outs, ins, _c10d.AllToAllOptions()), out)


def _broadcast_(input: torch.Tensor, src: int, group_name: Any) -> Any:
    opts = _c10d.BroadcastOptions()
    opts.rootRank = src
    return _pending(_group(group_name).broadcast([input], opts), input)


def _copy(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.contiguous_format)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__[1:]: function
    for function in (
        *(_all_reduce_, _all_reduce_coalesced_, _all_gather_into_tensor, _all_gather_into_tensor_out),
        *(_all_gather_into_tensor_coalesced, _reduce_scatter_tensor, _reduce_scatter_tensor_out),
        *(_reduce_scatter_tensor_coalesced, _all_to_all_single, _broadcast_),
    )
} | {
    "all_reduce": lambda input, reduce_op, group_name: _all_reduce_(_copy(input), reduce_op, group_name),
    "all_reduce_coalesced": lambda inputs, *options: _all_reduce_coalesced_(list(map(_copy, inputs)), *options),
    "broadcast": lambda input, src, group_name: _broadcast_(_copy(input), src, group_name),
    "wait_tensor": wait_pending,
}


def _fused_all_gather_matmul(
    shard: torch.Tensor, factors: Tensors, gather_dim: int, group_name: Any, *, return_A: bool = True
) -> tuple[torch.Tensor | None, Tensors]:
    group = _group(group_name)
    full_tensor = wait_pending(_all_gather_into_tensor(shard.movedim(gather_dim, 0), group.size(), group))
    full_tensor = full_tensor.movedim(0, gather_dim)
    return full_tensor if return_A else None, [full_tensor @ factor for factor in factors]


def _fused_matmul_reduce_scatter(
    x: torch.Tensor, factor: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: Any
) -> torch.Tensor:
    group = _group(group_name)
    product = (x @ factor).movedim(scatter_dim, 0)
    return wait_pending(_reduce_scatter_tensor(product, reduce_op, group.size(), group)).movedim(0, scatter_dim)


OPERATORS = {f"_c10d_functional::{name}": function for name, function in _FUNCTIONS.items()} | {
    "symm_mem::fused_all_gather_matmul": _fused_all_gather_matmul,
    "symm_mem::fused_matmul_reduce_scatter": _fused_matmul_reduce_scatter,
}
"""Operator -> the function that replaces it on simulated tensors."""


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a functional collective to raise NCCL's error for CPU tensors, which C++ would pass to gloo."""
    positions = list(inspect.signature(original).parameters)
    leading, group_at = positions[0], positions.index("group")

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        value = args[0] if args else kwargs.get(leading)
        tensors = value if isinstance(value, (list, tuple)) else (value,)
        if any(type(t) is torch.Tensor and t.device.type == "cpu" for t in tensors):
            group: Any = args[group_at] if len(args) > group_at else kwargs.get("group")
            if nccl_alone(_group(public._resolve_group_name(group, ""))):
                raise RuntimeError(NO_CPU)
        return original(*args, **kwargs)

    return collective


def _install_functional(patches: Patches) -> None:
    for name, function in list(vars(public).items()):
        if inspect.isfunction(function) and function.__module__ == public.__name__ and not name.startswith("_"):
            parameter_names = list(inspect.signature(function).parameters)
            if "group" in parameter_names[1:] and parameter_names[0] in ("self", "inputs"):
                patches.replace(function, _refusing(function))


_VIEWS_COMPLEX = ("all_reduce", "broadcast", "reduce")
"""ProcessGroupNCCL views complex tensors as real ones in these.

In others `torch.distributed` does, or they are refused.
"""
_NO_NCCL_OP = ("BAND", "BOR", "BXOR")
_pg = torch._C._distributed_c10d.ProcessGroup

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


def _carry_out(group: NcclGroup, calls: list[TransferCall]) -> LateWork | None:
    """Run calls as NCCL does, or queue them while the group coalesces."""
    for call in calls:
        _refuse(call, group)
        call.nccl = True
    tensor = next((t for call in calls for t in call.tensors()), None)
    # Messages do not connect the group: NCCL makes a separate communicator for each pair of ranks.
    if tensor is not None and not calls[0].peer:
        connect(group, tensor.get_device())
    queue = _coalescing.get(group.pg.group_name)
    if queue is not None:
        queue.extend(calls)
        return None
    return _run(group.pg, calls)


def _run(pg: dist.ProcessGroup, calls: list[TransferCall]) -> LateWork | None:
    late = any(call.late for call in calls)
    staging = Staging(late)
    delivered = None if hardware.present is None else hardware.sent(hardware.present, nccl_of(pg), calls)
    works: list[dist.Work] = []
    after: list[Callable[[], None]] = []
    for call in without_self(pg, calls, staging):
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
        return LateWork(works, staging, after, calls[0].title.upper() if calls and calls[0].nccl else "", delivered)
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
            args, kwargs = tree_map(lambda leaf: leaf.trigger_wait() if is_pending(leaf) else leaf, (args, kwargs))
            tensors = list(tensors_in([*args, *kwargs.values()]))
        group = nccl_of(self)
        if any(isinstance(t, SimulatedTensor) for t in tensors):
            calls = parse(*args, **kwargs)
            return _run(self, calls) if group is None else _carry_out(group, calls)
        if tensors and group is not None and "cpu" not in group.backends:
            raise RuntimeError(NO_CPU)
        if not tensors or any(t.layout is not torch.strided for t in tensors):
            return original(self, *args, **kwargs)
        calls = parse(*args, **kwargs)
        if not any(call.late for call in calls):
            return original(self, *args, **kwargs)
        return _run(self, calls)

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
    for call in (calls := _coalescing.pop(self.group_name, [])):
        call.late = True
    return _run(self, calls)


_recorded: Callable[[str, Callable[..., object]], Callable[..., object]] | None = None


def record() -> None:
    """Record each collective before it can wait for other ranks, in nodes that are entered from now on."""
    from mgpu_check.torch_hooks.collectives import recorded_method, recorded_wait  # late: only ranks record

    global _recorded
    _recorded = recorded_method
    Patches().wrap(LateWork, "wait", recorded_wait)


def _around(name: str, method: Callable[..., object]) -> Callable[..., object]:
    return method if _recorded is None else _recorded(name, method)


def install_collectives(patches: Patches) -> None:
    """Replace the collectives of process groups, and allow groups with the backend NCCL."""
    install_groups(patches)
    patches.at_exit(_coalescing.clear)
    for name in METHODS:
        parse = parser_of(name)
        original = getattr(_pg, name, None)
        if original is not None and parse is not None:
            patches.set(_pg, name, _around(name, _method(original, parse)))
    _install_functional(patches)
    patches.set(_pg, "barrier", _around("barrier", _barrier(_pg.barrier)))
    patches.wrap(_pg, "_start_coalescing", _start_coalescing)
    patches.wrap(_pg, "_end_coalescing", _end_coalescing)
