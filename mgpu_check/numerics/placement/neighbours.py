"""Place a tensor of constants, such as a bias of zeros, by where its neighbours in the same module are."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mgpu_check.numerics.placement.content import Wholes
from mgpu_check.numerics.placement.slices import Slice, indexed


def beside(
    name: str, local: torch.Tensor, neighbours: Iterable[tuple[torch.Size, Slice]], wholes: Wholes
) -> Slice | None:
    """Return the slice that has the same rows as a neighbour; None if no neighbour fits.

    Args:
        name: of the local tensor.
        local: dense, on the CPU, with the values from before the first step.
        neighbours: the shapes and slices of other tensors of the same module.
    """
    found = {}
    for shape, part in neighbours:
        whole = part.whole.rpartition(".")[0] + "." * ("." in part.whole) + name.rpartition(".")[2]
        value, rows = wholes.whole(whole), _rows(shape, part)
        if value is None or rows is None or value.shape[1:] != local.shape[1:] or len(rows) != len(local):
            continue
        if value.shape[0] == part.shape[0] and torch.equal(value[rows], local):
            found[whole, tuple(rows.tolist())] = Slice(whole, tuple(value.shape), indexed(value.shape, rows))
    return next(iter(found.values())) if len(found) == 1 else None


def _rows(shape: torch.Size, part: Slice) -> torch.Tensor | None:
    """Return the indices of the rows of the whole that a slice consists of; None if it has parts of rows."""
    if part.at is None or part.within is not None or not shape or not part.shape:
        return None
    width = torch.Size(part.shape[1:]).numel()
    if not len(part.at) or len(part.at) != shape[0] * width:
        return None
    at = part.at.view(shape[0], width)
    return at[:, 0] // width if torch.equal(at, at[:, :1] // width * width + torch.arange(width)) else None
