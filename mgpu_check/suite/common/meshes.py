"""Choose the shapes of device meshes."""

from __future__ import annotations


def near_square(ranks: int) -> tuple[int, int]:
    """Return the sides of the mesh of `ranks` ranks that is closest to a square, the smaller side first."""
    side = max(side for side in range(1, ranks + 1) if ranks % side == 0 and side * side <= ranks)
    return side, ranks // side
