"""Planted faults of less common options: accumulation, conversion, schedules, scalars, prefetch, missing entries of checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import default_planner
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp_collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp_param_group
from torch.distributed.fsdp._fully_shard import _fsdp_state as fsdp_state

from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.suite.sharded.faults.modules import zero_optimizer
from mgpu_check.torch_hooks.patches import replaced


@fault(
    "of gradients accumulated in the dtype of the reduction, only the last is kept",
    "test_mixed_precision",
    condition="reductions in another dtype than gradients, several micro-batches",
)
def last_of_the_accumulated() -> Iterator[None]:
    def accumulate(self: Any) -> None:
        held, new = self.unsharded_accumulated_grad, self.unsharded_param.grad
        if held is not None and new is not None:
            held.copy_(new)
            self.unsharded_param.grad = None

    with replaced(fsdp_param.FSDPParam, "accumulate_unsharded_grad_if_needed", accumulate):
        yield


@fault(
    "gradients that were reduce-scattered, but not yet all-reduced over replicas, are lost",
    "test_hybrid_shard",
    condition="two dimensions, set_requires_all_reduce(False)",
)
def scattered_gradients_forgotten() -> Iterator[None]:
    real = fsdp_param_group.FSDPParamGroup.post_backward

    def post_backward(self: Any, *args: Any) -> None:
        real(self, *args)
        if not self.all_reduce_grads:
            self._partial_reduce_output = None

    with replaced(fsdp_param_group.FSDPParamGroup, "post_backward", post_backward):
        yield


@fault(
    "an offloaded gradient replaces the accumulated one",
    "test_fully_shard",
    condition="CPUOffloadPolicy, from the second reduction on",
)
def offloaded_gradient_replaced() -> Iterator[None]:
    real = fsdp_collectives.foreach_reduce

    def reduce(params: list[Any], *args: Any, **kwargs: Any) -> Any:
        for param in params:
            if param.offload_to_cpu:
                param.sharded_param.grad = None
        return real(params, *args, **kwargs)

    with replaced(fsdp_param_group, "foreach_reduce", reduce):
        yield


@fault("convert_sync_batchnorm ignores process_group", "test_sync_batchnorm", condition="process_group=")
def group_lost_in_conversion() -> Iterator[None]:
    real = nn.SyncBatchNorm.__init__

    def init(self: nn.SyncBatchNorm, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.process_group = None

    with replaced(nn.SyncBatchNorm, "__init__", init):
        yield


@fault(
    "convert_sync_batchnorm unfreezes parameters", "test_sync_batchnorm", condition="parameters that need no gradient"
)
def conversion_thaws() -> Iterator[None]:
    real = nn.SyncBatchNorm.convert_sync_batchnorm

    def convert(module: nn.Module, process_group: Any = None) -> nn.Module:
        made: nn.Module = real(module, process_group)
        return made.requires_grad_(True)

    with replaced(nn.SyncBatchNorm, "convert_sync_batchnorm", staticmethod(convert)):
        yield


@fault(
    "a scheduler changes the first parameter group only",
    "test_zero_redundancy_state",
    condition="ZeroRedundancyOptimizer, two groups",
)
def schedule_of_the_first_group() -> Iterator[None]:
    optimizer = zero_optimizer()
    real = optimizer._sync_param_groups

    def sync(source: list[Any], target: list[Any]) -> None:
        real(source[:1], target[:1])

    with replaced(optimizer, "_sync_param_groups", staticmethod(sync)):
        yield


@fault(
    "the first consolidated state is returned by all later calls",
    "test_zero_redundancy_state",
    condition="the second consolidation",
)
def consolidated_once() -> Iterator[None]:
    optimizer = zero_optimizer()
    real = optimizer.consolidate_state_dict

    def consolidate(self: Any, *args: Any, **kwargs: Any) -> None:
        before = self._all_state_dicts
        real(self, *args, **kwargs)
        self._all_state_dicts = before or self._all_state_dicts

    with replaced(optimizer, "consolidate_state_dict", consolidate):
        yield


@fault(
    "0-dim tensors keep their values when a checkpoint is loaded",
    "test_distributed_checkpoint",
    condition="tensors without dimensions",
)
def scalars_not_loaded() -> Iterator[None]:
    real = default_planner.DefaultLoadPlanner.resolve_tensor

    def resolve(self: Any, item: Any) -> torch.Tensor:
        found: torch.Tensor = real(self, item)
        return found if found.dim() else found.clone()

    with replaced(default_planner.DefaultLoadPlanner, "resolve_tensor", resolve):
        yield


@fault(
    "missing entries of a checkpoint are ignored",
    "test_distributed_checkpoint",
    condition="a tensor that was not saved",
)
def lacking_passed_over() -> Iterator[None]:
    real = default_planner.create_default_local_load_plan

    def plan(state_dict: Any, metadata: Any, strict: bool = True) -> Any:
        return real(state_dict, metadata, False)

    with replaced(default_planner, "create_default_local_load_plan", plan):
        yield


@fault(
    "prefetched parameters are those of the previous step",
    "test_fully_shard",
    condition="set_modules_to_forward_prefetch, from the second forward pass on",
)
def fetched_too_early() -> Iterator[None]:
    kind = fsdp_param_group.FSDPParamGroup
    fetch, wait = kind._prefetch_unshard, kind.wait_for_unshard
    ahead: set[int] = set()
    before: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] = weakref.WeakKeyDictionary()

    def prefetch(group: Any, when: str) -> None:
        if when == "forward":
            ahead.add(id(group))
        fetch(group, when)

    def wait_for_unshard(self: Any) -> None:
        wait(self)
        if id(self) not in ahead:
            return
        ahead.remove(id(self))
        values = [param._unsharded_param.data for param in self.fsdp_params]
        now = [value.clone() for value in values]
        for value, old in zip(values, before.get(self, now), strict=True):
            value.copy_(old)
        before[self] = now

    with (
        replaced(kind, "_prefetch_unshard", staticmethod(prefetch)),
        replaced(kind, "wait_for_unshard", wait_for_unshard),
    ):
        yield


@fault(
    "the columns of a gradient come in reverse order",
    "test_hybrid_shard",
    condition="shard_placement_fn, parameters that are divided by another dimension than the first",
)
def columns_of_a_gradient_reversed() -> Iterator[None]:
    real = fsdp_param.FSDPParam.to_sharded_dtensor

    def to_sharded_dtensor(self: Any, tensor: torch.Tensor) -> Any:
        dim = self.fsdp_placement.dim
        # The first assignment is the initial value of the parameter, not a gradient.
        return real(self, tensor.flip(dim).contiguous() if dim and hasattr(self, "sharded_param") else tensor)

    with replaced(fsdp_param.FSDPParam, "to_sharded_dtensor", to_sharded_dtensor):
        yield


@fault(
    "gradients are accumulated in the dtype of the arithmetic",
    "test_mixed_precision",
    condition="reductions in float32 of gradients in another dtype, several micro-batches",
)
def accumulated_in_low_precision() -> Iterator[None]:
    real = fsdp_param.FSDPParam.accumulate_unsharded_grad_if_needed

    def accumulate(self: Any) -> None:
        real(self)
        held = self.unsharded_accumulated_grad
        if held is not None and self.param_dtype is not None:
            held.copy_(held.to(self.param_dtype))

    with replaced(fsdp_param.FSDPParam, "accumulate_unsharded_grad_if_needed", accumulate):
        yield


@fault(
    "of the changes of a scheduler, only the learning rate reaches the optimizers of the ranks",
    "test_zero_redundancy_state",
    condition="a weight decay that changes",
)
def rates_alone_shared() -> Iterator[None]:
    optimizer = zero_optimizer()
    real = optimizer._sync_param_groups

    def share(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        kept = [group.get("weight_decay") for group in target]
        real(source, target)
        for group, decay in zip(target, kept, strict=True):
            if decay is not None:
                group["weight_decay"] = decay

    with replaced(optimizer, "_sync_param_groups", staticmethod(share)):
        yield


@fault(
    "outputs in containers keep the dtype of the arithmetic",
    "test_mixed_precision",
    condition="MixedPrecisionPolicy(output_dtype=...), outputs in containers",
)
def containers_not_cast() -> Iterator[None]:
    real = fsdp_state.FSDPState._cast_output_dtype

    def cast(self: Any, output: Any) -> Any:
        return real(self, output) if isinstance(output, torch.Tensor) else output

    with replaced(fsdp_state.FSDPState, "_cast_output_dtype", cast):
        yield


@fault(
    "parameters added to an optimizer later are sharded, but not broadcast",
    "test_zero_redundancy_optimizer",
    condition="add_param_group, several ranks",
)
def later_group_not_sent() -> Iterator[None]:
    optimizer = zero_optimizer()
    real, send = optimizer.add_param_group, optimizer._sync_params

    def add(self: Any, param_group: dict[str, Any]) -> None:
        real(self, param_group)
        if hasattr(self, "_added_later"):
            self._added_later += param_group["params"]

    def sync(self: Any) -> None:
        kept = [(value, value.detach().clone()) for value in self._added_later]
        send(self)
        own = {id(value) for group in self.optim.param_groups for value in group["params"]}
        for value, before in kept:
            if id(value) not in own:
                value.data.copy_(before)

    begin = optimizer.__init__

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._added_later = []

    with (
        replaced(optimizer, "__init__", start),
        replaced(optimizer, "add_param_group", add),
        replaced(optimizer, "_sync_params", sync),
    ):
        yield


@fault(
    "parameters resharded to two ranks after forward return as zeros on the second",
    "test_fully_shard",
    condition="reshard_after_forward=2, one of two ranks",
    least_gpus=4,
)
def half_of_a_pair_lost() -> Iterator[None]:
    real = fsdp_param.FSDPParam.to_sharded_post_forward

    def reshard(self: Any) -> None:
        real(self)
        if self.post_forward_mesh_info.shard_mesh_rank == 1:
            self._sharded_post_forward_param_data.zero_()

    with replaced(fsdp_param.FSDPParam, "to_sharded_post_forward", reshard):
        yield


@fault(
    "the last of several layers sharded together has no gradient",
    "test_fully_shard",
    condition="fully_shard of several layers",
)
def last_of_a_group_forgotten() -> Iterator[None]:
    real = fsdp_param_group.FSDPParamGroup.post_backward

    def after(self: Any, *args: Any) -> None:
        gradient = self.fsdp_params[-1].unsharded_param.grad if len(self.modules) > 1 else None
        if gradient is not None:
            gradient.zero_()
        real(self, *args)

    with replaced(fsdp_param_group.FSDPParamGroup, "post_backward", after):
        yield
