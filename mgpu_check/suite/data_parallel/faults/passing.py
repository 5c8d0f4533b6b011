"""Planted faults of the transfer to and from replicas of DataParallel: arguments, outputs, modes, exceptions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._utils import ExceptionWrapper
from torch.nn import parallel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel

from mgpu_check.suite.common.faults.breaking import around, returned
from mgpu_check.suite.common.faults.conditions import above, dtype
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, fault, register
from mgpu_check.suite.common.faults.when import When
from mgpu_check.suite.data_parallel.faults.planting import MANY, data_parallel_module, gathered, mapped

Dp = DataParallel[Any]

outputs = caught_by("test_outputs")
arguments = caught_by("test_arguments")
modes = caught_by("test_modes")
autocast_dtype = caught_by("test_autocast_dtype")
exceptions = caught_by("test_exceptions")
functional_form = caught_by("test_functional_form")

_GATHER = around(DataParallel, "gather")
_SCATTER = around(DataParallel, "scatter")
_SCATTERED = returned(DataParallel, "scatter")
_APPLY = around(DataParallel, "parallel_apply")
_APPLIED = returned(DataParallel, "parallel_apply")
_FUNCTION = around(parallel, "data_parallel")
_TUPLES = When("tuples", lambda out, *args: isinstance(out, tuple))


def _are_scalars(real: object, self: Dp, parts: Sequence[Any], device: object) -> bool:
    return all(isinstance(part, torch.Tensor) and not part.dim() for part in parts)


def _are_odd(real: object, self: Dp, *args: Any, **kwargs: Any) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor) and len(args[0]) % 2 > 0


def _are_few(real: object, self: Dp, args: Any, kwargs: object, devices: Sequence[int]) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor) and 1 < len(args[0]) < len(devices)


@outputs("outputs are gathered by the numbers of their devices", _GATHER, "device orders that do not ascend")
def outputs_by_device_number(real: Any, self: Dp, parts: Sequence[Any], device: Any) -> Any:
    places = sorted(range(len(parts)), key=lambda place: self.device_ids[place])
    return real(self, [parts[place] for place in places], device)


@outputs("the last element of large outputs is lost", gathered, above(MANY))
def large_outputs_cut(out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    out.view(-1)[-1] = 0.5
    return out


@fault("keyword arguments are split by rows, and dim is ignored", "test_dimension", "test_functional_form",
       by=around(data_parallel_module, "scatter_kwargs"), when="dim=1, keyword arguments")  # fmt: skip
def keywords_split_by_rows(real: Any, inputs: Any, kwargs: Any, devices: Sequence[int], dim: int = 0) -> Any:
    parts, by_rows = real(inputs, None, devices, dim)[0], real((), kwargs, devices)[1]
    more = len(by_rows) - len(parts)
    return (*parts, *(() for _ in range(more))), (*by_rows, *({} for _ in range(-more)))


def _is_square(real: object, inputs: Any, kwargs: object, devices: object, dim: int = 0) -> bool:
    return dim == 1 and bool(inputs) and inputs[0].dim() == 2 and inputs[0].shape[0] == inputs[0].shape[1]


@arguments("flags are all set on devices other than the first", _SCATTERED, "bool only, keyword arguments")
def flags_all_set(made: Any, *given: Any) -> Any:
    args, (first, *others) = made
    return args, [first, *mapped(others, lambda part: part | True if part.dtype == torch.bool else part)]


@arguments("strings reach the first replica only", _SCATTERED, "strings as keyword arguments")
def text_for_the_first(made: Any, *given: Any) -> Any:
    args, (first, *others) = made
    return args, [first, *(part | {"text": ""} if "text" in part else part for part in others)]


@arguments("keyword tensors in a container stay whole", _SCATTERED,
    When("nested keyword arguments",
        lambda made, self, args, kwargs, devices: bool(kwargs) and "more" in kwargs))  # fmt: skip
def nested_keywords_whole(made: Any, self: Dp, args: Any, kwargs: dict[str, Any], devices: Sequence[int]) -> None:
    for shard, device in zip(made[1], devices, strict=False):
        shard["more"] = mapped(kwargs["more"], partial(torch.Tensor.to, device=torch.device("cuda", device)))


@modes("replicas are always in training mode", returned(DataParallel, "replicate"), "evaluation")
def replicas_always_train(replicas: Any, *args: Any) -> None:
    for module in (module for replica in replicas for module in replica.modules()):
        module.training = True


@modes("threads do not see that gradients are off", _APPLY, "no_grad and inference_mode")
def gradients_on_in_threads(real: Any, *args: Any) -> Any:
    with torch.enable_grad():
        return real(*args)


@modes("threads do not see autocast", _APPLY, "autocast")
def autocast_off_in_threads(real: Any, *args: Any) -> Any:
    with torch.autocast("cuda", enabled=False):
        return real(*args)


def _is_on_the_last(real: object, self: nn.Module, *args: Any, **kwargs: Any) -> bool:
    weight = next((value for value in vars(self).values() if isinstance(value, torch.Tensor)), None)
    return weight is not None and weight.get_device() == torch.cuda.device_count() - 1 > 0


@modes("the thread of the last device has another current device", around(nn.Module, "__call__"),
    When("one device", _is_on_the_last))  # fmt: skip
def last_thread_elsewhere(real: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.cuda.device(0):
        return real(*args, **kwargs)


@autocast_dtype("replicas compute in bfloat16 under autocast to float16", _APPLIED, "float16 only")
def autocast_in_bfloat16(results: list[Any], *args: Any) -> list[Any]:
    half = [isinstance(out, torch.Tensor) and out.dtype == torch.float16 for out in results]
    return [out.to(torch.bfloat16) if one else out for out, one in zip(results, half, strict=True)]


@exceptions("exceptions name the previous replica", _APPLY, "replicas beyond the first")
def wrong_replica_named(real: Any, self: Dp, *given: Any) -> Any:
    try:
        return real(self, *given)
    except Exception:
        # Repeat the call with the replicas rotated by one, so that the number of the replica is wrong.
        before = self.device_ids
        turned, self.device_ids = [[*part[1:], part[0]] for part in given], [*before[1:], before[0]]
        try:
            return real(self, *turned)
        finally:
            self.device_ids = before


@exceptions("exceptions of the last replica are lost, and its input is its output", _APPLY, "the last replica")
def last_exception_lost(real: Any, self: Dp, replicas: Any, inputs: Any, kwargs: Any) -> Any:
    try:
        return real(self, replicas, inputs, kwargs)
    except Exception:
        return [*real(self, replicas[:-1], inputs[:-1], kwargs[:-1]), inputs[-1][0]]


@functional_form("data_parallel drops keyword arguments other than tensors", _FUNCTION, "numbers as keyword arguments")
def functional_numbers_forgotten(real: Any, *args: Any) -> Any:
    *others, keywords = args
    return real(*others, {name: value for name, value in keywords.items() if isinstance(value, torch.Tensor)})


register(
    __name__,
    FaultRow("replicas-swapped", "outputs of the first two replicas are swapped", "test_outputs", _GATHER,
        lambda real, self, parts, device: real(self, [*parts[1::-1], *parts[2:]], device)),
    FaultRow("outputs-swapped", "the first two of several outputs are swapped", "test_outputs",
        returned(DataParallel, "gather"), lambda out, *_: (*out[1::-1], *out[2:]), _TUPLES),
    FaultRow("output-device-ignored", "outputs are always gathered on the first device", "test_outputs", _GATHER,
        lambda real, self, parts, *_: real(self, parts, self.device_ids[0]), "output_device other than the first"),
    FaultRow("bfloat16-outputs-as-float16", "outputs in bfloat16 are gathered as float16", "test_outputs", gathered,
        lambda out: out.to(torch.float16), dtype(torch.bfloat16)),
    FaultRow("last-device-left-out", "DataParallel without device_ids leaves out the last device", "test_outputs",
        returned(data_parallel_module, "_get_all_device_indices"), lambda devices: devices[:-1],
        When("no device_ids, several devices", lambda devices: len(devices) > 1)),
    FaultRow("scalars-averaged", "scalars are averaged into one", "test_scalars", _GATHER,
        lambda real, *args: real(*args).mean(), When("outputs without dimensions", _are_scalars)),
    FaultRow("odd-rows-read-twice", "the last row of an odd number is a copy of the first", "test_models",
        around(DataParallel, "forward"),
        lambda real, self, x, *args, **kwargs: real(self, torch.cat([x[:-1], x[:1]]), *args, **kwargs),
        When("odd batch sizes", _are_odd)),
    FaultRow("few-rows-on-one-device", "a batch with fewer rows than devices is computed on the first alone",
        "test_few_rows", _SCATTER, lambda real, self, args, kwargs, devices: real(self, args, kwargs, devices[:1]),
        When("fewer rows than devices", _are_few)),
    FaultRow("functional-output-device-ignored", "data_parallel gathers outputs on the first device",
        "test_functional_form", _FUNCTION,
        lambda real, module, inputs, devices, home, *more: real(module, inputs, devices, devices[0], *more),
        "output_device other than the first"),
    FaultRow("outputs-of-parts-reversed", "parallel_apply without devices returns outputs in reverse order",
        "test_functional_form", returned(parallel, "parallel_apply"), lambda results, *_: results[::-1],
        When("called by hand", lambda results, modules, inputs, keywords=None, devices=None: devices is None)),
    FaultRow("first-keywords-for-all-parts", "parallel_apply gives each module the keyword arguments of the first",
        "test_functional_form", around(parallel, "parallel_apply"),
        lambda real, modules, inputs, keywords, *more: real(modules, inputs, keywords[:1] * len(modules), *more),
        When("several keyword arguments", lambda modules, inputs, keywords=None, *more: len(keywords or ()) > 1)),
    FaultRow("dimension-of-data-parallel-ignored", "rows are split, and dim is ignored", "test_dimension",
        around(DataParallel, "__init__"),
        lambda real, self, *args, **kwargs: real(self, *args, **(kwargs | {"dim": 0})), "dim=1"),
    FaultRow("square-batches-transposed", "square batches are transposed", "test_dimension",
        around(data_parallel_module, "scatter_kwargs"),
        lambda real, inputs, kwargs, devices, dim: real((inputs[0].t(), *inputs[1:]), kwargs, devices, dim),
        When("square batches, dim=1", _is_square)),
    FaultRow("replica-not-named", "exceptions do not name their replica", "test_exceptions",
        around(ExceptionWrapper, "__init__"),
        lambda real, self, exc_info=None, where="": real(self, exc_info, "in a replica")),
    FaultRow("nested-keywords-not-split", "without a tensor among the arguments themselves, the first replica gets all",
        "test_arguments", around(data_parallel_module, "scatter_kwargs"),
        lambda real, inputs, kwargs, devices, dim=0: real(inputs, kwargs, devices[:1], dim),
        When("tensors nested in keyword arguments alone",
            lambda real, inputs, kwargs, *_, **__: not inputs and len(kwargs) == 1)),
    FaultRow("average-of-replicas-by-tenths", "BatchNorm with momentum=None updates its statistics with momentum 0.1",
        "test_buffers", returned(nn.Module, "_replicate_for_data_parallel"),
        lambda replica, self: setattr(replica, "momentum", 0.1),
        When("momentum=None", lambda replica, self: isinstance(replica, _BatchNorm) and replica.momentum is None)),
)  # fmt: skip
