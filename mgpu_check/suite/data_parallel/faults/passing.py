"""Planted faults of the transfer to and from replicas of DataParallel: arguments, outputs, modes, exceptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._utils import ExceptionWrapper
from torch.nn import parallel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel

from mgpu_check.suite.common.faults.breaking import replaced_method
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.suite.data_parallel.faults.replicas import data_parallel_module

_MANY = 1 << 16


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change each tensor of a nested result."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(part, change) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(part, change) for part in value)
    return value


def _gathered(change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Change each tensor that DataParallel has gathered."""

    def gather(real: Callable[..., Any], *given: Any) -> Any:
        return _mapped(real(*given), change)

    with replaced_method(DataParallel, "gather", gather):
        yield


# Outputs


@fault("outputs of the first two replicas are swapped", "test_outputs")
def replicas_swapped() -> Iterator[None]:
    def gather(real: Callable[..., Any], self: DataParallel[Any], outputs: Sequence[Any], device: Any) -> Any:
        return real(self, [*outputs[1::-1], *outputs[2:]], device)

    with replaced_method(DataParallel, "gather", gather):
        yield


@fault("the first two of several outputs are swapped", "test_outputs", condition="tuples")
def outputs_swapped() -> Iterator[None]:
    def gather(real: Callable[..., Any], *given: Any) -> Any:
        out = real(*given)
        return (*out[1::-1], *out[2:]) if isinstance(out, tuple) else out

    with replaced_method(DataParallel, "gather", gather):
        yield


@fault(
    "outputs are gathered by the numbers of their devices", "test_outputs", condition="device orders that do not ascend"
)
def outputs_by_device_number() -> Iterator[None]:
    def gather(real: Callable[..., Any], self: DataParallel[Any], outputs: Sequence[Any], device: Any) -> Any:
        places = sorted(range(len(outputs)), key=lambda place: self.device_ids[place])
        return real(self, [outputs[place] for place in places], device)

    with replaced_method(DataParallel, "gather", gather):
        yield


@fault(
    "outputs are always gathered on the first device", "test_outputs", condition="output_device other than the first"
)
def output_device_ignored() -> Iterator[None]:
    def gather(real: Callable[..., Any], self: DataParallel[Any], outputs: Sequence[Any], device: Any) -> Any:
        return real(self, outputs, self.device_ids[0])

    with replaced_method(DataParallel, "gather", gather):
        yield


@fault("outputs in bfloat16 are gathered as float16", "test_outputs", condition="bfloat16 only")
def bfloat16_outputs_as_float16() -> Iterator[None]:
    yield from _gathered(lambda out: out.to(torch.float16) if out.dtype == torch.bfloat16 else out)


@fault("the last element of large outputs is lost", "test_outputs", condition="above 64 Ki elements")
def large_outputs_cut() -> Iterator[None]:
    def cut(out: torch.Tensor) -> torch.Tensor:
        if out.numel() <= _MANY:
            return out
        out = out.clone()
        out.view(-1)[-1] = 0.5
        return out

    yield from _gathered(cut)


@fault("scalars are averaged into one", "test_scalars", condition="outputs without dimensions")
def scalars_averaged() -> Iterator[None]:
    def gather(real: Callable[..., Any], self: DataParallel[Any], outputs: Sequence[Any], device: Any) -> Any:
        out = real(self, outputs, device)
        return out.mean() if all(isinstance(part, torch.Tensor) and not part.dim() for part in outputs) else out

    with replaced_method(DataParallel, "gather", gather):
        yield


@fault("rows are split, and dim is ignored", "test_dimension", condition="dim=1")
def dimension_of_data_parallel_ignored() -> Iterator[None]:
    def init(real: Callable[..., Any], self: DataParallel[Any], *args: Any, **kwargs: Any) -> None:
        real(self, *args, **(kwargs | {"dim": 0}))

    with replaced_method(DataParallel, "__init__", init):
        yield


@fault(
    "keyword arguments are split by rows, and dim is ignored",
    "test_dimension",
    "test_functional_form",
    condition="dim=1, keyword arguments",
)
def keywords_split_by_rows() -> Iterator[None]:
    def scatter(
        real: Callable[..., Any], inputs: Any, kwargs: Any, devices: Sequence[int], dim: int = 0
    ) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
        parts, by_rows = real(inputs, None, devices, dim)[0], real((), kwargs, devices)[1]
        more = len(by_rows) - len(parts)
        return (*parts, *(() for _ in range(more))), (*by_rows, *({} for _ in range(-more)))

    with replaced_method(data_parallel_module, "scatter_kwargs", scatter):
        yield


# Arguments


