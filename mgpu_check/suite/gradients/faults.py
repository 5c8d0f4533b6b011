"""Planted faults of parallel training steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel, comm
from torch.nn.parallel import distributed as distributed_module

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.oracles.training import gradient_exchange as reducing
from mgpu_check.oracles.training import training_steps
from mgpu_check.suite.common.faults.planting import around, communicated, given, is_last, returned, wrapped
from mgpu_check.suite.common.faults.registry import FaultRow, entered, fault, register
from mgpu_check.torch_hooks.tensors import plain

_DDP, _NORM_IN_DDP, _RESNET_IN_DDP, _DP, _NORM_IN_DP, _RESNET_IN_DP, _ACCUMULATION, _REPLICAS = (
    "test_distributed_data_parallel", "test_batchnorm_in_distributed_data_parallel",
    "test_resnet18_in_distributed_data_parallel", "test_data_parallel", "test_batchnorm_in_data_parallel",
    "test_resnet18_in_data_parallel", "test_gradient_accumulation", "test_replicas_stay_equal",
)  # fmt: skip
_BIT = 12  # of float32's 23 bits of mantissa: a relative change of 2.4e-4 to 4.9e-4
_LINE = 128  # bytes of a cache line of a GPU
_LAUNCH = 64  # most tensors in one launch of a foreach kernel
_SMALL = 32  # bytes


def _flip_a_bit(gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy with one mantissa bit of the largest element inverted."""
    values = plain(gradient).clone()
    if values.dtype == torch.float32 and values.numel():
        values.view(-1).view(torch.int32)[values.abs().argmax()] ^= 1 << _BIT
    return values.to(gradient.device)


register(
    __name__,
    FaultRow("statistics-drift", "DDP does not broadcast rank 0's BatchNorm statistics", _NORM_IN_DDP, entered,
        partial(wrapped, broadcast_buffers=False)),
    FaultRow("sum-instead-of-mean", "DDP sums gradients instead of averaging them", _DDP, communicated,
        lambda buffer, bucket, model: buffer * model.process_group.size()),
    FaultRow("flipped-bit-in-one-rank",
        "one mantissa bit of one gradient of the last rank is flipped before DDP averages", _RESNET_IN_DDP,
        communicated, lambda buffer, bucket, model: _flip_a_bit(buffer) if is_last() else buffer),
    FaultRow("later-buckets-lost", "DDP loses the results of buckets after the first", _DDP, communicated,
        lambda buffer, bucket, model: buffer.zero_() if bucket.index() else buffer,
        "models of several buckets, from the second step on"),
    FaultRow("last-device-forgotten", "DataParallel forgets the gradients of the last device", _DP,
        given(comm, "reduce_add_coalesced"), lambda inputs, *_: (inputs[:-1] or inputs,)),
    FaultRow("gradients-past-a-launch-forgotten",
        "DataParallel adds up only 64 gradients, and uses those of the first device for the rest", _RESNET_IN_DP,
        returned(comm, "reduce_add_coalesced"),
        lambda sums, inputs, *_: (*sums[:_LAUNCH], *inputs[0][_LAUNCH:]), "above 64 parameters"),
    FaultRow("divided-twice", "the loss of each shard by hand is divided by the size of the whole batch twice",
        "test_step_by_hand", given(training_steps, "sgd"),
        lambda parameters, rate, batch: (parameters, rate, batch * batch)),
    FaultRow("last-window-forgotten", "accumulation forgets the last micro-batch", _ACCUMULATION,
        given(training_steps, "accumulated_step"),
        lambda model, optimizer, shards, *_: (model, optimizer, shards[:-1] or shards)),
    FaultRow("parameters-not-broadcast", "DDP does not broadcast rank 0's parameters at the start", _REPLICAS,
        around(distributed_module, "_sync_module_states"), lambda real, *_, **__: None),
    FaultRow("evaluation-ignored", "DDP puts the model into training mode, so that BatchNorm normalises by the batch",
        "test_batchnorm_in_evaluation", given(DistributedDataParallel, "forward"),
        lambda model, *_, **__: model.module.train()),
    FaultRow("small-statistics-not-sent", "DDP does not broadcast BatchNorm statistics below 32 bytes", _NORM_IN_DDP,
        given(DistributedDataParallel, "_distributed_broadcast_coalesced"),
        lambda model, tensors, *_: (model, [tensor for tensor in tensors if tensor.nbytes >= _SMALL]),
        "BatchNorm of fewer than 8 channels, from the second step on"),
    FaultRow("tensors-past-a-launch-not-sent", "DDP broadcasts only the first 64 tensors of rank 0", _RESNET_IN_DDP,
        given(torch.distributed, "_broadcast_coalesced"),
        lambda group, tensors, *_: (group, tensors[:_LAUNCH]), "above 64 parameters and buffers"),
)  # fmt: skip


