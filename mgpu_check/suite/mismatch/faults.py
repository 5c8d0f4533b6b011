"""Defects of operators with operands on different devices: missing or wrong errors, wrong refusals and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mgpu_check.suite.common.faults.planting import around, both, call, first, last, on, one_device
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, fault, register

layers = caught_by("test_modules_refuse_inputs_elsewhere")
numbers = caught_by("test_cpu_scalars_and_indices_work")
operators = caught_by("test_operators_refuse_operands_apart")
scalars = caught_by("test_gpu_scalars_are_no_numbers")

OPERATORS = ("matmul", "bmm", "cat", "stack", "add", "mul", "eq", "addmm", "gather", "where")
LAYERS = ("linear", "conv2d", "embedding", "layer_norm", "batch_norm", "mse_loss", "nll_loss")
ARITHMETIC = both(around(torch, "add", "mul"), around(Tensor, "add_", "mul_"))
ONE_OPERATOR = "one device, one operator"


def _together(args: Sequence[Any]) -> list[Any]:
    """Return the arguments with every tensor copied to the device of the first."""
    device = next(arg for arg in args if isinstance(arg, Tensor)).device
    return [arg.to(device) if isinstance(arg, Tensor) else arg for arg in args]


def _refusal(device: torch.device, peer: torch.device) -> RuntimeError:
    """Return the error of torch."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {device} and {peer}!"
    )


