"""Find the values of DTensors that all ranks of their mesh have, before the gate gathers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def least_anywhere(counts: Sequence[tuple[torch.Tensor, int]]) -> list[int]:
    """Return for each tensor the smallest count among the ranks of its mesh; without a mesh, its own count.

    Gathering a gradient or a state is a collective: if one rank skipped its step, the others would wait forever.

    Args:
        counts: tensors with a count each; all ranks of a mesh pass the same DTensors in the same order.
    """
    found = [count for _, count in counts]
    by_mesh: dict[int, tuple[Any, list[int]]] = {}
    for place, (tensor, _) in enumerate(counts):
        if (mesh := getattr(tensor, "device_mesh", None)) is not None:
            by_mesh.setdefault(id(mesh), (mesh, []))[1].append(place)
    for mesh, places in by_mesh.values():
        least = torch.tensor([found[place] for place in places], device=mesh.device_type)
        for dim in range(mesh.ndim):
            dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group(dim))
        for place, count in zip(places, least.tolist(), strict=True):
            found[place] = count
    return found
