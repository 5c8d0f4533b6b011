"""Planted faults of the replicas of DataParallel, of their gradients, buffers and hooks."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import parallel
from torch.nn.parallel import DataParallel, comm
from torch.nn.parallel._functions import ReduceAddCoalesced

from mgpu_check.suite.common.faults.breaking import around, given, returned, upper_bits
from mgpu_check.suite.common.faults.conditions import above, counted, dtype
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, register
from mgpu_check.suite.common.faults.when import When
from mgpu_check.suite.data_parallel.faults.planting import (
    MANY,
    ONE_DEVICE,
    added,
    copied,
    copied_together,
    hooks_of_replicas,
    replica_parts,
)

Dp = DataParallel[Any]
Inputs = list[list[torch.Tensor]]

held = caught_by("test_replicas")
models = caught_by("test_models")
several_calls = caught_by("test_several_calls")
buffers = caught_by("test_buffers")
modes = caught_by("test_modes")
hooks = caught_by("test_hooks")

_BUFFER = 10 << 20
"""Size of a buffer of `broadcast_coalesced` and `reduce_add_coalesced`, in bytes."""


def _ends(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the end of each tensor in one buffer for all, in bytes."""
    return list(itertools.accumulate(value.nbytes for value in tensors))


_LARGE = When(f"above {_BUFFER >> 20} MiB", lambda tensors: _ends(tensors)[-1:] > [_BUFFER])
_OTHERS = When("other devices", lambda inputs: len(inputs) > 1)
_FLOAT32 = When("NaN of float32 only", dtype(torch.float32).holds)
_FLOAT64 = When("float64", dtype(torch.float64).holds)
_COUNTS = When("int64 above 2^53", dtype(torch.int64).holds)
_EVALUATION = When("evaluation, floating point only", lambda out, self, *args, **kwargs: not self.training)
_LISTS = When("nn.ParameterList, other devices", lambda replica, part: isinstance(part, nn.ParameterList))


@held("elements beyond the first 64 Ki of a parameter are not copied to the last device", copied,
    above(MANY) & ONE_DEVICE)  # fmt: skip
