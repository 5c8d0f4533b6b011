"""Planted faults of the replicas of DataParallel, of their gradients, buffers and hooks."""

from __future__ import annotations

import copy
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DataParallel, comm
from torch.nn.parallel._functions import ReduceAddCoalesced

from mgpu_check.suite.common.faults.breaking import replaced_method, upper_bits
from mgpu_check.suite.common.faults.conditions import Count
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced

_MANY = 1 << 16

data_parallel_module = sys.modules["torch.nn.parallel.data_parallel"]
"""The module. The package attribute of this name is the function `data_parallel`."""


def _copied(change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Change each tensor that the last of several devices receives."""

    def broadcast(real: Callable[..., Any], tensors: Sequence[torch.Tensor], devices: Any, *more: Any) -> Any:
        outputs = [list(held) for held in real(tensors, devices, *more)]
        if len(outputs) > 1:
            with torch.no_grad():
                outputs[-1] = [change(held) for held in outputs[-1]]
        return outputs

    with replaced_method(comm, "broadcast_coalesced", broadcast):
        yield


def _added(change: Callable[[list[list[torch.Tensor]]], list[list[torch.Tensor]]]) -> Iterator[None]:
    """Change the gradients of all devices, a list for each, before they are added up."""

    def reduce(real: Callable[..., Any], inputs: Sequence[Sequence[torch.Tensor]], *more: Any) -> Any:
        return real(change([list(held) for held in inputs]), *more)

    with replaced_method(comm, "reduce_add_coalesced", reduce):
        yield


# Replicas


@fault(
    "elements beyond the first 64 Ki of a parameter are not copied to the last device",
    "test_replicas",
    condition="above 64 Ki elements, one device",
)
def long_parameters_not_copied() -> Iterator[None]:
    def cut(held: torch.Tensor) -> torch.Tensor:
        if held.numel() <= _MANY:
            return held
        held = held.clone()
        held.view(-1)[_MANY:] = 0
        return held

    yield from _copied(cut)


@fault("flags of the last device are inverted", "test_replicas", condition="bool only, one device")
def flags_inverted() -> Iterator[None]:
    yield from _copied(lambda held: ~held if held.dtype == torch.bool else held)


@fault("NaN loses its payload on the last device", "test_replicas", condition="NaN of float32 only, one device")
def payloads_of_replicas_lost() -> Iterator[None]:
    def quiet(held: torch.Tensor) -> torch.Tensor:
        if held.dtype != torch.float32:
            return held
        return torch.where(held.isnan(), torch.tensor(torch.nan, device=held.device), held)

    yield from _copied(quiet)


@fault("float64 parameters pass through float32 on the last device", "test_replicas", condition="float64, one device")
def float64_copied_as_float32() -> Iterator[None]:
    yield from _copied(lambda held: held.float().double() if held.dtype == torch.float64 else held)


@fault("a module with two names becomes two modules in each replica", "test_replicas", condition="shared modules")
def shared_modules_apart() -> Iterator[None]:
    def replicate(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        replicas = real(*args, **kwargs)
        for replica in replicas:
            if "twin" in replica._modules:
                replica._modules["twin"] = copy.copy(replica._modules["twin"])
        return replicas

    with replaced_method(torch.nn.parallel, "replicate", replicate):
        yield


# Gradients


@fault("DataParallel adds gradients up in TF32", "test_models")
def gradients_added_in_tf32() -> Iterator[None]:
    yield from _added(lambda inputs: [[upper_bits(value) for value in held] for held in inputs])


@fault(
    "elements beyond the first 64 Ki of the last device's gradient are lost",
    "test_models",
    condition="above 64 Ki elements, one device",
)
def long_gradients_lost() -> Iterator[None]:
    def cut(inputs: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        if len(inputs) > 1:
            inputs[-1] = [value.clone() for value in inputs[-1]]
            for value in inputs[-1]:
                value.view(-1)[_MANY:] = 0
        return inputs

    yield from _added(cut)


@fault(
    "gradients of four-dimensional weights leave out the second device",
    "test_models",
    condition="convolutions, one device",
)
def convolutions_without_the_second_device() -> Iterator[None]:
    def without(inputs: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        if len(inputs) > 1:
            inputs[1] = [value * 0 if value.dim() == 4 else value for value in inputs[1]]
        return inputs

    yield from _added(without)


@fault("frozen parameters get a gradient", "test_frozen_parameters", condition="frozen parameters")
def frozen_parameters_thawed() -> Iterator[None]:
    def forward(real: Callable[..., Any], self: DataParallel[Any], *args: Any, **kwargs: Any) -> Any:
        for parameter in self.module.parameters():
            parameter.requires_grad_(True)
        return real(self, *args, **kwargs)

    with replaced_method(DataParallel, "forward", forward):
        yield


@fault("every second addition of gradients is lost", "test_several_calls", condition="one call in two")
def every_second_gradient_lost() -> Iterator[None]:
    count = Count()

    def lose(inputs: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        return [[value * 0 for value in held] for held in inputs] if count.every(2) else inputs

    yield from _added(lose)


@fault(
    "the last device keeps the parameters of the first call",
    "test_several_calls",
    condition="from the second call on, one device",
)
def replica_kept() -> Iterator[None]:
    kept: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    def broadcast(real: Callable[..., Any], tensors: Sequence[torch.Tensor], devices: Any, *more: Any) -> Any:
        outputs = [list(held) for held in real(tensors, devices, *more)]
        if len(outputs) > 1 and tensors:
            key = (tensors[0].data_ptr(), *(tuple(value.shape) for value in tensors))
            first = kept.setdefault(key, [held.detach().clone() for held in outputs[-1]])
            outputs[-1] = [held.clone() for held in first]
        return outputs

    with replaced_method(comm, "broadcast_coalesced", broadcast):
        yield


@fault(
    "a call loses its gradients if another call precedes backward",
    "test_several_calls",
    condition="two calls before one backward pass",
)
def gradients_of_earlier_calls_lost() -> Iterator[None]:
    latest: WeakKeyDictionary[DataParallel[Any], object] = WeakKeyDictionary()

    def forward(real: Callable[..., Any], self: DataParallel[Any], *args: Any, **kwargs: Any) -> Any:
        out, this = real(self, *args, **kwargs), object()
        latest[self] = this
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.register_hook(lambda gradient: gradient if latest[self] is this else gradient * 0)
        return out

    with replaced_method(DataParallel, "forward", forward):
        yield


# Buffers and hooks


@fault("the module keeps the buffers of the last replica", "test_buffers", condition="training")
def buffers_of_the_last_device() -> Iterator[None]:
    def apply(real: Callable[..., Any], self: DataParallel[Any], replicas: Any, *more: Any) -> Any:
        outputs = real(self, replicas, *more)
        with torch.no_grad():
            for name, value in self.module.named_buffers():
                value.copy_(getattr(replicas[-1], name, value))
        return outputs

    with replaced_method(DataParallel, "parallel_apply", apply):
        yield


@fault(
    "integers are converted through float64 on the last device",
    "test_buffers",
    condition="int64 above 2^53, one device",
)
def counts_copied_as_float64() -> Iterator[None]:
    yield from _copied(lambda held: held.double().long() if held.dtype == torch.int64 else held)


@fault("floating-point buffers change in evaluation, too", "test_buffers", condition="evaluation, floating point only")
def buffers_change_in_evaluation() -> Iterator[None]:
    def forward(real: Callable[..., Any], self: DataParallel[Any], *args: Any, **kwargs: Any) -> Any:
        out = real(self, *args, **kwargs)
        if not self.training:
            with torch.no_grad():
                for value in self.module.buffers():
                    if value.is_floating_point():
                        value += 1
        return out

    with replaced_method(DataParallel, "forward", forward):
        yield


@fault("hooks are called on the first replica only", "test_hooks", condition="devices other than the first")
def hooks_on_the_first_replica() -> Iterator[None]:
    def replicate(real: Callable[..., Any], *given: Any) -> Any:
        replicas = real(*given)
        for replica in replicas[1:]:
            for module in replica.modules():
                module._forward_hooks = OrderedDict()
        return replicas

    with replaced_method(DataParallel, "replicate", replicate):
        yield


@fault("hooks that take keyword arguments are not called", "test_hooks", condition="pre-hooks with_kwargs")
def hooks_with_keywords_lost() -> Iterator[None]:
    def replicate(real: Callable[..., Any], self: nn.Module) -> Any:
        replica = real(self)
        replica._forward_pre_hooks = OrderedDict(
            (key, hook)
            for key, hook in self._forward_pre_hooks.items()
            if key not in self._forward_pre_hooks_with_kwargs
        )
        return replica

    with replaced_method(nn.Module, "_replicate_for_data_parallel", replicate):
        yield


@fault("sparse gradients are added up without the last device", "test_sparse_gradients", condition="sparse gradients")
def sparse_gradients_of_the_last_left_out() -> Iterator[None]:
    def add(real: Callable[..., Any], inputs: Sequence[torch.Tensor], *args: Any) -> Any:
        if inputs[-1].is_sparse and len(inputs) > 1:
            inputs = [*inputs[:-1], inputs[-1] * 0]
        return real(inputs, *args)

    with replaced_method(comm, "reduce_add", add):
        yield


@fault("a parameter's hook gets half of its gradient", "test_hooks", condition="hooks of parameters")
def hook_of_half_a_gradient() -> Iterator[None]:
    def register(real: Callable[..., Any], self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        return real(self, (lambda gradient: hook(gradient * 0.5)) if isinstance(self, nn.Parameter) else hook)

    with replaced_method(torch.Tensor, "register_hook", register):
        yield


# Less common models


def _replicas(change: Callable[[nn.Module, nn.Module], None]) -> Iterator[None]:
    """Call ``change(replica, module)`` for each module of each replica except the first."""

    def replicate(real: Callable[..., Any], network: nn.Module, *args: Any) -> Any:
        replicas = real(network, *args)
        for replica in replicas[1:]:
            for part in replica.modules():
                change(replica, part)
        return replicas

    with replaced_method(data_parallel_module, "replicate", replicate):
        yield


@fault(
    "parameters in lists have the gradient of the first device only",
    "test_models",
    condition="nn.ParameterList, other devices",
)
def lists_of_parameters_detached() -> Iterator[None]:
    def detach(replica: nn.Module, part: nn.Module) -> None:
        if isinstance(part, nn.ParameterList):
            for name in [name for name, held in vars(part).items() if isinstance(held, torch.Tensor)]:
                setattr(part, name, getattr(part, name).detach())

    yield from _replicas(detach)


@fault(
    "all modules of a replica have the mode of the whole model",
    "test_modes",
    condition="modules in another mode, other devices",
)
def mode_of_the_whole() -> Iterator[None]:
    def spread(replica: nn.Module, part: nn.Module) -> None:
        part.training = replica.training

    yield from _replicas(spread)


@fault("gradients of gradients are zero", "test_second_gradients", condition="create_graph=True")
def second_gradients_lost() -> Iterator[None]:
    backward = ReduceAddCoalesced.backward

    def zeros(ctx: Any, *grads: Any) -> Any:
        return tuple(None if one is None else one * 0 for one in backward(ctx, *grads))

    with replaced(ReduceAddCoalesced, "backward", staticmethod(zeros)):
        yield


@fault(
    "gradients of other dtypes than the first include the first device only", "test_models", condition="mixed dtypes"
)
def gradients_of_one_dtype() -> Iterator[None]:
    def change(inputs: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        kind = inputs[0][0].dtype
        return [inputs[0], *([held if held.dtype == kind else held * 0 for held in each] for each in inputs[1:])]

    yield from _added(change)


@fault(
    "parameters beyond the first 10 MiB are not copied to the last device",
    "test_replicas",
    condition="above 10 MiB, one device",
)
def first_buffer_only() -> Iterator[None]:
    def broadcast(real: Callable[..., Any], tensors: Sequence[torch.Tensor], devices: Any, *more: Any) -> Any:
        outputs = [list(held) for held in real(tensors, devices, *more)]
        ends = list(itertools.accumulate(held.numel() * held.itemsize for held in tensors))
        if len(outputs) > 1:
            outputs[-1] = [
                held if end <= 10 << 20 else torch.zeros_like(held) for held, end in zip(outputs[-1], ends, strict=True)
            ]
        return outputs

    with replaced_method(comm, "broadcast_coalesced", broadcast):
        yield


@fault(
    "gradients beyond the first 10 MiB include the first device only",
    "test_replicas",
    condition="above 10 MiB, other devices",
)
def first_buffer_of_gradients_only() -> Iterator[None]:
    def change(inputs: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        ends = list(itertools.accumulate(held.numel() * held.itemsize for held in inputs[0]))
        rest = [[held * (end <= 10 << 20) for held, end in zip(each, ends, strict=True)] for each in inputs[1:]]
        return [inputs[0], *rest]

    yield from _added(change)


@fault("two parameters are swapped on the last device", "test_replicas", condition="above 10 MiB, one device")
def ends_of_buffers_exchanged() -> Iterator[None]:
    def broadcast(real: Callable[..., Any], tensors: Sequence[torch.Tensor], devices: Any, *more: Any) -> Any:
        outputs = [list(held) for held in real(tensors, devices, *more)]
        if len(outputs) > 1 and sum(held.numel() * held.itemsize for held in tensors) > 10 << 20:
            last = outputs[-1]
            last[1], last[-1] = last[-1], last[1]
        return outputs

    with replaced_method(comm, "broadcast_coalesced", broadcast):
        yield
