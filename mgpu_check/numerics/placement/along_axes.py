"""Place a tensor of constants by the axis of a mesh over which other tensors of the rank are divided."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mgpu_check.numerics.placement.content import Wholes
from mgpu_check.numerics.placement.declared import Coordinates
from mgpu_check.numerics.placement.slices import Slice, indexed


def along_axes(
    name: str, local: torch.Tensor, wholes: Wholes, coordinates: Coordinates, others: Iterable[tuple[torch.Size, Slice]]
) -> Slice | None:
    """Return the chunk of the whole of this name that is this rank's along an axis; None if that is not known.

    Args:
        local: dense, on the CPU, with the values from before the first step.
        coordinates: of this rank.
        others: the shapes and slices of other tensors of this rank. They must be chunks along the same axis.
    """
    whole = wholes.whole(name)
    cut = None if whole is None else _cut(tuple(whole.shape), local.shape)
    if whole is None or cut is None:
        return None
    dim, parts = cut
    alike = [(part, other) for shape, part in others if (other := _cut(part.shape, shape)) and other[1] == parts]
    places = {
        index
        for index, size in coordinates.values()
        if size == parts
        and alike
        and all(part.at is not None and torch.equal(part.at, _chunk(part.shape, other, index)) for part, other in alike)
    }
    if len(places) != 1:
        return None
    at = _chunk(tuple(whole.shape), (dim, parts), places.pop())
    return Slice(name, tuple(whole.shape), at) if torch.equal(whole.reshape(-1)[at], local.reshape(-1)) else None


def _cut(whole: tuple[int, ...], local: tuple[int, ...] | torch.Size) -> tuple[int, int] | None:
    """Return the one dimension that is divided, and into how many equal parts; None if there is no such dimension."""
    if len(whole) != len(local):
        return None
    cut = [dim for dim, (size, here) in enumerate(zip(whole, local, strict=True)) if size != here]
    if len(cut) != 1 or not local[cut[0]] or whole[cut[0]] % local[cut[0]]:
        return None
    return cut[0], whole[cut[0]] // local[cut[0]]


def _chunk(shape: tuple[int, ...], cut: tuple[int, int], index: int) -> torch.Tensor:
    dim, parts = cut
    width = shape[dim] // parts
    return indexed(shape, (*[slice(None)] * dim, slice(index * width, (index + 1) * width)))
