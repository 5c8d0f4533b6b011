"""Parse the arguments of the methods of process groups into :class:`~mgpu_check.simulated.calls.TransferCall`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.simulated import calls
from mgpu_check.simulated.calls import TransferCall
from mgpu_check.torch_hooks.table import METHODS

Tensors = list[torch.Tensor]
_Op = dist.ReduceOp


def _late(opts: Any) -> bool:
    return bool(getattr(opts, "asyncOp", True))


def _limit(opts: Any, timeout: timedelta | None) -> timedelta | None:
    return timeout if timeout is not None else getattr(opts, "timeout", None)


def _list(value: torch.Tensor | Sequence[torch.Tensor]) -> Tensors:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _is_op(value: object) -> bool:
    return isinstance(value, (_Op, _Op.RedOpType))


def _reduction(opts: Any, op: Any) -> tuple[Any, Any]:
    """Return (options, operation) for a method whose argument is one of them."""
    if _is_op(opts):
        opts, op = None, opts
    if op is None:
        op = _Op.SUM if opts is None else opts.reduceOp
    return opts, op


def _root(opts: Any, root: int) -> int:
    """Return the root for a method whose argument is either options or the rank."""
    if isinstance(opts, int):
        return opts
    return root if opts is None else int(opts.rootRank)


def _parse_allreduce(
    tensors: Any = None, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None, tensor: Any = None
) -> list[TransferCall]:
    opts, op = _reduction(opts, op)
    given = _list(tensors if tensor is None else tensor)
    return [TransferCall("all_reduce", calls.all_reduce, _late(opts), both=given, op=op, timeout=_limit(opts, timeout))]


def _parse_allreduce_coalesced(tensors: Sequence[torch.Tensor], opts: Any = None) -> list[TransferCall]:
    opts, op = _reduction(opts, None)
    title = "allreduce_coalesced"
    return [
        TransferCall(title, calls.all_reduce, _late(opts), both=[t], op=op, timeout=_limit(opts, None)) for t in tensors
    ]


def _parse_broadcast(
    tensors: Any = None, opts: Any = None, timeout: timedelta | None = None, *, tensor: Any = None, root: int = 0
) -> list[TransferCall]:
    source = _root(opts, root)
    given = _list(tensors if tensor is None else tensor)
    return [
        TransferCall("broadcast", calls.broadcast, _late(opts), both=given, root=source, timeout=_limit(opts, timeout))
    ]


def _parse_reduce(
    tensors: Any = None, opts: Any = None, op: Any = None, timeout: Any = None, *, tensor: Any = None, root: int = 0
) -> list[TransferCall]:
    target = _root(opts, root)
    opts, op = _reduction(None if isinstance(opts, int) else opts, op)
    given = _list(tensors if tensor is None else tensor)
    return [
        TransferCall("reduce", calls.reduce, _late(opts), both=given, op=op, root=target, timeout=_limit(opts, timeout))
    ]


def _nested(value: Any) -> Tensors:
    """Return the only list inside a list of lists, or a flat list unchanged."""
    given = list(value or ())
    return list(given[0]) if given and isinstance(given[0], (list, tuple)) else given


def _parse_allgather(
    output_tensors: Any, input_tensors: Any = None, opts: Any = None, *, input_tensor: Any = None, timeout: Any = None
) -> list[TransferCall]:
    outs, ins = _nested(output_tensors), _list(input_tensors if input_tensor is None else input_tensor)
    limit = opts if isinstance(opts, timedelta) else _limit(opts, timeout)
    return [TransferCall("all_gather", calls.all_gather, _late(opts), outs, ins, lists=(True, False), timeout=limit)]


def _parse_allgather_coalesced(output_lists: Any, input_list: Any, opts: Any = None) -> list[TransferCall]:
    # One list per rank, with one output per input.
    pairs = zip(zip(*output_lists, strict=True), input_list, strict=True)
    return [call for outs, mine in pairs for call in _parse_allgather([list(outs)], [mine], opts)]


def _parse_all_gather_single(output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> list[TransferCall]:
    limit = _limit(opts, None)
    return [TransferCall("_all_gather_base", calls.all_gather_single, _late(opts), [output], [input], timeout=limit)]


def _parse_all_gather_single_coalesced(outputs: Any, inputs: Any, opts: Any = None) -> list[TransferCall]:
    pairs = zip(outputs, inputs, strict=True)
    return [call for out, mine in pairs for call in _parse_all_gather_single(out, mine, opts)]


def _parse_gather(
    output_tensors: Any, input_tensors: Any = None, opts: Any = None, timeout: Any = None, *,
    input_tensor: Any = None, root: int = 0,
) -> list[TransferCall]:  # fmt: skip
    target = _root(opts, root)
    outs, ins = _nested(output_tensors), _list(input_tensors if input_tensor is None else input_tensor)
    limit = _limit(opts, timeout)
    return [
        TransferCall("gather", calls.gather, _late(opts), outs, ins, root=target, lists=(True, False), timeout=limit)
    ]


def _parse_gather_single(output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> list[TransferCall]:
    target, limit = _root(opts, 0), _limit(opts, None)
    return [TransferCall("gather", calls.gather_single, _late(opts), [output], [input], root=target, timeout=limit)]


def _parse_scatter(
    output_tensors: Any = None, input_tensors: Any = None, opts: Any = None, timeout: Any = None, *,
    output_tensor: Any = None, root: int = 0,
) -> list[TransferCall]:  # fmt: skip
    source = _root(opts, root)
    outs, ins = _list(output_tensors if output_tensor is None else output_tensor), _nested(input_tensors)
    limit = _limit(opts, timeout)
    return [
        TransferCall("scatter", calls.scatter, _late(opts), outs, ins, root=source, lists=(False, True), timeout=limit)
    ]


def _parse_reduce_scatter(
    output_tensors: Any = None, input_tensors: Any = None, opts: Any = None, timeout: Any = None, *,
    output: Any = None, input: Any = None, op: Any = None,
) -> list[TransferCall]:  # fmt: skip
    opts, op = _reduction(opts, op)
    outs = _list(output_tensors if output is None else output)
    ins = _nested(input_tensors if input is None else input)
    limit = _limit(opts, timeout)
    return [
        TransferCall(
            "reduce_scatter", calls.reduce_scatter, _late(opts), outs, ins, op=op, lists=(False, True), timeout=limit
        )
    ]


def _parse_reduce_scatter_single(
    outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: Any = None
) -> list[TransferCall]:  # torch's names
    opts, op = _reduction(opts, None)
    title, limit = "_reduce_scatter_base", _limit(opts, None)
    return [
        TransferCall(
            title, calls.reduce_scatter_single, _late(opts), [outputTensor], [inputTensor], op=op, timeout=limit
        )
    ]


def _parse_reduce_scatter_single_coalesced(outputs: Any, inputs: Any, opts: Any = None) -> list[TransferCall]:
    pairs = zip(outputs, inputs, strict=True)
    return [call for out, given in pairs for call in _parse_reduce_scatter_single(out, given, opts)]


def _parse_all_to_all_single(
    output: torch.Tensor, input: torch.Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int],
    opts: Any = None, *, timeout: Any = None,
) -> list[TransferCall]:  # fmt: skip
    limit = opts if isinstance(opts, timedelta) else _limit(opts, timeout)
    splits = output_split_sizes, input_split_sizes
    title = "all_to_all"
    return [TransferCall(title, calls.all_to_all_single, _late(opts), [output], [input], splits=splits, timeout=limit)]


def _parse_alltoall(output_tensors: Any, input_tensors: Any, opts: Any = None) -> list[TransferCall]:
    lists, limit = (True, True), _limit(opts, None)
    outs, ins = list(output_tensors), list(input_tensors)
    return [TransferCall("all_to_all", calls.all_to_all, _late(opts), outs, ins, lists=lists, timeout=limit)]


def _parse_send(tensors: Any, dstRank: int, tag: int = 0) -> list[TransferCall]:
    return [TransferCall("send", calls.send, True, ins=_list(tensors), root=dstRank, peer=True, tag=tag)]


def _parse_recv(tensors: Any, srcRank: int, tag: int = 0) -> list[TransferCall]:
    return [TransferCall("recv", calls.recv, True, outs=_list(tensors), root=srcRank, peer=True, tag=tag)]


def _parse_recv_anysource(tensors: Any, tag: int = 0) -> list[TransferCall]:
    return [TransferCall("recv", calls.recv_anysource, True, outs=_list(tensors), root=-1, peer=True, tag=tag)]


PARSERS: dict[str, Callable[..., list[TransferCall]]] = {
    "all_reduce": _parse_allreduce,
    "all_reduce_coalesced": _parse_allreduce_coalesced,
    "broadcast": _parse_broadcast,
    "reduce": _parse_reduce,
    "all_gather": _parse_allgather,
    "all_gather_coalesced": _parse_allgather_coalesced,
    "all_gather_into_tensor": _parse_all_gather_single,
    "all_gather_into_tensor_coalesced": _parse_all_gather_single_coalesced,
    "gather": _parse_gather,
    "gather_single": _parse_gather_single,
    "scatter": _parse_scatter,
    "reduce_scatter": _parse_reduce_scatter,
    "reduce_scatter_tensor": _parse_reduce_scatter_single,
    "reduce_scatter_tensor_coalesced": _parse_reduce_scatter_single_coalesced,
    "all_to_all": _parse_alltoall,
    "all_to_all_single": _parse_all_to_all_single,
    "send": _parse_send,
    "recv": _parse_recv,
    "recv_anysource": _parse_recv_anysource,
}
"""Function of ``torch.distributed``, or method with other arguments -> the parser of its methods."""


def parser_of(method: str) -> Callable[..., list[TransferCall]] | None:
    """Return the parser for a method of process groups; None for a barrier, which has no tensors."""
    return PARSERS.get(method) or PARSERS.get(METHODS[method].function)
