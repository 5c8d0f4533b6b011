"""Planted faults of SyncBatchNorm, ZeroRedundancyOptimizer and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from mgpu_check.suite.common.faults.conditions import Count, is_last, ranks_here
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced


@fault("SyncBatchNorm weighs all ranks alike", "test_sync_batchnorm", condition="different numbers of samples")
def samples_not_counted() -> Iterator[None]:
    real: Any = torch.batch_norm_gather_stats_with_counts

    def gather(*args: Any) -> Any:
        *others, counts = args
        return real(*others, torch.full_like(counts, float(counts.mean())))

    with replaced(torch, "batch_norm_gather_stats_with_counts", gather):
        yield


@fault(
    "SyncBatchNorm of a rank without samples keeps the statistics of before",
    "test_sync_batchnorm",
    condition="a rank without samples",
    least_gpus=3,
)
def statistics_of_no_samples_kept() -> Iterator[None]:
    real = nn.SyncBatchNorm.forward

    def forward(self: nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
        mean = self.get_buffer("running_mean")
        before = mean.clone()
        normed = real(self, x)
        if not x.numel():
            mean.copy_(before)
        return normed

    with replaced(nn.SyncBatchNorm, "forward", forward):
        yield


@fault("the gradients of SyncBatchNorm use sums over the own samples", "test_sync_batchnorm")
def sums_of_gradients_local() -> Iterator[None]:
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return real(tensor.clone() if tensor.is_floating_point() else tensor, *args, **kwargs)

    with replaced(dist, "all_reduce", all_reduce):
        yield


@fault(
    "SyncBatchNorm with momentum=None keeps the statistics of the last batch only",
    "test_sync_batchnorm",
    condition="momentum=None, from the second step on",
)
def cumulative_average_ignored() -> Iterator[None]:
    real = nn.SyncBatchNorm.forward

    def forward(self: nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
        if self.momentum is None and self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.zero_()
        return real(self, x)

    with replaced(nn.SyncBatchNorm, "forward", forward):
        yield


def zero_optimizer() -> Any:
    """Import and return ZeroRedundancyOptimizer."""
    # Imported here, because this import makes torch compile functions of the optimizers.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer


@fault(
    "the last rank keeps a parameter from the previous step",
    "test_zero_redundancy_optimizer",
    condition="from the second step on, on the last rank",
)
def stale_parameters_of_others() -> Iterator[None]:
    optimizer, count = zero_optimizer(), Count()
    real = optimizer.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        first = next(p for group in self.param_groups for p in group["params"])
        before = first.detach().clone()
        result = real(self, *args, **kwargs)
        if count.every(2) and is_last():
            first.detach().copy_(before)
        return result

    with replaced(optimizer, "step", step):
        yield


@fault(
    "parameters in buckets are broadcast before their optimizer step",
    "test_zero_redundancy_optimizer",
    condition="parameters_as_bucket_view",
)
def buckets_sent_too_early() -> Iterator[None]:
    optimizer = zero_optimizer()
    real = optimizer._sync_params

    def sync(self: Any) -> None:
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        real(self)
        if self.parameters_as_bucket_view and is_last():
            for p, old in zip((p for group in self.param_groups for p in group["params"]), before, strict=True):
                p.detach().copy_(old)

    with replaced(optimizer, "_sync_params", sync):
        yield


@fault(
    "the consolidated state lacks the second moments of one rank",
    "test_zero_redundancy_state",
    condition="the state of rank 0",
)
def state_put_together_in_part() -> Iterator[None]:
    optimizer = zero_optimizer()
    real = optimizer.state_dict

    def state_dict(self: Any) -> Any:
        state = real(self)
        torch.cuda.synchronize()
        entry = next(entry for entry in state["state"].values() if entry)
        entry["exp_avg_sq"] = torch.zeros_like(entry["exp_avg_sq"])
        return state

    with replaced(optimizer, "state_dict", state_dict):
        yield


@fault(
    "a loaded state has the rate of the first group in all groups",
    "test_zero_redundancy_state",
    condition="the second group of parameters",
)
def rates_of_groups_lost() -> Iterator[None]:
    optimizer = zero_optimizer()
    real = optimizer.load_state_dict

    def load(self: Any, state: Any) -> None:
        real(self, state)
        for group in (*self.param_groups, *self.optim.param_groups):
            group["lr"] = self.param_groups[0]["lr"]

    with replaced(optimizer, "load_state_dict", load):
        yield


@fault("the reduce-scatter of gradients leaves out the last rank", "test_fully_shard", condition="three ranks or more")
def last_rank_not_reduced() -> Iterator[None]:
    real = collectives.DefaultReduceScatter.__call__

    def reduce_scatter(
        self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kw: Any
    ) -> Any:
        if is_last() and ranks_here() > 2:
            input_tensor = torch.zeros_like(input_tensor)
        return real(self, output_tensor, input_tensor, *args, **kw)

    with replaced(collectives.DefaultReduceScatter, "__call__", reduce_scatter):
        yield


@fault(
    "the all-gather of parameters returns a stale result on one rank",
    "test_fully_shard",
    condition="every fifth call, on the last rank",
)
def stale_parameters_gathered() -> Iterator[None]:
    real, count = collectives.DefaultAllGather.__call__, Count()
    last: dict[int, torch.Tensor] = {}

    def all_gather(self: Any, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = real(self, output_tensor, *args, **kwargs)
        if not is_last():
            return work
        if work is not None:
            work.wait()
        old = last.get(output_tensor.numel())
        last[output_tensor.numel()] = output_tensor.clone()
        if count.every(5):
            output_tensor.copy_(output_tensor.flip(0) if old is None else old + 1)
        return work

    with replaced(collectives.DefaultAllGather, "__call__", all_gather):
        yield


@fault(
    "the last micro-batch overwrites accumulated gradients",
    "test_fully_shard",
    condition="steps of several micro-batches, meshes of one dimension",
)
def accumulated_gradients_lost() -> Iterator[None]:
    real_accumulate = fsdp_param.FSDPParam.accumulate_unsharded_grad_if_needed
    real_keep = fsdp_param.FSDPParam.to_accumulated_grad_if_needed

    def accumulate(self: Any) -> None:
        if self.mesh_info.mesh.ndim > 1:
            real_accumulate(self)
        elif self.unsharded_accumulated_grad is not None and self.unsharded_param.grad is not None:
            self.unsharded_accumulated_grad = self.unsharded_param.grad
            self.unsharded_param.grad = None

    def keep(self: Any) -> None:
        if self.mesh_info.mesh.ndim > 1:
            real_keep(self)
        elif self._unsharded_param.grad is not None:
            grad = self._unsharded_param.grad
            self._unsharded_param.grad = None
            self.unsharded_accumulated_grad = grad

    with (
        replaced(fsdp_param.FSDPParam, "accumulate_unsharded_grad_if_needed", accumulate),
        replaced(fsdp_param.FSDPParam, "to_accumulated_grad_if_needed", keep),
    ):
        yield


@fault("gradients are not reduced among replicas", "test_hybrid_shard", condition="meshes of two dimensions")
def repeats_not_reduced() -> Iterator[None]:
    real, real_all_reduce = collectives.foreach_reduce, dist.all_reduce
    reducing: list[bool] = []

    def reduce(*args: Any, **kwargs: Any) -> Any:
        reducing.append(True)
        try:
            return real(*args, **kwargs)
        finally:
            reducing.pop()

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return real_all_reduce(tensor.clone() if reducing else tensor, *args, **kwargs)

    with replaced(fsdp_param_group, "foreach_reduce", reduce), replaced(dist, "all_reduce", all_reduce):
        yield


@fault(
    "parameters are kept in the precision of the computation",
    "test_mixed_precision",
    condition="policies of float16 only",
)
def parameters_kept_in_low_precision() -> Iterator[None]:
    real, real_step = fsdp_param.FSDPParam.init_dtype_attrs, torch.optim.SGD.step
    low: list[torch.dtype | None] = [None]

    def init(self: Any, policy: Any) -> None:
        real(self, policy)
        low[0] = self.param_dtype

    def step(self: torch.optim.SGD, *args: Any, **kwargs: Any) -> Any:
        result = real_step(self, *args, **kwargs)
        for value in (value for group in self.param_groups for value in group["params"]):
            if low[0] == torch.float16:
                value.detach().copy_(value.detach().half())
        return result

    with replaced(fsdp_param.FSDPParam, "init_dtype_attrs", init), replaced(torch.optim.SGD, "step", step):
        yield


@fault(
    "gradients are reduced in the precision of the computation",
    "test_mixed_precision",
    condition="policies that reduce in another precision",
)
def reduced_in_low_precision() -> Iterator[None]:
    real = fsdp_param.FSDPParam.init_dtype_attrs

    def init(self: Any, policy: Any) -> None:
        real(self, policy)
        self.reduce_dtype = None

    with replaced(fsdp_param.FSDPParam, "init_dtype_attrs", init):
        yield


@fault("each rank clips by the norm of its own parts", "test_clipping")
def norm_of_own_parts() -> Iterator[None]:
    real = clip_grad._get_total_norm

    def total(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return real([t.to_local() if isinstance(t, DTensor) else t for t in tensors], *args, **kwargs)

    with replaced(clip_grad, "_get_total_norm", total):
        yield


@fault("infinity norms of parts are added up instead of their maximum", "test_clipping", condition="the norm inf")
def largest_of_parts_added_up() -> Iterator[None]:
    real = clip_grad._get_total_norm

    def total(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = list(tensors)
        norm: torch.Tensor = real(tensors, norm_type, *args, **kwargs)
        if norm_type != float("inf"):
            return norm
        ranks: int = tensors[0].device_mesh.size()
        return norm * ranks

    with replaced(clip_grad, "_get_total_norm", total):
        yield
