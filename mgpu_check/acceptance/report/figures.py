"""Figures of the page: heat maps with a number in each cell, and telemetry over time. See `mgpu_check.pages`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mgpu_check import pages
from mgpu_check.acceptance.account import CheckRun
from mgpu_check.acceptance.health.checks import THROTTLED
from mgpu_check.devices.telemetry.values import TelemetrySample

__all__ = ["PANELS", "Grid", "Scale", "heat_map", "over_time", "reasons"]

_CHARACTER = 7.0  # average width of a character at font size 12
_ROW = 30  # height of a row of cells
_WIDTH = 880
_PANEL, _STRIP, _GAP = 130, 17, 34  # heights: of a panel, of a row of checks, between panels
_POINTS = 1200  # most points of a curve; longer curves are thinned out
_DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))

PANELS = {"temperature": "°C", "power": "W", "sm_clock": "MHz"}
"""Telemetry fields to draw over time, with their units."""


Scale = Literal["much", "little", "failures"]


@dataclass(frozen=True)
class Grid:
    """The content of a heat map: numbers by row and column.

    Attributes:
        rows, columns: labels of the rows and columns.
        values: numbers row by row; None if unknown.
        texts: texts of the cells, row by row.
        marked: row and column of the cells that belong to an accused part.
        scale: "much" if large values are good, "little" if small ones are, "failures" for counts of failures; one for the
            grid, or one for each row.
        by_row: each row has a colour scale of its own.
        across, down: titles of the columns and of the rows.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    texts: Sequence[Sequence[str]]
    marked: Collection[tuple[int, int]] = ()
    scale: Scale | Sequence[Scale] = "much"
    by_row: bool = False
    across: str = ""
    down: str = ""

    def scale_of(self, row: int) -> str:
        return self.scale if isinstance(self.scale, str) else self.scale[row]


