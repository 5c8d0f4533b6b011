"""Draw curves over optimizer steps as inline SVG, readable without colour and on dark and light backgrounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu_check import pages

__all__ = ["Curve", "draw"]

_WIDTH, _HEIGHT = 860, 330
_MARKED = 80  # with more steps, marks of points would overlap
_POINTS = 2000  # longer runs are thinned to about this number: more points would not be visible
_LARGEST = 1e200  # larger values are drawn here, because the scale needs room above them


@dataclass(frozen=True)
class Curve:
    """A curve of a picture.

    Attributes:
        values: one for each step; None leaves a gap.
        style: "one" (broad and solid), "ranks" (narrow and dashed), "each" (dotted), "limit"; its class in the SVG.
    """

    label: str
    values: Sequence[float | None]
    style: str


def draw(
    name: str,
    title: str,
    unit: str,
    curves: Sequence[Curve],
    *,
    logarithmic: bool = False,
    mark: int | None = None,
) -> str:
    """Return the picture of `curves` as an ``<svg>`` element.

    Args:
        name: name of the picture in its page, and prefix of its ids.
        title: description for screen readers.
        unit: label of the vertical axis.
        logarithmic: use a logarithmic vertical axis, and omit values that are not positive.
        mark: a step to mark, counted from 1.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = max((len(curve.values) for curve in curves), default=0)
    with pages.drawing():
        figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72), layout="constrained")
        axes = figure.add_subplot(xlabel="optimizer step", ylabel=unit)
        axes.grid(axis="y")
        axes.set_xlim(1, max(steps, 2))
        axes.margins(y=0.08)
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 5, 10]))
        shown: dict[str, Any] = {}
        for curve in curves:
            every = max(1, len(curve.values) // _POINTS)
            at = [n for n in range(1, len(curve.values) + 1) if n % every == 0 or n == len(curve.values)]
            drawn = [_number(curve.values[n - 1], logarithmic) for n in at]
            (line,) = axes.plot(at, drawn, gid=curve.style, clip_on=False, **_look(curve.style, len(at)))
            shown.setdefault(curve.label, line)
        positive = [_number(value, True) for curve in curves for value in curve.values]
        positive = [value for value in positive if value > 0]
        if logarithmic and positive:
            _decades(axes, min(positive), max(positive))
        if mark is not None and steps:
            _mark(axes, min(mark, steps), mark, steps)
        figure.legend(list(shown.values()), list(shown), loc="outside upper left", ncols=3, handlelength=3)
        return pages.inline(figure, name, title)


def _number(value: float | None, logarithmic: bool) -> float:
    """Return the value within the drawable range, or NaN for a gap."""
    drawn = value is not None and math.isfinite(value) and (value > 0 or not logarithmic)
    if not drawn or value is None:
        return math.nan
    least = 1 / _LARGEST if logarithmic else -_LARGEST
    return min(max(float(value), least), _LARGEST)


def _look(style: str, points: int) -> Mapping[str, Any]:
    few = points <= _MARKED
    one, ranks = pages.colour("series0"), pages.colour("series1")
    if style == "one":
        hollow = {"marker": "o", "markersize": 10, "markerfacecolor": "none"} if few else {}
        return {"color": one, "linewidth": 4, "markeredgewidth": 1.5, **hollow}
    if style == "ranks":
        cross = {"marker": "x", "markersize": 6} if few else {}
        return {"color": ranks, "linewidth": 2, "linestyle": (0, (3.5, 2)), **cross}
    if style == "each":
        return {"color": pages.colour("weak"), "linewidth": 1, "linestyle": ":"}
    return {"color": pages.colour("text"), "linewidth": 1.5, "linestyle": "-."}


def _decades(axes: Any, low: float, high: float) -> None:
    """Give the vertical axis a logarithmic scale between powers of ten, with at most ten labels."""
    bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
    top = max(top, bottom + 1)
    powers = range(bottom, top + 1, math.ceil((top - bottom) / 9))
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_yticks([10.0**power for power in powers], [f"1e{power}" for power in powers])
    axes.set_ylim(10.0**bottom, 10.0**top)


def _mark(axes: Any, at: int, step: int, steps: int) -> None:
    wrong = pages.colour("wrong")
    axes.axvline(at, color=wrong, linewidth=1.5, gid="mark", clip_on=False)
    left = at - 1 < (steps - 1) / 2 or steps == 1
    axes.annotate(
        f"step {step}: first difference",
        (at, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-2 if left else 2, 5),
        textcoords="offset pixels",
        ha="left" if left else "right",
        va="bottom",
        color=wrong,
        fontweight="bold",
        gid="marked",
    )
