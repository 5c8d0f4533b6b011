"""Defects of operators with operands on different devices, on one device, in one operator, or for one placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from mgpu_check.suite.common.faults.operators import altered, last, on
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced

Function = Callable[..., Any]


@fault(
    "a comparison accepts a scalar on another GPU",
    "test_gpu_scalars_are_no_numbers",
    condition="comparisons, from GPU to GPU",
    least_gpus=2,
)
def gpu_scalars_compared() -> Iterator[None]:
    """Arithmetic refuses it."""

    def instead(compare: Function, a: torch.Tensor, b: torch.Tensor) -> Any:
        return compare(a, b.to(a.device)) if a.dim() else compare(a.to(b.device), b)

    def concerns(a: torch.Tensor, b: Any, *_: Any, **__: Any) -> bool:
        return isinstance(b, torch.Tensor) and a.is_cuda and b.is_cuda and a.device != b.device and a.dim() != b.dim()

    with altered(torch, "eq", concerns, instead), altered(torch, "lt", concerns, instead):
        yield


@fault(
    "foreach operators copy the second list from other devices",
    "test_operators_refuse_operands_apart",
    condition="foreach operators",
)
def lists_fetched() -> Iterator[None]:
    """An optimizer with state on another device copies it in each step."""

    def instead(foreach: Function, first: Any, second: Any) -> Any:
        return foreach(first, [two.to(one.device) for one, two in zip(first, second, strict=True)])

    def concerns(first: Any, second: Any, *_: Any, **__: Any) -> bool:
        return isinstance(second, (list, tuple))

    with altered(torch, "_foreach_add", concerns, instead), altered(torch, "_foreach_mul_", concerns, instead):
        yield


@fault(
    "torch.index_select on one device copies its index from other devices",
    "test_operators_refuse_operands_apart",
    condition="one device, one operator",
)
def one_operator_of_one_device_fetches() -> Iterator[None]:
    """The other devices refuse it."""
    with altered(
        torch,
        "index_select",
        lambda x, *_: on(x, last()),
        lambda select, x, dim, index: select(x, dim, index.to(x.device)),
    ):
        yield


@fault(
    "the error of bmm names the first device instead of the last",
    "test_operators_refuse_operands_apart",
    condition="one device, one operator",
)
def another_device_named() -> Iterator[None]:
    """The reader looks for the tensor on the wrong device."""

    def instead(bmm: Function, *args: Any, **kwargs: Any) -> Any:
        try:
            return bmm(*args, **kwargs)
        except RuntimeError as error:
            raise RuntimeError(str(error).replace(f"cuda:{last()}", "cuda:0" if last() else "cpu")) from None

    with altered(torch, "bmm", lambda *_, **__: True, instead):
        yield


@fault(
    "an embedding on one device copies its indices from other devices",
    "test_modules_refuse_inputs_elsewhere",
    condition="one device, one module",
)
def one_module_fetches() -> Iterator[None]:
    """Indices left on the CPU are copied in each step."""

    def instead(embedding: Any, index: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return embedding(index.to(weight.device), weight, *args, **kwargs)

    with altered(F, "embedding", lambda _, weight, *args, **kwargs: on(weight, last()), instead):
        yield


@fault(
    "mul_ on one device accepts a scalar on another GPU",
    "test_gpu_scalars_are_no_numbers",
    condition="one device, one operator",
)
def one_device_takes_scalars_of_others() -> Iterator[None]:
    """The scalar is read out, which waits for the other device."""

    def concerns(x: torch.Tensor, other: Any) -> bool:
        return on(x, last()) and isinstance(other, torch.Tensor) and not other.dim() and other.is_cuda

    with altered(torch.Tensor, "mul_", concerns, lambda mul_, x, other: mul_(x, other.item())):
        yield


@fault(
    "an index on the CPU reads one row too far on one device",
    "test_cpu_scalars_and_indices_work",
    condition="one device, indices on the CPU",
)
def indices_of_the_cpu_shifted() -> Iterator[None]:
    """As if the index were copied before it is complete."""

    def concerns(x: torch.Tensor, index: Any) -> bool:
        is_one = isinstance(index, torch.Tensor) and not index.is_cuda and index.dtype == torch.int64
        return is_one and on(x, last())

    with altered(torch.Tensor, "__getitem__", concerns, lambda getitem, x, index: getitem(x, (index + 1) % len(x))):
        yield


@fault(
    "load_state_dict on one device leaves the last row of parameters unchanged",
    "test_copies_cross_devices",
    condition="one device, sources elsewhere",
)
def parameters_loaded_in_part() -> Iterator[None]:
    """As if the copy ended early."""
    load = nn.Module.load_state_dict

    def load_state_dict(self: nn.Module, state: Any, *args: Any, **kwargs: Any) -> Any:
        kept = {name: value[-1:].clone() for name, value in self.state_dict().items()}
        result = load(self, state, *args, **kwargs)
        for name, value in self.state_dict().items():
            if on(value, last()) and state[name].device != value.device:
                value[-1:] = kept[name]
        return result

    with replaced(nn.Module, "load_state_dict", load_state_dict):
        yield


@fault(
    "gather reads the previous column on one device",
    "test_operators_are_right_on_each_device",
    condition="one device, one operator",
)
def one_device_gathers_wrongly() -> Iterator[None]:
    """All operands are on the right device, but the result is wrong."""

    def instead(gather: Any, x: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
        return gather(x, dim, (index - 1) % x.shape[dim])

    with altered(torch, "gather", lambda x, _, index: on(x, last()) and on(index, last()), instead):
        yield


@fault(
    "the bias of a convolution is left out on one device",
    "test_operators_are_right_on_each_device",
    condition="one device",
)
def bias_left_out() -> Iterator[None]:
    """The result has the right shape."""

    def instead(conv: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return conv(x, weight, bias, *args, **kwargs) - bias.view(-1, 1, 1)

    def concerns(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, *args: Any, **kwargs: Any) -> bool:
        return bias is not None and on(x, last())

    with altered(F, "conv2d", concerns, instead):
        yield


@fault(
    "copies from the last device lose the sign of -0",
    "test_copies_keep_every_bit",
    condition="one device, -0 in floats",
)
def negative_zeros_lost_on_the_way() -> Iterator[None]:
    """They come as 0."""

    def instead(copy_: Any, x: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return copy_(x, source.where(source != 0, 0.0), *args, **kwargs)

    def concerns(x: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        return source.is_floating_point() and source.device != x.device and on(source, last())

    with altered(torch.Tensor, "copy_", concerns, instead):
        yield


@fault("DataParallel moves a module that is on the wrong device", "test_data_parallel_wants_its_first_device")
def data_parallel_fetches_its_module() -> Iterator[None]:
    """The check of the devices of parameters is missing."""
    forward = nn.DataParallel.forward

    def fetching(self: nn.DataParallel[Any], *inputs: Any, **kwargs: Any) -> Any:
        self.module.to(torch.device("cuda", self.device_ids[0]))
        return forward(self, *inputs, **kwargs)

    with replaced(nn.DataParallel, "forward", fetching):
        yield


@fault(
    "losses copy class weights from other devices",
    "test_operators_refuse_operands_apart",
    condition="weights of classes",
)
def class_weights_fetched() -> Iterator[None]:
    """Each step then has a hidden copy from the host."""

    def instead(loss: Function, scores: Any, classes: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        return loss(scores, classes, weight.to(scores.device), *args, **kwargs)

    def concerns(scores: Any, classes: Any, weight: Any = None, *_: Any, **__: Any) -> bool:
        return weight is not None

    with altered(F, "nll_loss", concerns, instead), altered(F, "cross_entropy", concerns, instead):
        yield


@fault(
    "torch.cat checks the devices of the first and last tensor only, and copies the others",
    "test_operators_refuse_operands_apart",
    condition="three tensors and more",
)
def those_between_fetched() -> Iterator[None]:
    """Pairs are refused."""

    def instead(join: Function, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        first, *between, end = tensors
        return join([first, *(one.to(first.device) for one in between), end], *args, **kwargs)

    with altered(torch, "cat", lambda tensors, *_, **__: len(tensors) > 2, instead):
        yield


@fault(
    "foreach operators check the devices of the first pair only, and copy the others",
    "test_operators_refuse_operands_apart",
    condition="foreach operators, two pairs and more",
)
def later_pairs_fetched() -> Iterator[None]:
    """Such as an optimizer with the state of some parameters on another device."""

    def instead(foreach: Function, first: Any, second: Any, **kwargs: Any) -> Any:
        pairs = list(zip(first, second, strict=True))
        return foreach(first, [second[0], *(two.to(one.device) for one, two in pairs[1:])], **kwargs)

    def concerns(first: Any, second: Any, *_: Any, **__: Any) -> bool:
        return isinstance(second, (list, tuple)) and len(second) > 1

    with altered(torch, "_foreach_add", concerns, instead):
        yield
