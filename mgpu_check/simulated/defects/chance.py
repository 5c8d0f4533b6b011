"""Timing and patterns of hardware defects.

After arXiv 2605.04213: most wrong results of hardware have more than one wrong bit. Wrong elements often repeat with a
period, such as the lanes of a warp, and about one in a hundred is NaN or infinite.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from mgpu_check.simulated.defects.parameters import PATTERNS, Parameters
from mgpu_check.torch_hooks.tensors import name_of

_WARP = 32
_TILE = 16

Pattern = Callable[[torch.Tensor, random.Random], None]
"""Changes elements in place.

The tensor has one dimension, at least one element, and an integer dtype of the element size.
"""


class Chance:
    """Selects the events that a defect affects: one in ``every``, and each of these with ``probability``."""

    def __init__(self, parameters: Parameters) -> None:
        self._every = int(parameters.get("every", 1))
        self._probability = float(parameters.get("probability", 1.0))
        self.random = random.Random(int(parameters.get("seed", 0)))
        self._seen = 0

    def now(self) -> bool:
        self._seen += 1
        return self._seen % self._every == 0 and self.random.random() < self._probability


def dtype_matches(parameters: Parameters, dtype: torch.dtype) -> bool:
    """Return whether `dtype` matches the parameter "dtype", such as "float16"; always if that is "any" or missing."""
    return parameters.get("dtype", "any") in ("any", name_of(dtype))


def _invert(elements: torch.Tensor, bit: int) -> None:
    """Invert one bit of each element; bit -1 is the highest one below the sign."""
    elements ^= 1 << bit % (8 * elements.itemsize - 1)


def _one_of(elements: torch.Tensor, chosen: random.Random) -> torch.Tensor:
    return elements[chosen.randrange(elements.numel()) :][:1]


def _bit(elements: torch.Tensor, chosen: random.Random) -> None:
    _invert(_one_of(elements, chosen), chosen.randrange(64))


def _low_bit(elements: torch.Tensor, chosen: random.Random) -> None:
    _invert(_one_of(elements, chosen), 0)


def _bits(elements: torch.Tensor, chosen: random.Random) -> None:
    one = _one_of(elements, chosen)
    for bit in chosen.sample(range(8 * elements.itemsize - 1), 3):
        _invert(one, bit)


def _lane(elements: torch.Tensor, chosen: random.Random) -> None:
    lane = chosen.randrange(min(_WARP, elements.numel()))
    _invert(elements[lane::_WARP], -chosen.randrange(2, 7))


def _not_finite(elements: torch.Tensor, chosen: random.Random) -> None:
    """Set all bits of one element except the sign, which gives NaN in each floating dtype."""
    _one_of(elements, chosen).fill_(torch.iinfo(elements.dtype).max)


def _tile(elements: torch.Tensor, chosen: random.Random) -> None:
    """Invert one bit of each element of a run as long as a row of a tile."""
    start = chosen.randrange(max(elements.numel() - _TILE, 1))
    _invert(elements[start : start + _TILE], -chosen.randrange(2, 7))


def _swap(elements: torch.Tensor, chosen: random.Random) -> None:
    """Swap the first and the last element; if they are equal or the same, invert one bit."""
    first, last = elements[0].item(), elements[-1].item()
    if first == last:
        _bit(elements, chosen)
    else:
        elements[0], elements[-1] = last, first


SPOIL: dict[str, Pattern] = dict(zip(PATTERNS, (_bit, _low_bit, _bits, _lane, _not_finite, _tile, _swap), strict=True))
"""The functions for the names of `PATTERNS`."""