def _last_flipped(inputs: Sequence[Sequence[torch.Tensor]], *_: Any) -> Any:
    *others, last = inputs
    return ([*others, [_flip_a_bit(last[0]), *last[1:]]],) if others else None


@fault("one mantissa bit of one gradient of the last device is flipped before DataParallel adds up", _NORM_IN_DP,
       _RESNET_IN_DP)  # fmt: skip
def flipped_bit_in_one_device() -> Iterator[None]:
    by_hand = given(reducing, "allreduce")(lambda data: data[-1].copy_(_flip_a_bit(data[-1])))
    with by_hand, given(comm, "reduce_add_coalesced")(_last_flipped):
        yield


@fault("DDP leaves the gradient of one parameter local", _REPLICAS, by=lambda change: wrapped(before=change))
def local_gradient_of_one_parameter(module: nn.Module) -> None:
    last = [name for name, _ in module.named_parameters()][-1]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [last])


@fault("each rank takes the mean over its own shard, so uneven shards have the same weight", _DDP,
       by=around(training_steps, "accumulated_step"))  # fmt: skip
def mean_of_means(real: Any, model: nn.Module, optimizer: torch.optim.Optimizer, shards: Any, *_: int) -> None:
    optimizer.zero_grad()
    for index, (inputs, labels) in enumerate(shards):
        with training_steps.unsynchronized(model) if index + 1 < len(shards) else contextlib.nullcontext():
            (F.cross_entropy(model(inputs), labels) / len(shards)).backward()
    optimizer.step()


@fault("ranks and devices other than the first keep the gradients of the previous step", _ACCUMULATION)
def stale_gradients() -> Iterator[None]:
    def zero_grad(real: Any, *_: Any, **__: Any) -> Any:
        rank = current_rank()
        return None if rank is not None and rank.index else NotImplemented

    def clear(real: Any, parameters: dict[str, torch.Tensor]) -> Any:
        return None if next(iter(parameters.values())).device.index else NotImplemented

    with around(torch.optim.Optimizer, "zero_grad")(zero_grad), around(training_steps, "clear")(clear):
        yield


@fault("DataParallel copies a shard from the start of its first cache line of 128 bytes", _DP,
       by=returned(DataParallel, "scatter"),
       when="shards that do not start at a multiple of 128 bytes")  # fmt: skip
def shard_from_the_start_of_a_line(result: Any, model: Any, inputs: Any, *_: Any) -> Any:
    scattered, named = result
    flat, begin, moved = inputs[0].reshape(-1), 0, []
    for shard, *rest in scattered:
        start = begin - begin % (_LINE // flat.element_size())
        moved.append((flat[start : start + shard.numel()].to(shard.device).view(shard.shape), *rest))
        begin += shard.numel()
    return tuple(moved), named


@fault("DataParallel pads the last shard with zeros, and drops their outputs", _NORM_IN_DP,
       by=around(DataParallel, "parallel_apply"),
       when="batches not divisible by the devices, models with statistics over the batch")  # fmt: skip
def last_shard_filled_up(real: Any, model: Any, replicas: Any, inputs: Any, *args: Any) -> Any:
    (last,) = inputs[-1]
    zeros = last.new_zeros((len(inputs[0][0]) - len(last), *last.shape[1:]))
    outputs = real(model, replicas, (*inputs[:-1], (torch.cat([last, zeros]),)), *args)
    return [*outputs[:-1], outputs[-1][: len(last)]]


@fault("DDP broadcasts rank 0's parameters in its first forward pass, not in its constructor", _REPLICAS,
       when="until the first forward pass")  # fmt: skip
def parameters_broadcast_late() -> Iterator[None]:
    due: list[Any] = []

    def forward(*_: Any, **__: Any) -> None:
        while due:
            due.pop()()

    late = around(distributed_module, "_sync_module_states")(
        lambda real, *args, **kwargs: due.append(partial(real, *args, **kwargs))
    )
    with late, given(DistributedDataParallel, "forward")(forward):
        yield
