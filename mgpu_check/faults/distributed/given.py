"""Planted faults of what a model under DistributedDataParallel is given: inputs, other buffers, two optimizers, averagers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as distributed_module
from torch.utils import _pytree as pytree

from mgpu_check.faults.breaking import DDP, ddp_fault, replaced_method
from mgpu_check.torch_hooks.patches import replaced


@ddp_fault(
    "arguments that are moved to the device give no gradient back",
    "test_arguments",
    condition="arguments that need gradients",
)
def arguments_detached() -> Iterator[None]:
    def move(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, real(*args, **kwargs))

    with replaced_method(distributed_module, "_to_kwargs", move):
        yield


@ddp_fault(
    "buffers that the module has been given since are not sent",
    "test_buffers",
    condition="buffers that are assigned anew",
)
def buffers_of_the_start_sent() -> Iterator[None]:
    def assign(real: Callable[..., Any], self: DistributedDataParallel) -> None:
        if not hasattr(self, "modules_buffers"):
            real(self)

    with replaced_method(DDP, "_assign_modules_buffers", assign):
        yield


@ddp_fault(
    "a GradScaler looks at the first optimizer alone when it sets its scale",
    "test_scaler",
    condition="two optimizers, an infinity in the second",
)
def scale_of_the_first_optimizer() -> Iterator[None]:
    def update(real: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
        for state in list(self._per_optimizer_states.values())[1:]:
            state["found_inf_per_device"] = {}
        real(self, *args, **kwargs)

    with replaced_method(torch.amp.GradScaler, "update", update):
        yield


@ddp_fault(
    "of two periods that are due the one of fewer ranks is taken",
    "test_model_averagers",
    condition="HierarchicalModelAverager, steps that two periods divide",
    least_gpus=4,
)
def fewer_ranks_averaged() -> Iterator[None]:
    def find(self: Any) -> Any:
        due = [period for period in self._periods if self.step % period == 0]
        return self.period_process_group_dict[due[0]] if due else None

    with replaced(HierarchicalModelAverager, "_find_process_group", find):
        yield


@ddp_fault("the steps to warm up are averaged too", "test_model_averagers", condition="the first steps")
def averaged_from_the_start() -> Iterator[None]:
    def average(real: Callable[..., Any], self: Any, *args: Any) -> None:
        self.warmup_steps = 0
        real(self, *args)

    with replaced_method(PeriodicModelAverager, "average_parameters", average):
        yield
