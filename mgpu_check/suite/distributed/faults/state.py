"""Planted faults of the state and the inputs of a model under DistributedDataParallel, and of training loops."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as distributed_module

from mgpu_check.engine.rank_side.rank import current_rank
from mgpu_check.suite.common.faults.breaking import DDP, communicated, replaced_method, slices
from mgpu_check.suite.common.faults.conditions import Count, is_last
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced

_MANY = 1 << 16


def _is_first() -> bool:
    rank = current_rank()
    return rank is None or rank.index == 0


def _after_the_start(change: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Apply `change` to the state that ranks other than the first receive at the start."""

    def sync(real: Callable[..., Any], **kwargs: Any) -> None:
        real(**kwargs)
        if not _is_first():
            with torch.no_grad():
                for value in (*kwargs["module"].parameters(), *kwargs["module"].buffers()):
                    change(value)

    with replaced_method(distributed_module, "_sync_module_states", sync):
        yield


# The start


@fault(
    "elements beyond the first 64 Ki are not sent at the start",
    "test_state_of_the_start",
    condition="above 64 Ki elements",
)
def long_parameters_cut() -> Iterator[None]:
    def cut(value: torch.Tensor) -> None:
        value.view(-1)[_MANY:] = 0

    yield from _after_the_start(cut)


@fault(
    "parameters without dimensions are not sent at the start",
    "test_state_of_the_start",
    condition="parameters without dimensions",
)
def scalar_parameters_not_sent() -> Iterator[None]:
    def forget(value: torch.Tensor) -> None:
        if isinstance(value, nn.Parameter) and not value.dim():
            value.zero_()

    yield from _after_the_start(forget)


@fault("parameters in bfloat16 are sent as float16", "test_state_of_the_start", condition="bfloat16 only")
def bfloat16_sent_as_float16() -> Iterator[None]:
    def narrow(value: torch.Tensor) -> None:
        if value.dtype == torch.bfloat16:
            value.copy_(value.to(torch.float16))

    yield from _after_the_start(narrow)


@fault("the imaginary parts of complex parameters are not sent", "test_state_of_the_start", condition="complex only")
def imaginary_parts_of_gradients_lost() -> Iterator[None]:
    def real_only(value: torch.Tensor) -> None:
        if value.is_complex():
            torch.view_as_real(value.detach())[..., 1] = 0

    yield from _after_the_start(real_only)


@fault("NaN arrive at the start as zeros", "test_state_of_the_start", condition="NaN only")
def nan_sent_as_zero() -> Iterator[None]:
    def zero(value: torch.Tensor) -> None:
        if value.dtype == torch.float32:
            value.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)

    yield from _after_the_start(zero)


# Buffers


def _instead_of_sending(
    around: Callable[[DistributedDataParallel, Callable[[], None]], None],
) -> Iterator[None]:
    """Replace the broadcast of buffers before a forward pass by `around`, which gets the model and the original."""

    def sync(real: Callable[..., Any], self: DistributedDataParallel, *args: Any) -> None:
        around(self, lambda: real(self, *args))

    with replaced_method(DDP, "_sync_module_buffers", sync):
        yield


@fault("buffers of int64 are not sent before a step", "test_buffers", condition="int64 only")
def counts_not_sent() -> Iterator[None]:
    def keep(model: DistributedDataParallel, send: Callable[[], None]) -> None:
        kept = {name: value.clone() for name, value in model.module.named_buffers() if value.dtype == torch.int64}
        send()
        for name, value in kept.items():
            model.module.get_buffer(name).copy_(value)

    yield from _instead_of_sending(keep)


@fault("buffers of int64 are sent as float64", "test_buffers", condition="int64 only, above 2^53")
def counts_sent_as_float64() -> Iterator[None]:
    def through(model: DistributedDataParallel, send: Callable[[], None]) -> None:
        send()
        for value in model.module.buffers():
            if value.dtype == torch.int64 and not _is_first():
                value.copy_(value.double())

    yield from _instead_of_sending(through)