def heat_map(grid: Grid, name: str, title: str) -> str:
    """Return the grid as an ``<svg>`` element; see `pages.inline` for `name` and `title`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    longest = max((len(text) for row in grid.texts for text in row), default=1)
    heads = max(map(len, grid.columns), default=1)
    cell = max(34.0, _CHARACTER * max(longest, heads) + 12)
    left = _CHARACTER * max(map(len, grid.rows), default=1) + (30 if grid.down else 12)
    top = 48 if grid.across else 28
    width, height = left + cell * len(grid.columns) + 6, top + _ROW * len(grid.rows) + 6
    with pages.drawing():
        figure = Figure(figsize=(width / 72, height / 72))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set(xlim=(0, width), ylim=(height, 0))
        if grid.across:
            axes.text(left + cell * len(grid.columns) / 2, 14, grid.across, ha="center", va="center")
        if grid.down:
            axes.text(10, top + _ROW * len(grid.rows) / 2, grid.down, rotation=90, ha="center", va="center")
        for place, text in enumerate(grid.columns):
            axes.text(left + cell * (place + 0.5), top - 11, text, ha="center", va="center", color=pages.colour("weak"))
        for row, label in enumerate(grid.rows):
            middle = top + _ROW * (row + 0.5)
            axes.text(left - 8, middle, label, ha="right", va="center", color=pages.colour("weak"))
            scale = grid.values[row] if grid.by_row else [value for one in grid.values for value in one]
            known = [abs(value) for value in scale if value is not None and math.isfinite(value)]
            most = (min if grid.scale_of(row) == "little" else max)(known, default=0.0) or 1.0
            for column, value in enumerate(grid.values[row]):
                x, y = left + cell * column, top + _ROW * row
                fill, ink = _cell_colours(value, most, grid.scale_of(row))
                axes.add_patch(Rectangle((x + 1, y + 1), cell - 2, _ROW - 2, facecolor=fill, edgecolor="none"))
                axes.text(x + cell / 2, middle, grid.texts[row][column], ha="center", va="center", color=ink)
        for row, column in sorted(grid.marked):
            corner = (left + cell * column + 1, top + _ROW * row + 1)
            wrong = pages.colour("wrong")
            axes.add_patch(
                Rectangle(corner, cell - 2, _ROW - 2, facecolor="none", edgecolor=wrong, linewidth=3, gid="marked")
            )
        return pages.inline(figure, name, title)


def _cell_colours(value: float | None, most: float, scale: str) -> tuple[str, str]:
    """Return the colours of a cell and of its number: page colours for no value or no failure, else from a colour map.

    Args:
        most: the best value on the scale; for failures the largest number.
    """
    import matplotlib as mpl
    from matplotlib.colors import to_hex

    if value is None or not math.isfinite(value) or (scale == "failures" and not value):
        return pages.colour("panel"), pages.colour("weak" if value is None else "text")
    share = min(1.0, abs(value) / most) if scale != "little" else most / abs(value) if value else 1.0
    if scale == "failures":
        red, green, blue, _ = mpl.colormaps["OrRd"](0.45 + 0.5 * share)
    else:
        red, green, blue, _ = mpl.colormaps["cividis"](0.15 + 0.8 * (share))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
    return to_hex((red, green, blue)), "#ffffff" if dark else "#000000"


def over_time(
    samples: Sequence[TelemetrySample], checks: Sequence[CheckRun], accused: Collection[int], name: str, title: str
) -> str:
    """Return temperature, power and clocks of GPUs over time, with a bar for each check, as an ``<svg>`` element.

    Args:
        samples: samples of the GPUs to draw; at least one has a value for a field of `PANELS`.
        accused: numbers of the GPUs whose curves are highlighted.
    """
    from matplotlib.figure import Figure

    by_gpu: dict[int, list[TelemetrySample]] = {}
    for sample in samples:
        by_gpu.setdefault(sample.gpu, []).append(sample)
    wrong = sorted(set(accused) & set(by_gpu))
    panels = [key for key in PANELS if any(_number(sample.values.get(key)) is not None for sample in samples)]
    end = max([sample.at for sample in samples] + [run.started + run.seconds for run in checks])
    unit, scale = ("s", 1.0) if end < 180 else ("min", 60.0) if end < 10_800 else ("h", 3600.0)
    left, right = 106.0, 14.0
    columns = 6 if wrong else 8
    legend = 19.0 * math.ceil(len(by_gpu) / columns) + 12
    strip = _STRIP * len(checks) + 4
    height = legend + strip + 24 + len(panels) * (_PANEL + _GAP) + 20
    with pages.drawing():
        figure = Figure(figsize=(_WIDTH / 72, height / 72))
        top = legend + strip + 24

        def area(start: float, tall: float) -> tuple[float, float, float, float]:
            return left / _WIDTH, 1 - (start + tall) / height, (_WIDTH - left - right) / _WIDTH, tall / height

        drawn = []
        for key in panels:
            axes = figure.add_axes(area(top, _PANEL))
            top += _PANEL + _GAP
            axes.set_title(f"{_TITLES[key]} in {PANELS[key]}", loc="left", pad=6)
            axes.grid(axis="y")
            axes.set_xlim(0, end / scale)
            axes.tick_params(labelbottom=key == panels[-1])
            drawn.append(axes)
            for number, mine in sorted(by_gpu.items()):
                axes.plot(*_curve(mine, key, scale), gid=f"{key} gpu", **_look(number, wrong))
            if key == "sm_clock":
                _throttled(axes, by_gpu, scale)
        drawn[-1].set_xlabel(f"{unit} since the start of the run")
        if checks:
            bars = figure.add_axes(area(legend, strip))
            _bars(bars, checks, end, scale)
            for axes in drawn:
                for run in checks:
                    axes.axvline(
                        run.started / scale, color=pages.colour("weak"), linewidth=0.8, linestyle=":", zorder=0
                    )
        handles = drawn[0].get_lines()[: len(by_gpu)]
        labels = [f"GPU {number}{' (accused)' if number in accused else ''}" for number in sorted(by_gpu)]
        figure.legend(
            handles, labels, loc="upper left", ncols=columns, handlelength=1.6,
            columnspacing=1.2, borderpad=0.2, bbox_to_anchor=(0, 1),
        )  # fmt: skip
        return pages.inline(figure, name, title)


_TITLES = {"temperature": "Temperature", "power": "Power", "sm_clock": "SM clock"}


def _number(value: object) -> float | None:
    right = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if right and isinstance(value, (int, float)) else None


def _curve(samples: Sequence[TelemetrySample], key: str, scale: float) -> tuple[list[float], list[float]]:
    every = max(1, math.ceil(len(samples) / _POINTS))
    chosen = samples[::every]
    values = (_number(sample.values.get(key)) for sample in chosen)
    return [sample.at / scale for sample in chosen], [math.nan if value is None else value for value in values]


def _look(number: int, accused: Sequence[int]) -> Mapping[str, Any]:
    if number in accused:
        dash = _DASHES[accused.index(number) % len(_DASHES)]
        return {"color": pages.colour("wrong"), "linewidth": 3, "zorder": 3, "linestyle": dash}
    dash = _DASHES[number // pages.SERIES % len(_DASHES)]
    return {"color": pages.colour(f"series{number % pages.SERIES}"), "linewidth": 1.3, "linestyle": dash}


def _throttled(axes: Any, by_gpu: Mapping[int, Sequence[TelemetrySample]], scale: float) -> None:
    """Mark samples with GPU clocks held down."""
    at, clocks = [], []
    for mine in by_gpu.values():
        held = [sample for sample in mine if reasons(sample)]
        for sample in held[:: max(1, math.ceil(len(held) / 40))]:
            clock = _number(sample.values.get("sm_clock"))
            if clock is not None:
                at.append(sample.at / scale)
                clocks.append(clock)
    if at:
        axes.plot(at, clocks, linestyle="none", marker="v", markersize=6, color=pages.colour("wrong"), gid="throttled")
        axes.set_title("Triangles: clocks are held down", loc="right", pad=6, color=pages.colour("wrong"))


def reasons(sample: TelemetrySample) -> list[str]:
    """Return the throttle reasons of a sample that are signs of a defect."""
    parts = str(sample.values.get("throttle") or "").split(", ")
    return [part for part in parts if part in THROTTLED]


def _bars(axes: Any, checks: Sequence[CheckRun], end: float, scale: float) -> None:
    colours = {"passed": "right", "failed": "wrong", "unknown": "unsure", "skipped": "weak"}
    least = end / 400  # a shorter bar would be invisible
    for row, run in enumerate(checks):
        if not run.seconds:
            continue  # the check has not started
        start = min(run.started, end - least) / scale
        axes.barh(
            row,
            max(run.seconds, least) / scale,
            left=start,
            height=0.7,
            color=pages.colour(colours[run.outcome]),
            gid="check",
        )
    axes.set_yticks(range(len(checks)), [run.name for run in checks])
    axes.set(xlim=(0, end / scale), ylim=(len(checks) - 0.5, -0.5), xticks=[])
    axes.tick_params(axis="y", length=0)
    for side in axes.spines.values():
        side.set_visible(False)
