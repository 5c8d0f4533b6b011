"""Planted faults of accumulation, of uneven inputs, and of hooks of gradients under DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_check.suite.common.faults.breaking import DDP, replaced_method
from mgpu_check.suite.common.faults.conditions import is_last
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced


@fault(
    "zero_grad(set_to_none=False) keeps the gradients of the last rank",
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


@fault("no_sync does not hold gradients back", "test_accumulation")
def no_sync_ignored() -> Iterator[None]:
    with replaced(DDP, "no_sync", lambda self: contextlib.nullcontext()):
        yield


@fault("the last rank loses gradients accumulated within no_sync", "test_accumulation", condition="one rank")
def accumulated_forgotten() -> Iterator[None]:
    def forward(real_forward: Callable[..., Any], self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if is_last() and self.require_backward_grad_sync:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        return real_forward(self, *args, **kwargs)

    with replaced_method(DDP, "forward", forward):
        yield


@fault(
    "join divides by the number of all ranks in any case",
    "test_uneven_inputs",
    condition="divide_by_initial_world_size=False",
)
def join_divides_by_all() -> Iterator[None]:
    def join(real: Callable[..., Any], self: DistributedDataParallel, **options: Any) -> Any:
        return real(self, **(options | {"divide_by_initial_world_size": True}))

    with replaced_method(DDP, "join", join):
        yield


@contextlib.contextmanager
def _joined_ranks_keep(values_of: Callable[[nn.Module], Iterator[torch.Tensor]]) -> Iterator[None]:
    """Make ranks that joined early keep the values `values_of` of their own model at the end of ``join``."""

    def sync(real: Callable[..., Any], self: DistributedDataParallel, is_last_joiner: bool) -> None:
        held = [value.detach().clone() for value in values_of(self.module)]
        real(self, is_last_joiner)
        if not is_last_joiner:
            with torch.no_grad():
                for value, before in zip(values_of(self.module), held, strict=True):
                    value.copy_(before)

    with replaced_method(DDP, "_sync_final_model", sync):
        yield


@fault("ranks that joined early do not get the final parameters", "test_uneven_inputs")
def joined_ranks_left_behind() -> Iterator[None]:
    with _joined_ranks_keep(nn.Module.parameters):
        yield


@fault(
    "join ends with the model of the last rank instead of the one that trained longest",
    "test_uneven_inputs",
    condition="the last rank runs out of batches before another",
    least_gpus=2,
)
def join_ends_with_the_last_rank() -> Iterator[None]:
    with replaced_method(DDP, "_find_common_rank", lambda real, self, rank, cond: real(self, rank, True)):
        yield


@fault(
    "join ignores throw_on_early_termination",
    "test_uneven_inputs",
    condition="throw_on_early_termination=True",
    least_gpus=2,
)
def join_does_not_throw() -> Iterator[None]:
    def join(real: Callable[..., Any], self: DistributedDataParallel, **options: Any) -> Any:
        return real(self, **(options | {"throw_on_early_termination": False}))

    with replaced_method(DDP, "join", join):
        yield


@fault("hooks registered on a parameter under DDP are not called", "test_gradient_hooks")
def parameter_hooks_dropped() -> Iterator[None]:
    def register(real: Callable[..., Any], self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        return real(self, (lambda gradient: None) if isinstance(self, nn.Parameter) else hook)

    with replaced_method(torch.Tensor, "register_hook", register):
        yield


@fault("a full backward hook is called twice for the second step", "test_gradient_hooks", condition="second step")
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


@fault(
    "delayed gradients are summed instead of averaged",
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


@fault("the end of an inner no_sync ends the outer one", "test_accumulation", condition="no_sync within no_sync")
def inner_no_sync_ends_both() -> Iterator[None]:
    @contextlib.contextmanager
    def no_sync(self: DistributedDataParallel) -> Iterator[None]:
        self.require_backward_grad_sync = False
        yield
        self.require_backward_grad_sync = True

    with replaced(DDP, "no_sync", no_sync):
        yield


@fault(
    "ranks that joined early get the final parameters, but not the buffers",
    "test_uneven_inputs",
    condition="buffers",
    least_gpus=2,
)
def joined_ranks_keep_buffers() -> Iterator[None]:
    with _joined_ranks_keep(nn.Module.buffers):
        yield
