"""Planted faults of DataParallel: arguments and outputs of replicas, the replicas themselves, and their training."""

from __future__ import annotations

import copy
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._utils import ExceptionWrapper
from torch.nn import parallel
from torch.nn.parallel import DataParallel, comm

from mgpu_check.suite.common.faults.planting import above, around, counted, dtype, given, keeping, returned
from mgpu_check.suite.common.faults.registry import FaultRow, Planter, When, caught_by, register
from mgpu_check.torch_hooks.patches import replaced

MANY = 1 << 16

ONE_DEVICE = When("one device", lambda *args: True)  # the last device, which `copied` and `copied_together` select

data_parallel_module = sys.modules["torch.nn.parallel.data_parallel"]
"""The module. The package attribute of this name is the function `data_parallel`."""

Context = AbstractContextManager[None]


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change each tensor of a nested value. If `change` returns NotImplemented, the tensor stays."""
    if isinstance(value, torch.Tensor):
        changed = change(value)
        return value if changed is NotImplemented else changed
    if isinstance(value, dict):
        return {key: mapped(element, change) for key, element in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(element, change) for element in value)
    return value


def _ending(value: torch.Tensor, start: int, filling: float = 0.0) -> torch.Tensor:
    """Return a copy whose elements from `start` on are all `filling`."""
    value = value.clone()
    value.view(-1)[start:] = filling
    return value


def gathered(change: Callable[[torch.Tensor], torch.Tensor]) -> Context:
    return returned(DataParallel, "gather")(lambda outputs, *args: mapped(outputs, change))


def copied_together(change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Context:
    """Plant a change of the tensors that the last of several devices receives in one call."""

    def broadcast(outputs: Any, *args: Any) -> Any:
        *others, last = map(list, outputs)
        with torch.no_grad():
            changed = change(last) if others else NotImplemented
        return [*others, last if changed is NotImplemented else changed]

    return returned(comm, "broadcast_coalesced")(broadcast)


def copied(change: Callable[[torch.Tensor], torch.Tensor]) -> Context:
    """Plant a change of each tensor that the last of several devices receives."""
    return copied_together(lambda tensors: mapped(tensors, change))


def added(change: Callable[[list[list[torch.Tensor]]], list[list[torch.Tensor]]]) -> Context:
    """Plant a change of the gradients of several devices, a list for each, before they are added up."""

    def reduce(inputs: Any, *args: Any) -> Any:
        changed = change([list(gradients) for gradients in inputs])
        return None if changed is NotImplemented else (changed,)

    return given(comm, "reduce_add_coalesced")(reduce)


def replica_parts(change: Callable[[nn.Module, nn.Module], object]) -> Context:
    """Plant a change of each module of each replica except the first; it gets the replica and the module."""

    def replicate(replicas: list[nn.Module], *args: Any) -> None:
        for replica in replicas[1:]:
            for module in replica.modules():
                change(replica, module)

    return returned(data_parallel_module, "replicate")(replicate)


def hooks_of_replicas(register: str) -> Planter:
    """Plant a change of what hooks with keyword arguments return on replicas.
    It gets the arguments of the hook without the module, and the result."""

    def plant(change: Callable[[tuple[Any, ...], Any], Any]) -> Context:
        def registered(real: Any, self: nn.Module, hook: Any, *, with_kwargs: bool = False, **options: Any) -> Any:
            def called(module: nn.Module, *arguments: Any) -> Any:
                result = hook(module, *arguments)
                return change(arguments, result) if getattr(module, "_is_replica", False) else result

            return real(self, called if with_kwargs else hook, with_kwargs=with_kwargs, **options)

        return around(nn.Module, register)(registered)

    return plant


Dp = DataParallel[Any]

arguments = caught_by("test_arguments")
modes = caught_by("test_modes")
exceptions = caught_by("test_exceptions")

_GATHER = around(DataParallel, "gather")
_SCATTER = around(DataParallel, "scatter")
_SCATTERED = returned(DataParallel, "scatter")
_APPLY = around(DataParallel, "parallel_apply")
_APPLIED = returned(DataParallel, "parallel_apply")
_FUNCTION = around(parallel, "data_parallel")


@arguments("keyword tensors in a container stay whole", _SCATTERED,
    When("nested keyword arguments",
        lambda scattered, self, args, kwargs, devices: bool(kwargs) and "more" in kwargs))  # fmt: skip
def nested_keywords_whole(scattered: Any, self: Dp, args: Any, kwargs: dict[str, Any], devices: Sequence[int]) -> None:
    for shard, device in zip(scattered[1], devices, strict=False):
        shard["more"] = mapped(kwargs["more"], partial(torch.Tensor.to, device=torch.device("cuda", device)))


@exceptions("exceptions name the previous replica", _APPLY, "replicas beyond the first")
def wrong_replica_named(real: Any, self: Dp, *arguments: Any) -> Any:
    try:
        return real(self, *arguments)
    except Exception:
        # Repeat the call with the replicas rotated by one, so that the number of the replica is wrong.
        turned = [[*argument[1:], argument[0]] for argument in arguments]
        with replaced(self, "device_ids", [*self.device_ids[1:], self.device_ids[0]]):
            return real(self, *turned)


@exceptions("exceptions of the last replica are lost, and its input is its output", _APPLY, "the last replica")
def last_exception_lost(real: Any, self: Dp, replicas: Any, inputs: Any, kwargs: Any) -> Any:
    try:
        return real(self, replicas, inputs, kwargs)
    except Exception:
        return [*real(self, replicas[:-1], inputs[:-1], kwargs[:-1]), inputs[-1][0]]


register(
    __name__,
    FaultRow("replicas-swapped", "outputs of the first two replicas are swapped", "test_outputs", _GATHER,
        lambda real, self, results, device: real(self, [*results[1::-1], *results[2:]], device)),
    FaultRow("outputs-swapped", "the first two of several outputs are swapped", "test_outputs",
        returned(DataParallel, "gather"), lambda out, *_: (*out[1::-1], *out[2:]),
        When("tuples", lambda out, *args: isinstance(out, tuple))),
    FaultRow("output-device-ignored", "outputs are always gathered on the first device", "test_outputs", _GATHER,
        lambda real, self, results, *_: real(self, results, self.device_ids[0]), "output_device other than the first"),
    FaultRow("bfloat16-outputs-as-float16", "outputs in bfloat16 are gathered as float16", "test_outputs", gathered,
        lambda out: out.to(torch.float16), dtype(torch.bfloat16)),
    FaultRow("last-device-left-out", "DataParallel without device_ids leaves out the last device", "test_outputs",
        returned(data_parallel_module, "_get_all_device_indices"), lambda devices: devices[:-1],
        When("no device_ids, several devices", lambda devices: len(devices) > 1)),
    FaultRow("scalars-averaged", "scalars are averaged into one", "test_scalars", _GATHER,
        lambda real, *args: real(*args).mean(), When("outputs without dimensions", lambda real, self, results, device:
            all(isinstance(result, torch.Tensor) and not result.dim() for result in results))),
    FaultRow("few-rows-on-one-device", "a batch with fewer rows than devices is computed on the first alone",
        "test_few_rows", _SCATTER, lambda real, self, args, kwargs, devices: real(self, args, kwargs, devices[:1]),
        When("fewer rows than devices", lambda real, self, args, kwargs, devices:
            bool(args) and isinstance(args[0], torch.Tensor) and 1 < len(args[0]) < len(devices))),
    FaultRow("functional-output-device-ignored", "data_parallel gathers outputs on the first device",
        "test_functional_form", _FUNCTION,
        lambda real, module, inputs, devices, home, *rest: real(module, inputs, devices, devices[0], *rest),
        "output_device other than the first"),
    FaultRow("dimension-of-data-parallel-ignored", "rows are split, and dim is ignored", "test_dimension",
        around(DataParallel, "__init__"),
        lambda real, self, *args, **kwargs: real(self, *args, **(kwargs | {"dim": 0})), "dim=1"),
    FaultRow("square-batches-transposed", "square batches are transposed", "test_dimension",
        around(data_parallel_module, "scatter_kwargs"),
        lambda real, inputs, kwargs, devices, dim: real((inputs[0].t(), *inputs[1:]), kwargs, devices, dim),
        When("square batches, dim=1", lambda real, inputs, kwargs, devices, dim=0:
            dim == 1 and bool(inputs) and inputs[0].dim() == 2 and inputs[0].shape[0] == inputs[0].shape[1])),
    FaultRow("replica-not-named", "exceptions do not name their replica", "test_exceptions",
        around(ExceptionWrapper, "__init__"),
        lambda real, self, exc_info=None, where="": real(self, exc_info, "in a replica")),
    FaultRow("nested-keywords-not-split", "without a tensor among the arguments themselves, the first replica gets all",
        "test_arguments", around(data_parallel_module, "scatter_kwargs"),
        lambda real, inputs, kwargs, devices, dim=0: real(inputs, kwargs, devices[:1], dim),
        When("tensors nested in keyword arguments alone",
            lambda real, inputs, kwargs, *_, **__: not inputs and len(kwargs) == 1)),
    FaultRow("outputs-by-device-number", "outputs are gathered by the numbers of their devices", "test_outputs",
        _GATHER, lambda real, self, results, device: real(
            self, [results[place] for place in sorted(range(len(results)), key=self.device_ids.__getitem__)], device),
        "device orders that do not ascend"),
    FaultRow("large-outputs-cut", "the last element of large outputs is lost", "test_outputs", gathered,
        lambda out: _ending(out, -1, 0.5), above(MANY)),
    FaultRow("replicas-always-train", "replicas are always in training mode", "test_modes",
        returned(DataParallel, "replicate"), lambda replicas, *_: [replica.train() for replica in replicas],
        "evaluation"),
    FaultRow("gradients-on-in-threads", "threads do not see that gradients are off", "test_modes", _APPLY,
        lambda real, *args: torch.enable_grad()(real)(*args), "no_grad and inference_mode"),
    FaultRow("autocast-off-in-threads", "threads do not see autocast", "test_modes", _APPLY,
        lambda real, *args: torch.autocast("cuda", enabled=False)(real)(*args), "autocast"),
    FaultRow("autocast-in-bfloat16", "replicas compute in bfloat16 under autocast to float16", "test_autocast_dtype",
        _APPLIED, lambda results, *_: [out.to(torch.bfloat16)
            if isinstance(out, torch.Tensor) and out.dtype == torch.float16 else out for out in results],
        "float16 only"),
)  # fmt: skip


in_replicas = caught_by("test_replicas")
several_calls = caught_by("test_several_calls")
buffers = caught_by("test_buffers")

_BUFFER = 10 << 20  # size of a buffer of `broadcast_coalesced` and `reduce_add_coalesced`, in bytes


def _ends(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the end of each tensor in one buffer for all, in bytes."""
    return list(itertools.accumulate(value.nbytes for value in tensors))


