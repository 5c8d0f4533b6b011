"""Run functional collectives on simulated tensors through the methods of the process group.

C++ would send these operators to gloo. Through the group they raise NCCL's errors, and a result is poison until the
caller waits for it. Products fused with a collective, which CUDA does in symmetric memory, call the same methods.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as public

_WORK = "_mgpu_check_work"
_c10d = torch._C._distributed_c10d
_OPS = {"sum": "SUM", "avg": "AVG", "product": "PRODUCT", "min": "MIN", "max": "MAX"}
Tensors = list[torch.Tensor]


def _group(name: Any) -> Any:
    if isinstance(name, str):
        return _c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return name if isinstance(name, dist.ProcessGroup) else _c10d.ProcessGroup.unbox(name)


def _reduction(kind: type, name: str) -> Any:
    opts = kind()
    known = _OPS.get(name.lower())
    opts.reduceOp = getattr(dist.ReduceOp, known or name.upper())
    return opts


def _pending(work: Any, *results: torch.Tensor) -> None:
    for result in results:
        result.untyped_storage().__dict__[_WORK] = work


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


def _all_reduce_(input: torch.Tensor, reduce_op: str, group_name: Any) -> torch.Tensor:
    _pending(_group(group_name).allreduce([input], _reduction(_c10d.AllreduceOptions, reduce_op)), input)
    return input


def _all_reduce(input: torch.Tensor, reduce_op: str, group_name: Any) -> torch.Tensor:
    return _all_reduce_(input.clone(memory_format=torch.contiguous_format), reduce_op, group_name)


def _all_reduce_coalesced_(inputs: Tensors, reduce_op: str, group_name: Any) -> Tensors:
    opts = _reduction(_c10d.AllreduceCoalescedOptions, reduce_op)
    _pending(_group(group_name).allreduce_coalesced(inputs, opts), *inputs)
    return inputs


def _all_reduce_coalesced(inputs: Tensors, reduce_op: str, group_name: Any) -> Tensors:
    copies = [t.clone(memory_format=torch.contiguous_format) for t in inputs]
    return _all_reduce_coalesced_(copies, reduce_op, group_name)


def _gathered(input: torch.Tensor, size: int) -> torch.Tensor:
    shape = (input.size(0) * size, *input.shape[1:]) if input.dim() else (size,)
    return input.new_empty(shape)


def _all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    _pending(_group(group_name)._allgather_base(_real(out), _real(_dense(input)), _c10d.AllgatherOptions()), out)
    return out


def _all_gather_into_tensor(input: torch.Tensor, group_size: int, group_name: Any) -> torch.Tensor:
    return _all_gather_into_tensor_out(input, group_size, group_name, out=_gathered(input, group_size))


def _all_gather_into_tensor_coalesced(inputs: Tensors, group_size: int, group_name: Any) -> Tensors:
    outs = [_gathered(t, group_size) for t in inputs]
    given = [_dense(t) for t in inputs]
    group = _group(group_name)
    _pending(group.allgather_into_tensor_coalesced(outs, given, _c10d.AllgatherOptions()), *outs)
    return outs


def _scattered(input: torch.Tensor, size: int) -> torch.Tensor:
    if input.size(0) % size:
        raise RuntimeError("input dimension 0 must be a multiple of the group size")
    return input.new_empty((input.size(0) // size, *input.shape[1:]))


def _reduce_scatter_tensor_out(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    opts = _reduction(_c10d.ReduceScatterOptions, reduce_op)
    _pending(_group(group_name)._reduce_scatter_base(_real(out), _real(_dense(input)), opts), out)
    return out


def _reduce_scatter_tensor(input: torch.Tensor, reduce_op: str, group_size: int, group_name: Any) -> torch.Tensor:
    return _reduce_scatter_tensor_out(input, reduce_op, group_size, group_name, out=_scattered(input, group_size))


def _reduce_scatter_tensor_coalesced(inputs: Tensors, reduce_op: str, group_size: int, group_name: Any) -> Tensors:
    outs = [_scattered(t, group_size) for t in inputs]
    opts = _reduction(_c10d.ReduceScatterOptions, reduce_op)
    given = [_dense(t) for t in inputs]
    _pending(_group(group_name).reduce_scatter_tensor_coalesced(outs, given, opts), *outs)
    return outs


def _all_to_all_single(
    input: torch.Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int], group_name: Any
) -> torch.Tensor:
    outs, ins = list(output_split_sizes), list(input_split_sizes)
    out = input.new_empty((sum(outs), *input.shape[1:]) if outs else input.shape)
    _pending(_group(group_name).alltoall_base(out, _dense(input), outs, ins, _c10d.AllToAllOptions()), out)
    return out


def _broadcast_(input: torch.Tensor, src: int, group_name: Any) -> torch.Tensor:
    opts = _c10d.BroadcastOptions()
    opts.rootRank = src
    _pending(_group(group_name).broadcast([input], opts), input)
    return input


def _broadcast(input: torch.Tensor, src: int, group_name: Any) -> torch.Tensor:
    return _broadcast_(input.clone(memory_format=torch.contiguous_format), src, group_name)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce_,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "all_reduce_coalesced_": _all_reduce_coalesced_,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_into_tensor_out": _all_gather_into_tensor_out,
    "all_gather_into_tensor_coalesced": _all_gather_into_tensor_coalesced,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter_tensor_out": _reduce_scatter_tensor_out,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_tensor_coalesced,
    "all_to_all_single": _all_to_all_single,
    "broadcast": _broadcast,
    "broadcast_": _broadcast_,
    "wait_tensor": wait_pending,
}


def _fused_all_gather_matmul(
    part: torch.Tensor, factors: Tensors, gather_dim: int, group_name: Any, *, return_A: bool = True
) -> tuple[torch.Tensor | None, Tensors]:
    group = _group(group_name)
    whole = wait_pending(_all_gather_into_tensor(part.movedim(gather_dim, 0), group.size(), group))
    whole = whole.movedim(0, gather_dim)
    return whole if return_A else None, [whole @ factor for factor in factors]


def _fused_matmul_reduce_scatter(
    x: torch.Tensor, factor: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: Any
) -> torch.Tensor:
    group = _group(group_name)
    made = (x @ factor).movedim(scatter_dim, 0)
    return wait_pending(_reduce_scatter_tensor(made, reduce_op, group.size(), group)).movedim(0, scatter_dim)


OPERATORS = {f"_c10d_functional::{name}": function for name, function in _FUNCTIONS.items()} | {
    "symm_mem::fused_all_gather_matmul": _fused_all_gather_matmul,
    "symm_mem::fused_matmul_reduce_scatter": _fused_matmul_reduce_scatter,
}
"""Operator -> the function that replaces it on simulated tensors."""


def _refusing(original: Callable[..., Any], refuse: Callable[[Any], None]) -> Callable[..., Any]:
    positions = list(inspect.signature(original).parameters)
    first, group_at = positions[0], positions.index("group")

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        value = args[0] if args else kwargs.get(first)
        tensors = value if isinstance(value, (list, tuple)) else (value,)
        if any(type(t) is torch.Tensor and t.device.type == "cpu" for t in tensors):
            refuse(args[group_at] if len(args) > group_at else kwargs.get("group"))
        return original(*args, **kwargs)

    return collective


def install_functional(replace: Callable[[object, object], None], refuse: Callable[[Any], None]) -> None:
    """Make the public functions call ``refuse(group)`` for CPU tensors, which C++ would pass to gloo."""
    for name, function in list(vars(public).items()):
        if inspect.isfunction(function) and function.__module__ == public.__name__ and not name.startswith("_"):
            names = list(inspect.signature(function).parameters)
            if "group" in names[1:] and names[0] in ("self", "inputs"):
                replace(function, _refusing(function, refuse))


def group_of(group: Any) -> Any:
    """Return the process group for ``group``: a group, its name, a mesh, or a mesh and a dimension."""
    return _group(public._resolve_group_name(group, ""))
