"""Planted faults of device meshes and DTensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, _random
from torch.distributed.tensor import _api as api
from torch.distributed.tensor import _redistribute as redistribute
from torch.nn import functional as F

from mgpu_check.suite.common.faults.conditions import is_last, ranks_here
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced

_LARGE = 16_384


@fault("a mesh gives the group of the other dimension", "test_device_meshes", condition="meshes of two dimensions")
def group_of_the_other_dimension() -> Iterator[None]:
    real = DeviceMesh.get_group

    def get_group(self: DeviceMesh, mesh_dim: int | str | None = None) -> Any:
        if self.ndim == 2 and isinstance(mesh_dim, str):
            names = self.mesh_dim_names or ()
            mesh_dim = names[1 - names.index(mesh_dim)]
        return real(self, mesh_dim)

    with replaced(DeviceMesh, "get_group", get_group):
        yield


@fault(
    "DeviceMesh.get_local_rank returns the global rank",
    "test_device_meshes",
    condition="the last rank of a mesh of two dimensions or more",
)
def local_rank_of_the_world() -> Iterator[None]:
    real = DeviceMesh.get_local_rank

    def get_local_rank(self: DeviceMesh, mesh_dim: int | str | None = None) -> int:
        return self.get_rank() if self.ndim > 1 and is_last() else real(self, mesh_dim)

    with replaced(DeviceMesh, "get_local_rank", get_local_rank):
        yield


@fault(
    "DeviceMesh.get_local_rank returns the coordinate instead of the rank in the group",
    "test_device_meshes",
    condition="meshes of two dimensions with unsorted ranks, dimension given by number",
    least_gpus=2,
)
def local_rank_of_the_place() -> Iterator[None]:
    real = DeviceMesh.get_local_rank

    def get_local_rank(self: DeviceMesh, mesh_dim: int | str | None = None) -> int:
        place = self.get_coordinate()
        return place[mesh_dim] if place and isinstance(mesh_dim, int) and self.ndim == 2 else real(self, mesh_dim)

    with replaced(DeviceMesh, "get_local_rank", get_local_rank):
        yield


@fault(
    "gathered tensors end with a slice of padding",
    "test_redistribution",
    condition="sizes that are no multiple of the number of ranks",
)
def padding_gathered() -> Iterator[None]:
    real = Shard._to_replicate_tensor

    def gather(self: Shard, local: torch.Tensor, mesh: DeviceMesh, dim: int, shape: Any) -> torch.Tensor:
        whole = real(self, local, mesh, dim, shape)
        if whole.shape[self.dim] % mesh.size(dim):
            whole.narrow(self.dim, whole.shape[self.dim] - 1, 1).zero_()
        return whole

    with replaced(Shard, "_to_replicate_tensor", gather):
        yield


@fault(
    "a change of the shard dimension reverses the order of elements",
    "test_redistribution",
    condition="the last of three ranks or more",
)
def exchanged_out_of_order() -> Iterator[None]:
    real = Shard._to_new_shard_dim

    def exchange(self: Shard, *args: Any) -> torch.Tensor:
        made = real(self, *args)
        return made.flip(self.dim).contiguous() if is_last() and ranks_here() > 2 else made

    with replaced(Shard, "_to_new_shard_dim", exchange):
        yield


@fault("partial maxima are added up", "test_redistribution", condition="Partial('max') only")
def maxima_added_up() -> Iterator[None]:
    real = Partial._reduce_value

    def reduce_value(self: Partial, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
        return real(Partial("sum") if self.reduce_op == "max" else self, tensor, mesh, mesh_dim)

    with replaced(Partial, "_reduce_value", reduce_value):
        yield


@fault(
    "reduce-scatter of partial sums loses the last element",
    "test_redistribution",
    condition="parts above 16 Ki elements",
)
def large_parts_reduced_short() -> Iterator[None]:
    real = Shard._reduce_shard_tensor

    def reduce_shard(self: Shard, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        made = real(self, tensor, *args)
        if made.numel() > _LARGE:
            made.view(-1)[-1] = 0
        return made

    with replaced(Shard, "_reduce_shard_tensor", reduce_shard):
        yield


@fault(
    "distribute_tensor shards each rank's own tensor instead of rank 0's",
    "test_redistribution",
    condition="ranks with different data",
)
def own_data_distributed() -> Iterator[None]:
    real = Shard._make_shard_tensor.__func__  # type: ignore[attr-defined]

    def make(cls: type[Shard], dim: int, tensor: Any, mesh: Any, mesh_dim: int, src_data_rank: int | None = 0) -> Any:
        return real(cls, dim, tensor, mesh, mesh_dim, None)

    with replaced(Shard, "_make_shard_tensor", classmethod(make)):
        yield


@fault(
    "a rank gets the shard of the next rank",
    "test_redistribution_in_two_dimensions",
    condition="the second dimension of a mesh",
)
def cut_for_the_neighbour() -> Iterator[None]:
    real = Shard._replicate_to_shard

    def cut(self: Shard, local: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, index: Any) -> torch.Tensor:
        if mesh_dim == 1:
            index = (int(index) + 1) % mesh.size(1)
        return real(self, local, mesh, mesh_dim, index)

    with replaced(Shard, "_replicate_to_shard", cut):
        yield


@fault(
    "partial sums are reduced over the first dimension of the mesh only",
    "test_redistribution_in_two_dimensions",
    condition="the second dimension of a mesh",
)
def second_dimension_not_reduced() -> Iterator[None]:
    real = Partial._reduce_value

    def reduce_value(self: Partial, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
        return tensor.clone() if mesh_dim == 1 and mesh.ndim > 1 else real(self, tensor, mesh, mesh_dim)

    with replaced(Partial, "_reduce_value", reduce_value):
        yield


@fault(
    "the gradient of redistribution is doubled on one rank",
    "test_gradients_of_redistribution",
    condition="the last rank",
)
def redistributed_gradient_doubled() -> Iterator[None]:
    real = redistribute.Redistribute.backward

    def backward(ctx: Any, grad: Any) -> Any:
        first, *others = real(ctx, grad)
        return (first * 2 if is_last() and first is not None else first, *others)

    with replaced(redistribute.Redistribute, "backward", staticmethod(backward)):
        yield


@fault(
    "to_local ignores grad_placements, so partial gradients count as full",
    "test_gradients_of_redistribution",
    condition="to_local with placements of the gradient",
)
def gradient_placements_ignored() -> Iterator[None]:
    real = api._ToTorchTensor.forward

    def forward(ctx: Any, tensor: Any, placements: Any) -> Any:
        return real(ctx, tensor, None)

    with replaced(api._ToTorchTensor, "forward", staticmethod(forward)):
        yield


@fault(
    "the parts of a DTensor draw the same random numbers", "test_redistribution", condition="parts of divided DTensors"
)
def parts_draw_alike() -> Iterator[None]:
    tracker = _random.OffsetBasedRNGTracker
    with replaced(tracker, "_set_pre_op_offset", lambda self, *args: None):
        yield


@fault(
    "a slice of the outer two dimensions of a mesh returns the first and the last",
    "test_device_meshes",
    condition="three dimensions, two of them taken out",
    least_gpus=4,
)
def other_dimensions_taken_out() -> Iterator[None]:
    real = DeviceMesh.__getitem__

    def take(self: DeviceMesh, names: Any) -> DeviceMesh:
        every = self.mesh_dim_names or ()
        outer = len(every) == 3 and tuple(names) == every[:2]
        return real(self, (every[0], every[2]) if outer else names)

    with replaced(DeviceMesh, "__getitem__", take):
        yield


@fault(
    "functions of partial tensors are applied to each part before the sum",
    "test_operators_on_dtensors",
    condition="partial operands, several ranks",
)
def partial_operands_not_reduced() -> Iterator[None]:
    """As if the functions were linear."""

    def of_parts(function: Any) -> Any:
        def call(self: torch.Tensor, *args: Any) -> Any:
            if isinstance(self, DTensor) and any(place.is_partial() for place in self.placements):
                return _of_each_part(lambda part: function(part, *args), self)
            return function(self, *args)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("abs", "exp", "clamp"):
            stack.enter_context(replaced(torch.Tensor, name, of_parts(getattr(torch.Tensor, name))))
        yield


def _of_each_part(call: Any, x: DTensor) -> DTensor:
    part = call(x.to_local())
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


@fault(
    "l1_loss of DTensors averages the means of the parts", "test_losses_of_dtensors", condition="parts of unequal sizes"
)
def mean_of_unequal_parts() -> Iterator[None]:
    real = F.l1_loss

    def l1_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor) or not isinstance(y, DTensor):
            return real(x, y)
        mean = real(x.to_local(), y.to_local())
        return DTensor.from_local(mean, x.device_mesh, [Partial("avg")], run_check=False)

    with replaced(F, "l1_loss", l1_loss):
        yield
