"""Slices of whole tensors, and wholes assembled from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch


class Unplaced(Enum):
    """Why it is not known which slice a tensor is."""

    AMBIGUOUS = "its values are in several places of the single-device model"
    NOWHERE = "its values before the first step are nowhere in the single-device model"
    OF_OTHER_SHAPE = "it is a DTensor of a shape that no tensor of the single-device model has"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Slice:
    """Elements of a whole tensor that a local tensor holds.

    Attributes:
        whole: name of the whole tensor: that of the parameter on one device.
        shape: shape of the whole tensor.
        at: for each element, in the order of the local tensor, its position in the flattened whole, int64; None where
            the local tensor is the whole.
        within: first and last + 1 element of the flattened local tensor that belong to this slice; None for all.
    """

    whole: str
    shape: tuple[int, ...]
    at: torch.Tensor | None = None
    within: tuple[int, int] | None = None

    @property
    def mask(self) -> torch.Tensor:
        """The elements of the whole that are held: bool, in the shape of the whole."""
        if self.at is None:
            return torch.ones(self.shape, dtype=torch.bool)
        mask = torch.zeros(self.shape, dtype=torch.bool)
        mask.view(-1)[self.at] = True
        return mask

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the elements of a local tensor that belong to this slice, flattened."""
        flat = local.reshape(-1)
        return flat if self.within is None else flat[slice(*self.within)]

    def put(self, local: torch.Tensor, whole: torch.Tensor) -> None:
        """Write the elements of a local tensor to their places in a contiguous whole."""
        flat = whole.view(-1)
        flat[slice(None) if self.at is None else self.at] = self.of(local).to(whole.dtype)

    def __str__(self) -> str:
        """Describe it: "all", "dim 0: 4 to 7 of 16", "elements 16 to 31 of 64"."""
        if self.at is None:
            return "all"
        if not self.at.numel():
            return "nothing"
        mask = self.mask
        cut = [dim for dim in range(mask.dim()) if not _is_full(mask, dim)]
        if all(_fills_its_box(mask, cut)):
            return ", ".join(f"dim {dim}: {_ranges(_used(mask, dim))} of {mask.shape[dim]}" for dim in cut) or "all"
        return f"elements {_ranges(mask.view(-1).nonzero().flatten())} of {mask.numel()}"


@dataclass(frozen=True)
class Assembled:
    """A whole tensor that was put together from slices.

    Attributes:
        value: the whole; of an element that several hold, what the first of them has.
        missing: the elements that no slice holds, bool; None if there are no such elements.
    """

    value: torch.Tensor
    missing: torch.Tensor | None


def assembled(parts: Sequence[tuple[Slice, torch.Tensor]]) -> Assembled:
    """Put slices of one whole together.

    Args:
        parts: at least one; each slice with the local tensor that has it.
    """
    first, local = parts[0]
    value = torch.zeros(first.shape, dtype=local.dtype)
    held = torch.zeros(first.shape, dtype=torch.bool)
    for part, tensor in reversed(parts):
        part.put(tensor, value)
        held |= part.mask
    return Assembled(value, None if bool(held.all()) else ~held)


def indexed(shape: Sequence[int], index: object) -> torch.Tensor:
    """Return the positions in a flattened tensor that an index selects: a slice, integers, or several."""
    count = 1
    for size in shape:
        count *= size
    positions: torch.Tensor = torch.arange(count).view(tuple(shape))[index]  # type: ignore[index]
    return positions.reshape(-1)


def _is_full(mask: torch.Tensor, dim: int) -> bool:
    return len(_used(mask, dim)) == mask.shape[dim]


def _used(mask: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the indices along a dimension that hold an element."""
    others = [other for other in range(mask.dim()) if other != dim]
    return (mask.any(others) if others else mask).nonzero().flatten()


def _fills_its_box(mask: torch.Tensor, cut: Iterable[int]) -> list[bool]:
    """Return whether all is held that has a used index in each dimension."""
    box = mask
    for dim in cut:
        box = box.index_select(dim, _used(mask, dim))
    return [bool(box.all())]


def _ranges(indices: torch.Tensor) -> str:
    """Return "4 to 7", or "0 to 1 and 8 to 9"."""
    found: list[tuple[int, int]] = []
    for index in indices.tolist():
        if found and found[-1][1] == index - 1:
            found[-1] = found[-1][0], index
        else:
            found.append((index, index))
    shown = [f"{low} to {high}" if high > low else str(low) for low, high in found[:3]]
    more = f" and {len(found) - 3} more ranges" if len(found) > 3 else ""
    return " and ".join(shown) + more
