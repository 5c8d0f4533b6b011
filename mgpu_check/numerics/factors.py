"""Find one factor by which all of what differs is off. Without torch: summaries are judged where it is not imported."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["common_factor", "evenly"]

_MOST = 100_000


def common_factor(
    pairs: Sequence[tuple[float, float]], *, least: float, relative: float = 0.0, of_largest: float = 0.0
) -> float | None:
    """Return the factor by which all of (got, expected) are off; None where there is none, or it is 1.

    It is the one that leaves least, by least squares. What it leaves of each number must be within the slack, which is
    `relative` times the number, plus `of_largest` times the largest of them, both of what is to be got.

    Args:
        pairs: not all expected values zero; those that are not finite are left aside.
        least: how far from 1 a factor must be to say anything.
        relative: for numbers that were computed in another order each.
        of_largest: for numbers that are sums, whose errors are those of the largest terms.
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
    """Choose which of so many numbers to look at: all, or as many as Python can, evenly spread."""
    return slice(None, None, max(1, -(-count // _MOST)))
