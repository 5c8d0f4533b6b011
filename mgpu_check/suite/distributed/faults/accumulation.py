"""Planted faults of accumulation, of uneven inputs, and of hooks of gradients under DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mgpu_check.suite.common.faults.breaking import DDP, around, given, optimized
from mgpu_check.suite.common.faults.conditions import LAST_RANK, keyword
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, fault, register
from mgpu_check.suite.common.faults.when import When

accumulation = caught_by("test_accumulation")

_TO_ZERO = When(
    "zero_grad(set_to_none=False), gradient_as_bucket_view", lambda real, self, set_to_none=True: not set_to_none
)


@accumulation("zero_grad(set_to_none=False) keeps the gradients of the last rank",
    around(torch.optim.Optimizer, "zero_grad"), _TO_ZERO & LAST_RANK)  # fmt: skip
def views_not_set_to_zero(real: Any, self: torch.optim.Optimizer, set_to_none: bool) -> None:
    held = [parameter.grad for parameter in optimized(self)]
    views = [(view, view.clone()) for view in held if view is not None and view._is_view()]
    real(self, set_to_none)
    for view, value in views:
        view.copy_(value)


@accumulation("the last rank loses gradients accumulated within no_sync", given(DDP, "forward"), LAST_RANK)
def accumulated_forgotten(self: DDP, *args: Any, **kwargs: Any) -> None:
    for parameter in self.module.parameters() if self.require_backward_grad_sync else ():
        if parameter.grad is not None:
            parameter.grad.zero_()


@contextlib.contextmanager
def _turned_off_within(self: DDP, restored: bool | None = None) -> Iterator[None]:
    """Hold gradients back; restore the mode of before, or `restored`, unless an exception leaves the context."""
    before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
    yield
    self.require_backward_grad_sync = before if restored is None else restored


def _kept(values_of: Callable[[nn.Module], Iterator[torch.Tensor]]) -> contextlib.AbstractContextManager[None]:
    """Make ranks that joined early keep the values `values_of` of their own model at the end of ``join``."""

    def sync(real: Any, self: DDP, is_last_joiner: bool) -> None:
        held = [] if is_last_joiner else [(value, value.detach().clone()) for value in values_of(self.module)]
        real(self, is_last_joiner)
        with torch.no_grad():
            for value, before in held:
                value.copy_(before)

    return around(DDP, "_sync_final_model")(sync)


@fault("a full backward hook is called twice for the second step", "test_gradient_hooks",
       by=around(nn.Module, "register_full_backward_hook"), when="second step")  # fmt: skip
def backward_hook_called_twice(real: Any, self: nn.Module, hook: Any, *args: Any, **kwargs: Any) -> Any:
    calls = iter(range(1 << 30))
    return real(self, lambda *given: [hook(*given) for _ in range(1 + (next(calls) == 1))][-1], *args, **kwargs)


register(
    __name__,
    FaultRow("no-sync-ignored", "no_sync does not hold gradients back", "test_accumulation", around(DDP, "no_sync"),
        lambda *_: contextlib.nullcontext()),
    FaultRow("inner-no-sync-ends-both", "the end of an inner no_sync ends the outer one", "test_accumulation",
        around(DDP, "no_sync"), lambda real, self: _turned_off_within(self, restored=True), "no_sync within no_sync"),
    FaultRow("no-sync-goes-on", "no_sync does not end when an exception leaves it", "test_accumulation",
        around(DDP, "no_sync"), lambda real, self: _turned_off_within(self), "an exception within no_sync"),
    FaultRow("join-divides-by-all", "join divides by the number of all ranks in any case", "test_uneven_inputs",
        around(DDP, "join"),
        lambda real, self, **options: real(self, **(options | {"divide_by_initial_world_size": True})),
        keyword("divide_by_initial_world_size", False)),
    FaultRow("join-does-not-throw", "join ignores throw_on_early_termination", "test_uneven_inputs",
        around(DDP, "join"),
        lambda real, self, **options: real(self, **(options | {"throw_on_early_termination": False})),
        keyword("throw_on_early_termination", True), least_gpus=2),
    FaultRow("join-ends-with-the-last-rank",
        "join ends with the model of the last rank instead of the one that trained longest", "test_uneven_inputs",
        around(DDP, "_find_common_rank"), lambda real, self, rank, *_: real(self, rank, True),
        "the last rank runs out of batches before another", least_gpus=2),
    FaultRow("joined-ranks-left-behind", "ranks that joined early do not get the final parameters",
        "test_uneven_inputs", _kept, lambda module: module.parameters()),
    FaultRow("joined-ranks-keep-buffers", "ranks that joined early get the final parameters, but not the buffers",
        "test_uneven_inputs", _kept, lambda module: module.buffers(), "buffers", least_gpus=2),
    FaultRow("parameter-hooks-dropped", "hooks registered on a parameter under DDP are not called",
        "test_gradient_hooks", around(torch.Tensor, "register_hook"),
        lambda real, self, hook: real(self, (lambda gradient: None) if isinstance(self, nn.Parameter) else hook)),
    FaultRow("delayed-gradients-summed", "delayed gradients are summed instead of averaged", "test_delayed_parameters",
        given(DDP, "_delayed_all_reduce_hook"),
        lambda self, *_: self._delay_grad_buffer.mul_(self.process_group.size()), "delay_all_reduce_named_params"),
)  # fmt: skip
