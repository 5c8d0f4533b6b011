"""Planted faults of communication hooks under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.suite.common.faults.breaking import around, given, returned
from mgpu_check.suite.common.faults.conditions import LAST_RANK, is_last
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, fault, register
from mgpu_check.suite.common.faults.when import When
from mgpu_check.suite.distributed.faults.planting import changed, hooked, kept_by

hooks_in_groups = caught_by("test_hooks_in_groups")
low_rank_hook = caught_by("test_low_rank_hook")


def _is_local(real: object, state: Any, bucket: object) -> bool:
    return bool(state.iter >= state.start_localSGD_iter)


_COMPRESSING = around(default_hooks, "_compress_hook")
_POWER = "powerSGD_hook"
_COMPRESSED = When("from the second step on", lambda real, state, bucket: state.iter >= state.start_powerSGD_iter)
_LATER = When("buckets beyond the first", lambda hook, state, bucket, model: bucket.index() > 0)
_OF_THREE = When("one of three buckets", lambda hook, state, bucket, model: bucket.index() % 3 == 1)
_FLOAT16 = When("float16 only", lambda real, dtype, *args: dtype == torch.float16)
_BFLOAT16 = When("bfloat16 only", lambda real, dtype, *args: dtype == torch.bfloat16)
_ALONE = When("post_local_gradient_allreduce=False", _is_local)
_LOCAL_SGD = around(post_localSGD_hook, "post_localSGD_hook")


@fault("the last rank keeps the result of a communication hook in the third step for all later steps",
       "test_averaging_hooks", by=hooked, when="from the fourth step on, one rank")  # fmt: skip
def third_result_kept(hook: Any, state: object, bucket: Any, model: DistributedDataParallel) -> Any:
    results = kept_by(model).setdefault(bucket.index(), [])

    def third_at_most(result: torch.Tensor) -> None:
        if is_last() and len(results) == 3:
            result.copy_(results[-1])
        else:
            results.append(result.clone())

    return changed(hook(state, bucket), third_at_most)


@fault("compressed gradients are divided after the sum instead of before", "test_compressing_hooks", by=_COMPRESSING,
       when="sums that the dtype does not hold", least_gpus=2)  # fmt: skip
def divided_after_the_sum(real: Any, dtype: torch.dtype, group: Any, bucket: Any) -> Any:
    buffer, size = bucket.buffer(), dist.get_world_size(group)
    done = dist.all_reduce(buffer.to(dtype), group=group, async_op=True).get_future()
    return done.then(lambda added: buffer.copy_(added.value()[0] / size))


@hooks_in_groups("a compressing hook in a group divides by the number of all ranks", _COMPRESSING,
    "hooks with a group of some ranks", least_gpus=2)  # fmt: skip
def compressed_mean_over_all(real: Any, dtype: torch.dtype, group: Any, bucket: Any) -> Any:
    factor = dist.get_world_size(group) / dist.get_world_size()
    return changed(real(dtype, group, bucket), lambda mean: mean.mul_(factor))


def _feedback_times(factor: float, future: Any, state: Any, bucket: Any) -> Any:
    """Multiply the error feedback that PowerSGD keeps for a bucket, once it keeps any."""
    index = bucket.index()
    return changed(future, lambda result: state.error_dict[index].mul_(factor) if index in state.error_dict else None)


@low_rank_hook("PowerSGD without a warm start loses its error feedback", given(powerSGD_hook, _POWER),
    When("warm_start=False, from the second compressed step on",
        lambda state, bucket: not state.warm_start and bucket.index() in state.error_dict))  # fmt: skip
def left_out_of_cold_starts(state: Any, bucket: Any) -> None:
    state.error_dict[bucket.index()].zero_()


@low_rank_hook("PowerSGD adds its error feedback to the next gradient twice", given(powerSGD_hook, _POWER),
    "from the second compressed step on")  # fmt: skip
def left_out_added_twice(state: Any, bucket: Any) -> None:
    for kept in state.error_dict.values():
        kept.mul_(2)


def _orthogonalized(real: Any, matrices: torch.Tensor, epsilon: float = 0) -> None:
    real(matrices if matrices.dim() == 3 else matrices[None], epsilon)


@low_rank_hook("batched PowerSGD keeps half of its error feedback", when="batched_powerSGD_hook")
def left_out_of_a_batch() -> Iterator[None]:
    # Without this the hook does not compress at all: see the known defects.
    with (
        around(powerSGD_hook, "_orthogonalize")(_orthogonalized),
        returned(powerSGD_hook, "batched_powerSGD_hook")(partial(_feedback_times, 0.5)),
    ):
        yield


@hooks_in_groups("post_localSGD_hook counts buckets as steps and becomes local too early",
    around(post_localSGD_hook.PostLocalSGDState, "maybe_increase_iter"), "several buckets", least_gpus=2)  # fmt: skip
def local_too_soon(real: Any, self: Any, bucket: Any) -> None:
    self.iter += 1


register(
    __name__,
    FaultRow("hook-for-the-first-bucket", "a communication hook is not called for buckets after the first",
        "test_averaging_hooks", hooked,
        lambda hook, state, bucket, model: default_hooks.allreduce_hook(model.process_group, bucket), _LATER),
    FaultRow("hook-with-an-offset", "the last rank adds 1 to an element of a communication hook's result",
        "test_averaging_hooks", hooked,
        lambda hook, state, bucket, *_: changed(hook(state, bucket), lambda result: result.view(-1)[:1].add_(1)),
        LAST_RANK & _OF_THREE),
    FaultRow("columns-not-orthogonal", "PowerSGD normalizes the columns of its factor, but leaves them oblique",
        "test_low_rank_hook", around(powerSGD_hook, "_orthogonalize"),
        lambda real, matrices, *_: matrices.div_(matrices.norm(dim=-2, keepdim=True) + 1e-8),
        "matrix_approximation_rank=2"),
    FaultRow("three-columns-not-factorized", "PowerSGD does not orthogonalize factors of three columns",
        "test_low_rank_hook", around(powerSGD_hook, "_orthogonalize"), lambda *_: None,
        When("matrix_approximation_rank=3", lambda real, matrices, *_: matrices.shape[-1] > 2)),
    FaultRow("gradients-told-in-reverse", "GradBucket.gradients returns the gradients in reverse order",
        ("test_averaging_hooks", "test_low_rank_hook"), returned(c10d.GradBucket, "gradients"),
        lambda gradients, *_: gradients[::-1], "buckets of several parameters"),
    FaultRow("float16-hook-in-bfloat16", "fp16_compress_hook compresses to bfloat16", "test_compressing_hooks",
        _COMPRESSING, lambda real, dtype, *args: real(torch.bfloat16, *args), _FLOAT16),
    FaultRow("bfloat16-hook-in-float32", "bf16_compress_hook does not compress", "test_compressing_hooks", _COMPRESSING,
        lambda real, dtype, *args: real(torch.float32, *args), _BFLOAT16),
    FaultRow("wrapped-hook-in-float32", "a hook wrapped for compression gets uncompressed gradients",
        "test_compressing_hooks", around(default_hooks, "bf16_compress_wrapper"), lambda real, hook: hook,
        "bf16_compress_wrapper"),
    FaultRow("never-local", "post_localSGD_hook averages over all ranks in local steps, too", "test_hooks_in_groups",
        _LOCAL_SGD, lambda real, state, bucket: default_hooks.allreduce_hook(state.process_group, bucket),
        When("local steps", lambda *given: _is_local(*given) and given[1].post_local_gradient_allreduce), least_gpus=2),
    FaultRow("never-alone", "post_localSGD_hook averages over the group in steps without a local average",
        "test_hooks_in_groups", _LOCAL_SGD,
        lambda real, state, bucket: default_hooks.allreduce_hook(state.subgroup, bucket), _ALONE, least_gpus=2),
    FaultRow("low-rank-result-narrowed", "PowerSGD's result is kept in bfloat16 on the last rank", "test_low_rank_hook",
        around(powerSGD_hook, _POWER),
        lambda real, state, bucket:
            changed(real(state, bucket), lambda result: result.copy_(result.to(torch.bfloat16))),
        LAST_RANK & _COMPRESSED),
    FaultRow("batch-compressed-too-soon", "batched PowerSGD compresses from its first step on", "test_low_rank_hook",
        given(powerSGD_hook, "batched_powerSGD_hook"),
        lambda state, bucket: setattr(state, "iter", max(state.iter, state.start_powerSGD_iter)),
        "batched_powerSGD_hook, steps before start_powerSGD_iter"),
    FaultRow("left-out-of-later-buckets", "PowerSGD loses the error feedback of buckets after the first",
        "test_low_rank_hook", returned(powerSGD_hook, _POWER), partial(_feedback_times, 0.0),
        When("several buckets", lambda future, state, bucket: bucket.index() > 0)),
)  # fmt: skip
