"""Planted faults of the state and the inputs of a model under DistributedDataParallel, and of training loops."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import distributed as distributed_module

from mgpu_check.suite.common.faults.breaking import DDP, around, communicating, returned
from mgpu_check.suite.common.faults.conditions import LAST_RANK, above, counted, dtype, is_last
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, fault, register
from mgpu_check.suite.common.faults.when import When
from mgpu_check.suite.distributed.faults.planting import MANY, is_first, model_with, received, slicewise
from mgpu_check.torch_hooks.patches import replaced

state_of_the_start = caught_by("test_state_of_the_start")
buckets = caught_by("test_buckets")
buffers = caught_by("test_buffers")
arguments = caught_by("test_arguments")
evaluation = caught_by("test_evaluation")
checkpoint = caught_by("test_checkpoint")
autocast = caught_by("test_autocast")
clipping = caught_by("test_clipping")

_FORWARD = around(DDP, "forward")
_AFTER_FORWARD = returned(DDP, "forward")
_LOADED = around(nn.Module, "load_state_dict")
_SENT = around(DDP, "_sync_module_buffers")
_CLIPPING = around(nn.utils, "clip_grad_norm_")


def _is_half(values: torch.Tensor) -> bool:
    return values.dtype in (torch.float16, torch.bfloat16)


def _is_channels_last(parameter: torch.Tensor) -> bool:
    return parameter.dim() == 4 and not parameter.is_contiguous()


_SCALAR = When("parameters without dimensions", lambda value: isinstance(value, nn.Parameter) and not value.dim())
_BIASES = When(
    "one dimension", lambda real, self, state, *args, **kw: any(value.dim() == 1 for value in state.values())
)
_NAN = When("NaN only", lambda value: value.dtype == torch.float32)
_FLOAT64 = model_with("float64 only", lambda parameter: parameter.dtype == torch.float64)
_HALF = model_with("float16 and bfloat16 only", _is_half)
_CHANNELS_LAST = model_with("channels_last only", _is_channels_last)
_ODD_OUTPUT = When(
    "evaluation, odd batch sizes",
    lambda out, self, *args, **kw: not self.training and isinstance(out, torch.Tensor) and len(out) % 2 > 0,
)
_NESTED = When("nested outputs", lambda out, *args, **kwargs: isinstance(out, dict) and "nested" in out)
_UNTOLD = When("no device_ids, ranks other than the first", lambda *args, **kwargs: kwargs.get("device_ids") is None)
_ORDER_2 = When("order 2", lambda real, parameters, most, norm_type=2.0, **kwargs: norm_type == 2.0)


@state_of_the_start("elements beyond the first 64 Ki are not sent at the start", received, above(MANY))
def long_parameters_cut(value: torch.Tensor) -> None:
    value.view(-1)[MANY:] = 0


@state_of_the_start("the imaginary parts of complex parameters are not sent", received,
    When("complex only", torch.is_complex))  # fmt: skip
def imaginary_parts_of_gradients_lost(value: torch.Tensor) -> None:
    torch.view_as_real(value.detach())[..., 1] = 0


@buckets("DDP without device_ids keeps each rank's own parameters", around(DDP, "__init__"), _UNTOLD, least_gpus=2)
def untold_device_not_synchronized(real: Any, *args: Any, **kwargs: Any) -> None:
    with replaced(distributed_module, "_sync_module_states", lambda **_: None):
        real(*args, **kwargs)


def _buffers(model: DDP, dtype: torch.dtype) -> list[torch.Tensor]:
    return [value for value in model.module.buffers() if value.dtype == dtype]


@buffers("buffers of int64 are not sent before a step", _SENT, "int64 only")
def counts_not_sent(send: Any, self: DDP, *args: Any) -> None:
    kept = [value.clone() for value in _buffers(self, torch.int64)]
    send(self, *args)
    for value, before in zip(_buffers(self, torch.int64), kept, strict=True):
        value.copy_(before)


@buffers("buffers of int64 are sent as float64", _SENT, "int64 only, above 2^53")
def counts_sent_as_float64(send: Any, self: DDP, *args: Any) -> None:
    send(self, *args)
    for value in _buffers(self, torch.int64) if not is_first() else ():
        value.copy_(value.double())


@buffers("flags are not sent before the second step of the last rank", returned(DDP, "_sync_module_buffers"),
    counted("bool only, one call in two", lambda count: count.every(2)) & LAST_RANK)  # fmt: skip
def flags_not_sent(result: None, self: DDP, *args: Any) -> None:
    for value in _buffers(self, torch.bool):
        value.logical_not_()


@fault("the last rank's gradients in half precision are rounded to 4 bits", "test_mixed_dtypes",
       by=communicating(_HALF), when=dtype(torch.float16, torch.bfloat16) & LAST_RANK)  # fmt: skip
def half_precision_rounded(buffer: torch.Tensor, *_: Any) -> torch.Tensor:
    mantissa, exponent = torch.frexp(buffer.float())
    return torch.ldexp((mantissa * 8).round() / 8, exponent).to(buffer.dtype)


def _turned(value: Any, inside: bool = False) -> Any:
    """Reverse whole numbers within lists."""
    if isinstance(value, torch.Tensor):
        return value.flip(-1) if inside and value.dtype == torch.int64 else value
    if isinstance(value, list):
        return [_turned(part, True) for part in value]
    return {key: _turned(part, inside) for key, part in value.items()} if isinstance(value, dict) else value


@arguments("an output within a tuple within a dict is one forward pass old", _AFTER_FORWARD, _NESTED)
def nested_output_rolled(out: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    out["nested"][1][0].zero_()


@evaluation("eval() of DDP does not reach the modules within", around(DDP, "train"))
def evaluation_stays_outside(real: Any, self: DDP, mode: bool = True) -> DDP:
    self.training = mode
    return self


@evaluation("the last row of an odd batch in evaluation is left as zeros", _AFTER_FORWARD, _ODD_OUTPUT)
def evaluation_cut(out: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    out[-1] = 0


@checkpoint("parameters with one dimension are not loaded on the last rank", _LOADED, LAST_RANK & _BIASES)
def biases_not_loaded(real: Any, self: nn.Module, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    own = {name: value.clone() for name, value in self.state_dict().items() if value.dim() == 1}
    return real(self, {**state, **own}, *args, **kwargs)


@autocast("autocast is off within DDP on the last rank", _FORWARD, LAST_RANK)
def autocast_off_within(real: Any, self: DDP, *args: Any, **kwargs: Any) -> Any:
    device = next(self.module.parameters()).device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext():
        return real(self, *args, **kwargs)


@fault("the last rank does not halve its loss scale", "test_scaler", by=around(torch.amp.GradScaler, "update"),
       when="one rank, after a skipped step")  # fmt: skip
def scale_not_halved(real: Any, self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
    before = self.get_scale()
    real(self, *args, **kwargs)
    if is_last() and self.get_scale() < before:
        real(self, before)


@clipping("clipping scales by a norm in float16 on the last rank", _CLIPPING, LAST_RANK)
def norm_in_float16(real: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    every = list(parameters)
    norm = real(every, *args, **kwargs)
    for parameter in every:
        parameter.grad *= 1 + 2**-11
    return norm


register(
    __name__,
    FaultRow("scalar-parameters-not-sent", "parameters without dimensions are not sent at the start",
        "test_state_of_the_start", received, lambda value: value.zero_(), _SCALAR),
    FaultRow("bfloat16-sent-as-float16", "parameters in bfloat16 are sent as float16", "test_state_of_the_start",
        received, lambda value: value.copy_(value.to(torch.float16)), dtype(torch.bfloat16)),
    FaultRow("nan-sent-as-zero", "NaN arrive at the start as zeros", "test_state_of_the_start", received,
        lambda value: value.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf), _NAN),
    FaultRow("buffers-always-sent", "buffers are sent before a step without broadcast_buffers, too", "test_buffers",
        around(DDP, "will_sync_module_buffers"),
        lambda real, self: self.require_forward_param_sync and len(self.modules_buffers) > 0,
        "broadcast_buffers=False"),
    FaultRow("buffers-of-static-graphs-not-sent", "buffers are not sent before a step with static_graph",
        "test_buffers", _SENT, lambda *_: None, When("static_graph", lambda send, self, *_: self.static_graph), 2),
    FaultRow("float64-reduced-in-float32", "gradients in float64 are reduced in float32", "test_mixed_dtypes",
        communicating(_FLOAT64), lambda buffer, *_: buffer.float().double(), dtype(torch.float64)),
    FaultRow("layout-taken-as-contiguous", "gradients in channels_last are read as if they were contiguous",
        "test_channels_last", slicewise(_CHANNELS_LAST, _is_channels_last),
        lambda part, parameter, *_: part.copy_(part.clone().view(parameter.shape).permute(0, 2, 3, 1).reshape(-1)),
        str(_CHANNELS_LAST)),
    FaultRow("listed-numbers-reversed", "whole numbers in a container arrive in reverse order", "test_arguments",
        _FORWARD, lambda real, self, *args, **kwargs: real(self, *args, **_turned(kwargs)), "int64 within a list"),
    FaultRow("infinities-lost", "infinite gradients become large finite ones", "test_scaler", communicating(),
        lambda buffer, *_: buffer.nan_to_num(nan=0.0), "infinities only"),
    FaultRow("optimizer-state-not-loaded", "an optimizer's state is not loaded", "test_checkpoint",
        around(torch.optim.Optimizer, "load_state_dict"), lambda real, self, state: real(self, state | {"state": {}}),
        "optimizers with state"),
    FaultRow("map-location-ignored", "a checkpoint is loaded to the device that it was saved from", "test_checkpoint",
        around(torch, "load"), lambda real, *args, map_location=None, **kwargs: real(*args, **kwargs),
        "ranks other than the first"),
    FaultRow("norm-without-biases", "clipping uses the norm of weights only, without biases", "test_clipping",
        _CLIPPING,
        lambda real, parameters, *args, **kwargs:
            real([parameter for parameter in parameters if parameter.dim() > 1], *args, **kwargs), _ORDER_2),
)  # fmt: skip