_LARGE = When(f"above {_BUFFER >> 20} MiB", lambda tensors: _ends(tensors)[-1:] > [_BUFFER])
_OTHERS = When("other devices", lambda inputs: len(inputs) > 1)
_EVALUATION = When("evaluation, floating point only", lambda out, self, *args, **kwargs: not self.training)


@several_calls("the last device keeps the parameters of the first call",
    keeping(returned(comm, "broadcast_coalesced")), "from the second call on, one device")  # fmt: skip
def replica_kept(kept: Any, outputs: Any, tensors: Sequence[torch.Tensor], *args: Any) -> Any:
    *others, last = map(list, outputs)
    if not others or not tensors:
        return None
    key = (tensors[0].data_ptr(), *(tuple(value.shape) for value in tensors))
    earliest = kept.setdefault(key, [value.detach().clone() for value in last])
    return [*others, [value.clone() for value in earliest]]


@in_replicas("a module with two names becomes two modules in each replica", returned(parallel, "replicate"),
    "shared modules")  # fmt: skip
def shared_modules_apart(replicas: Any, *args: Any, **kwargs: Any) -> None:
    for modules in (replica._modules for replica in replicas):
        if "twin" in modules:
            modules["twin"] = copy.copy(modules["twin"])


_latest: WeakKeyDictionary[Dp, object] = WeakKeyDictionary()


