"""Planted faults of device meshes and DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _random
from torch.distributed.tensor import _api as api
from torch.distributed.tensor import _redistribute as redistribute
from torch.nn import functional as F

from mgpu_check.suite.common.faults.breaking import around, given, returned
from mgpu_check.suite.common.faults.conditions import LAST_RANK, is_last, ranks_here
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, fault, register
from mgpu_check.suite.common.faults.when import When
from mgpu_check.suite.sharded.operator_rows import lacks

device_meshes = caught_by("test_device_meshes")
redistribution = caught_by("test_redistribution")
losses = caught_by("test_losses_of_dtensors")

_LARGE = 16_384
_LOCAL_RANK = around(DeviceMesh, "get_local_rank")
_REDUCE = around(Partial, "_reduce_value")


def _is_along(real: object, self: torch.Tensor, *args: Any, **_: Any) -> bool:
    """Return whether the last argument is the dimension that is divided."""
    return isinstance(self, DTensor) and args[-1:] == (getattr(self.placements[0], "dim", None),)


_ALONG = When("the dimension that is divided", _is_along)
_NAMED = When("meshes of two dimensions", lambda self, dim=None: self.ndim == 2 and isinstance(dim, str))
_LAST_OF_THREE = When("the last of three ranks or more", lambda *args: is_last() and ranks_here() > 2)
_MAXIMUM = When("Partial('max') only", lambda real, self, *args: self.reduce_op == "max")
_SECOND_PLACE = When("the second dimension of a mesh", lambda self, local, mesh, mesh_dim, index: mesh_dim == 1)
_SECOND_SUM = When("the second dimension of a mesh", lambda real, self, x, mesh, dim: dim == 1 and mesh.ndim > 1)
_LAST_GRADIENT = When("the last rank", lambda grads, *args: is_last() and grads[0] is not None)
_PARTIAL = When(
    "partial operands, several ranks",
    lambda real, self, *args: isinstance(self, DTensor) and any(place.is_partial() for place in self.placements),
)
_DTENSORS = When("parts of unequal sizes", lambda real, *tensors: all(isinstance(x, DTensor) for x in tensors))


@device_meshes("a mesh gives the group of the other dimension", given(DeviceMesh, "get_group"), _NAMED)
def group_of_the_other_dimension(self: DeviceMesh, mesh_dim: str) -> tuple[DeviceMesh, str]:
    names = self.mesh_dim_names or ()
    return self, names[1 - names.index(mesh_dim)]


@device_meshes("DeviceMesh.get_local_rank returns the coordinate instead of the rank in the group", _LOCAL_RANK,
    When("meshes of two dimensions with unsorted ranks, dimension given by number",
        lambda real, self, dim=None: self.ndim == 2 and isinstance(dim, int) and self.get_coordinate() is not None),
    least_gpus=2)  # fmt: skip
def local_rank_of_the_place(real: Any, self: Any, mesh_dim: int) -> int:
    place: list[int] = self.get_coordinate()
    return place[mesh_dim]


@redistribution("gathered tensors end with a slice of padding", returned(Shard, "_to_replicate_tensor"),
    When("sizes that are no multiple of the number of ranks",
        lambda whole, self, local, mesh, dim, shape: whole.shape[self.dim] % mesh.size(dim) > 0))  # fmt: skip
def padding_gathered(whole: torch.Tensor, self: Shard, *args: Any) -> None:
    whole.narrow(self.dim, whole.shape[self.dim] - 1, 1).zero_()


@redistribution("partial maxima are added up", _REDUCE, _MAXIMUM)
def maxima_added_up(real: Any, self: Partial, *args: Any) -> torch.Tensor:
    added: torch.Tensor = real(Partial("sum"), *args)
    return added


@redistribution("reduce-scatter of partial sums loses the last element", returned(Shard, "_reduce_shard_tensor"),
    When("parts above 16 Ki elements", lambda made, *args: made.numel() > _LARGE))  # fmt: skip
def large_parts_reduced_short(made: torch.Tensor, *args: Any) -> None:
    made.view(-1)[-1] = 0


@fault("functions of partial tensors are applied to each part before the sum", "test_operators_on_dtensors",
       by=around(torch.Tensor, "abs", "exp", "clamp"), when=_PARTIAL)  # fmt: skip
def partial_operands_not_reduced(real: Any, x: DTensor, *args: Any) -> DTensor:
    """As if the functions were linear, or along another dimension."""
    part = real(x.to_local(), *args)
    return DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


@losses("l1_loss of DTensors averages the means of the parts", around(F, "l1_loss"), _DTENSORS)
def mean_of_unequal_parts(real: Any, x: DTensor, y: DTensor) -> DTensor:
    return DTensor.from_local(real(x.to_local(), y.to_local()), x.device_mesh, [Partial("avg")], run_check=False)


_OF_TURNS = (
    FaultRow("turned-within-parts", "running sums, reversals and turns stay within the part of a rank",
        "test_operators_on_dtensors", around(torch.Tensor, "cumsum", "flip", "roll"), partial_operands_not_reduced,
        _ALONG),
)  # fmt: skip

register(
    __name__,
    FaultRow("local-rank-of-the-world", "DeviceMesh.get_local_rank returns the global rank", "test_device_meshes",
        _LOCAL_RANK, lambda real, self, *_: self.get_rank(),
        When("the last rank of a mesh of two dimensions or more",
            lambda real, self, dim=None: self.ndim > 1 and is_last())),
    FaultRow("other-dimensions-taken-out",
        "a slice of the outer two dimensions of a mesh returns the first and the last", "test_device_meshes",
        given(DeviceMesh, "__getitem__"), lambda self, *_: (self, (self.mesh_dim_names[0], self.mesh_dim_names[2])),
        When("three dimensions, two of them taken out",
            lambda self, names: len(self.mesh_dim_names or ()) == 3 and tuple(names) == self.mesh_dim_names[:2]),
        least_gpus=4),
    FaultRow("exchanged-out-of-order", "a change of the shard dimension reverses the order of elements",
        "test_redistribution", returned(Shard, "_to_new_shard_dim"),
        lambda made, self, *_: made.flip(self.dim).contiguous(), _LAST_OF_THREE),
    FaultRow("own-data-distributed", "distribute_tensor shards each rank's own tensor instead of rank 0's",
        "test_redistribution", around(Shard, "_make_shard_tensor"),
        lambda real, cls, dim, tensor, mesh, mesh_dim, *_: real(cls, dim, tensor, mesh, mesh_dim, None),
        "ranks with different data"),
    FaultRow("parts-draw-alike", "the parts of a DTensor draw the same random numbers", "test_redistribution",
        around(_random.OffsetBasedRNGTracker, "_set_pre_op_offset"), lambda *_: None, "parts of divided DTensors"),
    FaultRow("cut-for-the-neighbour", "a rank gets the shard of the next rank", "test_redistribution_in_two_dimensions",
        given(Shard, "_replicate_to_shard"),
        lambda self, local, mesh, dim, index: (self, local, mesh, dim, (int(index) + 1) % mesh.size(1)), _SECOND_PLACE),
    FaultRow("second-dimension-not-reduced", "partial sums are reduced over the first dimension of the mesh only",
        "test_redistribution_in_two_dimensions", _REDUCE, lambda real, self, tensor, *_: tensor.clone(), _SECOND_SUM),
    FaultRow("second-averages-added-up", "averages over the second dimension of a mesh are added up",
        "test_redistribution_in_two_dimensions", _REDUCE, lambda real, self, *args: real(Partial("sum"), *args),
        When("partial averages", lambda real, self, x, mesh, dim: self.reduce_op == "avg" and dim == 1), least_gpus=4),
    FaultRow("rank-0-distributes-always", "distribute_tensor ignores src_data_rank", "test_redistribution",
        around(Shard, "_make_shard_tensor"),
        lambda real, cls, dim, tensor, mesh, mesh_dim, source=0: real(cls, dim, tensor, mesh, mesh_dim, source and 0),
        "src_data_rank other than 0"),
    FaultRow("columns-draw-alike", "parts of the same rows draw the same random numbers",
        "test_redistribution_in_two_dimensions", around(_random.OffsetBasedRNGTracker, "_calc_shard_linear_idx"),
        lambda real, self, place, sizes: real(self, [*place[:1], *[0] * len(place[1:])], sizes), "divided by columns"),
    FaultRow("filled-on-all-but-one", "the last rank's part of a filled tensor is 0", "test_making_dtensors",
        returned("torch.distributed.tensor", "full", "ones"), lambda made, *_, **__: made * 0, LAST_RANK),
    FaultRow("replicas-not-checked", "from_local with run_check keeps tensors that differ between replicas",
        "test_making_dtensors", around(api, "mesh_broadcast"), lambda real, tensor, *_, **__: tensor,
        "run_check=True, replicated"),
    FaultRow("gradient-of-whole-replicated", "full_tensor ignores grad_placements", "test_making_dtensors",
        around(DTensor, "full_tensor"), lambda real, self, **_: real(self), "full_tensor with grad_placements"),
    FaultRow("sharded-twice-gathered-in-reverse", "full_tensor takes nested shards in the wrong order",
        "test_redistribution_in_two_dimensions", returned(DTensor, "full_tensor"),
        lambda whole, *_, **__: whole.flip(0),
        When("two dimensions that both divide the first",
            lambda whole, self, **_: tuple(self.placements) == (Shard(0), Shard(0)))),
    FaultRow("moved-as-it-is", "redistribute ignores forward_dtype", "test_making_dtensors",
        around(DTensor, "redistribute"), lambda real, *args, forward_dtype=None, **kwargs: real(*args, **kwargs),
        "forward_dtype"),
    FaultRow("local-sums-not-added", "local_map takes partial outputs for whole ones", "test_making_dtensors",
        around("torch.distributed.tensor.experimental", "local_map"),
        lambda real, function, out_placements, **kwargs: real(function, out_placements=[Replicate()], **kwargs)),
    *(() if lacks("flip") else _OF_TURNS),
    FaultRow("place-within-a-part", "argmax and argmin return the place within the part of a rank",
        "test_operators_on_dtensors", around(torch.Tensor, "argmax", "argmin"),
        lambda real, x, *dim, **options: DTensor.from_local(
            real(x.to_local(), *dim, **options), x.device_mesh, [Replicate()], run_check=False), _ALONG),
    FaultRow("redistributed-gradient-doubled", "the gradient of redistribution is doubled on one rank",
        "test_gradients_of_redistribution", returned(redistribute.Redistribute, "backward"),
        lambda grads, *_: (grads[0] * 2, *grads[1:]), _LAST_GRADIENT),
    FaultRow("gradient-placements-ignored", "to_local ignores grad_placements, so partial gradients count as full",
        "test_gradients_of_redistribution", given(api._ToTorchTensor, "forward"),
        lambda ctx, tensor, *_: (ctx, tensor, None), "to_local with placements of the gradient"),
)  # fmt: skip


@fault("distribute_tensor negates the last of fewer rows than ranks", "test_redistribution",
       by=returned("mgpu_check.suite.sharded.redistribution", "distribute_tensor"), least_gpus=3,
       when="one dimension, fewer rows than ranks")  # fmt: skip
def last_of_few_rows_negated(made: DTensor, *_: Any, **__: Any) -> None:
    mesh = made.device_mesh
    if mesh.ndim == 1 and made.placements[0].is_shard(0) and mesh.get_local_rank() == len(made) - 1 < mesh.size() - 1:
        made.to_local().detach().neg_()