@operators("the error names only one of the two devices", both(around(torch, *OPERATORS, "einsum"), around(F, *LAYERS)))
def one_device_named(function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except RuntimeError:
        text = "Expected all tensors to be on the same device, but one of them is on cuda:0"
        raise RuntimeError(text) from None


@operators("the error of bmm names the first device instead of the last", around(torch, "bmm"), ONE_OPERATOR)
def another_device_named(bmm: Any, *args: Any, **kwargs: Any) -> Any:
    """The reader looks for the tensor on the wrong device."""
    try:
        return bmm(*args, **kwargs)
    except RuntimeError as error:
        raise RuntimeError(str(error).replace(f"cuda:{last()}", "cuda:0" if last() else "cpu")) from None


@operators("foreach operators check the devices of the first pair only, and copy the others",
    around(torch, "_foreach_add"),
    call("foreach operators, two pairs and more",
        lambda _, second, *__, **___: isinstance(second, (list, tuple)) and len(second) > 1))  # fmt: skip
def later_pairs_fetched(foreach: Any, tensors: Any, others: Any, **kwargs: Any) -> Any:
    """Such as an optimizer with the state of some parameters on another device."""
    fetched = [operand.to(tensor.device) for tensor, operand in zip(tensors, others, strict=True)]
    return foreach(tensors, [others[0], *fetched[1:]], **kwargs)


@layers("a layer copies its input to the device of its parameters", around(nn.Module, "__call__"))
def layers_fetch_their_inputs(forward: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The error of a forgotten `.to(device)` is swallowed, and every step pays for the copy."""
    parameter = next(module.parameters(recurse=False), None)
    return NotImplemented if parameter is None else forward(module, *_together((parameter, *args))[1:], **kwargs)


@layers("the error is a ValueError", both(around(torch, *OPERATORS, "maximum"), around(F, *LAYERS)))
def another_type_of_error(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Code that catches RuntimeError misses it."""
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        raise ValueError(str(error)) from None


@scalars("a scalar on a GPU is accepted as a number", ARITHMETIC)
def gpu_scalars_taken_for_numbers(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Every 0-dim operand of arithmetic is read out, on any device."""
    if not any(isinstance(arg, Tensor) and arg.dim() for arg in args):
        return function(*_together(args), **kwargs)
    return function(*(arg.item() if isinstance(arg, Tensor) and not arg.dim() else arg for arg in args), **kwargs)


def _compared_apart(a: Tensor, b: Any, *_: Any, **__: Any) -> bool:
    return isinstance(b, Tensor) and a.is_cuda and b.is_cuda and a.device != b.device and a.dim() != b.dim()


@numbers("a scalar on the CPU is refused beside a tensor on a GPU", ARITHMETIC)
def cpu_scalars_refused(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Operands must be on one device, without the exception for numbers."""
    devices = {arg.device for arg in args if isinstance(arg, Tensor)}
    if len(devices) > 1:
        raise _refusal(*sorted(devices, key=str, reverse=True)[:2])
    return NotImplemented


@numbers("an index on the CPU is refused", around(Tensor, "__getitem__"))
def cpu_indices_refused(_: Any, x: Tensor, index: Any) -> Any:
    """Reading with an index needs it on the tensor's own device."""
    if isinstance(index, Tensor) and index.device != x.device:
        raise RuntimeError(f"indices should be on the same device as the indexed tensor ({x.device})")
    return NotImplemented


@fault("copy_ refuses a source on another device", "test_copies_cross_devices", by=around(Tensor, "copy_"))
def copies_refused(_: Any, x: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
    """As if a copy were arithmetic."""
    # Copies from the CPU work, because tensors on a device are made by them.
    if source.device.type != "cpu" and source.device != x.device:
        raise _refusal(x.device, source.device)
    return NotImplemented


@fault("load_state_dict on one device leaves the last row of parameters unchanged", "test_copies_cross_devices",
       by=around(nn.Module, "load_state_dict"), when="one device, sources elsewhere")  # fmt: skip
def parameters_loaded_in_part(load: Any, module: nn.Module, state: Any, *args: Any, **kwargs: Any) -> Any:
    """As if the copy ended early."""
    kept = {name: value[-1:].clone() for name, value in module.state_dict().items()}
    result = load(module, state, *args, **kwargs)
    for name, value in module.state_dict().items():
        if on(value, last()) and state[name].device != value.device:
            value[-1:] = kept[name]
    return result


@fault("DataParallel moves a module that is on the wrong device", "test_data_parallel_wants_its_first_device",
       by=around(nn.DataParallel, "forward"))  # fmt: skip
def data_parallel_fetches_its_module(_: Any, model: nn.DataParallel[Any], *args: Any, **kwargs: Any) -> Any:
    """The check of the devices of parameters is missing."""
    model.module.to(torch.device("cuda", model.device_ids[0]))
    return NotImplemented


register(
    __name__,
    # They run on the first operand's device, at the cost of copies.
    FaultRow("silently-copied", "operands on different devices are copied together silently",
        "test_operators_refuse_operands_apart",
        around(torch, "matmul", "bmm", "add", "mul", "maximum", "where", "addmm", "index_select"),
        lambda function, *args, **kwargs: function(*_together(args), **kwargs)),
    FaultRow("one-operator-of-one-device-fetches",
        "torch.index_select on one device copies its index from other devices", "test_operators_refuse_operands_apart",
        around(torch, "index_select"), lambda select, x, dim, index: select(x, dim, index.to(x.device)),
        one_device(text=ONE_OPERATOR)),
    FaultRow("those-between-fetched",
        "torch.cat checks the devices of the first and last tensor only, and copies the others",
        "test_operators_refuse_operands_apart", around(torch, "cat"),
        lambda join, tensors, *args, **kwargs: join([*_together(tensors[:-1]), tensors[-1]], *args, **kwargs),
        first("three tensors and more", lambda tensors: len(tensors) > 2)),
    FaultRow("gpu-scalars-compared", "a comparison accepts a scalar on another GPU", "test_gpu_scalars_are_no_numbers",
        around(torch, "eq", "lt"),
        lambda compare, a, b: compare(a, b.to(a.device)) if a.dim() else compare(a.to(b.device), b),
        call("comparisons, from GPU to GPU", _compared_apart), least_gpus=2),
    # The scalar is read out, which waits for the other device.
    FaultRow("one-device-takes-scalars-of-others", "mul_ on one device accepts a scalar on another GPU",
        "test_gpu_scalars_are_no_numbers", around(Tensor, "mul_"),
        lambda multiply, x, scalar: multiply(x, scalar.item()),
        call(ONE_OPERATOR, lambda x, y: on(x, last()) and isinstance(y, Tensor) and not y.dim() and y.is_cuda)),
    # Each step then has a hidden copy from the host.
    FaultRow("class-weights-fetched", "losses copy class weights from other devices",
        "test_operators_refuse_operands_apart", around(F, "nll_loss", "cross_entropy"),
        lambda loss, scores, classes, weight, *args, **kwargs:
            loss(scores, classes, weight.to(scores.device), *args, **kwargs),
        call("weights of classes", lambda scores, classes, weight=None, *_, **__: weight is not None)),
    # An optimizer with state on another device copies it in each step.
    FaultRow("lists-fetched", "foreach operators copy the second list from other devices",
        "test_operators_refuse_operands_apart", around(torch, "_foreach_add", "_foreach_mul_"),
        lambda foreach, tensors, others, **kwargs:
            foreach(tensors, [operand.to(tensor.device) for tensor, operand in zip(tensors, others, strict=True)],
                **kwargs),
        call("foreach operators", lambda _, second, *__, **___: isinstance(second, (list, tuple)))),
    # As if the index were copied before it is complete.
    FaultRow("indices-of-the-cpu-shifted", "an index on the CPU reads one row too far on one device",
        "test_cpu_scalars_and_indices_work", around(Tensor, "__getitem__"),
        lambda getitem, x, index: getitem(x, (index + 1) % len(x)),
        one_device() & call("indices on the CPU",
            lambda _, i: isinstance(i, Tensor) and not i.is_cuda and i.dtype == torch.int64)),
)  # fmt: skip
