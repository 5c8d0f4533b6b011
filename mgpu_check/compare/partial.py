"""Put statistics together that ranks keep of their own slices of a parameter, such as the column means of some rows.

Equal values on all ranks are a statistic that was reduced over the ranks. Of other values `compare` takes the mean,
weighted by the size of each slice: if the statistic is a mean, this is the statistic of the whole.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from mgpu_check.compare.alignment import deviation
from mgpu_check.compare.trace import HeldSlice, TensorSummary, joined

_NEAR = 1e-2
"""Relative deviation from one device: rounding causes less, and another reduction than the mean almost always more."""
_SHARE = 1e-6
"""Deviation of a sum of shares from 1: more than floating-point numbers cause, and less than one of a million rows."""


def together(
    parts: Collection[tuple[HeldSlice, TensorSummary]], expected: TensorSummary | None
) -> TensorSummary | None:
    """Return the whole tensor from all of its parts; None without parts.

    Args:
        expected: the tensor on one device. The norm of a mean is unknown without its elements, so its norm is taken.
    """
    if not parts:
        return None
    found = joined([_mean(own) for own in _by_place(parts)])
    return replace(found, norm=expected.norm) if math.isnan(found.norm) and expected is not None else found


def is_partial(parts: Iterable[tuple[HeldSlice, TensorSummary]]) -> bool:
    """Return whether ranks have different values of a statistic for the same place."""
    return any(_is_mean(own) for own in _by_place(parts))


def why_not_together(
    parts: Collection[tuple[HeldSlice, TensorSummary]], expected: TensorSummary | None, shape: Sequence[int]
) -> str:
    """Return why parts of a statistic are not the statistic of one device; "" if they are."""
    told = "; ".join(dict.fromkeys(held.covers for held, _ in parts))
    if any(abs(math.fsum(held.share for held, _ in own) - 1) > _SHARE for own in _by_place(parts)):
        return f"the slices that it is computed from do not cover the parameter once: {told}"
    if expected is None or deviation(together(parts, expected), expected, shape).size <= _NEAR:
        return ""
    return f"each rank may keep a statistic of its own slice ({told}), and their mean is not that of one device"


def _by_place(parts: Iterable[tuple[HeldSlice, TensorSummary]]) -> list[list[tuple[HeldSlice, TensorSummary]]]:
    found: dict[tuple[int, int], list[tuple[HeldSlice, TensorSummary]]] = defaultdict(list)
    for held, value in parts:
        found[held.key].append((held, value))
    return list(found.values())


def _is_mean(parts: Sequence[tuple[HeldSlice, TensorSummary]]) -> bool:
    return any(value != parts[0][1] for _, value in parts)


def _mean(parts: Sequence[tuple[HeldSlice, TensorSummary]]) -> TensorSummary:
    """Return the mean of partial statistics. Equal parts are the mean themselves."""
    if not _is_mean(parts):
        return parts[0][1]
    return mean_of([value for _, value in parts], [held.share for held, _ in parts])


def mean_of(values: Sequence[TensorSummary], shares: Sequence[float]) -> TensorSummary:
    """Return the weighted mean; its norm is not a number, since it is unknown."""

    def mean(some: Sequence[float]) -> float:
        return sum(share * value for share, value in zip(shares, some, strict=True))

    return TensorSummary(
        0,
        math.nan if all(value.finite for value in values) else math.inf,
        tuple(map(mean, zip(*(value.sums for value in values), strict=True))),
        # None is an element that no rank has at this place.
        tuple(some[0] if None in some else mean(some) for some in zip(*(v.samples for v in values), strict=True)),
    )
