"""Planted faults of styles of `torch.distributed.tensor.parallel`, and of losses in parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor.parallel import PrepareModuleOutput, loss

from mgpu_check.suite.common.faults.breaking import replaced_method
from mgpu_check.suite.common.faults.registry import fault

_MODULES = "test_parallelized_modules"
_MEAN, _SUM = 1, 2

Real = Callable[..., Any]


@fault(
    "gradients of a parallel mean loss are divided by all targets, ignored ones included",
    _MODULES,
    condition="loss_parallel, targets that are ignored, classes of one weight",
)
def ignored_targets_divide() -> Iterator[None]:
    def backward(
        real: Real, grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignore: int, total: Any, *rest: Any
    ) -> Any:
        if reduction == _MEAN and weight is None:
            total = torch.full_like(total, target.numel())
        return real(grad, x, target, weight, reduction, ignore, total, *rest)

    with replaced_method(loss, "_nll_loss_and_log_softmax_backward", backward):
        yield


@fault(
    "a parallel sum of losses ignores the class weights", _MODULES, condition="loss_parallel, reduction='sum', weight="
)
def weights_left_out_of_sums() -> Iterator[None]:
    def forward(real: Real, x: Any, target: Any, weight: Any, local_weight: Any, reduction: int, *rest: Any) -> Any:
        if reduction == _SUM:
            weight = local_weight = None
        return real(x, target, weight, local_weight, reduction, *rest)

    with replaced_method(loss, "_nll_loss_forward", forward):
        yield


@fault(
    "the last of several outputs is not redistributed",
    _MODULES,
    condition="PrepareModuleOutput, two outputs and more",
    least_gpus=2,
)
def last_output_as_it_was() -> Iterator[None]:
    def prepare(real: Real, self: Any, outputs: Any, device_mesh: Any) -> Any:
        made = real(self, outputs, device_mesh)
        return (*made[:-1], outputs[-1]) if isinstance(outputs, tuple) and len(outputs) > 1 else made

    with replaced_method(PrepareModuleOutput, "_prepare_out_fn", prepare):
        yield
