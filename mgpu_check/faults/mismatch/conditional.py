"""Defects of operands on different devices that strike on one device, in one operator, or in one way of placing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from mgpu_check.faults.devices.planting import altered, last, on
from mgpu_check.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced

Function = Callable[..., Any]


@fault(
    "mismatch",
    "a comparison takes a scalar on another GPU for a number",
    caught_by=("test_gpu_scalars_are_no_numbers",),
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
    "mismatch",
    "operators of lists fetch the second list from wherever it is",
    caught_by=("test_operators_refuse_operands_apart",),
    condition="foreach operators",
)
def lists_fetched() -> Iterator[None]:
    """An optimizer whose state is elsewhere copies it in each step."""

    def instead(foreach: Function, first: Any, second: Any) -> Any:
        return foreach(first, [two.to(one.device) for one, two in zip(first, second, strict=True)])

    def concerns(first: Any, second: Any, *_: Any, **__: Any) -> bool:
        return isinstance(second, (list, tuple))

    with altered(torch, "_foreach_add", concerns, instead), altered(torch, "_foreach_mul_", concerns, instead):
        yield


@fault(
    "mismatch",
    "torch.index_select of one device fetches its index from anywhere",
    caught_by=("test_operators_refuse_operands_apart",),
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
    "mismatch",
    "the error of bmm names the first device in place of the last",
    caught_by=("test_operators_refuse_operands_apart",),
    condition="one device, one operator",
)
def another_device_named() -> Iterator[None]:
    """Whoever reads it looks for the tensor in the wrong place."""

    def instead(bmm: Function, *args: Any, **kwargs: Any) -> Any:
        try:
            return bmm(*args, **kwargs)
        except RuntimeError as error:
            raise RuntimeError(str(error).replace(f"cuda:{last()}", "cuda:0" if last() else "cpu")) from None

    with altered(torch, "bmm", lambda *_, **__: True, instead):
        yield


@fault(
    "mismatch",
    "an embedding on one device fetches its indices",
    caught_by=("test_modules_refuse_inputs_elsewhere",),
    condition="one device, one module",
)
def one_module_fetches() -> Iterator[None]:
    """Indices that were forgotten on the CPU are copied in each step."""

    def instead(embedding: Any, index: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return embedding(index.to(weight.device), weight, *args, **kwargs)

    with altered(F, "embedding", lambda _, weight, *args, **kwargs: on(weight, last()), instead):
        yield


@fault(
    "mismatch",
    "mul_ by a scalar that lies on another GPU works on one device",
    caught_by=("test_gpu_scalars_are_no_numbers",),
    condition="one device, one operator",
)
def one_device_takes_scalars_of_others() -> Iterator[None]:
    """It is read out, which waits for the other device."""

    def concerns(x: torch.Tensor, other: Any) -> bool:
        return on(x, last()) and isinstance(other, torch.Tensor) and not other.dim() and other.is_cuda

    with altered(torch.Tensor, "mul_", concerns, lambda mul_, x, other: mul_(x, other.item())):
        yield


@fault(
    "mismatch",
    "an index on the CPU reads one row too far on one device",
    caught_by=("test_cpu_scalars_and_indices_work",),
    condition="one device, indices on the CPU",
)
def indices_of_the_cpu_shifted() -> Iterator[None]:
    """The index is copied while it is written."""

    def concerns(x: torch.Tensor, index: Any) -> bool:
        is_one = isinstance(index, torch.Tensor) and not index.is_cuda and index.dtype == torch.int64
        return is_one and on(x, last())

    with altered(torch.Tensor, "__getitem__", concerns, lambda getitem, x, index: getitem(x, (index + 1) % len(x))):
        yield


@fault(
    "mismatch",
    "load_state_dict leaves the last row of parameters as it was on one device",
    caught_by=("test_copies_cross_devices",),
    condition="one device, sources elsewhere",
)
def parameters_loaded_in_part() -> Iterator[None]:
    """The copy ends early."""
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
    "mismatch",
    "gather reads the column before on one device",
    caught_by=("test_operators_are_right_on_each_device",),
    condition="one device, one operator",
)
def one_device_gathers_wrongly() -> Iterator[None]:
    """Where all operands are is right, and the result is not."""

    def instead(gather: Any, x: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
        return gather(x, dim, (index - 1) % x.shape[dim])

    with altered(torch, "gather", lambda x, _, index: on(x, last()) and on(index, last()), instead):
        yield


@fault(
    "mismatch",
    "the bias of a convolution is left out on one device",
    caught_by=("test_operators_are_right_on_each_device",),
    condition="one device",
)
def bias_left_out() -> Iterator[None]:
    """The right shape comes back."""

    def instead(conv: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return conv(x, weight, bias, *args, **kwargs) - bias.view(-1, 1, 1)

    def concerns(x: torch.Tensor, weight: torch.Tensor, bias: Any = None, *args: Any, **kwargs: Any) -> bool:
        return bias is not None and on(x, last())

    with altered(F, "conv2d", concerns, instead):
        yield


@fault(
    "mismatch",
    "copies from the last device lose the sign of -0",
    caught_by=("test_copies_keep_every_bit",),
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


@fault(
    "mismatch",
    "DataParallel moves a module that is on the wrong device",
    caught_by=("test_data_parallel_wants_its_first_device",),
)
def data_parallel_fetches_its_module() -> Iterator[None]:
    """The check of where parameters are is gone."""
    forward = nn.DataParallel.forward

    def fetching(self: nn.DataParallel[Any], *inputs: Any, **kwargs: Any) -> Any:
        self.module.to(torch.device("cuda", self.device_ids[0]))
        return forward(self, *inputs, **kwargs)

    with replaced(nn.DataParallel, "forward", fetching):
        yield


@fault(
    "mismatch",
    "losses fetch the weights of classes from wherever they are",
    caught_by=("test_operators_refuse_operands_apart",),
    condition="weights of classes",
)
def class_weights_fetched() -> Iterator[None]:
    """A copy from the host in each step, which nobody sees."""

    def instead(loss: Function, scores: Any, classes: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        return loss(scores, classes, weight.to(scores.device), *args, **kwargs)

    def concerns(scores: Any, classes: Any, weight: Any = None, *_: Any, **__: Any) -> bool:
        return weight is not None

    with altered(F, "nll_loss", concerns, instead), altered(F, "cross_entropy", concerns, instead):
        yield


@fault(
    "mismatch",
    "what joins tensors looks at the first and the last of them, and fetches the others",
    caught_by=("test_operators_refuse_operands_apart",),
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
    "mismatch",
    "operators of lists look at their first pair, and fetch what others lack",
    caught_by=("test_operators_refuse_operands_apart",),
    condition="foreach operators, two pairs and more",
)
def later_pairs_fetched() -> Iterator[None]:
    """The parameters of an optimizer whose state is elsewhere for some."""

    def instead(foreach: Function, first: Any, second: Any, **kwargs: Any) -> Any:
        pairs = list(zip(first, second, strict=True))
        return foreach(first, [second[0], *(two.to(one.device) for one, two in pairs[1:])], **kwargs)

    def concerns(first: Any, second: Any, *_: Any, **__: Any) -> bool:
        return isinstance(second, (list, tuple)) and len(second) > 1

    with altered(torch, "_foreach_add", concerns, instead):
        yield
