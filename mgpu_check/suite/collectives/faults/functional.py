"""Planted faults of functional, differentiable and coalesced collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed.nn import functional as differentiable

from mgpu_check.suite.collectives.faults.planting import Seen, around
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced

_FUNCTIONAL, _GRADIENTS, _COALESCED = (
    "test_functional_collectives", "test_differentiable_collectives", "test_coalesced_collectives",
)  # fmt: skip


@fault("all_gather_tensor joins along the first dimension", _FUNCTIONAL, condition="dimension 1")
def functional_dimension_ignored() -> Iterator[None]:
    real = functional.all_gather_tensor

    def gather(self: torch.Tensor, gather_dim: int, *args: Any, **kwargs: Any) -> Any:
        whole = real(self, 0, *args, **kwargs)
        return whole.reshape(self.shape[0], -1) if gather_dim else whole

    with replaced(functional, "all_gather_tensor", gather):
        yield


@fault("a functional all_reduce changes its input", _FUNCTIONAL, condition="int64")
def input_changed() -> Iterator[None]:
    real = functional.all_reduce

    def all_reduce(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        total = real(self, *args, **kwargs)
        if self.dtype is torch.int64 and dist.get_world_size() > 1:
            self.copy_(functional.wait_tensor(total))
        return total

    with replaced(functional, "all_reduce", all_reduce):
        yield


@fault(
    "reduce_scatter_tensor gives the last rank the part of the first", _FUNCTIONAL, condition="dimension 1, one rank"
)
def part_of_another() -> Iterator[None]:
    real = functional.reduce_scatter_tensor

    def scatter(self: torch.Tensor, op: str, dim: int, *args: Any, **kwargs: Any) -> Any:
        given = self
        if dim == 1:
            parts = self.chunk(dist.get_world_size(), 1)
            given = torch.cat([*parts[:-1], parts[0]], 1)
        return real(given, op, dim, *args, **kwargs)

    with replaced(functional, "reduce_scatter_tensor", scatter):
        yield


@fault("a coalesced functional reduction leaves out the last tensor", _FUNCTIONAL, condition="lists of tensors")
def last_of_a_list_not_reduced() -> Iterator[None]:
    real = functional.all_reduce_coalesced

    def all_reduce(self: list[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return [*real(self, *args, **kwargs)[:-1], self[-1].clone()]

    with replaced(functional, "all_reduce_coalesced", all_reduce):
        yield


@fault("the gradient of a differentiable reduce reaches the root alone", _GRADIENTS, condition="calls with a root")
def gradient_of_the_root_only() -> Iterator[None]:
    real = differentiable.reduce

    def reduce(tensor: torch.Tensor, dst: int, *args: Any, **kwargs: Any) -> Any:
        total = real(tensor.detach(), dst, *args, **kwargs)
        own = tensor * (dist.get_rank() == dst)
        return own + (total - own.detach())

    with replaced(differentiable, "reduce", reduce):
        yield


@fault("the gradient of an all_reduce is that of one rank", _GRADIENTS, condition="backward")
def gradient_not_reduced() -> Iterator[None]:
    real = differentiable.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        total = real(tensor.detach(), *args, **kwargs)
        return tensor + (total - tensor.detach())

    with replaced(differentiable, "all_reduce", all_reduce):
        yield


@fault("the gradient of a gather covers only the rank's own use", _GRADIENTS, condition="backward")
def gradient_of_own_use() -> Iterator[None]:
    real = functional.all_gather_tensor_autograd

    def gather(self: torch.Tensor, gather_dim: int, *args: Any, **kwargs: Any) -> Any:
        whole = functional.wait_tensor(real(self.detach(), gather_dim, *args, **kwargs))
        parts = list(whole.chunk(dist.get_world_size(), gather_dim))
        parts[dist.get_rank()] = self
        return torch.cat(parts, gather_dim)

    with replaced(functional, "all_gather_tensor_autograd", gather):
        yield


@fault("a coalesced all_reduce leaves out the last tensor", _COALESCED)
def last_not_reduced() -> Iterator[None]:
    real = dist.all_reduce_coalesced

    def all_reduce(tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return real(tensors[:-1], *args, **kwargs)

    with replaced(dist, "all_reduce_coalesced", all_reduce):
        yield


@fault("an asynchronous coalesced all_reduce doubles its first tensor", _COALESCED, condition="async")
def doubled_when_late() -> Iterator[None]:
    real = dist.all_reduce_coalesced

    def all_reduce(tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op"):
            tensors[0].add_(tensors[0])
        return real(tensors, *args, **kwargs)

    with replaced(dist, "all_reduce_coalesced", all_reduce):
        yield


@fault("a coalesced all_gather mixes up the tensors of the ranks", _COALESCED, condition="2 ranks and more")
def coalesced_ranks_mixed_up() -> Iterator[None]:
    real = dist.all_gather_coalesced

    def gather(output: list[list[torch.Tensor]], given: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return real(list(reversed(output)), given, *args, **kwargs)

    with replaced(dist, "all_gather_coalesced", gather):
        yield


@fault(
    "the source of a differentiable broadcast gets only the gradient of its own use",
    _GRADIENTS,
    condition="another source than rank 0",
)
def source_gets_its_own_gradient() -> Iterator[None]:
    real = differentiable.broadcast

    def broadcast(tensor: torch.Tensor, src: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        sent: torch.Tensor = real(tensor if src == 0 else tensor.detach(), src, *args, **kwargs)
        return sent + (tensor - tensor.detach()) * (dist.get_rank() == src) if src else sent

    with replaced(differentiable, "broadcast", broadcast):
        yield


@fault(
    "a coalescing manager swaps the inputs of two collectives",
    _COALESCED,
    condition="two of one shape, with outputs of their own",
)
def coalesced_inputs_exchanged() -> Iterator[None]:
    real = c10d._coalescing_manager

    @contextlib.contextmanager
    def manager(group: Any = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with real(group, *args, **kwargs) as managed:
            yield managed
            calls = c10d._world.pg_coalesce_state.get(group or c10d._get_default_group(), [])
            if len(calls) > 1 and calls[0].tensor.shape == calls[1].tensor.shape and calls[0].dst_tensor is not None:
                calls[0].tensor, calls[1].tensor = calls[1].tensor, calls[0].tensor

    with replaced(c10d, "_coalescing_manager", manager):
        yield


@fault(
    "outputs in one storage are filled in the order of their memory",
    "test_copies_of_every_dtype",
    condition="outputs whose memory is not in the order of the ranks",
)
def gathered_as_they_lie() -> Iterator[None]:
    real = dist.all_gather

    def gather(tensor_list: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        one = len({part.untyped_storage().data_ptr() for part in tensor_list}) == 1
        return real(sorted(tensor_list, key=torch.Tensor.storage_offset) if one else tensor_list, *args, **kwargs)

    with replaced(dist, "all_gather", gather):
        yield


@fault("falsy objects arrive as None", "test_object_collectives", condition="zeros, empty strings and containers")
def false_objects_lost() -> Iterator[None]:
    real = dist.all_gather_object

    def gather(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
        real(object_list, *args, **kwargs)
        object_list[:] = [one or None for one in object_list]

    with replaced(dist, "all_gather_object", gather):
        yield


def _is_of_some(group: Any) -> bool:
    return dist.get_world_size(group) < dist.get_world_size()


@fault(
    "the gradient of a reduce_scatter in a group is divided by the number of its members",
    _GRADIENTS,
    condition="groups of some ranks",
    least_gpus=3,
)
def group_gradient_divided() -> Iterator[None]:
    real = differentiable._Reduce_Scatter.backward

    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        found = real(ctx, *gradients)
        size = dist.get_world_size(ctx.group) if _is_of_some(ctx.group) else 1
        return tuple(one if one is None else one / size for one in found)

    with replaced(differentiable._Reduce_Scatter, "backward", staticmethod(backward)):
        yield


@fault(
    "reduce_scatter_tensor gives members of a group the parts of their ranks in the world",
    _FUNCTIONAL,
    condition="groups of some ranks",
    least_gpus=3,
)
def parts_by_rank_of_the_world() -> Iterator[None]:
    real = functional.reduce_scatter_tensor

    def scatter(self: torch.Tensor, op: str, dim: int, group: Any, *args: Any, **kwargs: Any) -> Any:
        ranks = dist.get_process_group_ranks(group)
        parts = self.chunk(len(ranks), dim)
        given = torch.cat([parts[rank % len(ranks)] for rank in ranks], dim) if _is_of_some(group) else self
        return real(given, op, dim, group, *args, **kwargs)

    with replaced(functional, "reduce_scatter_tensor", scatter):
        yield


@fault("all_reduce_coalesced reduces every fourth tensor twice", _COALESCED, condition="more than four tensors")
def fifth_coalesced_twice() -> Iterator[None]:
    real = dist.all_reduce_coalesced

    def all_reduce(tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        works = [real(tensors[max(0, start - 1) : start + 4], *args, **kwargs) for start in range(0, len(tensors), 4)]
        for work in works[:-1]:
            if work is not None:
                work.wait()
        return works[-1]

    with replaced(dist, "all_reduce_coalesced", all_reduce):
        yield


@fault(
    "an asynchronous scatter completes before the end of long parts has arrived",
    "test_asynchronous_collectives",
    condition="async, above 64 Ki elements",
)
def late_end_of_long_parts() -> Iterator[None]:
    def scatter(seen: Seen) -> Any:
        if not seen.late or seen.first.numel() <= 1 << 16:
            return seen.call()
        end = seen.first.view(-1)[1 << 16 :]
        before = end.clone()
        work = seen.finish()
        end.copy_(before)
        return work

    with around(scatter, "scatter"):
        yield
