"""Check that device meshes give each rank its place, and that the groups of each dimension have the right members."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mgpu_check.asserts.findings import on_any_rank
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.collectives.findings import WrongResult, raise_findings


def assert_mesh_matches(rank: Rank, shape: Sequence[int]) -> None:
    """Assert that `init_device_mesh` lays ranks out row by row, and that collectives in its groups reach all members.

    Args:
        shape: the sizes of the dimensions; their product is the world size.
    """
    names = tuple(f"dim{number}" for number in range(len(shape)))
    mesh = init_device_mesh("cuda", tuple(shape), mesh_dim_names=names)
    findings: list[WrongResult] = []
    label = f"mesh of {'x'.join(map(str, shape))}"

    def compare(what: str, got: object, right: object) -> None:
        if got != right:
            findings.append(WrongResult(f"{label}: {what}", f"got {got}, expected {right}"))

    layout = torch.arange(math.prod(shape)).view(tuple(shape))
    place = tuple(int(number) for number in (layout == rank.index).nonzero()[0])
    compare("the coordinate", tuple(mesh.get_coordinate() or ()), place)
    compare("the ranks", mesh.mesh.cpu().tolist(), layout.tolist())
    for number, name in enumerate(names):
        # The ranks that differ from this one in that dimension only.
        members = layout.movedim(number, -1)[(*place[:number], *place[number + 1 :])].tolist()
        group = mesh.get_group(number)
        compare(f"the local rank in {name}", mesh.get_local_rank(number), place[number])
        compare(f"the size of {name}", mesh.size(number), shape[number])
        compare(f"the members of {name}", dist.get_process_group_ranks(group), members)
        if on_any_rank(rank, dist.get_process_group_ranks(group) != members):
            continue  # with wrong members a collective could hang, so all ranks leave it out
        compare(f"the part called {name}", mesh[name].mesh.cpu().tolist(), members)
        present = torch.zeros(rank.size, dtype=torch.int64, device=rank.device)
        present[rank.index] = 1
        dist.all_reduce(present, group=group)
        compare(f"an all_reduce in {name}", present.tolist(), [int(one in members) for one in range(rank.size)])
        gathered = torch.empty(len(members), dtype=torch.int64, device=rank.device)
        dist.all_gather(list(gathered.chunk(len(members))), torch.tensor([rank.index], device=rank.device), group=group)
        compare(f"an all_gather in {name}", gathered.tolist(), members)
    raise_findings(findings, len(shape) * 6 + 2, rank)
