"""Planted faults of communication hooks under DistributedDataParallel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.suite.common.faults.breaking import DDP, replaced_method
from mgpu_check.suite.common.faults.conditions import is_last
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced


def _with_first_off(values: torch.Tensor) -> torch.Tensor:
    """Add 1 to the first element, in place."""
    values.view(-1)[:1] += 1
    return values


# Hooks


@fault(
    "a communication hook is not called for buckets after the first",
    "test_averaging_hooks",
    condition="buckets beyond the first",
)
def hook_for_the_first_bucket() -> Iterator[None]:
    def register(
        real: Callable[..., Any], self: DistributedDataParallel, state: object, hook: Callable[..., Any]
    ) -> None:
        def first_only(state: object, bucket: Any) -> Any:
            if bucket.index() == 0:
                return hook(state, bucket)
            return default_hooks.allreduce_hook(self.process_group, bucket)

        # DDP compares annotations with its own types, and does not resolve string annotations.
        first_only.__annotations__.clear()
        real(self, state, first_only)

    with replaced_method(DDP, "register_comm_hook", register):
        yield


@fault(
    "the last rank adds 1 to an element of a communication hook's result",
    "test_averaging_hooks",
    condition="one rank, one of three buckets",
)
def hook_with_an_offset() -> Iterator[None]:
    def register(
        real: Callable[..., Any], self: DistributedDataParallel, state: object, hook: Callable[..., Any]
    ) -> None:
        def shifted(state: object, bucket: Any) -> Any:
            future = hook(state, bucket)
            if not is_last() or bucket.index() % 3 != 1:
                return future
            return future.then(
                lambda done: _with_first_off(
                    done.value() if isinstance(done.value(), torch.Tensor) else done.value()[0]
                )
            )

        shifted.__annotations__.clear()
        real(self, state, shifted)

    with replaced_method(DDP, "register_comm_hook", register):
        yield


def _compressing_to(wrong: Mapping[torch.dtype, torch.dtype]) -> Iterator[None]:
    def compress(real: Callable[..., Any], dtype: torch.dtype, *args: Any) -> Any:
        return real(wrong.get(dtype, dtype), *args)

    with replaced_method(default_hooks, "_compress_hook", compress):
        yield


@fault("fp16_compress_hook compresses to bfloat16", "test_compressing_hooks", condition="float16 only")
def float16_hook_in_bfloat16() -> Iterator[None]:
    yield from _compressing_to({torch.float16: torch.bfloat16})


@fault("bf16_compress_hook does not compress", "test_compressing_hooks", condition="bfloat16 only")
def bfloat16_hook_in_float32() -> Iterator[None]:
    yield from _compressing_to({torch.bfloat16: torch.float32})


@fault(
    "a hook wrapped for compression gets uncompressed gradients",
    "test_compressing_hooks",
    condition="bf16_compress_wrapper",
)
def wrapped_hook_in_float32() -> Iterator[None]:
    def wrap(_: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
        return hook

    with replaced_method(default_hooks, "bf16_compress_wrapper", wrap):
        yield


@fault(
    "compressed gradients are divided after the sum instead of before",
    "test_compressing_hooks",
    condition="sums that the dtype does not hold",
    least_gpus=2,
)
def divided_after_the_sum() -> Iterator[None]:
    def compress(real: Callable[..., Any], dtype: torch.dtype, group: Any, bucket: Any) -> Any:
        buffer, size = bucket.buffer(), dist.get_world_size(group)
        done = dist.all_reduce(buffer.to(dtype), group=group, async_op=True).get_future()
        return done.then(lambda added: buffer.copy_(added.value()[0] / size))

    with replaced_method(default_hooks, "_compress_hook", compress):
        yield


@fault(
    "the last rank keeps the result of a communication hook in the third step for all later steps",
    "test_averaging_hooks",
    condition="from the fourth step on, one rank",
)
def third_result_kept() -> Iterator[None]:
    def register(
        real: Callable[..., Any], self: DistributedDataParallel, state: object, hook: Callable[..., Any]
    ) -> None:
        held: dict[int, list[torch.Tensor]] = {}

        def keeping(state: object, bucket: Any) -> Any:
            results = held.setdefault(bucket.index(), [])
            return hook(state, bucket).then(lambda done: _third_at_most(results, done.value()))

        keeping.__annotations__.clear()
        real(self, state, keeping)

    with replaced_method(DDP, "register_comm_hook", register):
        yield


def _third_at_most(results: list[torch.Tensor], value: Any) -> torch.Tensor:
    """Return the result of a hook; on the last rank, replace all results after the third by the third."""
    result: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]
    if is_last() and len(results) == 3:
        return result.copy_(results[-1])
    results.append(result.clone())
    return result


@fault(
    "PowerSGD's result is kept in bfloat16 on the last rank",
    "test_low_rank_hook",
    condition="one rank, from the second step on",
)
def low_rank_result_narrowed() -> Iterator[None]:
    real = powerSGD_hook.powerSGD_hook

    @functools.wraps(real)
    def hook(state: Any, bucket: Any) -> Any:
        compressing = state.iter >= state.start_powerSGD_iter
        future = real(state, bucket)
        if not compressing or not is_last():
            return future
        return future.then(lambda done: done.value().to(torch.bfloat16).to(torch.float32))

    with replaced(powerSGD_hook, "powerSGD_hook", hook):
        yield


@fault(
    "a compressing hook in a group divides by the number of all ranks",
    "test_hooks_in_groups",
    condition="hooks with a group of some ranks",
    least_gpus=2,
)
def compressed_mean_over_all() -> Iterator[None]:
    def compress(real: Callable[..., Any], dtype: torch.dtype, group: Any, bucket: Any) -> Any:
        size = dist.get_world_size(group)
        return real(dtype, group, bucket).then(lambda done: done.value().mul_(size / dist.get_world_size()))

    with replaced_method(default_hooks, "_compress_hook", compress):
        yield


@fault(
    "PowerSGD loses the error feedback of buckets after the first", "test_low_rank_hook", condition="several buckets"
)
def left_out_of_later_buckets() -> Iterator[None]:
    def compress(real: Callable[..., Any], state: Any, bucket: Any) -> Any:
        future = real(state, bucket)
        return future if bucket.index() == 0 else future.then(functools.partial(_forget, state, bucket.index()))

    with replaced_method(powerSGD_hook, "powerSGD_hook", compress):
        yield


def _forget(state: Any, bucket: int, done: Any) -> torch.Tensor:
    result: torch.Tensor = done.value()
    if bucket in state.error_dict:
        state.error_dict[bucket].zero_()
    return result


@fault(
    "GradBucket.gradients returns the gradients in reverse order",
    "test_averaging_hooks",
    "test_low_rank_hook",
    condition="buckets of several parameters",
)
def gradients_told_in_reverse() -> Iterator[None]:
    def gradients(real: Callable[..., Any], self: Any) -> list[torch.Tensor]:
        return [*reversed(real(self))]

    with replaced_method(c10d.GradBucket, "gradients", gradients):
        yield


@fault(
    "PowerSGD adds its error feedback to the next gradient twice",
    "test_low_rank_hook",
    condition="from the second compressed step on",
)
def left_out_added_twice() -> Iterator[None]:
    def compress(real: Callable[..., Any], state: Any, bucket: Any) -> Any:
        for kept in state.error_dict.values():
            kept.mul_(2)
        return real(state, bucket)

    with replaced_method(powerSGD_hook, "powerSGD_hook", compress):
        yield


@fault(
    "batched PowerSGD compresses from its first step on",
    "test_low_rank_hook",
    condition="batched_powerSGD_hook, steps before start_powerSGD_iter",
)
def batch_compressed_too_soon() -> Iterator[None]:
    def compress(real: Callable[..., Any], state: Any, bucket: Any) -> Any:
        state.iter = max(state.iter, state.start_powerSGD_iter)
        return real(state, bucket)

    with replaced_method(powerSGD_hook, "batched_powerSGD_hook", compress):
        yield


@fault("batched PowerSGD keeps half of its error feedback", "test_low_rank_hook", condition="batched_powerSGD_hook")
def left_out_of_a_batch() -> Iterator[None]:
    def orthogonalize(real: Callable[..., Any], matrices: torch.Tensor, epsilon: float = 0) -> None:
        # Without this the hook does not compress at all: see the known defects.
        real(matrices if matrices.dim() == 3 else matrices[None], epsilon)

    def compress(real: Callable[..., Any], state: Any, bucket: Any) -> Any:
        return real(state, bucket).then(functools.partial(_halve, state, bucket.index()))

    with (
        replaced_method(powerSGD_hook, "_orthogonalize", orthogonalize),
        replaced_method(powerSGD_hook, "batched_powerSGD_hook", compress),
    ):
        yield


def _halve(state: Any, bucket: int, done: Any) -> torch.Tensor:
    result: torch.Tensor = done.value()
    if bucket in state.error_dict:
        state.error_dict[bucket].div_(2)
    return result


@fault(
    "post_localSGD_hook counts buckets as steps and becomes local too early",
    "test_hooks_in_groups",
    condition="several buckets",
    least_gpus=2,
)
def local_too_soon() -> Iterator[None]:
    def count(real: Callable[..., Any], self: Any, bucket: Any) -> None:
        self.iter += 1

    with replaced_method(post_localSGD_hook.PostLocalSGDState, "maybe_increase_iter", count):
        yield


@fault(
    "post_localSGD_hook averages over all ranks in local steps, too",
    "test_hooks_in_groups",
    condition="local steps",
    least_gpus=2,
)
def never_local() -> Iterator[None]:
    def average(real: Callable[..., Any], state: Any, bucket: Any) -> Any:
        if state.iter >= state.start_localSGD_iter and state.post_local_gradient_allreduce:
            return default_hooks.allreduce_hook(state.process_group, bucket)
        return real(state, bucket)

    with replaced_method(post_localSGD_hook, "post_localSGD_hook", average):
        yield


@fault(
    "post_localSGD_hook averages over the group in steps without a local average",
    "test_hooks_in_groups",
    condition="post_local_gradient_allreduce=False",
    least_gpus=2,
)
def never_alone() -> Iterator[None]:
    def average(real: Callable[..., Any], state: Any, bucket: Any) -> Any:
        if state.iter >= state.start_localSGD_iter:
            return default_hooks.allreduce_hook(state.subgroup, bucket)
        return real(state, bucket)

    with replaced_method(post_localSGD_hook, "post_localSGD_hook", average):
        yield
