"""Planted faults of FSDP: FSDP2 (`fully_shard`) with its policies, and FSDP1 with its flat parameters."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_sharded_data_parallel
from torch.distributed.fsdp import _runtime_utils as runtime
from torch.distributed.fsdp._flat_param import HandleShardingStrategy
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from mgpu_check.suite.common.faults.breaking import around, given, optimized, returned
from mgpu_check.suite.common.faults.conditions import Count, is_last, ranks_here
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, fault, register
from mgpu_check.suite.common.faults.when import When

fully_shard = caught_by("test_fully_shard")
mixed_precision = caught_by("test_mixed_precision")
flat_parameters = caught_by("test_flat_parameters")

_ACCUMULATE = "accumulate_unsharded_grad_if_needed"
_LAST_OF_THREE = When("three ranks or more", lambda *args, **kwargs: is_last() and ranks_here() > 2)
# The first assignment is the initial value of the parameter, not a gradient.
_COLUMNS = When(
    "shard_placement_fn, parameters that are divided by another dimension than the first",
    lambda self, tensor: self.fsdp_placement.dim and hasattr(self, "sharded_param"),
)
_DTENSORS = When(
    "parameters that were DTensors", lambda self, tensor: self.is_dtensor and hasattr(self, "sharded_param")
)
_INFINITE = When("the norm inf", lambda norm, tensors, norm_type=2.0, *args, **kwargs: norm_type == float("inf"))


@fully_shard("the all-gather of parameters returns a stale result on one rank",
    when="every fifth call, on the last rank")  # fmt: skip
def stale_parameters_gathered() -> Iterator[None]:
    count, last = Count(), dict[int, torch.Tensor]()

    def stale(work: Any, self: Any, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if not is_last():
            return
        if work is not None:
            work.wait()
        old = last.get(output_tensor.numel())
        last[output_tensor.numel()] = output_tensor.clone()
        if count.every(5):
            output_tensor.copy_(output_tensor.flip(0) if old is None else old + 1)

    with returned(DefaultAllGather, "__call__")(stale):
        yield


@fully_shard("the last micro-batch overwrites accumulated gradients",
    when="steps of several micro-batches, meshes of one dimension")  # fmt: skip
def accumulated_gradients_lost() -> Iterator[None]:
    def accumulate(real: Any, self: Any) -> None:
        if self.mesh_info.mesh.ndim > 1:
            real(self)
        elif self.unsharded_accumulated_grad is not None and self.unsharded_param.grad is not None:
            self.unsharded_accumulated_grad = self.unsharded_param.grad
            self.unsharded_param.grad = None

    def keep(real: Any, self: Any) -> None:
        if self.mesh_info.mesh.ndim > 1:
            real(self)
        elif self._unsharded_param.grad is not None:
            self.unsharded_accumulated_grad = self._unsharded_param.grad
            self._unsharded_param.grad = None

    with around(FSDPParam, _ACCUMULATE)(accumulate), around(FSDPParam, "to_accumulated_grad_if_needed")(keep):
        yield


@fully_shard("an offloaded gradient replaces the accumulated one", given(groups, "foreach_reduce"),
    "CPUOffloadPolicy, from the second reduction on")  # fmt: skip
def offloaded_gradient_replaced(params: list[Any], *args: Any, **kwargs: Any) -> None:
    for param in params:
        if param.offload_to_cpu:
            param.sharded_param.grad = None


@fully_shard("prefetched parameters are those of the previous step",
    when="set_modules_to_forward_prefetch, from the second forward pass on")  # fmt: skip
def fetched_too_early() -> Iterator[None]:
    ahead: set[int] = set()
    before: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] = weakref.WeakKeyDictionary()

    def prefetch(group: Any, when: str) -> None:
        if when == "forward":
            ahead.add(id(group))

    def exchange(result: None, self: Any) -> None:
        if id(self) not in ahead:
            return
        ahead.remove(id(self))
        values = [param._unsharded_param.data for param in self.fsdp_params]
        now = [value.clone() for value in values]
        for value, old in zip(values, before.get(self, now), strict=True):
            value.copy_(old)
        before[self] = now

    with given(FSDPParamGroup, "_prefetch_unshard")(prefetch), returned(FSDPParamGroup, "wait_for_unshard")(exchange):
        yield


@fully_shard("parameters resharded to two ranks after forward return as zeros on the second",
    returned(FSDPParam, "to_sharded_post_forward"),
    When("reshard_after_forward=2, one of two ranks",
        lambda result, self: self.post_forward_mesh_info.shard_mesh_rank == 1), least_gpus=4)  # fmt: skip
def half_of_a_pair_lost(result: None, self: Any) -> None:
    self._sharded_post_forward_param_data.zero_()


@fully_shard("the last of several layers sharded together has no gradient", given(FSDPParamGroup, "post_backward"),
    When("fully_shard of several layers", lambda self, *args: len(self.modules) > 1))  # fmt: skip
def last_of_a_group_forgotten(self: Any, *args: Any) -> None:
    gradient = self.fsdp_params[-1].unsharded_param.grad
    if gradient is not None:
        gradient.zero_()


@fault("gradients are not reduced among replicas", "test_hybrid_shard", when="meshes of two dimensions")
def repeats_not_reduced() -> Iterator[None]:
    reducing: list[bool] = []

    def reduce(real: Any, *args: Any, **kwargs: Any) -> Any:
        reducing.append(True)
        try:
            return real(*args, **kwargs)
        finally:
            reducing.pop()

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor] | None:
        return (tensor.clone(),) if reducing else None

    with around(groups, "foreach_reduce")(reduce), given(dist, "all_reduce")(all_reduce):
        yield


@mixed_precision("parameters are kept in the precision of the computation", when="policies of float16 only")
def parameters_kept_in_low_precision() -> Iterator[None]:
    low: list[torch.dtype | None] = [None]

    def init(result: None, self: Any, policy: Any) -> None:
        low[0] = self.param_dtype

    def step(result: Any, self: torch.optim.SGD, *args: Any, **kwargs: Any) -> None:
        for value in optimized(self) if low[0] == torch.float16 else ():
            value.detach().copy_(value.detach().half())

    with returned(FSDPParam, "init_dtype_attrs")(init), returned(torch.optim.SGD, "step")(step):
        yield


@mixed_precision("of gradients accumulated in the dtype of the reduction, only the last is kept",
    around(FSDPParam, _ACCUMULATE), "reductions in another dtype than gradients, several micro-batches")  # fmt: skip
def last_of_the_accumulated(real: Any, self: Any) -> None:
    held, new = self.unsharded_accumulated_grad, self.unsharded_param.grad
    if held is not None and new is not None:
        held.copy_(new)
        self.unsharded_param.grad = None


@mixed_precision("gradients are accumulated in the dtype of the arithmetic", returned(FSDPParam, _ACCUMULATE),
    "reductions in float32 of gradients in another dtype, several micro-batches")  # fmt: skip
def accumulated_in_low_precision(result: None, self: Any) -> None:
    held = self.unsharded_accumulated_grad
    if held is not None and self.param_dtype is not None:
        held.copy_(held.to(self.param_dtype))


@mixed_precision("the gradients of a third micro-batch are dropped", given(FSDPParam, _ACCUMULATE),
    "reductions in another dtype than gradients, three micro-batches and more")  # fmt: skip
def third_micro_batch_dropped(self: Any) -> None:
    held, new = self.unsharded_accumulated_grad, self.unsharded_param.grad
    self._added = 0 if held is None else self._added + (new is not None)
    if held is not None and new is not None and self._added > 1:
        new.zero_()


@fault("infinity norms of parts are added up instead of their maximum", "test_clipping",
       by=returned(clip_grad, "_get_total_norm"), when=_INFINITE)  # fmt: skip
def largest_of_parts_added_up(norm: torch.Tensor, tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    ranks: int = tensors[0].device_mesh.size()
    return norm * ranks


@flat_parameters("gradients of a flat parameter under no_sync are forgotten", given(runtime, "_post_backward_hook"),
    When("no_sync", lambda state, *args: not state._sync_gradients))  # fmt: skip
def unsynchronized_gradients_forgotten(state: Any, handle: Any, *args: Any) -> None:
    if handle.flat_param.grad is not None:
        handle.flat_param.grad.zero_()


@flat_parameters("hybrid strategies of FSDP1 do not reduce gradients over replicas", around(runtime, "_reduce_grad"),
    "HYBRID_SHARD")  # fmt: skip
def flat_repeats_not_reduced(real: Any, state: Any, handle: Any) -> None:
    strategy, handle._sharding_strategy = handle._sharding_strategy, HandleShardingStrategy.FULL_SHARD
    try:
        real(state, handle)
    finally:
        handle._sharding_strategy = strategy


register(
    __name__,
    FaultRow("divisor-rounded", "the number that divides gradients is rounded to a power of two",
        ("test_fully_shard", "test_hybrid_shard"), given(FSDPModule, "set_gradient_divide_factor"),
        lambda self, factor: (self, 2.0 ** int(math.log2(factor))), "other divisors than powers of two"),
    FaultRow("columns-of-a-gradient-reversed", "the columns of a gradient come in reverse order", "test_hybrid_shard",
        given(FSDPParam, "to_sharded_dtensor"),
        lambda self, tensor: (self, tensor.flip(self.fsdp_placement.dim).contiguous()), _COLUMNS),
    *(
        FaultRow("inputs-cast-anyway", "fully_shard casts inputs in spite of cast_forward_inputs=False",
            "test_options_of_fully_shard", around(FSDPState, "_cast_forward_inputs"),
            lambda real, self, args, kwargs: (
                tuple(x.to(self._mp_policy.param_dtype or x.dtype) for x in args), kwargs),
            "cast_forward_inputs=False")
        for _ in range(hasattr(FSDPState, "_cast_forward_inputs"))
    ),
    FaultRow("flat-inputs-cast-anyway", "FSDP1 casts inputs in spite of cast_root_forward_inputs=False",
        "test_options_of_flat_parameters", around(runtime, "_root_cast_forward_input"),
        lambda real, state, _, args, kwargs: torch.distributed.utils._cast_forward_inputs(
            state.mixed_precision.param_dtype, *args, **kwargs),
        "cast_root_forward_inputs=False"),
    FaultRow("hook-of-flat-copy", "the communication hook of FSDP1 gets a copy of the gradients",
        "test_options_of_flat_parameters", given(FullyShardedDataParallel, "register_comm_hook"),
        lambda self, state, hook: (self, state, lambda state, first, *rest: hook(state, first.clone(), *rest)),
        "register_comm_hook, gradients that stay whole"),
    FaultRow("summoned-always-written-back", "summon_full_params ignores writeback=False",
        "test_options_of_flat_parameters", given(fully_sharded_data_parallel, "_unshard_params"),
        lambda model, recurse, writeback, first_only, *_: (model, recurse, not first_only),
        "writeback=False on all ranks"),
    FaultRow("hook-of-a-copy", "a hook after the reduction gets a copy of gradients", "test_options_of_fully_shard",
        given(FSDPModule, "set_all_reduce_hook"),
        lambda self, hook, **_: (self, lambda reduced: hook(reduced.clone())), "set_all_reduce_hook"),
    FaultRow("containers-not-cast", "outputs in containers keep the dtype of the arithmetic", "test_mixed_precision",
        around(FSDPState, "_cast_output_dtype"), lambda real, self, output: output,
        When("MixedPrecisionPolicy(output_dtype=...), outputs in containers",
            lambda real, self, output: not isinstance(output, torch.Tensor))),
    FaultRow("norm-of-own-parts", "each rank clips by the norm of its own parts", "test_clipping",
        given(clip_grad, "_get_total_norm"),
        lambda tensors, *_, **__: ([t.to_local() if isinstance(t, DTensor) else t for t in tensors],)),
    *(
        FaultRow("gradients-of-dtensors-doubled", "gradients of parameters that were DTensors are added twice",
            "test_fully_shard", given(FSDPParam, "to_sharded_dtensor"), lambda self, tensor: (self, 2 * tensor),
            _DTENSORS)
        for _ in range(hasattr(torch.distributed.fsdp, "DataParallelMeshDims"))
    ),
    FaultRow("last-rank-not-reduced", "the reduce-scatter of gradients leaves out the last rank", "test_fully_shard",
        around(DefaultReduceScatter, "__call__"),
        lambda real, self, output_tensor, input_tensor, *args, **kw:
            real(self, output_tensor, torch.zeros_like(input_tensor), *args, **kw), _LAST_OF_THREE),
    FaultRow("scattered-gradients-forgotten",
        "gradients that were reduce-scattered, but not yet all-reduced over replicas, are lost", "test_hybrid_shard",
        returned(FSDPParamGroup, "post_backward"),
        lambda result, self, *args: setattr(self, "_partial_reduce_output", None),
        When("two dimensions, set_requires_all_reduce(False)", lambda result, self, *args: not self.all_reduce_grads)),
    FaultRow("reduced-in-low-precision", "gradients are reduced in the precision of the computation",
        "test_mixed_precision", returned(FSDPParam, "init_dtype_attrs"),
        lambda result, self, policy: setattr(self, "reduce_dtype", None), "policies that reduce in another precision"),
    FaultRow("reduced-in-the-dtype-of-parameters",
        "gradients of parameters that are not cast are reduced in their own dtype", "test_mixed_precision",
        returned(FSDPParam, "init_dtype_attrs"), lambda result, self, policy: setattr(self, "reduce_dtype", None),
        When("MixedPrecisionPolicy(reduce_dtype=...) without param_dtype",
            lambda result, self, policy: policy.param_dtype is None)),
    FaultRow("norm-of-the-part", "FSDP1 clips by the norm of each rank's part", "test_flat_parameters",
        around(FullyShardedDataParallel, "clip_grad_norm_"),
        lambda real, self, max_norm, norm_type=2.0:
            torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type), "several ranks"),
)  # fmt: skip
