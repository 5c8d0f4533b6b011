"""Pages for people: one HTML file that loads nothing, light or dark, on a desktop or a telephone.

Jinja2 makes them. It comes with the extra ``mgpu-check[report]``, and is imported when a page is made. The style sheet
in ``pages.html`` has a class for each look of a line, so that a chart brings no colours of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

INSTALL = "pip install 'mgpu-check[report]'"

_WIDTH, _RIGHT = 880, 14
_CHARACTER = 7.5  # widest average of a character at font size 12, over the fonts of browsers
_ROW = 17  # height of a row of bars
_TITLE, _WORDS = 26, 18  # heights above a panel: its title, and the words of marked places
_LARGEST = 1e200  # larger values are drawn here, because the scale needs room above them
_MARKS = {
    "circle": "m-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0",
    "cross": "m-3-3l6 6m0-6l-6 6",
    "triangle": "m-4-3h8l-4 7z",
}
"""Form of a mark, as a path that begins at the point."""


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    label: str  # its name in the legend; "" for a line without an entry there
    # x and y in the order of x; a y that is None or not finite leaves a gap
    points: Sequence[tuple[float, float | None]]
    look: str  # its classes, see the style sheet
    mark: str = ""  # form of the mark at each point: "circle", "cross", "triangle", or "" for no marks


@dataclass(frozen=True)
class Panel:
    """One vertical axis with its lines."""

    title: str  # quantity and unit of the axis
    lines: Sequence[Line]
    note: str = ""  # words at the right of the title
    logarithmic: bool = False  # values that are not positive leave a gap


@dataclass(frozen=True)
class Bar:
    """A span of the horizontal axis, in a row of its own above the panels."""

    label: str
    # start, end: of the span; None for a row without a bar
    start: float | None
    end: float
    look: str
    words: str  # what its tooltip says


@dataclass(frozen=True)
class Chart:
    """Lines over a common horizontal axis."""

    title: str  # what the picture shows, for those who cannot see it
    across: str  # quantity and unit of the horizontal axis
    span: tuple[float, float]  # first and last value of the horizontal axis
    panels: Sequence[Panel]
    bars: Sequence[Bar] = ()
    # values of the horizontal axis to mark with a vertical line, with their words or ""
    marked: Sequence[tuple[float, str]] = ()
    whole: bool = False  # the horizontal axis has integers only
    tall: int = 130  # height of a panel in pixels


def require(option: str) -> None:
    """Check that pages can be made.

    `option`: the option that asks for one, as the message names it. Raises `ValueError`: the extra is not installed.
    """
    if find_spec("jinja2") is None:
        raise ValueError(f"{option} needs jinja2, not installed here; do: {INSTALL}")


def render(template: Path, *, version: str, **values: object) -> str:
    """Fill a template, which extends ``pages.html`` beside this file; what is put in is escaped, except charts of
    `svg`.

    `version`: of mgpu-check, shown at the end of the page.
    """
    return _environment(template.parent).get_template(template.name).render(version=version, **values) + "\n"


def _environment(*folders: Path) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def svg(chart: Chart) -> str:
    """Draw a chart as an ``<svg>`` element of a page. It has no ids and no colours of its own."""
    from markupsafe import Markup

    scales = [_scale(panel) for panel in chart.panels]
    start, end = chart.span
    ticks = _ticks(start, end, 10, 1.0 if chart.whole else 0.0)
    labels = [text for scale in scales for _, text in scale.ticks] + [bar.label for bar in chart.bars]
    left = 16 + _CHARACTER * max(map(len, labels), default=0)

    def x(value: float) -> float:
        return left + (_WIDTH - _RIGHT - left) * (value - start) / (end - start)

    keys, top = _legend(chart)
    bars = [_drawn_bar(bar, top + _ROW * row, x) for row, bar in enumerate(chart.bars)]
    first = top + 4
    top += _ROW * len(bars)
    panels = []
    for panel, scale in zip(chart.panels, scales, strict=True):
        top += _TITLE + (_WORDS if any(words for _, words in chart.marked) else 0)
        panels.append(_drawn_panel(panel, scale, top, chart.tall, x))
        top += chart.tall
    marked = [{"x": x(at), "words": words, "left": at - start < (end - start) / 2} for at, words in chart.marked]
    drawn = {"keys": keys, "bars": bars, "panels": panels, "marked": marked, "first": first, "bottom": top}
    drawn |= {
        "left": left,
        "ticks": [(x(value), text) for value, text in ticks],
        "width": _WIDTH,
        "right": _WIDTH - _RIGHT,
    }
    return Markup(_environment().get_template("chart.html").render(chart=chart, **drawn))


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    logarithmic: bool

    def share(self, value: float | None) -> float | None:
        """Return the place of a value between 0, the lowest, and 1, the highest; None for a gap."""
        value = _within(value, self.logarithmic)
        return None if value is None else (value - self.low) / (self.high - self.low)


def _within(value: float | None, logarithmic: bool) -> float | None:
    """Return the value that the scale has for a value: its logarithm on a logarithmic one, and never one too large."""
    if value is None or not math.isfinite(value) or (logarithmic and value <= 0):
        return None
    if logarithmic:
        return math.log10(min(max(value, 1 / _LARGEST), _LARGEST))
    return min(max(float(value), -_LARGEST), _LARGEST)


def _scale(panel: Panel) -> _Scale:
    drawn = (_within(value, panel.logarithmic) for line in panel.lines for _, value in line.points)
    values = [value for value in drawn if value is not None] or [0.0]
    low, high = min(values), max(values)
    if panel.logarithmic:
        low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
        powers = range(low, high + 1, math.ceil((high - low) / 9))
        return _Scale(low, high, [(float(power), f"1e{power}") for power in powers], True)
    margin = 0.08 * (high - low) or 0.1 * abs(high)
    if margin < 1e-290:  # a number so small has no steps
        margin = 1.0
    low, high = low - margin, high + margin
    return _Scale(low, high, _ticks(low, high, 7), False)


def _ticks(low: float, high: float, most: int, least: float = 0.0) -> list[tuple[float, str]]:
    """Return round values within a range with their texts: multiples of 1, 2 or 5 times a power of ten.

    `most`: how many steps the range may have. `least`: the smallest step.
    """
    wanted = max((high - low) / most, least)
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= wanted * (1 - 1e-9))
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [(number * step, _tick_text(number * step, step)) for number in numbers]


def _tick_text(value: float, step: float) -> str:
    """Write a value with as many digits as it needs to differ from the next tick."""
    if not value:
        return "0"
    digits = math.floor(math.log10(step) + 1e-9)
    if digits >= -4 and abs(value) < 1e7:
        return f"{value:.{max(0, -digits)}f}"
    return f"{value:.{max(0, math.floor(math.log10(abs(value)) + 1e-9) - digits)}e}"


def _legend(chart: Chart) -> tuple[list[dict[str, Any]], float]:
    """Return the entries of the legend with their places, and the height below which the picture begins."""
    named = {line.label: line for panel in chart.panels for line in panel.lines if line.label}
    cell = 46 + _CHARACTER * max(map(len, named), default=1)
    columns = max(1, int(_WIDTH // cell))
    keys = []
    for number, line in enumerate(named.values()):
        place = {"x": 4 + cell * (number % columns), "y": 12 + 19 * (number // columns)}
        keys.append({**place, "line": line, "mark": _MARKS.get(line.mark)})
    return keys, 19.0 * math.ceil(len(keys) / columns) + 8


def _drawn_bar(bar: Bar, top: float, x: Any) -> Mapping[str, Any]:
    drawn = None if bar.start is None else (x(bar.start), x(bar.end) - x(bar.start))
    return {"bar": bar, "top": top, "drawn": drawn, "tall": _ROW}


def _drawn_panel(panel: Panel, scale: _Scale, top: float, tall: float, x: Any) -> Mapping[str, Any]:
    def y(value: float | None) -> float | None:
        share = scale.share(value)
        return None if share is None else top + tall * (1 - share)

    ticks = [(y(10.0**value if scale.logarithmic else value), text) for value, text in scale.ticks]
    lines = [_drawn_line(line, [(x(at), y(value)) for at, value in line.points]) for line in panel.lines]
    return {"panel": panel, "top": top, "bottom": top + tall, "ticks": ticks, "lines": lines}


def _drawn_line(line: Line, places: Sequence[tuple[float, float | None]]) -> Mapping[str, Any]:
    commands: list[str] = []
    pen = False  # whether the last point was drawn
    for across, down in places:
        if down is not None:
            commands.append(f"{'L' if pen else 'M'}{across:.1f} {down:.1f}")
        pen = down is not None
    form = _MARKS.get(line.mark)
    marks = [
        (f"M{across:.1f} {down:.1f}{form}", f"{at:.4g}: {value:.6g}")
        for (across, down), (at, value) in zip(places, line.points, strict=True)
        if form and down is not None and value is not None
    ]
    return {"line": line, "path": "".join(commands), "marks": marks, "words": _in_words(line)}


def _in_words(line: Line) -> str:
    """Return what the tooltip of a line says: its name and its values, the lowest, the highest and the last."""
    values = [value for _, value in line.points if value is not None and math.isfinite(value)]
    if not values:
        return line.label
    if min(values) == max(values):
        return f"{line.label}: {values[-1]:.6g}"
    return f"{line.label}: {min(values):.6g} to {max(values):.6g}, at the end {values[-1]:.6g}"