def _scattered(change: Callable[[list[Any], list[Any]], tuple[Any, Any]]) -> Iterator[None]:
    """Change the shards of positional and keyword arguments."""

    def scatter(real: Callable[..., Any], *given: Any) -> Any:
        args, kwargs = real(*given)
        return change(list(args), list(kwargs))

    with replaced_method(DataParallel, "scatter", scatter):
        yield


def _flags(kwargs: dict[str, Any], place: int) -> dict[str, Any]:
    return _mapped(kwargs, lambda part: part | True if part.dtype == torch.bool and place else part)  # type: ignore[no-any-return]


@fault("flags are all set on devices other than the first", "test_arguments", condition="bool only, keyword arguments")
def flags_all_set() -> Iterator[None]:
    yield from _scattered(lambda args, kwargs: (args, [_flags(part, place) for place, part in enumerate(kwargs)]))


@fault("strings reach the first replica only", "test_arguments", condition="strings as keyword arguments")
def text_for_the_first() -> Iterator[None]:
    def first_only(args: list[Any], kwargs: list[Any]) -> tuple[Any, Any]:
        return args, [part | {"text": ""} if place and "text" in part else part for place, part in enumerate(kwargs)]

    yield from _scattered(first_only)


@fault("keyword tensors in a container stay whole", "test_arguments", condition="nested keyword arguments")
def nested_keywords_whole() -> Iterator[None]:
    def scatter(real: Callable[..., Any], self: DataParallel[Any], args: Any, kwargs: Any, devices: Any) -> Any:
        parts, shards = real(self, args, kwargs, devices)
        if kwargs and "more" in kwargs:
            homes = [torch.device("cuda", device) for device in devices]
            for shard, home in zip(shards, homes, strict=False):
                shard["more"] = _mapped(kwargs["more"], partial(torch.Tensor.to, device=home))
        return parts, shards

    with replaced_method(DataParallel, "scatter", scatter):
        yield


@fault("the last row of an odd number is a copy of the first", "test_models", condition="odd batch sizes")
def odd_rows_read_twice() -> Iterator[None]:
    def forward(real: Callable[..., Any], self: DataParallel[Any], *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor) and len(args[0]) % 2 and len(args[0]) > 1:
            args = (torch.cat([args[0][:-1], args[0][:1]]), *args[1:])
        return real(self, *args, **kwargs)

    with replaced_method(DataParallel, "forward", forward):
        yield


@fault(
    "a batch with fewer rows than devices is computed on the first alone",
    "test_few_rows",
    condition="fewer rows than devices",
)
def few_rows_on_one_device() -> Iterator[None]:
    def scatter(real: Callable[..., Any], self: DataParallel[Any], args: Any, kwargs: Any, devices: Any) -> Any:
        few = bool(args) and isinstance(args[0], torch.Tensor) and 1 < len(args[0]) < len(devices)
        return real(self, args, kwargs, devices[:1] if few else devices)

    with replaced_method(DataParallel, "scatter", scatter):
        yield


# Modes


@fault("replicas are always in training mode", "test_modes", condition="evaluation")
def replicas_always_train() -> Iterator[None]:
    def replicate(real: Callable[..., Any], *given: Any) -> Any:
        replicas = real(*given)
        for replica in replicas:
            for module in replica.modules():
                module.training = True
        return replicas

    with replaced_method(DataParallel, "replicate", replicate):
        yield


@fault("threads do not see that gradients are off", "test_modes", condition="no_grad and inference_mode")
def gradients_on_in_threads() -> Iterator[None]:
    def apply(real: Callable[..., Any], *given: Any) -> Any:
        with torch.enable_grad():
            return real(*given)

    with replaced_method(DataParallel, "parallel_apply", apply):
        yield


@fault("threads do not see autocast", "test_modes", condition="autocast")
def autocast_off_in_threads() -> Iterator[None]:
    def apply(real: Callable[..., Any], *given: Any) -> Any:
        with torch.autocast("cuda", enabled=False):
            return real(*given)

    with replaced_method(DataParallel, "parallel_apply", apply):
        yield


@fault(
    "BatchNorm with momentum=None updates its statistics with momentum 0.1", "test_buffers", condition="momentum=None"
)
def average_of_replicas_by_tenths() -> Iterator[None]:
    def replicate(real: Callable[..., Any], self: nn.Module) -> Any:
        replica = real(self)
        if isinstance(replica, _BatchNorm) and replica.momentum is None:
            replica.momentum = 0.1
        return replica

    with replaced_method(nn.Module, "_replicate_for_data_parallel", replicate):
        yield


