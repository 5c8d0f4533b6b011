"""Planted faults of hooks, of accumulation and of uneven inputs under DistributedDataParallel."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.faults.breaking import DDP, ddp_fault, replaced_method
from mgpu_check.faults.conditions import is_last
from mgpu_check.torch_hooks.patches import replaced


def _with_first_off(values: torch.Tensor) -> torch.Tensor:
    """Add 1 to the first element, in place."""
    values.view(-1)[:1] += 1
    return values


# Hooks


@ddp_fault(
    "a communication hook is not asked for buckets beyond the first",
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

        # DDP compares annotations with its own types, and does not resolve those that are strings.
        first_only.__annotations__.clear()
        real(self, state, first_only)

    with replaced_method(DDP, "register_comm_hook", register):
        yield


@ddp_fault(
    "what a communication hook returns is added to once more on the last rank",
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


@ddp_fault("fp16_compress_hook compresses to bfloat16", "test_compressing_hooks", condition="float16 only")
def float16_hook_in_bfloat16() -> Iterator[None]:
    yield from _compressing_to({torch.float16: torch.bfloat16})


@ddp_fault("bf16_compress_hook does not compress", "test_compressing_hooks", condition="bfloat16 only")
def bfloat16_hook_in_float32() -> Iterator[None]:
    yield from _compressing_to({torch.bfloat16: torch.float32})


@ddp_fault(
    "a hook that is wrapped to compress is given what is not compressed",
    "test_compressing_hooks",
    condition="bf16_compress_wrapper",
)
def wrapped_hook_in_float32() -> Iterator[None]:
    def wrap(_: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
        return hook

    with replaced_method(default_hooks, "bf16_compress_wrapper", wrap):
        yield


@ddp_fault(
    "compressed gradients are divided after they were added up",
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


@ddp_fault(
    "the last rank goes on with what a communication hook has returned in the third step",
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
    """Return the result of a hook, or on the last rank the third one in place of each that follows."""
    result: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]
    if is_last() and len(results) == 3:
        return result.copy_(results[-1])
    results.append(result.clone())
    return result


@ddp_fault(
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


@ddp_fault(
    "a compressing hook divides by the number of all ranks in a group, too",
    "test_hooks_in_groups",
    condition="hooks that are given a group of some of the ranks",
    least_gpus=2,
)
def compressed_mean_over_all() -> Iterator[None]:
    def compress(real: Callable[..., Any], dtype: torch.dtype, group: Any, bucket: Any) -> Any:
        size = dist.get_world_size(group)
        return real(dtype, group, bucket).then(lambda done: done.value().mul_(size / dist.get_world_size()))

    with replaced_method(default_hooks, "_compress_hook", compress):
        yield


@ddp_fault(
    "PowerSGD does not keep what it has left out of other buckets than the first",
    "test_low_rank_hook",
    condition="several buckets",
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


# Accumulation, uneven inputs, hooks of gradients


@ddp_fault(
    "gradients that are to be zero keep their values on the last rank",
    "test_accumulation",
    condition="zero_grad(set_to_none=False), gradient_as_bucket_view, one rank",
)
def views_not_set_to_zero() -> Iterator[None]:
    def zero_grad(real: Callable[..., Any], self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        held = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        views = [gradient for gradient in held if gradient is not None and gradient._is_view()]
        before = [gradient.clone() for gradient in views]
        real(self, set_to_none)
        if not set_to_none and is_last():
            for gradient, value in zip(views, before, strict=True):
                gradient.copy_(value)

    with replaced_method(torch.optim.Optimizer, "zero_grad", zero_grad):
        yield


@ddp_fault("no_sync does not hold gradients back", "test_accumulation")
def no_sync_ignored() -> Iterator[None]:
    with replaced(DDP, "no_sync", lambda self: contextlib.nullcontext()):
        yield


@ddp_fault("the last rank forgets what it accumulated within no_sync", "test_accumulation", condition="one rank")
def accumulated_forgotten() -> Iterator[None]:
    def forward(real_forward: Callable[..., Any], self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if is_last() and self.require_backward_grad_sync:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        return real_forward(self, *args, **kwargs)

    with replaced_method(DDP, "forward", forward):
        yield


@ddp_fault(
    "join divides by the number of all ranks in any case",
    "test_uneven_inputs",
    condition="divide_by_initial_world_size=False",
)
def join_divides_by_all() -> Iterator[None]:
    def join(real: Callable[..., Any], self: DistributedDataParallel, **options: Any) -> Any:
        return real(self, **(options | {"divide_by_initial_world_size": True}))

    with replaced_method(DDP, "join", join):
        yield


@ddp_fault("ranks that have joined are not sent the model of those that trained on", "test_uneven_inputs")
def joined_ranks_left_behind() -> Iterator[None]:
    def sync(real: Callable[..., Any], self: DistributedDataParallel, is_last_joiner: bool) -> None:
        held = [parameter.detach().clone() for parameter in self.module.parameters()]
        real(self, is_last_joiner)
        if not is_last_joiner:
            with torch.no_grad():
                for parameter, before in zip(self.module.parameters(), held, strict=True):
                    parameter.copy_(before)

    with replaced_method(DDP, "_sync_final_model", sync):
        yield


@ddp_fault(
    "join ends with the model of the last rank, whoever has trained longest",
    "test_uneven_inputs",
    condition="the last rank runs out of batches before another",
    least_gpus=2,
)
def join_ends_with_the_last_rank() -> Iterator[None]:
    with replaced_method(DDP, "_find_common_rank", lambda real, self, rank, cond: real(self, rank, True)):
        yield


@ddp_fault(
    "join goes on where it is to end with the first rank that has no batch left",
    "test_uneven_inputs",
    condition="throw_on_early_termination=True",
    least_gpus=2,
)
def join_does_not_throw() -> Iterator[None]:
    def join(real: Callable[..., Any], self: DistributedDataParallel, **options: Any) -> Any:
        return real(self, **(options | {"throw_on_early_termination": False}))

    with replaced_method(DDP, "join", join):
        yield


@ddp_fault("hooks that a parameter is given under DDP are not called", "test_gradient_hooks")
def parameter_hooks_dropped() -> Iterator[None]:
    def register(real: Callable[..., Any], self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        return real(self, (lambda gradient: None) if isinstance(self, nn.Parameter) else hook)

    with replaced_method(torch.Tensor, "register_hook", register):
        yield


@ddp_fault("a full backward hook is called twice for the second step", "test_gradient_hooks", condition="second step")
def backward_hook_called_twice() -> Iterator[None]:
    def register(real: Callable[..., Any], self: nn.Module, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls = iter(range(1 << 30))

        def twice(*given: Any) -> Any:
            if next(calls) == 1:
                hook(*given)
            return hook(*given)

        return real(self, twice, *args, **kwargs)

    with replaced_method(nn.Module, "register_full_backward_hook", register):
        yield


@ddp_fault(
    "delayed gradients are added up and not averaged",
    "test_delayed_parameters",
    condition="delay_all_reduce_named_params",
)
def delayed_gradients_summed() -> Iterator[None]:
    def summed(real: Callable[..., Any], self: DistributedDataParallel, gradient: torch.Tensor) -> Any:
        buffer: Any = self._delay_grad_buffer
        buffer.mul_(self.process_group.size())
        return real(self, gradient)

    with replaced_method(DDP, "_delayed_all_reduce_hook", summed):
        yield


@ddp_fault(
    "a communication hook is told the gradients of a bucket in the order of another",
    "test_averaging_hooks",
    "test_low_rank_hook",
    condition="buckets of several parameters",
)
def gradients_told_in_reverse() -> Iterator[None]:
    def gradients(real: Callable[..., Any], self: Any) -> list[torch.Tensor]:
        return [*reversed(real(self))]

    with replaced_method(c10d.GradBucket, "gradients", gradients):
        yield


@ddp_fault(
    "PowerSGD adds what it has left out to the next gradient twice",
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


@ddp_fault("the end of a no_sync ends the one around it", "test_accumulation", condition="no_sync within no_sync")
def inner_no_sync_ends_both() -> Iterator[None]:
    @contextlib.contextmanager
    def no_sync(self: DistributedDataParallel) -> Iterator[None]:
        self.require_backward_grad_sync = False
        yield
        self.require_backward_grad_sync = True

    with replaced(DDP, "no_sync", no_sync):
        yield
