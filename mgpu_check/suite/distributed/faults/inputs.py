"""Planted faults of a model under DistributedDataParallel with inputs, new buffers, two optimizers, or averagers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel, scatter_gather
from torch.nn.parallel import distributed as distributed_module
from torch.utils import _pytree as pytree

from mgpu_check.suite.common.faults.breaking import DDP, communicated, replaced_method, slices
from mgpu_check.suite.common.faults.conditions import is_last
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced


@fault("arguments moved to the device get no gradient", "test_arguments", condition="arguments that need gradients")
def arguments_detached() -> Iterator[None]:
    def move(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, real(*args, **kwargs))

    with replaced_method(distributed_module, "_to_kwargs", move):
        yield


@fault("buffers assigned after the wrap are not broadcast", "test_buffers", condition="buffers that are replaced")
def buffers_of_the_start_sent() -> Iterator[None]:
    def assign(real: Callable[..., Any], self: DistributedDataParallel) -> None:
        if not hasattr(self, "modules_buffers"):
            real(self)

    with replaced_method(DDP, "_assign_modules_buffers", assign):
        yield


@fault(
    "GradScaler updates its scale by the first optimizer only",
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


@fault(
    "if two periods are due, the average is over the smaller group",
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


@fault(
    "PostLocalSGDOptimizer averages parameters before its own step",
    "test_model_averagers",
    condition="steps with an average",
    least_gpus=2,
)
def averaged_before_the_step() -> Iterator[None]:
    # Imported here, because this import makes torch compile functions of the optimizers.
    from torch.distributed.optim import PostLocalSGDOptimizer

    def step(real: Callable[..., Any], self: Any) -> None:
        self.averager.average_parameters(params=self.optim.param_groups)
        self.optim.step()

    with replaced_method(PostLocalSGDOptimizer, "step", step):
        yield


@fault("averagers also average during warm-up", "test_model_averagers", condition="the first steps")
def averaged_from_the_start() -> Iterator[None]:
    def average(real: Callable[..., Any], self: Any, *args: Any) -> None:
        self.warmup_steps = 0
        real(self, *args)

    with replaced_method(PeriodicModelAverager, "average_parameters", average):
        yield


@fault(
    "named tuples moved to the device become plain tuples",
    "test_arguments",
    condition="named tuples among the arguments",
)
def names_of_tuples_lost() -> Iterator[None]:
    with replaced(scatter_gather, "_is_namedtuple", lambda value: False):
        yield


@fault("non-persistent buffers are not broadcast", "test_buffers", condition="persistent=False")
def unsaved_buffers_not_sent() -> Iterator[None]:
    def assign(real: Callable[..., Any], self: DistributedDataParallel) -> None:
        real(self)
        saved = self.module.state_dict(keep_vars=True)
        self.named_module_buffers = {name: value for name, value in self.named_module_buffers.items() if name in saved}
        self.modules_buffers = list(self.named_module_buffers.values())

    with replaced_method(DDP, "_assign_modules_buffers", assign):
        yield


@fault("no_sync does not end when an exception leaves it", "test_accumulation", condition="an exception within no_sync")
def no_sync_goes_on() -> Iterator[None]:
    @contextlib.contextmanager
    def no_sync(self: DistributedDataParallel) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        yield
        self.require_backward_grad_sync = before

    with replaced(DDP, "no_sync", no_sync):
        yield


@fault(
    "a rank adds the previous step's gradient for parameters that it did not use",
    "test_unused_parameters",
    condition="find_unused_parameters and gradient_as_bucket_view, from the second step on",
)
def unused_views_not_cleared() -> Iterator[None]:
    before: dict[int, torch.Tensor] = {}

    def change(buffer: torch.Tensor, bucket: Any, model: DistributedDataParallel) -> torch.Tensor:
        for parameter, own in slices(buffer, bucket):
            held = before.get(id(parameter))
            if own.any():
                before[id(parameter)] = own.clone()
            elif held is not None and held.shape == own.shape:
                own.copy_(held)
        return buffer

    with communicated(change, lambda model: model.find_unused_parameters and model.gradient_as_bucket_view):
        yield


@fault(
    "BatchNorm with momentum=None uses momentum 0.1 on the last rank",
    "test_buffers",
    condition="momentum=None, one rank",
)
def average_by_tenths() -> Iterator[None]:
    def forward(real: Callable[..., Any], self: Any, x: torch.Tensor) -> Any:
        given = self.momentum
        if given is None and is_last():
            self.momentum = 0.1
        result = real(self, x)
        self.momentum = given
        return result

    with replaced_method(_BatchNorm, "forward", forward):
        yield
