"""Planted faults of functional, differentiable and coalesced collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed.nn import functional as differentiable

from mgpu_check.suite.collectives.functional import ANY_LAYOUT
from mgpu_check.suite.common.faults.breaking import around, given, returned
from mgpu_check.suite.common.faults.registry import FaultRow, fault, register
from mgpu_check.suite.common.faults.when import When

_FUNCTIONAL, _GRADIENTS, _COALESCED = (
    "test_functional_collectives", "test_differentiable_collectives", "test_coalesced_collectives",
)  # fmt: skip


def _is_of_some(group: Any) -> bool:
    return dist.get_world_size(group) < dist.get_world_size()


def _valued(value: torch.Tensor, gradient_of: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the numbers of one tensor and the gradient of another."""
    return gradient_of + (value - gradient_of.detach())


def _as_rows(own: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor]:
    return (own.t().reshape(own.shape),)


register(
    __name__,
    FaultRow("functional-dimension-ignored", "all_gather_tensor joins along the first dimension", _FUNCTIONAL,
        around(functional, "all_gather_tensor"),
        lambda real, own, dim, *args, **kwargs: real(own, 0, *args, **kwargs).reshape(own.shape[0], -1),
        When("dimension 1", lambda real, own, dim, *_, **__: dim == 1)),
    *(
        FaultRow("columns-gathered-as-rows", "all_gather_tensor reads a transposed input as if it were contiguous",
            _FUNCTIONAL, given(functional, "all_gather_tensor"), _as_rows,
            When("dimension 1, transposed", lambda own, dim, *_, **__: dim == 1 and not own.is_contiguous()))
        for _ in range(ANY_LAYOUT)
    ),
    FaultRow("columns-broadcast-as-rows", "broadcast reads a transposed input as if it were contiguous", _FUNCTIONAL,
        given(functional, "broadcast"), _as_rows,
        When("a transposed input", lambda own, *_, **__: not own.is_contiguous())),
    FaultRow("part-of-another", "reduce_scatter_tensor gives the last rank the part of the first", _FUNCTIONAL,
        given(functional, "reduce_scatter_tensor"),
        lambda own, *_, **__: (torch.cat([*(parts := own.chunk(dist.get_world_size(), 1))[:-1], parts[0]], 1),),
        When("dimension 1, one rank", lambda tensor, op, dim, *_: dim == 1)),
    FaultRow("last-of-a-list-not-reduced", "a coalesced functional reduction leaves out the last tensor", _FUNCTIONAL,
        returned(functional, "all_reduce_coalesced"), lambda totals, own, *_, **__: [*totals[:-1], own[-1].clone()],
        "lists of tensors"),
    FaultRow("gradient-of-the-root-only", "the gradient of a differentiable reduce reaches the root alone", _GRADIENTS,
        around(differentiable, "reduce"),
        lambda real, own, dst, *args, **kwargs:
            _valued(real(own.detach(), dst, *args, **kwargs), own * (dist.get_rank() == dst)), "calls with a root"),
    FaultRow("gradient-not-reduced", "the gradient of an all_reduce is that of one rank", _GRADIENTS,
        around(differentiable, "all_reduce"),
        lambda real, own, *args, **kwargs: _valued(real(own.detach(), *args, **kwargs), own), "backward"),
    FaultRow("rows-of-the-gradient-reversed", "all_gather_tensor_autograd reverses the rows of its gradient",
        _GRADIENTS, given(functional, "all_gather_tensor_autograd"),
        lambda own, *_, **__: (own.detach() + (own - own.detach()).flip(0),), "backward"),
    FaultRow("source-gets-its-own-gradient",
        "the source of a differentiable broadcast gets only the gradient of its own use", _GRADIENTS,
        around(differentiable, "broadcast"),
        lambda real, own, src, *args, **kwargs: _valued(
            real(own.detach(), src, *args, **kwargs), own * (dist.get_rank() == src)),
        When("another source than rank 0", lambda real, own, src, *_, **__: src != 0)),
    FaultRow("functional-maximum-added", "reduce_scatter_tensor adds in place of MAX", _FUNCTIONAL,
        around(functional, "reduce_scatter_tensor"),
        lambda real, own, op, *args, **kwargs: real(own, "sum", *args, **kwargs),
        When("MAX", lambda real, own, op, *_, **__: op == "max")),
    FaultRow("functional-list-added", "a coalesced functional reduce_scatter adds in place of MIN", _FUNCTIONAL,
        around(functional, "reduce_scatter_tensor_coalesced"),
        lambda real, own, op, *args, **kwargs: real(own, "sum", *args, **kwargs),
        When("MIN", lambda real, own, op, *_, **__: op == "min")),
    FaultRow("last-not-reduced", "a coalesced all_reduce leaves out the last tensor", _COALESCED,
        given(dist, "all_reduce_coalesced"), lambda tensors, *_, **__: (tensors[:-1],)),
    FaultRow("doubled-when-late", "an asynchronous coalesced all_reduce doubles its first tensor", _COALESCED,
        given(dist, "all_reduce_coalesced"), lambda tensors, *_, **__: tensors[0].mul_(2),
        When("async", lambda *_, async_op=False, **__: async_op)),
    FaultRow("coalesced-ranks-mixed-up", "a coalesced all_gather mixes up the tensors of the ranks", _COALESCED,
        given(dist, "all_gather_coalesced"), lambda output, *_, **__: (output[::-1],), "2 ranks and more"),
)  # fmt: skip


