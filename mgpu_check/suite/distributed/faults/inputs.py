"""Planted faults of a model under DistributedDataParallel with inputs, new buffers, two optimizers, or averagers."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import distributed as distributed_module
from torch.nn.parallel import scatter_gather
from torch.utils import _pytree as pytree

from mgpu_check.suite.common.faults.breaking import DDP, around, communicating, given, returned, slices
from mgpu_check.suite.common.faults.conditions import LAST_RANK
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, fault, register
from mgpu_check.suite.common.faults.when import When
from mgpu_check.suite.distributed.faults.planting import kept_by, of_model

buffers = caught_by("test_buffers")
model_averagers = caught_by("test_model_averagers")

_LOCAL_SGD = "torch.distributed.optim:PostLocalSGDOptimizer"
"""Imported only by its faults, because this import makes torch compile functions of the optimizers."""
_UNUSED_VIEWS = of_model(
    "find_unused_parameters and gradient_as_bucket_view",
    lambda model: model.find_unused_parameters and model.gradient_as_bucket_view,
)
_WHOLE_AVERAGE = When("momentum=None", lambda real, self, x: self.momentum is None)
_ASSIGNED_AGAIN = When("buffers that are replaced", lambda real, self: hasattr(self, "modules_buffers"))


@buffers("non-persistent buffers are not broadcast", returned(DDP, "_assign_modules_buffers"), "persistent=False")
def unsaved_buffers_not_sent(result: None, self: DDP) -> None:
    saved = self.module.state_dict(keep_vars=True)
    self.named_module_buffers = {name: value for name, value in self.named_module_buffers.items() if name in saved}
    self.modules_buffers = list(self.named_module_buffers.values())


@buffers("BatchNorm with momentum=None uses momentum 0.1 on the last rank", around(_BatchNorm, "forward"),
    _WHOLE_AVERAGE & LAST_RANK)  # fmt: skip
def average_by_tenths(real: Any, self: Any, x: torch.Tensor) -> Any:
    self.momentum = 0.1
    try:
        return real(self, x)
    finally:
        self.momentum = None


@fault("a rank adds the previous step's gradient for parameters that it did not use", "test_unused_parameters",
       by=communicating(_UNUSED_VIEWS), when=f"{_UNUSED_VIEWS}, from the second step on")  # fmt: skip
def unused_views_not_cleared(buffer: torch.Tensor, bucket: Any, model: DDP) -> None:
    before = kept_by(model)
    for parameter, own in slices(buffer, bucket):
        if own.any():
            before[id(parameter)] = own.clone()
        elif id(parameter) in before:
            own.copy_(before[id(parameter)])


@fault("GradScaler updates its scale by the first optimizer only", "test_scaler",
       by=given(torch.amp.GradScaler, "update"), when="two optimizers, an infinity in the second")  # fmt: skip
def scale_of_the_first_optimizer(self: Any, *args: Any, **kwargs: Any) -> None:
    for state in list(self._per_optimizer_states.values())[1:]:
        state["found_inf_per_device"] = {}


def _is_counted_in_half(made: Any, param: torch.Tensor, value: object, *rest: Any, key: object = None) -> bool:
    return (rest[2:] or [key])[0] == "step" and isinstance(made, torch.Tensor) and param.dtype.itemsize == 2


@model_averagers("if two periods are due, the average is over the smaller group",
    around(HierarchicalModelAverager, "_find_process_group"),
    "HierarchicalModelAverager, steps that two periods divide", least_gpus=4)  # fmt: skip
def fewer_ranks_averaged(real: Any, self: Any) -> Any:
    due = [period for period in self._periods if self.step % period == 0]
    return self.period_process_group_dict[due[0]] if due else None


@model_averagers("PostLocalSGDOptimizer averages parameters before its own step", around(_LOCAL_SGD, "step"),
    "steps with an average", least_gpus=2)  # fmt: skip
def averaged_before_the_step(real: Any, self: Any) -> None:
    self.averager.average_parameters(params=self.optim.param_groups)
    self.optim.step()


register(
    __name__,
    FaultRow("arguments-detached", "arguments moved to the device get no gradient", "test_arguments",
        returned(distributed_module, "_to_kwargs"),
        lambda moved, *_, **__: pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, moved),
        "arguments that need gradients"),
    FaultRow("keywords-alone-negated", "tensors arrive with another sign", "test_arguments",
        returned(distributed_module, "_to_kwargs"),
        lambda moved, *_, **__: pytree.tree_map_only(torch.Tensor, torch.Tensor.neg, moved),
        When("keyword arguments alone", lambda moved, inputs, *_, **__: not inputs)),
    FaultRow("names-of-tuples-lost", "named tuples moved to the device become plain tuples", "test_arguments",
        around(scatter_gather, "_is_namedtuple"), lambda *_: False, "named tuples among the arguments"),
    FaultRow("buffers-of-the-start-sent", "buffers assigned after the wrap are not broadcast", "test_buffers",
        around(DDP, "_assign_modules_buffers"), lambda *_: None, _ASSIGNED_AGAIN),
    FaultRow("steps-in-a-narrow-dtype", "the number of steps of an optimizer is loaded in the dtype of its parameters",
        "test_checkpoint", returned(torch.optim.Optimizer, "_process_value_according_to_param_policy"),
        lambda made, param, *_, **__: made.to(param.dtype).to(made.dtype),
        When("narrow parameters, more steps than their dtype can count", _is_counted_in_half)),
    FaultRow("last-loss-unscaled", "GradScaler leaves the last of several losses unscaled", "test_scaler",
        returned(torch.amp.GradScaler, "scale"),
        lambda scaled, self, outputs: type(scaled)([*scaled[:-1], outputs[-1]]),
        When("lists and tuples", lambda scaled, *_: not isinstance(scaled, torch.Tensor))),
    FaultRow("averaged-from-the-start", "averagers also average during warm-up", "test_model_averagers",
        given(PeriodicModelAverager, "average_parameters"), lambda self, *args: setattr(self, "warmup_steps", 0),
        "the first steps"),
    FaultRow("averager-begins-anew", "a loaded optimizer of local SGD counts its steps from 0", "test_model_averagers",
        returned(_LOCAL_SGD, "load_state_dict"), lambda result, self, state_dict: setattr(self.averager, "step", 0),
        "load_state_dict after a step", least_gpus=2),
)  # fmt: skip
