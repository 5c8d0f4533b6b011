"""Planted faults of parallel training steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel, comm
from torch.nn.parallel import distributed as distributed_module

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.suite.common.faults.breaking import communicated, replaced_method, wrapped
from mgpu_check.suite.common.faults.conditions import is_last
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.suite.recipes import allreduce as reducing
from mgpu_check.suite.recipes import training
from mgpu_check.torch_hooks.patches import replaced
from mgpu_check.torch_hooks.tensors import plain

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


@fault("DDP sums gradients instead of averaging them", "test_distributed_data_parallel")
def sum_instead_of_mean() -> Iterator[None]:
    with communicated(lambda buffer, bucket, model: buffer * model.process_group.size()):
        yield


@fault(
    "one mantissa bit of one gradient of the last rank is flipped before DDP averages",
    "test_resnet18_in_distributed_data_parallel",
)
def flipped_bit_in_one_rank() -> Iterator[None]:
    with communicated(lambda buffer, bucket, model: _flip_a_bit(buffer) if is_last() else buffer):
        yield


@fault(
    "one mantissa bit of one gradient of the last device is flipped before DataParallel adds up",
    "test_batchnorm_in_data_parallel",
    "test_resnet18_in_data_parallel",
)
def flipped_bit_in_one_device() -> Iterator[None]:
    real, real_by_hand = comm.reduce_add_coalesced, reducing.allreduce

    def reduce_add_coalesced(inputs: Sequence[Sequence[torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        if len(inputs) > 1:
            inputs = [*inputs[:-1], [_flip_a_bit(inputs[-1][0]), *inputs[-1][1:]]]
        return real(inputs, *args, **kwargs)

    def allreduce(data: Sequence[torch.Tensor]) -> None:
        real_by_hand([*data[:-1], data[-1].copy_(_flip_a_bit(data[-1]))])

    with replaced(comm, "reduce_add_coalesced", reduce_add_coalesced), replaced(reducing, "allreduce", allreduce):
        yield


@fault("DataParallel forgets the gradients of the last device", "test_data_parallel")
def last_device_forgotten() -> Iterator[None]:
    real = comm.reduce_add_coalesced

    def reduce_add_coalesced(inputs: Sequence[Sequence[torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        return real(inputs[:-1] if len(inputs) > 1 else inputs, *args, **kwargs)

    with replaced(comm, "reduce_add_coalesced", reduce_add_coalesced):
        yield


@fault("DDP leaves the gradient of one parameter local", "test_replicas_stay_equal")
def local_gradient_of_one_parameter() -> Iterator[None]:
    def ignore(module: nn.Module) -> None:
        last = [name for name, _ in module.named_parameters()][-1]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [last])

    with wrapped(before=ignore):
        yield


@fault(
    "each rank takes the mean over its own shard, so uneven shards have the same weight",
    "test_distributed_data_parallel",
)
def mean_of_means() -> Iterator[None]:
    def accumulated_step(
        model: nn.Module, optimizer: torch.optim.Optimizer, shards: Any, batch_size: int, ranks: int = 1
    ) -> None:
        optimizer.zero_grad()
        for index, (inputs, labels) in enumerate(shards):
            with training.unsynchronized(model) if index + 1 < len(shards) else contextlib.nullcontext():
                (F.cross_entropy(model(inputs), labels) / len(shards)).backward()
        optimizer.step()

    with replaced(training, "accumulated_step", accumulated_step):
        yield


@fault("the loss of each shard by hand is divided by the size of the whole batch twice", "test_step_by_hand")
def divided_twice() -> Iterator[None]:
    real = training.sgd

    def sgd(parameters: Mapping[str, torch.Tensor], rate: float, batch_size: int) -> None:
        real(parameters, rate, batch_size * batch_size)

    with replaced(training, "sgd", sgd):
        yield


@fault("ranks and devices other than the first keep the gradients of the previous step", "test_gradient_accumulation")
def stale_gradients() -> Iterator[None]:
    real, real_by_hand = torch.optim.Optimizer.zero_grad, training.clear

    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        rank = current_rank()
        if rank is None or rank.index == 0:
            real(self, set_to_none)

    def clear(parameters: Mapping[str, torch.Tensor]) -> None:
        if not next(iter(parameters.values())).device.index:
            real_by_hand(parameters)

    with replaced(torch.optim.Optimizer, "zero_grad", zero_grad), replaced(training, "clear", clear):
        yield


@fault("DDP does not broadcast rank 0's parameters at the start", "test_replicas_stay_equal")
def parameters_not_broadcast() -> Iterator[None]:
    with replaced(distributed_module, "_sync_module_states", lambda *args, **kwargs: None):
        yield


@fault("accumulation forgets the last micro-batch", "test_gradient_accumulation")
def last_window_forgotten() -> Iterator[None]:
    real = training.accumulated_step

    def accumulated_step(
        model: nn.Module, optimizer: torch.optim.Optimizer, shards: Any, batch_size: int, ranks: int = 1
    ) -> None:
        real(model, optimizer, shards[:-1] if len(shards) > 1 else shards, batch_size, ranks)

    with replaced(training, "accumulated_step", accumulated_step):
        yield


@fault("DDP does not broadcast rank 0's BatchNorm statistics", "test_batchnorm_in_distributed_data_parallel")
def statistics_drift() -> Iterator[None]:
    with wrapped(broadcast_buffers=False):
        yield


@fault(
    "DDP puts the model into training mode, so that BatchNorm normalises by the batch", "test_batchnorm_in_evaluation"
)
def evaluation_ignored() -> Iterator[None]:
    real = DistributedDataParallel.forward

    def forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        self.module.train()
        return real(self, *args, **kwargs)

    with replaced(DistributedDataParallel, "forward", forward):
        yield


@fault(
    "DataParallel copies a shard from the start of its first cache line of 128 bytes",
    "test_data_parallel",
    condition="shards that do not start at a multiple of 128 bytes",
)
def shard_from_the_start_of_a_line() -> Iterator[None]:
    def scatter(real: Any, model: Any, inputs: Any, *args: Any) -> Any:
        scattered, named = real(model, inputs, *args)
        whole, begin, moved = inputs[0].reshape(-1), 0, []
        for shard, *rest in scattered:
            start = begin - begin % (_LINE // whole.element_size())
            held = whole[start : start + shard.numel()].to(shard.device).view(shard.shape)
            moved.append((held, *rest))
            begin += shard.numel()
        return tuple(moved), named

    with replaced_method(DataParallel, "scatter", scatter):
        yield


@fault(
    "DataParallel pads the last shard with zeros, and drops their outputs",
    "test_batchnorm_in_data_parallel",
    condition="batches not divisible by the devices, models with statistics over the batch",
)
def last_shard_filled_up() -> Iterator[None]:
    def parallel_apply(real: Any, model: Any, replicas: Any, inputs: Any, *args: Any) -> Any:
        (last,) = inputs[-1]
        zeros = last.new_zeros((len(inputs[0][0]) - len(last), *last.shape[1:]))
        outputs = real(model, replicas, (*inputs[:-1], (torch.cat([last, zeros]),)), *args)
        return [*outputs[:-1], outputs[-1][: len(last)]]

    with replaced_method(DataParallel, "parallel_apply", parallel_apply):
        yield


@fault(
    "DataParallel adds up only 64 gradients, and uses those of the first device for the rest",
    "test_resnet18_in_data_parallel",
    condition="above 64 parameters",
)
def gradients_past_a_launch_forgotten() -> Iterator[None]:
    def reduce_add_coalesced(real: Any, inputs: Sequence[Sequence[torch.Tensor]], *args: Any) -> Any:
        return (*real(inputs, *args)[:_LAUNCH], *inputs[0][_LAUNCH:])

    with replaced_method(comm, "reduce_add_coalesced", reduce_add_coalesced):
        yield


@fault(
    "DDP loses the results of buckets after the first",
    "test_distributed_data_parallel",
    condition="models of several buckets, from the second step on",
)
def later_buckets_lost() -> Iterator[None]:
    with communicated(lambda buffer, bucket, model: buffer.zero_() if bucket.index() else buffer):
        yield


@fault(
    "DDP broadcasts rank 0's parameters in its first forward pass, not in its constructor",
    "test_replicas_stay_equal",
    condition="until the first forward pass",
)
def parameters_broadcast_late() -> Iterator[None]:
    due: list[Any] = []

    def synchronize(real: Any, *args: Any, **kwargs: Any) -> None:
        due.append(lambda: real(*args, **kwargs))

    def forward(real: Any, *args: Any, **kwargs: Any) -> Any:
        while due:
            due.pop()()
        return real(*args, **kwargs)

    with (
        replaced_method(distributed_module, "_sync_module_states", synchronize),
        replaced_method(DistributedDataParallel, "forward", forward),
    ):
        yield


@fault(
    "DDP does not broadcast BatchNorm statistics below 32 bytes",
    "test_batchnorm_in_distributed_data_parallel",
    condition="BatchNorm of fewer than 8 channels, from the second step on",
)
def small_statistics_not_sent() -> Iterator[None]:
    def broadcast(real: Any, model: Any, tensors: Sequence[torch.Tensor], *args: Any) -> None:
        real(model, [tensor for tensor in tensors if tensor.numel() * tensor.element_size() >= _SMALL], *args)

    with replaced_method(DistributedDataParallel, "_distributed_broadcast_coalesced", broadcast):
        yield


@fault(
    "DDP broadcasts only the first 64 tensors of rank 0",
    "test_resnet18_in_distributed_data_parallel",
    condition="above 64 parameters and buffers",
)
def tensors_past_a_launch_not_sent() -> Iterator[None]:
    def broadcast(real: Any, group: Any, tensors: Sequence[torch.Tensor], *args: Any) -> None:
        real(group, tensors[:_LAUNCH], *args)

    with replaced_method(torch.distributed, "_broadcast_coalesced", broadcast):
        yield
