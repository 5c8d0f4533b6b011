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


def _one(
    title: str, run: Callable[..., calls.Started], opts: Any, timeout: Any = None, **given: Any
) -> list[TransferCall]:
    """Return a call; its options are an object of torch, a time limit, or another argument, which has neither."""
    if timeout is None:
        timeout = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", None)
    return [TransferCall(title, run, bool(getattr(opts, "asyncOp", True)), timeout=timeout, **given)]


def _list(value: Any, other: Any = None) -> Tensors:
    """Return the tensors of an argument, or of its other spelling."""
    value = value if other is None else other
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _nested(value: Any) -> Tensors:
    """Return the only list inside a list of lists, or a flat list unchanged."""
    given = list(value or ())
    return list(given[0]) if given and isinstance(given[0], (list, tuple)) else given


def _reduction(opts: Any, op: Any) -> tuple[Any, Any]:
    """Return (options, operation) for a method whose argument is one of them."""
    if isinstance(opts, (_Op, _Op.RedOpType)):
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
    return _one("all_reduce", calls.all_reduce, opts, timeout, both=_list(tensors, tensor), op=op)


def _parse_allreduce_coalesced(tensors: Sequence[torch.Tensor], opts: Any = None) -> list[TransferCall]:
    opts, op = _reduction(opts, None)
    return [call for t in tensors for call in _one("allreduce_coalesced", calls.all_reduce, opts, both=[t], op=op)]


def _parse_broadcast(
    tensors: Any = None, opts: Any = None, timeout: timedelta | None = None, *, tensor: Any = None, root: int = 0
) -> list[TransferCall]:
    source = _root(opts, root)
    return _one("broadcast", calls.broadcast, opts, timeout, both=_list(tensors, tensor), root=source)


def _parse_reduce(
    tensors: Any = None, opts: Any = None, op: Any = None, timeout: Any = None, *, tensor: Any = None, root: int = 0
) -> list[TransferCall]:
    target = _root(opts, root)
    opts, op = _reduction(None if isinstance(opts, int) else opts, op)
    return _one("reduce", calls.reduce, opts, timeout, both=_list(tensors, tensor), op=op, root=target)


def _parse_allgather(
    output_tensors: Any, input_tensors: Any = None, opts: Any = None, *, input_tensor: Any = None, timeout: Any = None
) -> list[TransferCall]:
    outs, ins = _nested(output_tensors), _list(input_tensors, input_tensor)
    return _one("all_gather", calls.all_gather, opts, timeout, outs=outs, ins=ins, lists=(True, False))


def _parse_allgather_coalesced(output_lists: Any, input_list: Any, opts: Any = None) -> list[TransferCall]:
    # One list per rank, with one output per input.
    pairs = zip(zip(*output_lists, strict=True), input_list, strict=True)
    return [call for outs, mine in pairs for call in _parse_allgather([list(outs)], [mine], opts)]


def _parse_all_gather_single(output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> list[TransferCall]:
    return _one("_all_gather_base", calls.all_gather_single, opts, outs=[output], ins=[input])


def _parse_gather(
    output_tensors: Any, input_tensors: Any = None, opts: Any = None, timeout: Any = None, *,
    input_tensor: Any = None, root: int = 0,
) -> list[TransferCall]:  # fmt: skip
    outs, ins, target = _nested(output_tensors), _list(input_tensors, input_tensor), _root(opts, root)
    return _one("gather", calls.gather, opts, timeout, outs=outs, ins=ins, root=target, lists=(True, False))


def _parse_gather_single(output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> list[TransferCall]:
    return _one("gather", calls.gather_single, opts, outs=[output], ins=[input], root=_root(opts, 0))


def _parse_scatter(
    output_tensors: Any = None, input_tensors: Any = None, opts: Any = None, timeout: Any = None, *,
    output_tensor: Any = None, root: int = 0,
) -> list[TransferCall]:  # fmt: skip
    outs, ins, source = _list(output_tensors, output_tensor), _nested(input_tensors), _root(opts, root)
    return _one("scatter", calls.scatter, opts, timeout, outs=outs, ins=ins, root=source, lists=(False, True))


def _parse_reduce_scatter(
    output_tensors: Any = None, input_tensors: Any = None, opts: Any = None, timeout: Any = None, *,
    output: Any = None, input: Any = None, op: Any = None,
) -> list[TransferCall]:  # fmt: skip
    opts, op = _reduction(opts, op)
    outs, ins = _list(output_tensors, output), _nested(input_tensors if input is None else input)
    return _one("reduce_scatter", calls.reduce_scatter, opts, timeout, outs=outs, ins=ins, op=op, lists=(False, True))


def _parse_reduce_scatter_single(
    outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: Any = None
) -> list[TransferCall]:  # torch's names
    outs, ins = [outputTensor], [inputTensor]
    opts, op = _reduction(opts, None)
    return _one("_reduce_scatter_base", calls.reduce_scatter_single, opts, outs=outs, ins=ins, op=op)


def _each(parse: Callable[..., list[TransferCall]]) -> Callable[..., list[TransferCall]]:
    def parse_each(outputs: Any, inputs: Any, opts: Any = None) -> list[TransferCall]:
        return [call for pair in zip(outputs, inputs, strict=True) for call in parse(*pair, opts)]

    return parse_each


def _parse_all_to_all_single(
    output: torch.Tensor, input: torch.Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int],
    opts: Any = None, *, timeout: Any = None,
) -> list[TransferCall]:  # fmt: skip
    splits = output_split_sizes, input_split_sizes
    return _one("all_to_all", calls.all_to_all_single, opts, timeout, outs=[output], ins=[input], splits=splits)


def _parse_alltoall(output_tensors: Any, input_tensors: Any, opts: Any = None) -> list[TransferCall]:
    outs, ins = list(output_tensors), list(input_tensors)
    return _one("all_to_all", calls.all_to_all, opts, outs=outs, ins=ins, lists=(True, True))


def _parse_send(tensors: Any, dstRank: int, tag: int = 0) -> list[TransferCall]:
    return _one("send", calls.send, None, ins=_list(tensors), root=dstRank, peer=True, tag=tag)


def _parse_recv(tensors: Any, srcRank: int, tag: int = 0) -> list[TransferCall]:
    return _one("recv", calls.recv, None, outs=_list(tensors), root=srcRank, peer=True, tag=tag)


def _parse_recv_anysource(tensors: Any, tag: int = 0) -> list[TransferCall]:
    return _one("recv", calls.recv_anysource, None, outs=_list(tensors), root=-1, peer=True, tag=tag)


PARSERS: dict[str, Callable[..., list[TransferCall]]] = {
    "all_reduce": _parse_allreduce,
    "all_reduce_coalesced": _parse_allreduce_coalesced,
    "broadcast": _parse_broadcast,
    "reduce": _parse_reduce,
    "all_gather": _parse_allgather,
    "all_gather_coalesced": _parse_allgather_coalesced,
    "all_gather_into_tensor": _parse_all_gather_single,
    "all_gather_into_tensor_coalesced": _each(_parse_all_gather_single),
    "gather": _parse_gather,
    "gather_single": _parse_gather_single,
    "scatter": _parse_scatter,
    "reduce_scatter": _parse_reduce_scatter,
    "reduce_scatter_tensor": _parse_reduce_scatter_single,
    "reduce_scatter_tensor_coalesced": _each(_parse_reduce_scatter_single),
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
