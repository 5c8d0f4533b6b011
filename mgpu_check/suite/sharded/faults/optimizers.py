"""Planted faults of SyncBatchNorm and ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mgpu_check.suite.common.faults.breaking import around, given, optimized, returned
from mgpu_check.suite.common.faults.conditions import counted, is_last, keyword
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, register
from mgpu_check.suite.common.faults.when import When

sync_batchnorm = caught_by("test_sync_batchnorm")
zero_redundancy_optimizer = caught_by("test_zero_redundancy_optimizer")
zero_redundancy_state = caught_by("test_zero_redundancy_state")

_ZERO = "torch.distributed.optim:ZeroRedundancyOptimizer"
"""Imported by its faults only, because this import makes torch compile functions of the optimizers."""
_LAST = When("on the last rank", lambda *args, **kwargs: is_last())
_EMPTY = When("a rank without samples", lambda real, self, x: not x.numel())
_AS_VIEWS = keyword("parameters_as_bucket_view", True)
_VIEWS = When("parameters_as_bucket_view", lambda real, self: self.parameters_as_bucket_view and is_last())


@sync_batchnorm("SyncBatchNorm weighs all ranks alike", given(torch, "batch_norm_gather_stats_with_counts"),
    "different numbers of samples")  # fmt: skip
def samples_not_counted(*args: Any) -> tuple[Any, ...]:
    *others, counts = args
    return (*others, torch.full_like(counts, float(counts.mean())))


@sync_batchnorm("SyncBatchNorm of a rank without samples keeps the statistics of before",
    around(nn.SyncBatchNorm, "forward"), _EMPTY, least_gpus=3)  # fmt: skip
def statistics_of_no_samples_kept(real: Any, self: nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    mean = self.get_buffer("running_mean")
    before = mean.clone()
    normed: torch.Tensor = real(self, x)
    mean.copy_(before)
    return normed


@zero_redundancy_optimizer("the last rank keeps a parameter from the previous step", around(_ZERO, "step"),
    counted("from the second step on", lambda count: count.every(2)) & _LAST)  # fmt: skip
def stale_parameters_of_others(real: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    first = optimized(self)[0].detach()
    before = first.clone()
    result = real(self, *args, **kwargs)
    first.copy_(before)
    return result


@zero_redundancy_optimizer("parameters in buckets are broadcast before their optimizer step",
    around(_ZERO, "_sync_params"), _VIEWS)  # fmt: skip
def buckets_sent_too_early(real: Any, self: Any) -> None:
    before = [parameter.detach().clone() for parameter in optimized(self)]
    real(self)
    for parameter, old in zip(optimized(self), before, strict=True):
        parameter.detach().copy_(old)


@zero_redundancy_optimizer("parameters added to an optimizer later are sharded, but not broadcast",
    when="add_param_group, several ranks")  # fmt: skip
def later_group_not_sent() -> Iterator[None]:
    late: set[torch.Tensor] = set()

    def add(result: None, self: Any, param_group: dict[str, Any]) -> None:
        late.update(param_group["params"] if self.initialized else ())

    def send(real: Any, self: Any) -> None:
        kept = [(value, value.detach().clone()) for value in late.difference(optimized(self.optim))]
        real(self)
        for value, before in kept:
            value.data.copy_(before)

    with returned(_ZERO, "add_param_group")(add), around(_ZERO, "_sync_params")(send):
        yield


@zero_redundancy_state("the consolidated state lacks the second moments of one rank", returned(_ZERO, "state_dict"),
    "the state of rank 0")  # fmt: skip
def state_put_together_in_part(state: dict[str, Any], self: Any) -> None:
    torch.cuda.synchronize()
    entry = next(entry for entry in state["state"].values() if entry)
    entry["exp_avg_sq"] = torch.zeros_like(entry["exp_avg_sq"])


@zero_redundancy_state("a loaded state has the rate of the first group in all groups",
    returned(_ZERO, "load_state_dict"), "the second group of parameters")  # fmt: skip
def rates_of_groups_lost(result: None, self: Any, state: Any) -> None:
    for group in (*self.param_groups, *self.optim.param_groups):
        group["lr"] = self.param_groups[0]["lr"]


@zero_redundancy_state("of the changes of a scheduler, only the learning rate reaches the optimizers of the ranks",
    around(_ZERO, "_sync_param_groups"), "a weight decay that changes")  # fmt: skip
def rates_alone_shared(real: Any, source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    kept = [(group, group["weight_decay"]) for group in target if group.get("weight_decay") is not None]
    real(source, target)
    for group, decay in kept:
        group["weight_decay"] = decay


@zero_redundancy_state(
    "a step resets the changes of a scheduler, which a consolidation would have kept", given(_ZERO, "_local_step")
)
def changes_lost_in_step(self: Any, *args: Any, **kwargs: Any) -> None:
    self._sync_param_groups(self.optim.param_groups, self.param_groups)


@zero_redundancy_state("the first consolidated state is returned by all later calls",
    around(_ZERO, "consolidate_state_dict"), "the second consolidation")  # fmt: skip
def consolidated_once(real: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    before = self._all_state_dicts
    real(self, *args, **kwargs)
    self._all_state_dicts = before or self._all_state_dicts


def _without_decay(real: Any, self: Any, *args: Any, weight_decay: float = 0.0, **kwargs: Any) -> None:
    real(self, *args, **kwargs)


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
    FaultRow("schedule-of-the-first-group", "a scheduler changes the first parameter group only",
        "test_zero_redundancy_state", given(_ZERO, "_sync_param_groups"),
        lambda source, target: (source[:1], target[:1]), "ZeroRedundancyOptimizer, two groups"),
    FaultRow("defaults-of-views-lost", "the default weight decay is lost with parameters_as_bucket_view",
        "test_zero_redundancy_state", around(_ZERO, "__init__"), _without_decay, _AS_VIEWS),
    FaultRow("group-lost-in-conversion", "convert_sync_batchnorm ignores process_group", "test_sync_batchnorm",
        returned(nn.SyncBatchNorm, "__init__"),
        lambda result, self, *args, **kwargs: setattr(self, "process_group", None), "process_group="),
    FaultRow("conversion-thaws", "convert_sync_batchnorm unfreezes parameters", "test_sync_batchnorm",
        returned(nn.SyncBatchNorm, "convert_sync_batchnorm"), lambda made, *args: made.requires_grad_(True),
        "parameters that need no gradient"),
)  # fmt: skip
