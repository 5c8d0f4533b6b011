"""Record the groups of ranks that the script makes, in its process, and make its ranks meet.

Each mesh and group of ranks is recorded: they divide the work.

Ranks meet at the store of this comparison, even if the script sets another address. Each rank is launched as by
torchrun, whose agent holds the store, so no rank creates one. A rank that tries to reach the store at another address
would wait until it times out.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mgpu_check.compare.in_script.script_calls import Note
from mgpu_check.numerics.placement import Coordinates
from mgpu_check.processes.python_environment import rank_and_world
from mgpu_check.processes.tracebacks import calling_line
from mgpu_check.torch_hooks.patches import Patches, around


def install_meshes(note: Note) -> Coordinates:
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

    def make_mesh(original: Callable[..., None], mesh: Any, *args: Any, **kwargs: Any) -> None:
        within.append(1)
        try:
            original(mesh, *args, **kwargs)
        finally:
            within.pop()
        if not within and (axes := _axes(mesh)):
            for axis, index, size in axes:
                coordinates.setdefault(axis, (index, size))
            note("mesh", axes=axes)

    def make_group(original: Callable[..., Any], ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = original(ranks, *args, **kwargs)
        if ranks is not None and not within:
            note("subgroup", ranks=sorted(map(int, ranks)))
        return result

    patches = Patches(among="torch")
    patches.wrap(DeviceMesh, "__init__", around(make_mesh))
    patches.replace(c10d.new_group, around(make_group)(c10d.new_group))
    patches.apply()
    return coordinates


def _axes(mesh: Any) -> list[tuple[str, int, int]]:
    """Return name, index of this rank and size of each axis of a root mesh; empty for a submesh."""
    if getattr(mesh, "_root_mesh", None) is not None or not mesh.mesh_dim_names:
        return []
    place = mesh.get_coordinate() or ()
    return [(name, int(place[dim]), int(mesh.size(dim))) for dim, name in enumerate(mesh.mesh_dim_names) if place]


_LOCAL = ("localhost", "127.0.0.1", "::1")

Places = Mapping[str, tuple[str, int]]
"""Environment variable -> file and line that set it."""


def install_meeting(note: Note, store: tuple[str, int], places: Places) -> None:
    """Redirect the ranks of the whole group to `store`; record "led" if the script set another address.

    `places`: filled while the script sets variables, and read when the script makes the group.
    """
    if not torch.distributed.is_available():
        return
    # Imported by name: the package also has a function `rendezvous`, which hides the module.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    ours = rank_and_world()

    def lead(original: Any, hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any) -> Any:
        there = port == store[1] and hostname in _LOCAL
        if not there and (rank, world_size) == ours and rendezvous._torchelastic_use_agent_store():
            meant = {"MASTER_PORT": (port, store[1]), "MASTER_ADDR": (hostname, store[0])}
            changed = [name for name, (own, given) in meant.items() if own != given]
            variable = next((name for name in changed if os.environ.get(name) == str(meant[name][0])), None)
            file, line = places.get(variable or "") or calling_line()
            note("led", address=f"{hostname}:{port}", variable=variable, file=file, line=line)
            hostname, port = store
        return original(hostname, port, rank, world_size, *args, **kwargs)

    patches = Patches(among="torch")
    patches.replace(rendezvous._create_c10d_store, around(lead)(rendezvous._create_c10d_store))
    patches.apply()
