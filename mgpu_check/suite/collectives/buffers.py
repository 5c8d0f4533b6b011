"""Lay the tensors of a collective out in one piece of memory, with guards before, between and after them.

The whole memory is compared. So the comparison finds writes beyond a tensor, between the elements of a tensor with
gaps, and to a tensor that should only be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_GUARD = 17
"""Elements between tensors; odd, so that tensors begin at addresses of every alignment."""
_FILLING = 0xA5
_UNWRITTEN = 0x5B


@dataclass(frozen=True)
class Shape:
    """The layout of a tensor in memory: its sizes, its strides, and its extent in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    extent: int


def shaped(layout: str, length: int) -> Shape:
    """Return `length` elements in a layout, or as a vector if the length does not allow it."""
    if layout == "gaps":
        return Shape((length,), (2,), max(2 * length - 1, 0))
    rows = next((rows for rows in (4, 3, 2) if length % rows == 0), 0)
    if layout in ("matrix", "stacked") and rows:
        return Shape((rows, length // rows), (length // rows, 1), length)
    if layout == "transposed" and rows:
        return Shape((length // rows, rows), (1, length // rows), length)
    if layout == "channels_last" and length % 4 == 0:
        height = length // 4
        return Shape((1, 2, height, 2), (length, 1, 4, 2), length)
    if layout == "scalar" and length == 1:
        return Shape((), (), 1)
    return Shape((length,), (1,), length)


def stacked(count: int, length: int) -> Shape:
    """Return `count` tensors of the layout "stacked", one after the other in one tensor with a dimension more."""
    part = shaped("stacked", length)
    return Shape((count, *part.sizes), (length, *part.strides), count * length)


class CallMemory:
    """The memory of one call: places its tensors, and makes its contents on the CPU."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._shapes: list[tuple[int, Shape]] = []
        self._end = _GUARD

    def add(self, shape: Shape) -> int:
        """Make room for a tensor; return its number."""
        self._shapes.append((self._end, shape))
        self._end += shape.extent + _GUARD
        return len(self._shapes) - 1

    def lay(self, shapes: Sequence[Shape], *, backwards: bool) -> None:
        """Make room for tensors, numbered in the given order; with `backwards` they lie in memory in reverse order."""
        for shape in reversed(shapes) if backwards else shapes:
            self.add(shape)
        if backwards:
            self._shapes.reverse()

    def filled(self, contents: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the whole memory on the CPU with these values; None for a tensor that the collective writes."""
        whole = torch.full((self._end * self.dtype.itemsize,), _FILLING, dtype=torch.uint8)
        if self.dtype is torch.bool:
            whole.fill_(1)
        for number, content in enumerate(contents):
            _offset, shape = self._shapes[number]
            if content is not None:
                view = self.view(whole.view(self.dtype), number)
                view.copy_(content.view(shape.sizes))
            elif self.dtype is not torch.bool:
                self.view(whole.view(self.dtype), number).view(self.dtype).copy_(_unwritten(shape.sizes, self.dtype))
        return whole.view(self.dtype)

    def view(self, whole: torch.Tensor, number: int) -> torch.Tensor:
        """Return a tensor in the memory."""
        offset, shape = self._shapes[number]
        return whole.as_strided(shape.sizes, shape.strides, offset)


def _unwritten(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(sizes).numel()
    return torch.full((count * dtype.itemsize,), _UNWRITTEN, dtype=torch.uint8).view(dtype).view(tuple(sizes))
