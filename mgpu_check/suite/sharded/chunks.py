"""Place, prefetch and check the parts that each rank holds of the parameters of a model under `fully_shard`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from mgpu_check.asserts.findings import Findings, on_any_rank
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import ShardError


def by_columns(parts: int) -> Callable[[nn.Parameter], Shard | None]:
    """Return a placement function: by columns if they divide evenly, as torch requires, else None for rows."""
    return lambda value: Shard(1) if value.dim() > 1 and value.shape[1] % parts == 0 else None


def fetch_ahead(model: nn.Sequential) -> None:
    """Make each sharded layer prefetch the parameters of the next one, and in the backward pass of the previous one."""
    layers = [layer for layer in model if isinstance(layer, FSDPModule)]
    for before, after in itertools.pairwise(layers):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def chunks_are_right(
    model: nn.Module,
    mesh: DeviceMesh,
    rank: Rank,
    place: torch.device,
    what: str,
    findings: Findings,
    whole: Collection[str] = (),
) -> bool:
    """Return whether all ranks hold their chunks of all parameters but those that are `whole`. A collective.

    If one rank does not, all must stop, because others could wait for its parts.
    """
    wrong = _wrong_chunks(model, mesh, place, whole)
    with findings.collected():
        if wrong:
            raise ShardError(f"{what}, rank {rank.index}: {wrong}", ranks=[rank.index])
    return not on_any_rank(rank, bool(wrong))


def _wrong_chunks(model: nn.Module, mesh: DeviceMesh, place: torch.device, whole: Collection[str]) -> str:
    """Describe the first parameter whose local part is not this rank's chunk; "" if all are right."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "all ranks are in the mesh"
    for name, value in model.named_parameters():
        if name in whole:
            continue
        assert isinstance(value, DTensor), "a sharded parameter is a DTensor"
        divided = value.placements[-1]
        dim = divided.dim if isinstance(divided, Shard) else 0
        size = -(-value.shape[dim] // mesh.size(-1))
        part = max(0, min(size, value.shape[dim] - size * coordinate[-1]))
        wanted = (*value.shape[:dim], part, *value.shape[dim + 1 :])
        local = value.to_local()
        if local.shape != wanted:
            return f"{name} has a part of {tuple(local.shape)} here, expected {wanted}"
        if local.device != place:
            return f"the part of {name} is on {local.device}"
    return ""
