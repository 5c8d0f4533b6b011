"""Record, in the script's process, each mesh and group of ranks that the script makes: they divide the work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mgpu_check.compare.watched import Note
from mgpu_check.numerics.placement import Coordinates
from mgpu_check.processes.python_environment import rank_and_world
from mgpu_check.torch_hooks.patches import Patches


def install(note: Note) -> Coordinates:
    """Record "mesh" for each mesh with named axes, and "subgroup" for each group with a list of ranks.

    Returns:
        Axis -> (index of this rank, size). "" is the world. The axes of a mesh are added when the script makes it.
    """
    coordinates: dict[str, tuple[int, int]] = {"": rank_and_world()}
    if not torch.distributed.is_available():
        return coordinates
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.device_mesh import DeviceMesh

    within: list[int] = []  # not empty while a mesh is made: the groups that it makes are its axes

    def making(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            within.append(1)
            try:
                original(self, *args, **kwargs)
            finally:
                within.pop()
            if not within and (axes := _axes(self)):
                for axis, index, size in axes:
                    coordinates.setdefault(axis, (index, size))
                note("mesh", axes=axes)

        return made

    new_group = c10d.new_group

    @functools.wraps(new_group)
    def grouped(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = new_group(ranks, *args, **kwargs)
        if ranks is not None and not within:
            note("subgroup", ranks=sorted(map(int, ranks)))
        return result

    patches = Patches(among="torch")
    patches.wrap(DeviceMesh, "__init__", making)
    patches.replace(new_group, grouped)
    patches.apply()
    return coordinates


def _axes(mesh: Any) -> list[tuple[str, int, int]]:
    """Return name, index of this rank and size of each axis of a root mesh; empty for a submesh."""
    if getattr(mesh, "_root_mesh", None) is not None or not mesh.mesh_dim_names:
        return []
    place = mesh.get_coordinate()
    if place is None:
        return []
    return [(name, int(place[dim]), int(mesh.size(dim))) for dim, name in enumerate(mesh.mesh_dim_names)]