@fault("replicas compute in bfloat16 under autocast to float16", "test_autocast_dtype", condition="float16 only")
def autocast_in_bfloat16() -> Iterator[None]:
    def apply(real: Callable[..., Any], *given: Any) -> Any:
        outputs = real(*given)
        half = [isinstance(out, torch.Tensor) and out.dtype == torch.float16 for out in outputs]
        return [out.to(torch.bfloat16) if one else out for out, one in zip(outputs, half, strict=True)]

    with replaced_method(DataParallel, "parallel_apply", apply):
        yield


@fault("the thread of the last device has another current device", "test_modes", condition="one device")
def last_thread_elsewhere() -> Iterator[None]:
    def forward(real: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        weight = next((value for value in vars(self).values() if isinstance(value, torch.Tensor)), None)
        if weight is None or weight.get_device() != torch.cuda.device_count() - 1 or not weight.get_device():
            return real(self, *args, **kwargs)
        with torch.cuda.device(0):
            return real(self, *args, **kwargs)

    with replaced_method(nn.Module, "__call__", forward):
        yield


# Exceptions


@fault("exceptions do not name their replica", "test_exceptions")
def replica_not_named() -> Iterator[None]:
    def init(real: Callable[..., Any], self: ExceptionWrapper, exc_info: Any = None, where: str = "") -> None:
        real(self, exc_info, "in a replica")

    with replaced_method(ExceptionWrapper, "__init__", init):
        yield


@fault("exceptions name the previous replica", "test_exceptions", condition="replicas beyond the first")
def wrong_replica_named() -> Iterator[None]:
    def apply(real: Callable[..., Any], self: DataParallel[Any], replicas: Any, inputs: Any, kwargs: Any) -> Any:
        try:
            return real(self, replicas, inputs, kwargs)
        except Exception:
            # Repeat the call with the replicas rotated by one, so that the number of the replica is wrong.
            order = [*range(1, len(replicas)), 0]
            turned = [[part[place] for place in order] for part in (replicas, inputs, kwargs)]
            before, self.device_ids = self.device_ids, [self.device_ids[place] for place in order]
            try:
                return real(self, *turned)
            finally:
                self.device_ids = before

    with replaced_method(DataParallel, "parallel_apply", apply):
        yield


@fault(
    "exceptions of the last replica are lost, and its input is its output",
    "test_exceptions",
    condition="the last replica",
)
def last_exception_lost() -> Iterator[None]:
    def apply(real: Callable[..., Any], self: DataParallel[Any], replicas: Any, inputs: Any, kwargs: Any) -> Any:
        try:
            return real(self, replicas, inputs, kwargs)
        except Exception:
            return [*real(self, replicas[:-1], inputs[:-1], kwargs[:-1]), inputs[-1][0]]

    with replaced_method(DataParallel, "parallel_apply", apply):
        yield


# The functional form


@fault(
    "data_parallel gathers outputs on the first device",
    "test_functional_form",
    condition="output_device other than the first",
)
def functional_output_device_ignored() -> Iterator[None]:
    def call(real: Callable[..., Any], module: Any, inputs: Any, devices: Any, home: Any, *more: Any) -> Any:
        return real(module, inputs, devices, devices[0], *more)

    with replaced_method(torch.nn.parallel, "data_parallel", call):
        yield


@fault(
    "data_parallel drops keyword arguments other than tensors",
    "test_functional_form",
    condition="numbers as keyword arguments",
)
def functional_numbers_forgotten() -> Iterator[None]:
    def call(
        real: Callable[..., Any], module: Any, inputs: Any, devices: Any, home: Any, dim: Any, keywords: Any
    ) -> Any:
        kept = {name: value for name, value in keywords.items() if isinstance(value, torch.Tensor)}
        return real(module, inputs, devices, home, dim, kept)

    with replaced_method(torch.nn.parallel, "data_parallel", call):
        yield


@fault(
    "DataParallel without device_ids leaves out the last device",
    "test_outputs",
    condition="no device_ids, several devices",
)
def last_device_left_out() -> Iterator[None]:
    def every(real: Callable[[], list[int]]) -> list[int]:
        return real()[:-1] or real()

    with replaced_method(data_parallel_module, "_get_all_device_indices", every):
        yield


@fault(
    "parallel_apply without devices returns outputs in reverse order",
    "test_functional_form",
    condition="called by hand",
)
def outputs_of_parts_reversed() -> Iterator[None]:
    def apply(real: Callable[..., Any], modules: Any, inputs: Any, *more: Any) -> Any:
        outputs = real(modules, inputs, *more)
        return outputs if more else outputs[::-1]

    with replaced_method(parallel, "parallel_apply", apply):
        yield
