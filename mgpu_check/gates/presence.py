"""Find out which values of DTensors all ranks of their mesh have, before the gate gathers them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["least_anywhere"]


def least_anywhere(counts: Sequence[tuple[torch.Tensor, int]]) -> list[int]:
    """Return for each tensor the least count that a rank of its mesh gives; the own count for a tensor that is no DTensor.

    Gathering a gradient or a state is a collective: a rank that skipped its step would let the others wait.

    Args:
        counts: on all ranks of a mesh the same DTensors, in the same order.
    """
    found = [count for _, count in counts]
    by_mesh: dict[int, list[int]] = {}
    for place, (tensor, _) in enumerate(counts):
        if (mesh := getattr(tensor, "device_mesh", None)) is not None:
            by_mesh.setdefault(id(mesh), []).append(place)
    for places in by_mesh.values():
        mesh = counts[places[0]][0].device_mesh  # type: ignore[attr-defined]
        least = torch.tensor([found[place] for place in places], device=mesh.device_type)
        for dim in range(mesh.ndim):
            dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group(dim))
        for place, count in zip(places, least.tolist(), strict=True):
            found[place] = count
    return found
