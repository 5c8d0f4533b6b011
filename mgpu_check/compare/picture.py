"""Draw curves over optimizer steps as inline SVG, readable without colour and on dark and light backgrounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgpu_check import pages

_MARKED = 80  # with more steps, marks of points would overlap
_POINTS = 2000  # longer runs are thinned to about this number: more points would not be visible
_MARKS = {"one": "circle", "ranks": "cross"}


@dataclass(frozen=True)
class Curve:
    """A curve of a picture.

    Attributes:
        values: one for each step; None leaves a gap.
        style: "one" (broad and solid), "ranks" (narrow and dashed), "each" (dotted), "limit"; its class in the
            SVG.
    """

    label: str
    values: Sequence[float | None]
    style: str


def draw(
    title: str,
    unit: str,
    curves: Sequence[Curve],
    *,
    logarithmic: bool = False,
    mark: int | None = None,
) -> str:
    """Return the picture of `curves` as an ``<svg>`` element.

    Args:
        title: description for screen readers.
        unit: label of the vertical axis.
        logarithmic: use a logarithmic vertical axis, and omit values that are not positive.
        mark: a step to mark.
    """
    steps = max((len(curve.values) for curve in curves), default=0)
    lines = []
    for curve in curves:
        every = max(1, len(curve.values) // _POINTS)
        at = [n for n in range(1, len(curve.values) + 1) if n % every == 0 or n == len(curve.values)]
        form = _MARKS.get(curve.style, "") if len(at) <= _MARKED else ""
        lines.append(pages.Line(curve.label, [(n, curve.values[n - 1]) for n in at], curve.style, form))
    marked = [(min(mark, steps), f"step {mark}: first difference")] if mark is not None and steps else []
    panel = pages.Panel(unit, lines, logarithmic=logarithmic)
    return pages.svg(
        pages.Chart(title, "optimizer step", (1, max(steps, 2)), [panel], marked=marked, whole=True, tall=230)
    )
