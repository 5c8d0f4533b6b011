"""Check device meshes: the coordinate of each rank, and the group of each dimension."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mgpu_check.asserts.findings import on_any_rank
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import ReplicaMismatch
from mgpu_check.suite.common.meshes import near_square

_NAMES = ("pp", "dp", "tp")


def assert_meshes_agree(rank: Rank) -> None:
    """Assert that meshes of one to three dimensions have the right coordinates and groups. A collective.

    Meshes have their ranks in order and out of order; one leaves the last rank out. The group of each dimension runs an
    all_reduce and an all_gather. A mesh made from a group must have the ranks of the group. A mesh of three dimensions
    is also sliced to each two of them.
    """
    rows, columns = near_square(rank.size)
    everybody = torch.arange(rank.size)
    shapes: list[tuple[int, ...]] = [(rank.size,), (rows, columns)]
    if columns % 2 == 0:
        shapes.append((rows, columns // 2, 2))
    found = []
    meshes = [
        (init_device_mesh("cuda", shape, mesh_dim_names=_NAMES[-len(shape) :]), everybody.reshape(shape))
        for shape in shapes
    ]
    turned = everybody.flip(0).reshape(columns, rows).T.contiguous()
    meshes.append((DeviceMesh("cuda", turned, mesh_dim_names=("dp", "tp")), turned))
    if rank.size > 1:
        meshes.append((DeviceMesh("cuda", everybody[:-1], mesh_dim_names=("dp",)), everybody[:-1]))
    for mesh, ranks in meshes:
        inside = rank.index in ranks
        # If the groups of ranks disagree, a collective could hang, so all ranks leave it out.
        strange = inside and any(sorted(members) != sorted(line) for members, line in _groups(rank, mesh, ranks))
        calling = not on_any_rank(rank, strange)
        if inside:
            found.append(_wrong(rank, mesh, ranks, calling=calling))
        elif mesh.get_coordinate() is not None:
            found.append(f"a mesh without rank {rank.index} gives it the coordinate {mesh.get_coordinate()}")
    texts = [text for text in found if text]
    if texts:
        raise ReplicaMismatch(f"device mesh, rank {rank.index}: {texts[0]}", ranks=[rank.index])


def _place(rank: Rank, ranks: torch.Tensor) -> list[int]:
    """Return the coordinate that a rank must have in a mesh of `ranks`."""
    return [int(position) for position in (ranks == rank.index).nonzero()[0]]


def _groups(rank: Rank, mesh: DeviceMesh, ranks: torch.Tensor) -> Iterator[tuple[list[int], list[int]]]:
    """Yield for each dimension the ranks of this rank's group, and the right ranks."""
    place = _place(rank, ranks)
    for dim, name in enumerate(mesh.mesh_dim_names or ()):
        line = ranks[tuple(slice(None) if other == dim else at for other, at in enumerate(place))].tolist()
        yield dist.get_process_group_ranks(mesh.get_group(name)), line


def _wrong(rank: Rank, mesh: DeviceMesh, ranks: torch.Tensor, *, calling: bool) -> str:
    """Describe the first error of a mesh; "" if it is right. With `calling`, a collective of the mesh's groups."""
    texts = []
    kind = f"{tuple(ranks.shape)} of ranks {ranks.flatten().tolist()}"
    place = _place(rank, ranks)
    coordinate = mesh.get_coordinate()
    if coordinate is None or list(coordinate) != place:
        texts.append(f"{kind} has this rank at {coordinate}, expected {place}")
    for dim, (members, line) in enumerate(_groups(rank, mesh, ranks)):
        name = (mesh.mesh_dim_names or ())[dim]
        if sorted(members) != sorted(line):
            texts.append(f"{kind}, dimension {name!r}: the group has ranks {members}, expected {line}")
        elif calling and (text := _wrong_collectives(rank, mesh.get_group(name), members)):
            texts.append(f"{kind}, dimension {name!r}: {text}")
        # A group has its ranks in order, and the local rank is the position in the group.
        number = members.index(rank.index) if rank.index in members else None
        for asked in (name, dim):
            if (told := mesh.get_local_rank(asked)) != number:
                texts.append(f"{kind}, dimension {asked!r}: local rank {told}, expected {number}")
        if mesh.size(dim) != len(line):
            texts.append(f"{kind}, dimension {name!r}: size {mesh.size(dim)}, expected {len(line)}")
        part = mesh[name].mesh.tolist() if ranks.dim() > 1 else line
        if part != line:
            texts.append(f"{kind}[{name!r}] has ranks {part}, expected {line}")
        if [*map(id, mesh.get_all_groups())][dim] != id(mesh.get_group(name)):
            texts.append(f"{kind}, dimension {name!r}: get_all_groups has another group than get_group")
        of_group = DeviceMesh.from_group(mesh.get_group(name), "cuda").mesh.tolist()
        if of_group != members:
            texts.append(f"{kind}, dimension {name!r}: the mesh of its group has ranks {of_group}, expected {members}")
    if ranks.dim() > 1:
        again = DeviceMesh.from_group(mesh.get_all_groups(), "cuda", ranks, mesh_dim_names=mesh.mesh_dim_names)
        if again.get_coordinate() != mesh.get_coordinate() or again.mesh.tolist() != ranks.tolist():
            texts.append(f"a mesh from the groups of {kind} has ranks {again.mesh.tolist()}, expected {ranks.tolist()}")
    texts += list(_wrong_slices(mesh, ranks, place, kind))
    return texts[0] if texts else ""


def _wrong_slices(mesh: DeviceMesh, ranks: torch.Tensor, place: list[int], kind: str) -> Iterator[str]:
    """Describe each slice of two of three dimensions without the ranks that share this rank's place in the third."""
    names = mesh.mesh_dim_names or ()
    if ranks.dim() != 3:
        return
    for left_out in range(3):
        kept = tuple(name for dim, name in enumerate(names) if dim != left_out)
        part, expected = mesh[kept].mesh.tolist(), ranks.select(left_out, place[left_out]).tolist()
        if part != expected:
            yield f"{kind}[{', '.join(kept)}] has ranks {part}, expected {expected}"


def _wrong_collectives(rank: Rank, group: dist.ProcessGroup, members: list[int]) -> str:
    """Describe an error in the order or the sum of a group's ranks; "" without one. A collective of the group."""
    held = torch.tensor([rank.index], device=rank.device)
    gathered = [torch.empty_like(held) for _ in members]
    # all_gather shows the order of the ranks in the group.
    dist.all_gather(gathered, held, group=group)
    dist.all_reduce(held, group=group)
    if [int(one) for one in gathered] != members:
        return f"all_gather gives ranks {[int(one) for one in gathered]}"
    return "" if int(held) == sum(members) else f"the sum of the ranks {members} is {int(held)}"
