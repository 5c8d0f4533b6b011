"""Planted faults of groups, and of device meshes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mgpu_check.suite.collectives.faults.planting import Seen, around, spoiled
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced

_GROUPS, _MESHES, _PROGRAMS = "test_groups", "test_device_meshes", "test_programs_of_collectives"


@fault("a broadcast in a group comes from its first member", _GROUPS, condition="groups")
def group_ignores_the_root() -> Iterator[None]:
    def broadcast(seen: Seen) -> Any:
        if seen.group is None or seen.size < 2:
            return seen.call()
        named = {key: value for key, value in seen.kwargs.items() if key not in ("src", "group_src")}
        return seen.real(*seen.args[:1], **named, group_src=0)

    with around(broadcast, "broadcast"):
        yield


@fault("a root given by its group rank is taken for a rank of the world", _GROUPS, condition="groups, group_src")
def group_root_taken_for_global() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        root = seen.kwargs.get("group_src")
        if root is None or seen.group is None or seen.size < 2:
            return
        if root != dist.get_global_rank(seen.group, root):
            seen.first.zero_()

    with spoiled(spoil, "scatter", "broadcast"):
        yield


@fault("all_gather in a group swaps its members", _GROUPS, condition="groups")
def members_swapped() -> Iterator[None]:
    def gather(seen: Seen) -> Any:
        if seen.group is None or len(seen.written) < 2:
            return seen.call()
        return seen.call([seen.written[1], seen.written[0], *seen.written[2:]])

    with around(gather, "all_gather"):
        yield


@fault("reduce_scatter in a group counts its last member twice", _GROUPS, condition="groups of 2 and more, one rank")
def member_counted_twice() -> Iterator[None]:
    def reduce(seen: Seen) -> Any:
        if seen.group is None or seen.size < 2 or dist.get_rank(seen.group) != seen.size - 1:
            return seen.call()
        given = seen.args[1]
        doubled = [part + part for part in given] if isinstance(given, list) else given + given
        return seen.call(seen.args[0], doubled)

    with around(reduce, "reduce_scatter", "reduce_scatter_tensor"):
        yield


@fault("a mean in a group is divided by the number of all ranks", _GROUPS, condition="AVG, groups of some ranks")
def group_mean_of_the_world() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.op == "AVG" and 1 < seen.size < dist.get_world_size():
            seen.first.mul_(seen.size / dist.get_world_size())

    with spoiled(spoil, "all_reduce", "reduce_scatter", "reduce_scatter_tensor"):
        yield


@fault("new_subgroups returns the subgroups in reverse order", _GROUPS, condition="two subgroups and more")
def subgroups_last_first() -> Iterator[None]:
    real = dist.new_subgroups

    def make(*args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        own, groups = real(*args, **kwargs)
        return own, [*reversed(groups)]

    with replaced(dist, "new_subgroups", make):
        yield


@fault(
    "group ranks are numbered as if the members were sorted",
    _GROUPS,
    condition="get_group_rank, groups whose ranks are not in order",
)
def numbers_in_order() -> Iterator[None]:
    real = dist.get_group_rank

    def number(group: Any, global_rank: int) -> int:
        real(group, global_rank)
        return sorted(dist.get_process_group_ranks(group)).index(global_rank)

    with replaced(dist, "get_group_rank", number):
        yield


@fault(
    "all members of a group are assumed as far apart as the first two",
    _GROUPS,
    condition="get_global_rank, groups of three ranks and more at different distances",
    least_gpus=3,
)
def members_evenly_apart() -> Iterator[None]:
    real = dist.get_global_rank

    def rank_of(group: Any, group_rank: int) -> int:
        found = real(group, group_rank)
        if dist.get_world_size(group) < 3:
            return found
        first, second = (real(group, number) for number in (0, 1))
        return first + group_rank * (second - first)

    with replaced(dist, "get_global_rank", rank_of):
        yield


@fault("a rank outside of a group loses its data", _GROUPS, condition="ranks that are not in the group")
def outsider_cleared() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.size == 0:
            seen.first.zero_()

    with spoiled(spoil, "all_reduce", "broadcast"):
        yield


@fault(
    "a mesh returns the group of its first dimension for every dimension",
    _MESHES,
    condition="meshes of 2 dimensions and more",
)
def one_group_for_all_dimensions() -> Iterator[None]:
    real = DeviceMesh.get_group

    def get_group(self: DeviceMesh, mesh_dim: Any = None) -> Any:
        return real(self, 0 if self.ndim > 1 and isinstance(mesh_dim, int) else mesh_dim)

    with replaced(DeviceMesh, "get_group", get_group):
        yield


@fault(
    "a mesh returns the local rank in the first dimension for every dimension",
    _MESHES,
    condition="meshes of 2 dimensions and more",
)
def place_of_the_first_dimension() -> Iterator[None]:
    real = DeviceMesh.get_local_rank

    def get_local_rank(self: DeviceMesh, mesh_dim: Any = None) -> int:
        return real(self, 0 if self.ndim > 1 else mesh_dim)

    with replaced(DeviceMesh, "get_local_rank", get_local_rank):
        yield


@fault("the last rank of a mesh has the coordinate of the first", _MESHES, condition="one rank")
def coordinate_of_another() -> Iterator[None]:
    real = DeviceMesh.get_coordinate

    def get_coordinate(self: DeviceMesh) -> Any:
        found = real(self)
        return [0] * len(found) if found is not None and dist.get_rank() == dist.get_world_size() - 1 else found

    with replaced(DeviceMesh, "get_coordinate", get_coordinate):
        yield


@fault(
    "a collective in flight loses an element when another group starts one",
    _PROGRAMS,
    condition="async, in two groups at once",
)
def lost_beside_another_group() -> Iterator[None]:
    begun: list[Any] = []

    @dataclass
    class Late:
        work: dist.Work
        seen: Seen
        number: int

        def wait(self) -> object:
            done = self.work.wait()
            if any(group is not self.seen.group for group in begun[self.number :]):
                self.seen.first.view(-1)[-1:].zero_()
            return done

    def late(seen: Seen) -> Any:
        work = seen.call()
        if not isinstance(work, dist.Work):
            return work
        begun.append(seen.group)
        return Late(work, seen, len(begun))

    with around(late, "all_reduce", "broadcast", "all_to_all_single"):
        yield


@fault(
    "a group created after another was destroyed uses the tensors of its first member only",
    _PROGRAMS,
    condition="groups made after one was destroyed",
)
def group_after_another() -> Iterator[None]:
    destroyed: list[Any] = []
    later: list[Any] = []

    def destroy(group: Any = None) -> None:
        destroyed.append(group)
        real_destroy(group)

    def make(*args: Any, **kwargs: Any) -> Any:
        group = real_make(*args, **kwargs)
        if destroyed:
            later.append(group)
        return group

    def reduce(seen: Seen) -> Any:
        if seen.size < 2 or not any(group is seen.group for group in later):
            return seen.call()
        seen.first.mul_(dist.get_rank(seen.group) == 0)
        return seen.call()

    real_destroy, real_make = dist.destroy_process_group, dist.new_group
    with (
        around(reduce, "all_reduce"),
        replaced(dist, "destroy_process_group", destroy),
        replaced(dist, "new_group", make),
    ):
        yield


@fault(
    "all_reduce of a mean in a group returns the sum",
    _GROUPS,
    condition="all_reduce, AVG, groups of some ranks",
    least_gpus=3,
)
def group_mean_not_divided() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.op == "AVG" and 1 < seen.size < dist.get_world_size():
            seen.first.mul_(seen.size)

    with spoiled(spoil, "all_reduce"):
        yield
