"""The place of a rank among the axes of a mesh, and collectives along an axis that pass gradients on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Grid"]

AXES = ("dp", "fs", "cp", "ep", "tp", "pp")


class Grid:
    """The axes of the mesh of a rank; without a mesh, one axis that is the world.

    Args:
        rank: the gate's.
        only: the axis that is the world, where there is no mesh.
    """

    def __init__(self, rank: Any, only: str = "") -> None:
        self.mesh, self.world, self.device = rank.mesh, rank.size, rank.device
        self.sizes, self.places = dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 0)
        self.groups: dict[str, Any] = {}
        if rank.mesh is None:
            self.sizes[only], self.places[only] = rank.size, rank.index
        else:
            for axis in rank.mesh.mesh_dim_names:
                self.sizes[axis], self.places[axis] = rank.mesh[axis].size(), rank.mesh.get_local_rank(axis)
                self.groups[axis] = rank.mesh[axis].get_group()

    def group(self, axis: str) -> Any:
        return self.groups.get(axis) or dist.group.WORLD

    def is_last(self, axis: str) -> bool:
        """Return whether the axis has several ranks, and this is the last."""
        return self.places[axis] == self.sizes[axis] - 1 > 0

    def summed(self, tensor: torch.Tensor, axes: Iterable[str]) -> torch.Tensor:
        """All-reduce in place along each of the axes."""
        for axis in axes:
            if self.sizes[axis] > 1:
                dist.all_reduce(tensor, group=self.group(axis))
        return tensor

    def parts_of(self, tensor: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        """The chunk of this rank along an axis."""
        return tensor.chunk(self.sizes[axis], dim)[self.places[axis]].contiguous()

    def gathered(self, tensor: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        if self.sizes[axis] == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.sizes[axis])]
        dist.all_gather(parts, tensor.contiguous(), group=self.group(axis))
        return torch.cat(parts, dim)

    def neighbour(self, axis: str, by: int) -> int:
        """The global rank of the neighbour along an axis."""
        return dist.get_global_rank(self.group(axis), self.places[axis] + by)

    # With gradients

    def copy(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        """The same forward; the gradients of all ranks are added up."""
        return _Copy.apply(x, self, axis)

    def reduce(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        """The sum forward; each rank has the gradient of it already."""
        return _Reduce.apply(x, self, axis)

    def gather(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        """All chunks forward; their gradients are added up, and each rank takes its chunk of the sum."""
        return _Gather.apply(x, self, axis, dim)

    def scatter(self, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
        """This rank's chunk of the sum forward; backward the gradients of all chunks."""
        return _Scatter.apply(x, self, axis, dim)

    def exchange(self, x: torch.Tensor, axis: str, send: list[int], receive: list[int]) -> torch.Tensor:
        """All-to-all of rows."""
        return x if self.sizes[axis] == 1 else _Exchange.apply(x, self, axis, send, receive)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: Grid, axis: str) -> torch.Tensor:
        ctx.where = grid, axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        grid, axis = ctx.where
        return grid.summed(_fresh(gradient), [axis]), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: Grid, axis: str) -> torch.Tensor:
        return grid.summed(_fresh(x), [axis])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: Grid, axis: str, dim: int) -> torch.Tensor:
        ctx.where = grid, axis, dim
        return grid.gathered(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        grid, axis, dim = ctx.where
        return grid.parts_of(grid.summed(_fresh(gradient), [axis]), axis, dim), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: Grid, axis: str, dim: int) -> torch.Tensor:
        ctx.where = grid, axis, dim
        return grid.parts_of(grid.summed(_fresh(x), [axis]), axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        grid, axis, dim = ctx.where
        return grid.gathered(gradient, axis, dim), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: Grid, axis: str, send: list[int], receive: list[int]) -> torch.Tensor:
        ctx.where = grid, axis, send, receive
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=grid.group(axis))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        grid, axis, send, receive = ctx.where
        out = gradient.new_empty(sum(send), *gradient.shape[1:])
        dist.all_to_all_single(out, gradient.contiguous(), send, receive, group=grid.group(axis))
        return out, None, None, None, None


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