@fault("a functional all_reduce changes its input", _FUNCTIONAL, by=returned(functional, "all_reduce"),
       when=When("int64", lambda total, own, *_, **__: own.dtype is torch.int64))  # fmt: skip
def input_changed(total: Any, own: torch.Tensor, *_: Any, **__: Any) -> None:
    if dist.get_world_size() > 1:
        own.copy_(functional.wait_tensor(total))


@fault("the gradient of a gather covers only the rank's own use", _GRADIENTS,
       by=around(functional, "all_gather_tensor_autograd"), when="backward")  # fmt: skip
def gradient_of_own_use(real: Any, own: torch.Tensor, dim: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    whole = functional.wait_tensor(real(own.detach(), dim, *args, **kwargs))
    parts = list(whole.chunk(dist.get_world_size(), dim))
    parts[dist.get_rank()] = own
    return torch.cat(parts, dim)


def _coalescing(change: Callable[[Any], object]) -> AbstractContextManager[None]:
    """Plant a change of the calls that a coalescing manager has collected, before it makes them."""

    @contextlib.contextmanager
    def manage(real: Any, group: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with real(group, *args, **kwargs) as managed:
            yield managed
            change(c10d._world.pg_coalesce_state.get(group or c10d._get_default_group(), []))

    return around(c10d, "_coalescing_manager")(manage)


@fault("a coalescing manager swaps the inputs of two collectives", _COALESCED, by=_coalescing,
       when="two of one shape, with outputs of their own")  # fmt: skip
def coalesced_inputs_exchanged(calls: Any) -> None:
    if len(calls) > 1 and calls[0].tensor.shape == calls[1].tensor.shape and calls[0].dst_tensor is not None:
        calls[0].tensor, calls[1].tensor = calls[1].tensor, calls[0].tensor


@fault("a coalescing manager adds, whatever the operation", _COALESCED, by=_coalescing,
       when="reduce_scatter with MAX or MIN")  # fmt: skip
def coalesced_operation_ignored(calls: Any) -> None:
    for one in calls:
        if one.redop is not None and one.dst_tensor is not None:
            one.redop = dist.ReduceOp(dist.ReduceOp.SUM)


@fault("a coalescing manager leaves out numbers of int8", "test_options_of_collectives", by=_coalescing, when="int8")
def coalesced_bytes_left_out(calls: Any) -> None:
    for one in calls:
        if one.tensor.dtype is torch.int8:
            one.tensor.zero_()


@fault("the gradient of a reduce_scatter in a group is divided by the number of its members", _GRADIENTS,
       by=returned(differentiable._Reduce_Scatter, "backward"), when="groups of some ranks",
       least_gpus=3)  # fmt: skip
def group_gradient_divided(gradients: Any, ctx: Any, *_: Any) -> Any:
    size = dist.get_world_size(ctx.group) if _is_of_some(ctx.group) else 1
    return tuple(one if one is None else one / size for one in gradients)


@fault("reduce_scatter_tensor gives members of a group the parts of their ranks in the world", _FUNCTIONAL,
       by=given(functional, "reduce_scatter_tensor"), when="groups of some ranks", least_gpus=3)  # fmt: skip
def parts_by_rank_of_the_world(own: torch.Tensor, op: str, dim: int, group: Any, *_: Any, **__: Any) -> Any:
    ranks = dist.get_process_group_ranks(group)
    parts = own.chunk(len(ranks), dim)
    return (torch.cat([parts[rank % len(ranks)] for rank in ranks], dim),) if _is_of_some(group) else None


@fault("all_reduce_coalesced reduces every fourth tensor twice", _COALESCED, by=around(dist, "all_reduce_coalesced"),
       when="more than four tensors")  # fmt: skip
def fifth_coalesced_twice(real: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    works = [real(tensors[max(0, start - 1) : start + 4], *args, **kwargs) for start in range(0, len(tensors), 4)]
    for work in works[:-1]:
        if work is not None:
            work.wait()
    return works[-1]
