"""Slices that FullyShardedDataParallel (FSDP1) holds, by what its flat parameters say of themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch


class Ranges(NamedTuple):
    """The parameters that a flat parameter is made of.

    Attributes:
        owners: of each the module, and its name there.
        shapes: of each, whole.
        parts: of each the positions of the elements that this rank holds, and where these are in the local shard, first
            and last + 1; (None, None) where it holds none.
    """

    owners: list[tuple[Any, str]]
    shapes: list[tuple[int, ...]]
    parts: list[tuple[torch.Tensor | None, tuple[int, int] | None]]


def flat_ranges(flat: torch.Tensor) -> Ranges | None:
    """Return what a flat parameter is made of; None if the tensor is no sharded flat parameter."""
    infos, shards = getattr(flat, "_param_infos", None), getattr(flat, "_shard_param_infos", None)
    if infos is None or shards is None:
        return None
    owners, shapes = [(info.module, info.param_name) for info in infos], [tuple(shape) for shape in flat._shapes]  # type: ignore[attr-defined]
    return Ranges(owners, shapes, [_part(shard) for shard in shards])


def local_ranges(view: torch.Tensor, called: Iterable[Any]) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """Return the positions that an original parameter has here (``use_orig_params=True``), and its shape.

    None if the tensor is no such parameter of any of the FSDP modules among `called`.
    """
    for module in called:
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        views, shards = getattr(flat, "_params", None) or (), getattr(flat, "_shard_param_infos", ())
        for one, shard, shape in zip(views, shards, getattr(flat, "_shapes", ()), strict=False):
            if one is view:
                at = _part(shard)[0]
                return torch.empty(0, dtype=torch.int64) if at is None else at, tuple(shape)
    return None


def _part(shard: Any) -> tuple[torch.Tensor | None, tuple[int, int] | None]:
    if not shard.in_shard:
        return None, None
    start = shard.offset_in_shard
    at = torch.arange(shard.intra_param_start_idx, shard.intra_param_end_idx + 1)
    return at, (start, start + shard.numel_in_shard)
