"""Operators that accept operands on different devices, or refuse them with a wrong error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from mgpu_check.suite.common.faults.breaking import replaced_method
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced

Function = Callable[..., Any]


@contextmanager
def _wrapped(owner: Any, names: tuple[str, ...], wrap: Callable[[Function], Function]) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(replaced(owner, name, wrap(getattr(owner, name))))
        yield


def _gathered_on_the_first(function: Function) -> Function:
    """Call `function` with every tensor copied to the device of the first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        first = next(arg for arg in args if isinstance(arg, torch.Tensor))
        moved = [arg.to(first.device) if isinstance(arg, torch.Tensor) else arg for arg in args]
        return function(*moved, **kwargs)

    return call


def _error_replaced(make: Callable[[RuntimeError], Exception]) -> Callable[[Function], Function]:
    """Call `function`, and replace its RuntimeError by another error."""

    def wrap(function: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                raise make(error) from None

        return call

    return wrap


@fault("operands on different devices are copied together silently", "test_operators_refuse_operands_apart")
def silently_copied() -> Iterator[None]:
    """Matrix products and arithmetic run on the first operand's device, at the cost of copies."""
    names = ("matmul", "bmm", "add", "mul", "maximum", "where", "addmm", "index_select")
    with _wrapped(torch, names, _gathered_on_the_first):
        yield


@fault("a layer copies its input to the device of its parameters", "test_modules_refuse_inputs_elsewhere")
def layers_fetch_their_inputs() -> Iterator[None]:
    """The error of a forgotten `.to(device)` is swallowed, and every step pays for the copy."""

    def call(real: Function, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        parameter = next(self.parameters(recurse=False), None)
        if parameter is not None:
            args = tuple(arg.to(parameter.device) if isinstance(arg, torch.Tensor) else arg for arg in args)
        return real(self, *args, **kwargs)

    with replaced_method(nn.Module, "__call__", call):
        yield


@fault("the error names only one of the two devices", "test_operators_refuse_operands_apart")
def one_device_named() -> Iterator[None]:
    """The message is cut before the second device."""

    def shorten(error: RuntimeError) -> Exception:
        return RuntimeError("Expected all tensors to be on the same device, but one of them is on cuda:0")

    functions = ("matmul", "bmm", "cat", "stack", "add", "mul", "eq", "einsum", "addmm", "gather", "where")
    with _wrapped(torch, functions, _error_replaced(shorten)), _wrapped(F, _LAYERS, _error_replaced(shorten)):
        yield


_LAYERS = ("linear", "conv2d", "embedding", "layer_norm", "batch_norm", "mse_loss", "nll_loss")


@fault("the error is a ValueError", "test_modules_refuse_inputs_elsewhere")
def another_type_of_error() -> Iterator[None]:
    """Code that catches RuntimeError misses it."""
    functions = ("matmul", "bmm", "cat", "stack", "add", "mul", "eq", "maximum", "addmm", "gather", "where")
    wrap = _error_replaced(lambda error: ValueError(str(error)))
    with _wrapped(torch, functions, wrap), _wrapped(F, _LAYERS, wrap):
        yield


@fault("a scalar on a GPU is accepted as a number", "test_gpu_scalars_are_no_numbers")
def gpu_scalars_taken_for_numbers() -> Iterator[None]:
    """Every 0-dim operand of arithmetic is read out, on any device."""

    def wrap(function: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(arg, torch.Tensor) and arg.dim() for arg in args):
                args = tuple(arg.item() if isinstance(arg, torch.Tensor) and not arg.dim() else arg for arg in args)
                return function(*args, **kwargs)
            return _gathered_on_the_first(function)(*args, **kwargs)

        return call

    with _wrapped(torch, ("add", "mul"), wrap), _wrapped(torch.Tensor, ("add_", "mul_"), wrap):
        yield


@fault("a scalar on the CPU is refused beside a tensor on a GPU", "test_cpu_scalars_and_indices_work")
def cpu_scalars_refused() -> Iterator[None]:
    """Operands must be on one device, without the exception for numbers."""

    def wrap(function: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            devices = {arg.device for arg in args if isinstance(arg, torch.Tensor)}
            if len(devices) > 1:
                first, second = sorted(map(str, devices), reverse=True)[:2]
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{first} and {second}!"
                )
            return function(*args, **kwargs)

        return call

    with _wrapped(torch, ("add", "mul"), wrap), _wrapped(torch.Tensor, ("add_", "mul_"), wrap):
        yield


@fault("an index on the CPU is refused", "test_cpu_scalars_and_indices_work")
def cpu_indices_refused() -> Iterator[None]:
    """Reading with an index needs it on the tensor's own device."""

    def wrap(function: Function) -> Function:
        def call(self: torch.Tensor, index: Any) -> Any:
            if isinstance(index, torch.Tensor) and index.device != self.device:
                raise RuntimeError(f"indices should be on the same device as the indexed tensor ({self.device})")
            return function(self, index)

        return call

    with _wrapped(torch.Tensor, ("__getitem__",), wrap):
        yield


@fault("copy_ refuses a source on another device", "test_copies_cross_devices")
def copies_refused() -> Iterator[None]:
    """As if a copy were arithmetic."""

    def wrap(function: Function) -> Function:
        def call(self: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # Copies from the CPU work, because tensors on a device are made by them.
            if source.device.type != "cpu" and source.device != self.device:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{self.device} and {source.device}!"
                )
            return function(self, source, *args, **kwargs)

        return call

    with _wrapped(torch.Tensor, ("copy_",), wrap):
        yield


@fault("copies from a GPU go through bfloat16", "test_copies_keep_every_bit")
def copies_rounded() -> Iterator[None]:
    """Wider numbers lose bits."""

    def wrap(function: Function) -> Function:
        def call(self: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if source.device != self.device and source.device.type == "cuda":
                source = source.bfloat16().to(source.dtype)
            return function(self, source, *args, **kwargs)

        return call

    with _wrapped(torch.Tensor, ("copy_",), wrap):
        yield