@fault(
    "flags are not sent before the second step of the last rank",
    "test_buffers",
    condition="bool only, one rank, one call in two",
)
def flags_not_sent() -> Iterator[None]:
    count = Count()

    def keep(model: DistributedDataParallel, send: Callable[[], None]) -> None:
        send()
        if count.every(2) and is_last():
            for value in model.module.buffers():
                if value.dtype == torch.bool:
                    value.logical_not_()

    yield from _instead_of_sending(keep)


@fault(
    "buffers are sent before a step without broadcast_buffers, too", "test_buffers", condition="broadcast_buffers=False"
)
def buffers_always_sent() -> Iterator[None]:
    def also(real: Callable[..., Any], self: DistributedDataParallel) -> Any:
        return self.require_forward_param_sync and len(self.modules_buffers) > 0

    with replaced_method(DDP, "will_sync_module_buffers", also):
        yield


# Dtypes and layouts


def _is_half(values: torch.Tensor) -> bool:
    return values.dtype in (torch.float16, torch.bfloat16)


def _is_channels_last(parameter: torch.Tensor) -> bool:
    return parameter.dim() == 4 and not parameter.is_contiguous()


@fault("gradients in float64 are reduced in float32", "test_mixed_dtypes", condition="float64 only")
def float64_reduced_in_float32() -> Iterator[None]:
    def narrow(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        return buffer.float().double() if buffer.dtype == torch.float64 else buffer

    with communicated(narrow, where=lambda model: any(p.dtype == torch.float64 for p in model.parameters())):
        yield


@fault(
    "the last rank's gradients in half precision are rounded to 4 bits",
    "test_mixed_dtypes",
    condition="float16 and bfloat16 only, one rank",
)
def half_precision_rounded() -> Iterator[None]:
    def narrow(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        if not _is_half(buffer) or not is_last():
            return buffer
        mantissa, exponent = torch.frexp(buffer.float())
        return torch.ldexp((mantissa * 8).round() / 8, exponent).to(buffer.dtype)

    with communicated(narrow, where=lambda model: any(map(_is_half, model.parameters()))):
        yield


@fault(
    "gradients in channels_last are read as if they were contiguous",
    "test_channels_last",
    condition="channels_last only",
)
def layout_taken_as_contiguous() -> Iterator[None]:
    def reorder(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        for parameter, part in slices(buffer, bucket):
            if _is_channels_last(parameter):
                part.copy_(part.clone().view(parameter.shape).permute(0, 2, 3, 1).reshape(-1))
        return buffer

    with communicated(reorder, where=lambda model: any(map(_is_channels_last, model.parameters()))):
        yield


# Arguments and modes


@fault("whole numbers in a container arrive in reverse order", "test_arguments", condition="int64 within a list")
def listed_numbers_reversed() -> Iterator[None]:
    def turned(value: Any, inside: bool = False) -> Any:
        if isinstance(value, torch.Tensor):
            return value.flip(-1) if inside and value.dtype == torch.int64 else value
        if isinstance(value, list):
            return [turned(part, True) for part in value]
        if isinstance(value, dict):
            return {key: turned(part, inside) for key, part in value.items()}
        return value

    def forward(real: Callable[..., Any], self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        return real(self, *args, **turned(kwargs))

    with replaced_method(DDP, "forward", forward):
        yield


@fault("an output within a tuple within a dict is one forward pass old", "test_arguments", condition="nested outputs")
def nested_output_rolled() -> Iterator[None]:
    def forward(real: Callable[..., Any], self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        out = real(self, *args, **kwargs)
        if isinstance(out, dict) and "nested" in out:
            out["nested"][1][0].zero_()
        return out

    with replaced_method(DDP, "forward", forward):
        yield


@fault("eval() of DDP does not reach the modules within", "test_evaluation")
def evaluation_stays_outside() -> Iterator[None]:
    def train(real: Callable[..., Any], self: DistributedDataParallel, mode: bool = True) -> Any:
        self.training = mode
        return self

    with replaced_method(DDP, "train", train):
        yield


@fault(
    "the last row of an odd batch in evaluation is left as zeros",
    "test_evaluation",
    condition="evaluation, odd batch sizes",
)
def evaluation_cut() -> Iterator[None]:
    def forward(real: Callable[..., Any], self: DistributedDataParallel, x: Any, *args: Any, **kwargs: Any) -> Any:
        out = real(self, x, *args, **kwargs)
        if not self.training and isinstance(out, torch.Tensor) and len(out) % 2:
            out[-1] = 0
        return out

    with replaced_method(DDP, "forward", forward):
        yield


# Checkpoints


@fault("an optimizer's state is not loaded", "test_checkpoint", condition="optimizers with state")
def optimizer_state_not_loaded() -> Iterator[None]:
    def load(real: Callable[..., Any], self: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        real(self, state | {"state": {}})

    with replaced_method(torch.optim.Optimizer, "load_state_dict", load):
        yield


@fault(
    "a checkpoint is loaded to the device that it was saved from",
    "test_checkpoint",
    condition="ranks other than the first",
)
def map_location_ignored() -> Iterator[None]:
    def load(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("map_location", None)
        return real(*args, **kwargs)

    with replaced_method(torch, "load", load):
        yield


@fault(
    "parameters with one dimension are not loaded on the last rank",
    "test_checkpoint",
    condition="one rank, one dimension",
)
def biases_not_loaded() -> Iterator[None]:
    def load(real: Callable[..., Any], self: nn.Module, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if is_last():
            own = self.state_dict()
            state = {name: own[name].clone() if value.dim() == 1 else value for name, value in state.items()}
        return real(self, state, *args, **kwargs)

    with replaced_method(nn.Module, "load_state_dict", load):
        yield


# Precision


@fault("autocast is off within DDP on the last rank", "test_autocast", condition="one rank")
def autocast_off_within() -> Iterator[None]:
    def forward(real: Callable[..., Any], self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        device = next(self.module.parameters()).device.type
        if not is_last() or not torch.is_autocast_enabled(device):
            return real(self, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return real(self, *args, **kwargs)

    with replaced_method(DDP, "forward", forward):
        yield


@fault("infinite gradients become large finite ones", "test_scaler", condition="infinities only")
def infinities_lost() -> Iterator[None]:
    def finite(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        return buffer.nan_to_num(nan=0.0)

    with communicated(finite):
        yield


@fault("the last rank does not halve its loss scale", "test_scaler", condition="one rank, after a skipped step")
def scale_not_halved() -> Iterator[None]:
    def update(real: Callable[..., Any], self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
        before = self.get_scale()
        real(self, *args, **kwargs)
        if is_last() and self.get_scale() < before:
            self.update(before)

    with replaced_method(torch.amp.GradScaler, "update", update):
        yield


@fault("clipping uses the norm of weights only, without biases", "test_clipping", condition="order 2")
def norm_without_biases() -> Iterator[None]:
    def clip(real: Callable[..., Any], parameters: Any, most: float, norm_type: float = 2.0, **kwargs: Any) -> Any:
        every = list(parameters)
        if norm_type == 2.0:
            every = [parameter for parameter in every if parameter.dim() > 1]
        return real(every, most, norm_type=norm_type, **kwargs)

    with replaced_method(nn.utils, "clip_grad_norm_", clip):
        yield


@fault("clipping scales by a norm in float16 on the last rank", "test_clipping", condition="one rank")
def norm_in_float16() -> Iterator[None]:
    def clip(real: Callable[..., Any], parameters: Any, most: float, **kwargs: Any) -> Any:
        every = list(parameters)
        norm = real(every, most, **kwargs)
        if is_last():
            for parameter in every:
                parameter.grad *= 1 + 2**-11
        return norm

    with replaced_method(nn.utils, "clip_grad_norm_", clip):
        yield


@fault(
    "DDP without device_ids keeps each rank's own parameters",
    "test_buckets",
    condition="no device_ids, ranks other than the first",
    least_gpus=2,
)
def untold_device_not_synchronized() -> Iterator[None]:
    def build(real: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.ExitStack() as kept:
            if kwargs.get("device_ids") is None:
                kept.enter_context(replaced(distributed_module, "_sync_module_states", lambda **_: None))
            real(self, *args, **kwargs)

    with replaced_method(DistributedDataParallel, "__init__", build):
        yield
