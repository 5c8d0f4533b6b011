"""Planted faults of the loading of optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mgpu_check.suite.common.faults.breaking import replaced_method
from mgpu_check.suite.common.faults.registry import fault


@fault(
    "a loaded optimizer of local SGD counts its steps from 0",
    "test_model_averagers",
    condition="load_state_dict after a step",
    least_gpus=2,
)
def averager_begins_anew() -> Iterator[None]:
    # This import compiles functions with a warning, so only this fault does it.
    from torch.distributed.optim import PostLocalSGDOptimizer

    def load(real: Callable[..., Any], self: PostLocalSGDOptimizer, state_dict: dict[str, Any]) -> None:
        real(self, state_dict)
        self.averager.step = 0

    with replaced_method(PostLocalSGDOptimizer, "load_state_dict", load):
        yield


@fault(
    "the number of steps of an optimizer is loaded in the dtype of its parameters",
    "test_checkpoint",
    condition="narrow parameters, more steps than their dtype can count",
)
def steps_in_a_narrow_dtype() -> Iterator[None]:
    def process(
        real: Callable[..., Any], param: torch.Tensor, value: Any, number: int, groups: Any, key: object = None
    ) -> Any:
        made = real(param, value, number, groups, key)
        counts = key == "step" and isinstance(made, torch.Tensor) and param.dtype.itemsize == 2
        return made.to(param.dtype).to(made.dtype) if counts else made

    with replaced_method(torch.optim.Optimizer, "_process_value_according_to_param_policy", process):
        yield