@several_calls("a call loses its gradients if another call precedes backward", returned(DataParallel, "forward"),
    "two calls before one backward pass")  # fmt: skip
def gradients_of_earlier_calls_lost(out: Any, self: Dp, *args: Any, **kwargs: Any) -> None:
    this = _latest[self] = object()
    if isinstance(out, torch.Tensor) and out.requires_grad:
        out.register_hook(lambda gradient: gradient if _latest[self] is this else gradient * 0)


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


register(
    __name__,
    FaultRow("flags-inverted", "flags of the last device are inverted", "test_replicas", copied, lambda value: ~value,
        dtype(torch.bool) & ONE_DEVICE),
    FaultRow("float64-copied-as-float32", "float64 parameters pass through float32 on the last device", "test_replicas",
        copied, lambda value: value.float().double(), When("float64", dtype(torch.float64).holds) & ONE_DEVICE),
    FaultRow("counts-copied-as-float64", "integers are converted through float64 on the last device", "test_buffers",
        copied, lambda value: value.double().long(), When("int64 above 2^53", dtype(torch.int64).holds) & ONE_DEVICE),
    FaultRow("convolutions-without-the-second-device",
        "gradients of four-dimensional weights leave out the second device", "test_models", added,
        lambda inputs: [inputs[0], [value * 0 if value.dim() == 4 else value for value in inputs[1]], *inputs[2:]],
        When("convolutions, one device", _OTHERS.holds)),
    FaultRow("every-second-gradient-lost", "every second addition of gradients is lost", "test_several_calls", added,
        lambda inputs: [[value * 0 for value in each] for each in inputs],
        counted("one call in two", lambda count: count.every(2))),
    FaultRow("frozen-parameters-thawed", "frozen parameters get a gradient", "test_frozen_parameters",
        given(DataParallel, "forward"), lambda self, *_, **__: self.module.requires_grad_(True), "frozen parameters"),
    FaultRow("keywords-of-before-the-hook", "a replica ignores the keyword arguments that its pre-hook returns",
        "test_hooks", hooks_of_replicas("register_forward_pre_hook"),
        lambda arguments, result: result and (result[0], arguments[1]), "forward pre-hooks with keyword arguments"),
    FaultRow("outputs-of-before-the-hook", "the result of a forward hook on a replica is dropped", "test_hooks",
        hooks_of_replicas("register_forward_hook"), lambda *_: None, "forward hooks with keyword arguments"),
    FaultRow("long-parameters-not-copied",
        "elements beyond the first 64 Ki of a parameter are not copied to the last device", "test_replicas", copied,
        lambda value: _ending(value, MANY), above(MANY) & ONE_DEVICE),
    FaultRow("first-buffer-only", "parameters beyond the first 10 MiB are not copied to the last device",
        "test_replicas", copied_together, lambda tensors: [value if end <= _BUFFER else torch.zeros_like(value)
            for value, end in zip(tensors, _ends(tensors), strict=True)], _LARGE & ONE_DEVICE),
    FaultRow("ends-of-buffers-exchanged", "two parameters are swapped on the last device", "test_replicas",
        copied_together, lambda tensors: [tensors[0], tensors[-1], *tensors[2:-1], tensors[1]], _LARGE & ONE_DEVICE),
    FaultRow("long-gradients-lost", "elements beyond the first 64 Ki of the last device's gradient are lost",
        "test_models", added, lambda inputs: [*inputs[:-1], [_ending(value, MANY) for value in inputs[-1]]],
        When("above 64 Ki elements, one device", _OTHERS.holds)),
    FaultRow("gradients-of-one-dtype", "gradients of other dtypes than the first include the first device only",
        "test_models", added, lambda inputs: [inputs[0], *(
            [value * (value.dtype == inputs[0][0].dtype) for value in each] for each in inputs[1:])], "mixed dtypes"),
    FaultRow("first-buffer-of-gradients-only", "gradients beyond the first 10 MiB include the first device only",
        "test_replicas", added, lambda inputs: [inputs[0], *([value * (end <= _BUFFER)
            for value, end in zip(each, _ends(inputs[0]), strict=True)] for each in inputs[1:])],
        When(f"{_LARGE}, other devices", lambda inputs: _LARGE.holds(inputs[0]))),
    FaultRow("lists-of-parameters-detached", "parameters in lists have the gradient of the first device only",
        "test_models", replica_parts, lambda replica, module: module.__dict__.update({
            name: value.detach() for name, value in vars(module).items() if isinstance(value, torch.Tensor)}),
        When("nn.ParameterList, other devices", lambda replica, module: isinstance(module, nn.ParameterList))),
    FaultRow("mode-of-the-whole", "all modules of a replica have the mode of the whole model", "test_modes",
        replica_parts, lambda replica, module: setattr(module, "training", replica.training),
        "modules in another mode, other devices"),
    FaultRow("hooks-on-the-first-replica", "hooks are called on the first replica only", "test_hooks", replica_parts,
        lambda replica, module: setattr(module, "_forward_hooks", OrderedDict()), "devices other than the first"),
    FaultRow("hooks-with-keywords-lost", "hooks that take keyword arguments are not called", "test_hooks",
        returned(nn.Module, "_replicate_for_data_parallel"),
        lambda replica, self: setattr(replica, "_forward_pre_hooks", OrderedDict(entry
            for entry in self._forward_pre_hooks.items() if entry[0] not in self._forward_pre_hooks_with_kwargs)),
        "pre-hooks with_kwargs"),
)  # fmt: skip
