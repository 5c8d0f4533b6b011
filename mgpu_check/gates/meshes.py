"""The mesh of a scenario, and the place of a rank in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.worlds import is_count
from mgpu_check.numerics.placement.declared import Coordinates

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Mesh = tuple[tuple[str, int], ...]
"""Axes in order, the outermost first, with their sizes."""

Place = tuple[int, Mesh]
"""A number of ranks, and their mesh, which may be empty."""


def check_meshes(
    gate: str, meshes: Iterable[Mapping[str, int]], largest: int, world_sizes: object, single_process: bool
) -> list[Mesh]:
    """Return the meshes that a user gives, without duplicates, the smallest first."""
    wanted = 'give mappings from axes to sizes, such as [{"dp": 2, "tp": 2}]'
    if world_sizes is not None:
        raise ValueError(f"{gate}: meshes and world_sizes are both given; the sizes of a mesh are its world size")
    if single_process:
        raise ValueError(
            f"{gate}: meshes and single_process=True are both given; a mesh needs a process for each device"
        )
    if isinstance(meshes, str | Mapping) or not isinstance(meshes, Iterable):
        raise ValueError(f"{gate}: meshes={meshes!r}; {wanted}")
    found = [_checked(gate, "meshes", given, largest, wanted) for given in meshes]
    if not found:
        raise ValueError(f"{gate}: meshes is empty; {wanted}")
    return sorted(dict.fromkeys(found), key=size_of)


def check_places(gate: str, argument: str, given: object, largest: int) -> list[Place]:
    """Return the world sizes and meshes that a user gives, one or several, without duplicates, the smallest first."""
    wanted = f'give ints from 1 to {largest}, or mappings from axes to sizes, such as [2, {{"dp": 2, "tp": 2}}]'
    several = [given] if isinstance(given, str | Mapping) or not isinstance(given, Iterable) else list(given)
    found: list[Place] = []
    for one in several:
        if isinstance(one, int) and not isinstance(one, bool):
            if not 1 <= one <= largest:
                raise ValueError(f"{gate}: {argument} has {one}; {wanted} (more with --gpus=N)")
            found.append((one, ()))
        else:
            mesh = _checked(gate, argument, one, largest, wanted)
            found.append((size_of(mesh), mesh))
    if not found:
        raise ValueError(f"{gate}: {argument} is empty; {wanted}")
    return sorted(dict.fromkeys(found))


def _checked(gate: str, argument: str, given: object, largest: int, wanted: str) -> Mesh:
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"{gate}: {argument} has {given!r}; {wanted}")
    wrong = [axis for axis, size in given.items() if not isinstance(axis, str) or not axis or not is_count(size)]
    if wrong:
        raise ValueError(f"{gate}: {argument} has {dict(given)!r}; {wanted}, each size an int of at least 1")
    mesh = tuple(given.items())
    if size_of(mesh) > largest:
        raise ValueError(
            f"{gate}: mesh {dict(given)!r} needs {size_of(mesh)} ranks, and this run has {largest} devices; "
            "give smaller ones, or more devices with --gpus=N"
        )
    return mesh


def described(mesh: Mesh) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh)


def where_is(world_size: int, mesh: Mesh) -> str:
    return f"mesh {described(mesh)}" if mesh else f"world size {world_size}"


def size_of(mesh: Sequence[tuple[str, int]]) -> int:
    count = 1
    for _, size in mesh:
        count *= size
    return count


def mesh_of(rank: Rank, mesh: Mesh) -> DeviceMesh:
    """Make the mesh on this rank; every axis has size 1 if the rank is alone in its world."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = tuple(1 if rank.size == 1 else size for _, size in mesh)
    return init_device_mesh(rank.device.type, shape, mesh_dim_names=tuple(axis for axis, _ in mesh))


def place_in(mesh: Mesh, index: int) -> dict[str, int]:
    """Return the coordinates of a rank: the last axis varies fastest."""
    place: dict[str, int] = {}
    for axis, size in reversed(mesh):
        index, place[axis] = divmod(index, size)
    return {axis: place[axis] for axis, _ in mesh}


def coordinates_of(rank: Rank) -> Coordinates:
    """Return the place of a rank in the world, and along each axis of its mesh."""
    found = {"": (rank.index, rank.size)}
    if rank.mesh is not None and rank.mesh.mesh_dim_names:
        for axis in rank.mesh.mesh_dim_names:
            found[axis] = rank.mesh.get_local_rank(axis), rank.mesh[axis].size()
    return found
