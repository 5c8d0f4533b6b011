"""Planted faults of sharding: meshes, DTensors, FSDP2, SyncBatchNorm, and checkpoints."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _state_dict_utils as utils
from torch.distributed.checkpoint import default_planner, planner_helpers, staging
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _random
from torch.distributed.tensor import _api as api
from torch.distributed.tensor import _redistribute as redistribute
from torch.nn import functional as F
from torch.nn.utils import clip_grad

from mgpu_check.suite.common.faults.planting import (
    LAST_RANK,
    Count,
    around,
    both,
    counted,
    given,
    is_last,
    keeping,
    optimized,
    ranks_here,
    returned,
)
from mgpu_check.suite.common.faults.registry import FaultRow, When, caught_by, fault, register
from mgpu_check.suite.sharded.dtensors import lacks

_LARGE = 16_384
_LOCAL_RANK = around(DeviceMesh, "get_local_rank")
_REDUCE = around(Partial, "_reduce_value")


def _clear(values: torch.Tensor) -> None:
    values.zero_()


_ALONG = When("the dimension that is divided", lambda real, self, *args, **_:
    isinstance(self, DTensor) and args[-1:] == (getattr(self.placements[0], "dim", None),))  # fmt: skip
_PARTIAL = When(
    "partial operands, several ranks",
    lambda real, self, *args: (
        isinstance(self, DTensor) and any(placement.is_partial() for placement in self.placements)
    ),
)


@fault("functions of partial tensors are applied to each part before the sum", "test_operators_on_dtensors",
       by=around(torch.Tensor, "abs", "exp", "clamp"), when=_PARTIAL)  # fmt: skip
def partial_operands_not_reduced(real: Any, x: DTensor, *args: Any) -> DTensor:
    """As if the functions were linear, or along another dimension."""
    shard = real(x.to_local(), *args)
    return DTensor.from_local(shard, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


_OF_TURNS = (
    FaultRow("turned-within-parts", "running sums, reversals and turns stay within the part of a rank",
        "test_operators_on_dtensors", around(torch.Tensor, "cumsum", "flip", "roll"), partial_operands_not_reduced,
        _ALONG),
)  # fmt: skip

register(
    __name__,
    FaultRow("local-rank-of-the-world", "DeviceMesh.get_local_rank returns the global rank", "test_device_meshes",
        _LOCAL_RANK, lambda real, self, *_: self.get_rank(), When("the last rank of a mesh of two dimensions or more",
            lambda real, self, dim=None: self.ndim > 1 and is_last())),
    FaultRow("other-dimensions-taken-out",
        "a slice of the outer two dimensions of a mesh returns the first and the last", "test_device_meshes",
        given(DeviceMesh, "__getitem__"), lambda self, *_: (self, (self.mesh_dim_names[0], self.mesh_dim_names[2])),
        When("three dimensions, two of them taken out",
            lambda self, axes: len(self.mesh_dim_names or ()) == 3 and tuple(axes) == self.mesh_dim_names[:2]),
        least_gpus=4),
    FaultRow("exchanged-out-of-order", "a change of the shard dimension reverses the order of elements",
        "test_redistribution", returned(Shard, "_to_new_shard_dim"),
        lambda shard, self, *_: shard.flip(self.dim).contiguous(),
        When("the last of three ranks or more", lambda *args: is_last() and ranks_here() > 2)),
    FaultRow("own-data-distributed", "distribute_tensor shards each rank's own tensor instead of rank 0's",
        "test_redistribution", around(Shard, "_make_shard_tensor"),
        lambda real, cls, dim, tensor, mesh, mesh_dim, *_: real(cls, dim, tensor, mesh, mesh_dim, None),
        "ranks with different data"),
    FaultRow("parts-draw-alike", "the parts of a DTensor draw the same random numbers", "test_redistribution",
        around(_random.OffsetBasedRNGTracker, "_set_pre_op_offset"), lambda *_: None, "parts of divided DTensors"),
    FaultRow("cut-for-the-neighbour", "a rank gets the shard of the next rank", "test_redistribution_in_two_dimensions",
        given(Shard, "_replicate_to_shard"),
        lambda self, local, mesh, dim, index: (self, local, mesh, dim, (int(index) + 1) % mesh.size(1)),
        When("the second dimension of a mesh", lambda self, local, mesh, mesh_dim, index: mesh_dim == 1)),
    FaultRow("second-dimension-not-reduced", "partial sums are reduced over the first dimension of the mesh only",
        "test_redistribution_in_two_dimensions", _REDUCE, lambda real, self, tensor, *_: tensor.clone(),
        When("the second dimension of a mesh", lambda real, self, x, mesh, dim: dim == 1 and mesh.ndim > 1)),
    FaultRow("second-averages-added-up", "averages over the second dimension of a mesh are added up",
        "test_redistribution_in_two_dimensions", _REDUCE, lambda real, self, *args: real(Partial("sum"), *args),
        When("partial averages", lambda real, self, x, mesh, dim: self.reduce_op == "avg" and dim == 1), least_gpus=4),
    FaultRow("rank-0-distributes-always", "distribute_tensor ignores src_data_rank", "test_redistribution",
        around(Shard, "_make_shard_tensor"),
        lambda real, cls, dim, tensor, mesh, mesh_dim, source=0: real(cls, dim, tensor, mesh, mesh_dim, source and 0),
        "src_data_rank other than 0"),
    FaultRow("columns-draw-alike", "parts of the same rows draw the same random numbers",
        "test_redistribution_in_two_dimensions", around(_random.OffsetBasedRNGTracker, "_calc_shard_linear_idx"),
        lambda real, self, position, sizes: real(self, [*position[:1], *[0] * len(position[1:])], sizes),
        "divided by columns"),
    FaultRow("filled-on-all-but-one", "the last rank's part of a filled tensor is 0", "test_making_dtensors",
        returned("torch.distributed.tensor", "full", "ones"), lambda dtensor, *_, **__: dtensor * 0, LAST_RANK),
    FaultRow("replicas-not-checked", "from_local with run_check keeps tensors that differ between replicas",
        "test_making_dtensors", around(api, "mesh_broadcast"), lambda real, tensor, *_, **__: tensor,
        "run_check=True, replicated"),
    FaultRow("gradient-of-whole-replicated", "full_tensor ignores grad_placements", "test_making_dtensors",
        around(DTensor, "full_tensor"), lambda real, self, **_: real(self), "full_tensor with grad_placements"),
    FaultRow("moved-as-it-is", "redistribute ignores forward_dtype", "test_making_dtensors",
        around(DTensor, "redistribute"), lambda real, *args, forward_dtype=None, **kwargs: real(*args, **kwargs),
        "forward_dtype"),
    FaultRow("local-sums-not-added", "local_map takes partial outputs for whole ones", "test_making_dtensors",
        around("torch.distributed.tensor.experimental", "local_map"),
        lambda real, function, out_placements, **kwargs: real(function, out_placements=[Replicate()], **kwargs)),
    *(() if lacks("flip") else _OF_TURNS),
    FaultRow("place-within-a-part", "argmax and argmin return the place within the part of a rank",
        "test_operators_on_dtensors", around(torch.Tensor, "argmax", "argmin"),
        lambda real, x, *dim, **options: DTensor.from_local(
            real(x.to_local(), *dim, **options), x.device_mesh, [Replicate()], run_check=False), _ALONG),
    FaultRow("redistributed-gradient-doubled", "the gradient of redistribution is doubled on one rank",
        "test_gradients_of_redistribution", returned(redistribute.Redistribute, "backward"),
        lambda grads, *_: (grads[0] * 2, *grads[1:]),
        When("the last rank", lambda grads, *args: is_last() and grads[0] is not None)),
    FaultRow("gradient-placements-ignored", "to_local ignores grad_placements, so partial gradients count as full",
        "test_gradients_of_redistribution", given(api._ToTorchTensor, "forward"),
        lambda ctx, tensor, *_: (ctx, tensor, None), "to_local with placements of the gradient"),
    FaultRow("one-group-for-all-dimensions", "a mesh returns the group of its first dimension for every dimension",
        "test_device_meshes", given(DeviceMesh, "get_group"), lambda mesh, dimension=None: (mesh, 0),
        When("meshes of 2 dimensions and more, dimensions by number",
            lambda mesh, dimension=None: mesh.ndim > 1 and isinstance(dimension, int))),
    FaultRow("coordinate-of-another", "the last rank of a mesh has the coordinate of the first", "test_device_meshes",
        returned(DeviceMesh, "get_coordinate"), lambda coordinate, mesh: coordinate and [0] * len(coordinate),
        When("the last rank", lambda *_: is_last())),
    FaultRow("group-of-the-other-dimension", "a mesh gives the group of the other dimension", "test_device_meshes",
        given(DeviceMesh, "get_group"),
        lambda self, dim: (self, self.mesh_dim_names[1 - self.mesh_dim_names.index(dim)]),
        When("meshes of two dimensions", lambda self, dim=None: self.ndim == 2 and isinstance(dim, str))),
    FaultRow("local-rank-of-the-place",
        "DeviceMesh.get_local_rank returns the coordinate instead of the rank in the group", "test_device_meshes",
        _LOCAL_RANK, lambda real, self, dim: self.get_coordinate()[dim],
        When("meshes of two dimensions with unsorted ranks, dimension given by number",
            lambda real, self, dim=None: self.ndim == 2 and isinstance(dim, int) and self.get_coordinate() is not None),
        2),
    FaultRow("maxima-added-up", "partial maxima are added up", "test_redistribution", _REDUCE,
        lambda real, self, *args: real(Partial("sum"), *args),
        When("Partial('max') only", lambda real, self, *args: self.reduce_op == "max")),
    FaultRow("large-parts-reduced-short", "reduce-scatter of partial sums loses the last element",
        "test_redistribution", returned(Shard, "_reduce_shard_tensor"), lambda shard, *_: _clear(shard.view(-1)[-1:]),
        When("parts above 16 Ki elements", lambda shard, *args: shard.numel() > _LARGE)),
    FaultRow("mean-of-unequal-parts", "l1_loss of DTensors averages the means of the parts", "test_losses_of_dtensors",
        around(F, "l1_loss"), lambda real, x, y: DTensor.from_local(
            real(x.to_local(), y.to_local()), x.device_mesh, [Partial("avg")], run_check=False),
        When("parts of unequal sizes", lambda real, *tensors: all(isinstance(x, DTensor) for x in tensors))),
)  # fmt: skip


@fault("distribute_tensor negates the last of fewer rows than ranks", "test_redistribution",
       by=returned("mgpu_check.suite.sharded.redistribution", "distribute_tensor"), least_gpus=3,
       when="one dimension, fewer rows than ranks")  # fmt: skip
def last_of_few_rows_negated(dtensor: DTensor, *_: Any, **__: Any) -> None:
    mesh = dtensor.device_mesh
    if (
        mesh.ndim == 1
        and dtensor.placements[0].is_shard(0)
        and mesh.get_local_rank() == len(dtensor) - 1 < mesh.size() - 1
    ):
        dtensor.to_local().detach().neg_()


fully_shard = caught_by("test_fully_shard")
mixed_precision = caught_by("test_mixed_precision")

_ACCUMULATE = "accumulate_unsharded_grad_if_needed"


@fully_shard("the all-gather of parameters returns a stale result on one rank",
    keeping(returned(DefaultAllGather, "__call__")), "every fifth call, on the last rank")  # fmt: skip
def stale_parameters_gathered(kept: Any, work: Any, self: Any, output_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    if not is_last():
        return
    if work is not None:
        work.wait()
    old = kept.get(output_tensor.numel())
    kept[output_tensor.numel()] = output_tensor.clone()
    if kept.setdefault("calls", Count()).every(5):
        output_tensor.copy_(output_tensor.flip(0) if old is None else old + 1)


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
    accumulated_gradient, new = self.unsharded_accumulated_grad, self.unsharded_param.grad
    if accumulated_gradient is not None and new is not None:
        accumulated_gradient.copy_(new)
        self.unsharded_param.grad = None


@mixed_precision("gradients are accumulated in the dtype of the arithmetic", returned(FSDPParam, _ACCUMULATE),
    "reductions in float32 of gradients in another dtype, several micro-batches")  # fmt: skip
def accumulated_in_low_precision(result: None, self: Any) -> None:
    accumulated_gradient = self.unsharded_accumulated_grad
    if accumulated_gradient is not None and self.param_dtype is not None:
        accumulated_gradient.copy_(accumulated_gradient.to(self.param_dtype))


@mixed_precision("the gradients of a third micro-batch are dropped", given(FSDPParam, _ACCUMULATE),
    "reductions in another dtype than gradients, three micro-batches and more")  # fmt: skip
def third_micro_batch_dropped(self: Any) -> None:
    accumulated_gradient, new = self.unsharded_accumulated_grad, self.unsharded_param.grad
    self._added = 0 if accumulated_gradient is None else self._added + (new is not None)
    if accumulated_gradient is not None and new is not None and self._added > 1:
        new.zero_()


register(
    __name__,
    FaultRow("divisor-rounded", "the number that divides gradients is rounded to a power of two",
        ("test_fully_shard", "test_hybrid_shard"), given(FSDPModule, "set_gradient_divide_factor"),
        lambda self, factor: (self, 2.0 ** int(math.log2(factor))), "other divisors than powers of two"),
    *(
        FaultRow("inputs-cast-anyway", "fully_shard casts inputs in spite of cast_forward_inputs=False",
            "test_options_of_fully_shard", around(FSDPState, "_cast_forward_inputs"),
            lambda real, self, args, kwargs: (
                tuple(x.to(self._mp_policy.param_dtype or x.dtype) for x in args), kwargs),
            "cast_forward_inputs=False")
        for _ in range(hasattr(FSDPState, "_cast_forward_inputs"))
    ),
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
            When("parameters that were DTensors",
                lambda self, tensor: self.is_dtensor and hasattr(self, "sharded_param")))
        for _ in range(hasattr(torch.distributed.fsdp, "DataParallelMeshDims"))
    ),
    FaultRow("last-rank-not-reduced", "the reduce-scatter of gradients leaves out the last rank", "test_fully_shard",
        around(DefaultReduceScatter, "__call__"), lambda real, self, output_tensor, input_tensor, *args, **kw:
            real(self, output_tensor, torch.zeros_like(input_tensor), *args, **kw), When("three ranks or more",
            lambda *args, **kwargs: is_last() and ranks_here() > 2)),
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
    FaultRow("largest-of-parts-added-up", "infinity norms of parts are added up instead of their maximum",
        "test_clipping", returned(clip_grad, "_get_total_norm"),
        lambda norm, tensors, *_, **__: norm * tensors[0].device_mesh.size(),
        When("the norm inf", lambda norm, tensors, norm_type=2.0, *args, **kwargs: norm_type == float("inf"))),
    FaultRow("last-of-a-group-forgotten", "the last of several layers sharded together has no gradient",
        "test_fully_shard", given(FSDPParamGroup, "post_backward"),
        lambda self, *_: [param.unsharded_param.grad.zero_() for param in self.fsdp_params[-1:]
            if param.unsharded_param.grad is not None],
        When("fully_shard of several layers", lambda self, *args: len(self.modules) > 1)),
)  # fmt: skip


sync_batchnorm = caught_by("test_sync_batchnorm")

_LAST = When("on the last rank", lambda *args, **kwargs: is_last())
_EMPTY = When("a rank without samples", lambda real, self, x: not x.numel())


@sync_batchnorm("SyncBatchNorm of a rank without samples keeps the statistics of before",
    around(nn.SyncBatchNorm, "forward"), _EMPTY, least_gpus=3)  # fmt: skip
def statistics_of_no_samples_kept(real: Any, self: nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    mean = self.get_buffer("running_mean")
    before = mean.clone()
    normed: torch.Tensor = real(self, x)
    mean.copy_(before)
    return normed


register(
    __name__,
    FaultRow("sums-of-gradients-local", "the gradients of SyncBatchNorm use sums over the own samples",
        "test_sync_batchnorm", given(dist, "all_reduce"),
        lambda tensor, *_, **__: (tensor.clone() if tensor.is_floating_point() else tensor,)),
    FaultRow("cumulative-average-ignored",
        "SyncBatchNorm with momentum=None keeps the statistics of the last batch only", "test_sync_batchnorm",
        given(nn.SyncBatchNorm, "forward"), lambda self, *_: self.num_batches_tracked.zero_(),
        When("momentum=None, from the second step on",
            lambda self, x: self.momentum is None and self.training and self.num_batches_tracked is not None)),
    FaultRow("group-lost-in-conversion", "convert_sync_batchnorm ignores process_group", "test_sync_batchnorm",
        returned(nn.SyncBatchNorm, "__init__"),
        lambda result, self, *args, **kwargs: setattr(self, "process_group", None), "process_group="),
    FaultRow("conversion-thaws", "convert_sync_batchnorm unfreezes parameters", "test_sync_batchnorm",
        returned(nn.SyncBatchNorm, "convert_sync_batchnorm"), lambda layer, *args: layer.requires_grad_(True),
        "parameters that need no gradient"),
    FaultRow("samples-not-counted", "SyncBatchNorm weighs all ranks alike", "test_sync_batchnorm",
        given(torch, "batch_norm_gather_stats_with_counts"),
        lambda *args: (*args[:-1], torch.full_like(args[-1], float(args[-1].mean()))), "different numbers of samples"),
)  # fmt: skip


state_dict = caught_by("test_state_dict")
distributed_checkpoint = caught_by("test_distributed_checkpoint")


@state_dict("0-dim buffers keep their old values on the last rank", around(state_dicts, "_broadcast_state_dict"),
    "buffers without dimensions")  # fmt: skip
def counts_not_given_out(real: Any, full: Any, local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    before = {key: value for key, value in local.items() if isinstance(value, torch.Tensor) and not value.dim()}
    before = {key: value.clone() for key, value in before.items() if not value.is_meta}
    real(full, local, *args, **kwargs)
    if is_last():
        local.update(before)


@distributed_checkpoint("async_save does not copy CPU tensors, so it writes later changes",
    both(returned(staging.DefaultStager, "stage"), returned(staging.BlockingAsyncStager, "stage")),
    "async_save, tensors of the CPU that change meanwhile")  # fmt: skip
def host_memory_not_staged(staged_state: Any, self: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """They need no copy from a device, so the copy is skipped."""
    same = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and not value.is_cuda}
    return staged_state | same if isinstance(staged_state, dict) else staged_state


@distributed_checkpoint("parameter groups after the first keep their old learning rate when a state is loaded",
    around(state_dicts, "_load_optim_state_dict"), "several groups of parameters")  # fmt: skip
def rates_of_groups_not_loaded(real: Any, model: Any, optimizers: Any, *args: Any, **kwargs: Any) -> None:
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups[1:]]
    real(model, optimizers, *args, **kwargs)
    loaded = [group for optimizer in optimizers for group in optimizer.param_groups[1:]]
    for group, rate in zip(loaded, rates, strict=True):
        group["lr"] = rate


_FLAT = returned(state_dicts, "_unflatten_optim_state_dict")
_SEVERAL_GROUPS = "flatten_optimizer_state_dict, several groups of parameters"


@distributed_checkpoint("parameter groups after the first of a flat optimizer state have no momentum", _FLAT,
    _SEVERAL_GROUPS)  # fmt: skip
def flat_momentum_of_the_first_group(flat_state: dict[str, Any], *args: Any) -> None:
    for name in (name for group in flat_state["param_groups"][1:] for name in group["params"]):
        flat_state["state"][name] = {key: value * 0 for key, value in flat_state["state"][name].items()}


register(
    __name__,
    FaultRow("zeros-saved", "a checkpoint has zeros for some tensors", "test_distributed_checkpoint",
        returned(DefaultSavePlanner, "resolve_data"), lambda tensor, *_: torch.zeros_like(tensor), When("bfloat16 only",
            lambda tensor, *args: isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bfloat16)),
    FaultRow("state-of-whole-parameters", "a state dict of layers that are gathered has whole parameters",
        "test_state_dict",
        around("torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup", "_register_state_dict_hooks"),
        lambda *_: None, "after unshard"),
    FaultRow("offload-not-done", "state dicts stay on the device", "test_options_of_state_dicts",
        given(state_dicts, "_maybe_full_or_cpu_state_dict"),
        lambda state, info: setattr(info, "cpu_offload", False), "cpu_offload"),
    FaultRow("flat-steps-lost", "flat states of optimizers have the step 0", "test_options_of_state_dicts",
        returned(state_dicts, "_flatten_optim_state_dict"),
        lambda flat, *_: {name: flat[name] * 0 if name.endswith(".step") else flat[name] for name in flat},
        "flatten_optimizer_state_dict, optimizers that count steps"),
    FaultRow("parts-across-read-in-part", "a part that two ranks saved is read from the first of them only",
        "test_distributed_checkpoint", returned(planner_helpers, "create_read_items_for_chunk_list"),
        lambda items, *_: items[:1], "parts across saved ones, as with another world size"),
    FaultRow("read-left-out", "one read of a checkpoint is left out", "test_distributed_checkpoint",
        given(DefaultLoadPlanner, "commit_tensor"), lambda self, item, tensor: tensor.detach().zero_(),
        counted("every seventh tensor", lambda count: count.every(7)) & _LAST),
    FaultRow("scalars-not-loaded", "0-dim tensors keep their values when a checkpoint is loaded",
        "test_distributed_checkpoint", returned(DefaultLoadPlanner, "resolve_tensor"),
        lambda tensor, *_: tensor.clone(), When("tensors without dimensions", lambda tensor, *args: not tensor.dim())),
    FaultRow("lacking-passed-over", "missing entries of a checkpoint are ignored", "test_distributed_checkpoint",
        around(default_planner, "create_default_local_load_plan"),
        lambda real, state, metadata, *_: real(state, metadata, False), "a tensor that was not saved"),
    FaultRow("full-state-left-on-the-device", "cpu_offload leaves a full state dict on the device", "test_state_dict",
        around(state_dicts, "_gather_state_dict"),
        lambda real, *args, cpu_offload=False, **kwargs: real(*args, **kwargs)),
    FaultRow("saved-in-the-order-of-memory", "a transposed matrix is saved in the order of its memory",
        "test_distributed_checkpoint", returned(DefaultSavePlanner, "resolve_data"),
        lambda tensor, *_: tensor.t().reshape(tensor.shape), When("matrices that are transposed",
            lambda tensor, *_: isinstance(tensor, torch.Tensor) and tensor.dim() == 2
            and not tensor.is_contiguous() and tensor.t().is_contiguous())),
    # Entries of tensors that are not sharded are not pairs.
    FaultRow("full-state-cut-wrongly", "a full state dict distributed by rank 0 is cut at the wrong rows",
        "test_state_dict", given(utils, "_distribute_tensors"), lambda local, keys, *_, **__: local.update({
            key: (local[key][0], local[key][1].roll(1, 0)) for key in keys
            if isinstance(local[key], tuple) and local[key][1].dim() == 2}),
        When("the last rank, tensors of two dimensions", lambda *args, **kwargs: is_last())),
    FaultRow("momentum-not-given-out", "the momentum is not distributed with the parameters", "test_state_dict",
        returned(torch.optim.Optimizer, "load_state_dict"),
        lambda result, self, state_dict: [entry.update(momentum_buffer=entry["momentum_buffer"] * 0)
            for entry in self.state.values() if entry.get("momentum_buffer") is not None]),
    FaultRow("large-parts-read-short", "tensors read from a checkpoint lack the last element",
        "test_distributed_checkpoint", given(DefaultLoadPlanner, "commit_tensor"),
        lambda self, item, tensor: tensor.detach()[-1:].zero_(),
        When("parts above 16 Ki elements", lambda self, item, tensor: tensor.numel() > _LARGE)),
    FaultRow("flat-rates-of-the-first-group",
        "all parameter groups of a flat optimizer state have the learning rate of the first",
        "test_distributed_checkpoint", _FLAT, lambda flat, *_: {**flat, "param_groups": [
            {**group, "lr": flat["param_groups"][0]["lr"]} for group in flat["param_groups"]]}, _SEVERAL_GROUPS),
)  # fmt: skip
