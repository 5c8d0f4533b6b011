"""Recognize recorded values by their sums and norms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mgpu_check.diagnosis.results import Result

Left = Mapping[str, Mapping[str, float]]
"""The sum and the norm of each gradient after a backward pass, by the name of the parameter."""

_CLOSE = 1e-5
"""Tolerance, as a fraction of the norm, for sums that are computed in the same order."""
_NEAR = 1e-4
"""Tolerance, as a fraction of the norm, for values that were summed in another order since."""


def is_left(name: Result, left: Sequence[Left], values: Sequence[torch.Tensor]) -> bool:
    """Return whether each rank holds the gradient of its own backward pass, unlike other ranks.

    Args:
        left: the gradients after the backward pass, by rank.
        values: the gradients that ranks hold now, by rank.
    """
    sums = [(one[name.of]["sum"], one[name.of]["norm"]) for one in left if name.of in one]
    if not len(sums) == len(values) == len(left) or len(set(sums)) == 1:
        return False
    wide = [value.double() for value in values]
    return all(
        abs(float(value.sum()) - total) <= _CLOSE * norm and abs(float(value.norm()) - norm) <= _CLOSE * norm
        for value, (total, norm) in zip(wide, sums, strict=True)
    )


def is_clipped(left: Sequence[Left], norms: Sequence[float | None]) -> bool:
    """Return whether each rank clips what its own backward pass left, unlike other ranks: clipping finds its norm."""
    own = [math.hypot(*(one["norm"] for one in gradients.values())) for gradients in left]
    if len(set(own)) < 2 or len(own) != len(norms):
        return False
    return all(norm is not None and abs(norm - total) <= _NEAR * total for norm, total in zip(norms, own, strict=True))


def is_held(contents: Mapping[str, float], values: Sequence[torch.Tensor], size: int) -> bool:
    """Return whether a recorded tensor has these values, or `size` times these values."""
    if "norm" not in contents or any(not value.is_floating_point() for value in values):
        return False
    wide = [value.double() for value in values]
    total = math.fsum(float(value.sum()) for value in wide)
    norm = math.hypot(*(float(value.norm()) for value in wide))
    return bool(norm) and any(
        abs(contents["sum"] - factor * total) <= _NEAR * factor * norm
        and abs(contents["norm"] - factor * norm) <= _NEAR * factor * norm
        for factor in (1, size)
    )