def long_parameters_not_copied(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.view(-1)[MANY:] = 0
    return value


@held("parameters beyond the first 10 MiB are not copied to the last device", copied_together, _LARGE & ONE_DEVICE)
def first_buffer_only(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    ends = zip(tensors, _ends(tensors), strict=True)
    return [value if end <= _BUFFER else torch.zeros_like(value) for value, end in ends]


@held("two parameters are swapped on the last device", copied_together, _LARGE & ONE_DEVICE)
def ends_of_buffers_exchanged(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    first, second, *others, last = tensors
    return [first, last, *others, second]


@several_calls("the last device keeps the parameters of the first call", when="from the second call on, one device")
def replica_kept() -> Iterator[None]:
    kept: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    def broadcast(outputs: Any, tensors: Sequence[torch.Tensor], *args: Any) -> Any:
        *others, last = map(list, outputs)
        if not others or not tensors:
            return None
        key = (tensors[0].data_ptr(), *(tuple(value.shape) for value in tensors))
        first = kept.setdefault(key, [value.detach().clone() for value in last])
        return [*others, [value.clone() for value in first]]

    with returned(comm, "broadcast_coalesced")(broadcast):
        yield


@held("a module with two names becomes two modules in each replica", returned(parallel, "replicate"), "shared modules")
def shared_modules_apart(replicas: Any, *args: Any, **kwargs: Any) -> None:
    for modules in (replica._modules for replica in replicas):
        if "twin" in modules:
            modules["twin"] = copy.copy(modules["twin"])


@models("elements beyond the first 64 Ki of the last device's gradient are lost", added,
    When("above 64 Ki elements, one device", _OTHERS.holds))  # fmt: skip
def long_gradients_lost(inputs: Inputs) -> Inputs:
    last = [value.clone() for value in inputs[-1]]
    for value in last:
        value.view(-1)[MANY:] = 0
    return [*inputs[:-1], last]


@models("gradients of other dtypes than the first include the first device only", added, "mixed dtypes")
def gradients_of_one_dtype(inputs: Inputs) -> Inputs:
    kind = inputs[0][0].dtype
    return [inputs[0], *([value if value.dtype == kind else value * 0 for value in each] for each in inputs[1:])]


@held("gradients beyond the first 10 MiB include the first device only", added,
    When(f"{_LARGE}, other devices", lambda inputs: _LARGE.holds(inputs[0])))  # fmt: skip
def first_buffer_of_gradients_only(inputs: Inputs) -> Inputs:
    ends = _ends(inputs[0])
    rest = [[value * (end <= _BUFFER) for value, end in zip(each, ends, strict=True)] for each in inputs[1:]]
    return [inputs[0], *rest]


_latest: WeakKeyDictionary[Dp, object] = WeakKeyDictionary()


@several_calls("a call loses its gradients if another call precedes backward", returned(DataParallel, "forward"),
    "two calls before one backward pass")  # fmt: skip
def gradients_of_earlier_calls_lost(out: Any, self: Dp, *args: Any, **kwargs: Any) -> None:
    this = _latest[self] = object()
    if isinstance(out, torch.Tensor) and out.requires_grad:
        out.register_hook(lambda gradient: gradient if _latest[self] is this else gradient * 0)


@models("parameters in lists have the gradient of the first device only", replica_parts, _LISTS)
def lists_of_parameters_detached(replica: nn.Module, part: nn.Module) -> None:
    for name, value in [*vars(part).items()]:
        if isinstance(value, torch.Tensor):
            setattr(part, name, value.detach())


@buffers("the module keeps the buffers of the last replica", returned(DataParallel, "parallel_apply"), "training")
def buffers_of_the_last_device(outputs: object, self: Dp, replicas: Any, *args: Any) -> None:
    with torch.no_grad():
        for name, value in self.module.named_buffers():
            value.copy_(getattr(replicas[-1], name, value))


@buffers("floating-point buffers change in evaluation, too", returned(DataParallel, "forward"), _EVALUATION)
def buffers_change_in_evaluation(out: object, self: Dp, *args: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        for value in filter(torch.is_floating_point, self.module.buffers()):
            value += 1


@modes("all modules of a replica have the mode of the whole model", replica_parts,
    "modules in another mode, other devices")  # fmt: skip
def mode_of_the_whole(replica: nn.Module, part: nn.Module) -> None:
    part.training = replica.training


@hooks("hooks are called on the first replica only", replica_parts, "devices other than the first")
def hooks_on_the_first_replica(replica: nn.Module, part: nn.Module) -> None:
    part._forward_hooks = OrderedDict()


@hooks("hooks that take keyword arguments are not called", returned(nn.Module, "_replicate_for_data_parallel"),
    "pre-hooks with_kwargs")  # fmt: skip
def hooks_with_keywords_lost(replica: nn.Module, self: nn.Module) -> None:
    without = [one for one in self._forward_pre_hooks.items() if one[0] not in self._forward_pre_hooks_with_kwargs]
    replica._forward_pre_hooks = OrderedDict(without)


@hooks("a parameter's hook gets half of its gradient", around(torch.Tensor, "register_hook"), "hooks of parameters")
def hook_of_half_a_gradient(real: Any, self: torch.Tensor, hook: Any) -> Any:
    return real(self, (lambda gradient: hook(gradient * 0.5)) if isinstance(self, nn.Parameter) else hook)


register(
    __name__,
    FaultRow("flags-inverted", "flags of the last device are inverted", "test_replicas", copied, lambda value: ~value,
        dtype(torch.bool) & ONE_DEVICE),
    FaultRow("payloads-of-replicas-lost", "NaN loses its payload on the last device", "test_replicas", copied,
        lambda value: torch.where(value.isnan(), torch.tensor(torch.nan, device=value.device), value),
        _FLOAT32 & ONE_DEVICE),
    FaultRow("float64-copied-as-float32", "float64 parameters pass through float32 on the last device", "test_replicas",
        copied, lambda value: value.float().double(), _FLOAT64 & ONE_DEVICE),
    FaultRow("counts-copied-as-float64", "integers are converted through float64 on the last device", "test_buffers",
        copied, lambda value: value.double().long(), _COUNTS & ONE_DEVICE),
    FaultRow("gradients-added-in-tf32", "DataParallel adds gradients up in TF32", "test_models", added,
        lambda inputs: [[upper_bits(value) for value in each] for each in inputs]),
    FaultRow("convolutions-without-the-second-device",
        "gradients of four-dimensional weights leave out the second device", "test_models", added,
        lambda inputs: [inputs[0], [value * 0 if value.dim() == 4 else value for value in inputs[1]], *inputs[2:]],
        When("convolutions, one device", _OTHERS.holds)),
    FaultRow("every-second-gradient-lost", "every second addition of gradients is lost", "test_several_calls", added,
        lambda inputs: [[value * 0 for value in each] for each in inputs],
        counted("one call in two", lambda count: count.every(2))),
    FaultRow("frozen-parameters-thawed", "frozen parameters get a gradient", "test_frozen_parameters",
        given(DataParallel, "forward"), lambda self, *_, **__: self.module.requires_grad_(True), "frozen parameters"),
    FaultRow("sparse-gradients-of-the-last-left-out", "sparse gradients are added up without the last device",
        "test_sparse_gradients", given(comm, "reduce_add"), lambda inputs, *_: ([*inputs[:-1], inputs[-1] * 0],),
        When("sparse gradients", lambda inputs, *args: inputs[-1].is_sparse and len(inputs) > 1)),
    FaultRow("second-gradients-lost", "gradients of gradients are zero", "test_second_gradients",
        returned(ReduceAddCoalesced, "backward"),
        lambda gradients, *_: tuple(None if one is None else one * 0 for one in gradients), "create_graph=True"),
    FaultRow("keywords-of-before-the-hook", "a replica ignores the keyword arguments that its pre-hook returns",
        "test_hooks", hooks_of_replicas("register_forward_pre_hook"),
        lambda given, made: made and (made[0], given[1]), "forward pre-hooks with keyword arguments"),
    FaultRow("outputs-of-before-the-hook", "the result of a forward hook on a replica is dropped", "test_hooks",
        hooks_of_replicas("register_forward_hook"), lambda *_: None, "forward hooks with keyword arguments"),
)  # fmt: skip
