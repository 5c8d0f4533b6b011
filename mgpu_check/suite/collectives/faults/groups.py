"""Planted faults of groups, and of device meshes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mgpu_check.suite.collectives.faults.conditions import GROUPS, LAST, SOME, op
from mgpu_check.suite.collectives.faults.planting import Seen, after, before, instead
from mgpu_check.suite.common.faults.breaking import around, given, returned
from mgpu_check.suite.common.faults.registry import FaultRow, fault, register
from mgpu_check.suite.common.faults.when import When

_GROUPS, _MESHES, _PROGRAMS = "test_groups", "test_device_meshes", "test_programs_of_collectives"
_DIMENSIONS = When("meshes of 2 dimensions and more", lambda real, mesh, *_: mesh.ndim > 1)
_BY_NUMBER = When("dimensions by number", lambda real, mesh, dimension=None: isinstance(dimension, int))
_APART = "get_global_rank, groups of three ranks and more at different distances"


def _numbered(seen: Seen) -> bool:
    return seen.kwargs.get("group_src") not in (None, dist.get_global_rank(seen.group, seen.kwargs.get("group_src", 0)))


def _doubled(tensors: Any) -> Any:
    return [tensor + tensor for tensor in tensors] if isinstance(tensors, list) else tensors + tensors


register(
    __name__,
    FaultRow("group-ignores-the-root", "a broadcast in a group comes from its first member", _GROUPS,
        instead("broadcast"), lambda seen: seen.with_root(group_src=0), GROUPS),
    FaultRow("group-root-taken-for-global", "a root given by its group rank is taken for a rank of the world", _GROUPS,
        after("scatter", "broadcast"), lambda seen: seen.first.zero_(), GROUPS & When("group_src", _numbered)),
    FaultRow("members-swapped", "all_gather in a group swaps its members", _GROUPS, instead("all_gather"),
        lambda seen: seen.call([*seen.written[1::-1], *seen.written[2:]]), GROUPS),
    FaultRow("member-counted-twice", "reduce_scatter in a group counts its last member twice", _GROUPS,
        instead("reduce_scatter", "reduce_scatter_tensor"),
        lambda seen: seen.call(seen.args[0], _doubled(seen.args[1])),
        When("groups of 2 and more", GROUPS.holds)
        & When("one rank", lambda seen: dist.get_rank(seen.group) == seen.size - 1)),
    FaultRow("group-mean-of-the-world", "a mean in a group is divided by the number of all ranks", _GROUPS,
        after("all_reduce", "reduce_scatter", "reduce_scatter_tensor"),
        lambda seen: seen.first.mul_(seen.size / dist.get_world_size()), op("AVG") & SOME),
    FaultRow("group-mean-not-divided", "all_reduce of a mean in a group returns the sum", _GROUPS, after("all_reduce"),
        lambda seen: seen.first.mul_(seen.size), op("AVG") & SOME, 3),
    FaultRow("outsider-cleared", "a rank outside of a group loses its data", _GROUPS, after("all_reduce", "broadcast"),
        lambda seen: seen.first.zero_(), When("ranks that are not in the group", lambda seen: seen.size == 0)),
    FaultRow("subgroups-last-first", "new_subgroups returns the subgroups in reverse order", _GROUPS,
        returned(dist, "new_subgroups"), lambda made, *_, **__: (made[0], made[1][::-1]),
        When("two subgroups and more", lambda made, *_, **__: len(made[1]) > 1)),
    FaultRow("numbers-in-order", "group ranks are numbered as if the members were sorted", _GROUPS,
        returned(dist, "get_group_rank"),
        lambda _, group, global_rank: sorted(dist.get_process_group_ranks(group)).index(global_rank),
        "get_group_rank, groups whose ranks are not in order"),
    FaultRow("one-group-for-all-dimensions", "a mesh returns the group of its first dimension for every dimension",
        _MESHES,
        around(DeviceMesh, "get_group"), lambda real, mesh, dimension=None: real(mesh, 0), _DIMENSIONS & _BY_NUMBER),
    FaultRow("place-of-the-first-dimension", "a mesh returns the local rank in the first dimension for every dimension",
        _MESHES, around(DeviceMesh, "get_local_rank"), lambda real, mesh, *_: real(mesh, 0), _DIMENSIONS),
    FaultRow("coordinate-of-another", "the last rank of a mesh has the coordinate of the first", _MESHES,
        returned(DeviceMesh, "get_coordinate"), lambda found, mesh: found and [0] * len(found), LAST),
)  # fmt: skip


@fault("all members of a group are assumed as far apart as the first two", _GROUPS, by=around(dist, "get_global_rank"),
       when=_APART, least_gpus=3)  # fmt: skip
def members_evenly_apart(real: Any, group: Any, group_rank: int) -> Any:
    if dist.get_world_size(group) < 3:
        return NotImplemented
    first, second = (real(group, number) for number in (0, 1))
    return first + group_rank * (second - first)


@dataclass
class _DelayedWork:
    work: dist.Work
    seen: Seen
    number: int

    def wait(self) -> object:
        done = self.work.wait()
        if any(group is not self.seen.group for number, group in self.seen.kept.items() if number > self.number):
            self.seen.first.view(-1)[-1:].zero_()
        return done


@fault("a collective in flight loses an element when another group starts one", _PROGRAMS,
       by=instead("all_reduce", "broadcast", "all_to_all_single"),
       when="async, in two groups at once")  # fmt: skip
def lost_beside_another_group(seen: Seen) -> Any:
    work, number = seen.call(), len(seen.kept)
    if not isinstance(work, dist.Work):
        return work
    seen.kept[number] = seen.group
    return _DelayedWork(work, seen, number)


@fault("a group created after another was destroyed uses the tensors of its first member only", _PROGRAMS,
       when="groups made after one was destroyed")  # fmt: skip
def group_after_another() -> Iterator[None]:
    destroyed: list[Any] = []
    later: list[Any] = []

    def make(group: Any, *_: Any, **__: Any) -> None:
        later.extend([group] if destroyed else [])

    def spoil(seen: Seen) -> None:
        if seen.size > 1 and any(group is seen.group for group in later):
            seen.first.mul_(dist.get_rank(seen.group) == 0)

    with (
        before("all_reduce")(spoil),
        returned(dist, "new_group")(make),
        given(dist, "destroy_process_group")(lambda group=None: destroyed.append(group)),
    ):
        yield
