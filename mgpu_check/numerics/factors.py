"""Find one factor that explains all differences. This module imports no torch: summaries are judged without it."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MOST = 100_000  # numbers that are fitted at most: Python handles them one by one


def common_factor(
    pairs: Sequence[tuple[float, float]], *, least: float, relative: float = 0.0, of_largest: float = 0.0
) -> float | None:
    """Return the factor f with got = f·expected for all pairs (got, expected), or None.

    f minimizes the squared error. Each number must fit within a slack: `relative` times |f·expected| of its own pair,
    plus `of_largest` times the largest |f·expected|. The result is None if a number does not fit, if |f - 1| < `least`,
    if f is 0 or if every expected value is 0.

    Args:
        pairs: (got, expected). Pairs with a value that is not finite are ignored.
        least: smallest distance of a factor from 1 that counts.
        relative: slack for numbers that were each computed in another order.
        of_largest: slack for sums, whose errors follow their largest terms.
    """
    kept = [(g, e) for g, e in pairs if math.isfinite(g) and math.isfinite(e)]
    square = math.fsum(e * e for _, e in kept)
    if not square:
        return None
    factor = math.fsum(g * e for g, e in kept) / square
    if abs(factor - 1) < least or not factor:
        return None
    floor = of_largest * max(abs(factor * e) for _, e in kept)
    fits = all(abs(g - factor * e) <= relative * abs(factor * e) + floor for g, e in kept)
    return factor if fits else None


def evenly(count: int) -> slice:
    """Return a slice that selects at most `_MOST` of `count` numbers, evenly spread."""
    return slice(None, None, max(1, -(-count // _MOST)))
