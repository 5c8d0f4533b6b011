"""Curves over optimizer steps as inline SVG: readable without colour, and on dark and light ground."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Curve", "draw"]

_WIDTH, _HEIGHT = 860, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 82, 20, 44, 52
_MARKED = 80  # up to so many steps each point has a mark
_POINTS = 2000  # of longer runs every so many steps are drawn


@dataclass(frozen=True)
class Curve:
    """A line of a picture.

    Attributes:
        values: one for each step; None leaves a gap.
        style: CSS class: "one" (broad and solid), "ranks" (narrow and dashed), "each" (dotted), "limit".
    """

    label: str
    values: Sequence[float | None]
    style: str


def draw(title: str, unit: str, curves: Sequence[Curve], *, logarithmic: bool = False, mark: int | None = None) -> str:
    """Return the picture of `curves` as an ``<svg>`` element, whose classes the page's style colours.

    Args:
        title: for those who cannot see it, and above it.
        unit: what the vertical axis shows.
        logarithmic: scale of the vertical axis; values that are not above 0 are left out.
        mark: a step, from 1, to be marked.
    """
    steps = max((len(curve.values) for curve in curves), default=0)
    known = [v for curve in curves for v in curve.values if v is not None and _fits(v, logarithmic)]
    low, high, ticks = _scale(known, logarithmic)
    across = _WIDTH - _LEFT - _RIGHT
    down = _HEIGHT - _TOP - _BOTTOM

    def x(step: float) -> float:
        return _LEFT + across * (step - 1) / max(steps - 1, 1)

    def y(value: float) -> float:
        part = (math.log10(value) if logarithmic else value) - low
        return _TOP + down * (1 - part / (high - low))

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{html.escape(title)}</title>",
    ]
    for value, text in ticks:
        parts += [
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>',
            f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{text}</text>',
        ]
    for step in _steps(steps):
        parts += [
            f'<line class="axis" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{_TOP + down}" y2="{_TOP + down + 5}"/>',
            f'<text x="{x(step):.1f}" y="{_TOP + down + 20}" text-anchor="middle">{step}</text>',
        ]
    parts += [
        f'<path class="axis" d="M{_LEFT},{_TOP} V{_TOP + down} H{_WIDTH - _RIGHT}"/>',
        f'<text x="{_LEFT + across / 2:.0f}" y="{_HEIGHT - 10}" text-anchor="middle">optimizer step</text>',
        f'<text transform="translate(16 {_TOP + down / 2:.0f}) rotate(-90)" text-anchor="middle">{html.escape(unit)}</text>',
    ]
    for curve in curves:
        parts += _line(curve, x, y, logarithmic)
    if mark is not None and steps:
        left = x(min(mark, steps))
        anchor = "start" if left < _WIDTH / 2 else "end"
        shift = 6 if anchor == "start" else -6
        parts += [
            f'<line class="mark" x1="{left:.1f}" x2="{left:.1f}" y1="{_TOP - 6}" y2="{_TOP + down}"/>',
            f'<text class="marked" x="{left + shift:.1f}" y="{_TOP + 10}" text-anchor="{anchor}">step {mark}: first difference</text>',
        ]
    parts += [*_legend(curves), "</svg>"]
    return "\n".join(parts)


def _fits(value: float, logarithmic: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not logarithmic)


def _line(curve: Curve, x: object, y: object, logarithmic: bool) -> list[str]:
    assert callable(x) and callable(y)
    points: list[tuple[float, float] | None] = []
    every = max(1, len(curve.values) // _POINTS)
    for number, value in enumerate(curve.values, 1):
        if number % every and number != len(curve.values):
            continue
        drawn = value is not None and _fits(value, logarithmic)
        points.append((x(number), y(value)) if drawn else None)
    path, pen_down = [], False
    for point in points:
        if point is not None:
            path.append(f"{'L' if pen_down else 'M'}{point[0]:.1f},{point[1]:.1f}")
        pen_down = point is not None
    parts = [f'<path class="{curve.style}" d="{" ".join(path)}"/>'] if path else []
    if len(points) <= _MARKED and curve.style in ("one", "ranks"):
        parts += [_point(curve.style, *point) for point in points if point is not None]
    return parts


def _point(style: str, x: float, y: float) -> str:
    if style == "one":
        return f'<circle class="one dot" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    return f'<path class="ranks cross" d="M{x - 3:.1f},{y - 3:.1f} l6,6 m0,-6 l-6,6"/>'


def _legend(curves: Sequence[Curve]) -> list[str]:
    parts, left = [], float(_LEFT)
    shown: set[str] = set()
    for curve in curves:
        if curve.label in shown:
            continue
        shown.add(curve.label)
        parts.append(f'<path class="{curve.style}" d="M{left:.0f},18 h34"/>')
        if curve.style in ("one", "ranks"):
            parts.append(_point(curve.style, left + 17, 18))
        parts.append(f'<text x="{left + 42:.0f}" y="22">{html.escape(curve.label)}</text>')
        left += 62 + 7.2 * len(curve.label)
    return parts


def _steps(count: int) -> list[int]:
    """Choose the steps that are numbered: about ten, the first among them."""
    if count <= 1:
        return [1][:count]
    apart = _round_number(count / 10) if count > 12 else 1.0
    every = max(1, int(apart))
    return [1, *(step for step in range(every, count + 1, every) if step > 1)]


def _round_number(about: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not below `about`."""
    power: float = 10.0 ** math.floor(math.log10(about))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= about * 0.999)


def _scale(values: Sequence[float], logarithmic: bool) -> tuple[float, float, list[tuple[float, str]]]:
    """Return the lower and upper end of the axis (of logarithms, there), and its ticks: (value, text)."""
    if not values:
        return 0.0, 1.0, []
    if logarithmic:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        high = max(high, low + 1)
        every = max(1, math.ceil((high - low) / 8))
        return low, high, [(10.0**power, f"1e{power}") for power in range(low, high + 1, every)]
    smallest, largest = min(values), max(values)
    if smallest == largest:
        smallest, largest = smallest - (abs(smallest) or 1) / 2, largest + (abs(largest) or 1) / 2
    apart = _round_number((largest - smallest) / 5)
    first, last = math.floor(smallest / apart), math.ceil(largest / apart)
    return first * apart, last * apart, [(n * apart, f"{n * apart:.6g}") for n in range(first, last + 1)]
