"""Figures of the page: tables with a shade for each number, and telemetry over time. See `mgpu_check.pages`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mgpu_check import pages
from mgpu_check.acceptance.health.checks import THROTTLED
from mgpu_check.acceptance.run_report import CheckRun
from mgpu_check.devices.observations import Outcome
from mgpu_check.devices.telemetry.fields import Value, number_of
from mgpu_check.devices.telemetry.sampler import TelemetrySample
from mgpu_check.processes.rank_lists import grouped

_DARKEST = 45
"""Percent of colour in the darkest cell: the text of the page is readable on it, on light and on dark ground."""
_POINTS = 1200  # most points of a curve; longer curves are thinned out
_HELD = 40  # most triangles of a GPU
_SERIES, _DASHES = 8, 4

PANELS = {"temperature": "°C", "power": "W", "sm_clock": "MHz"}  # telemetry fields to draw over time, with their units
_TITLES = {"temperature": "Temperature", "power": "Power", "sm_clock": "SM clock"}
_LOOKS: Mapping[Outcome, str] = {"passed": "good", "failed": "bad", "unknown": "open", "skipped": "none"}

Scale = Literal["much", "little", "failures"]


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    text: str
    is_known: bool
    shade: float  # percent of colour
    marked: bool
    words: str  # what its tooltip says


@dataclass(frozen=True)
class Grid:
    """The content of a table: numbers by row and column."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]  # numbers row by row; None if unknown
    texts: Sequence[Sequence[str]]  # texts of the cells, row by row
    marked: Collection[tuple[int, int]] = ()  # row and column of the cells with a frame
    # "much" if large values are good, "little" if small ones are, "failures" for counts of failures; one for the table,
    # or one for each row, which then has a scale of its own
    scale: Scale | Sequence[Scale] = "much"
    # across, down: titles of the columns and of the rows
    across: str = ""
    down: str = ""
    unit: str = ""  # of the texts; "" if each row names its own
    frame: str = "accused"  # what a frame means

    def cells(self) -> Iterator[tuple[str, list[Cell]]]:
        for row, label in enumerate(self.rows):
            scale, best, _ = self._best(row)
            cells = []
            for column, (value, text) in enumerate(zip(self.values[row], self.texts[row], strict=True)):
                marked = (row, column) in self.marked
                position = f"{f'{self.down} {label}'.strip()}, {self.across} {self.columns[column]}"
                value_text = "not known" if value is None else f"{text} {self.unit}".rstrip()
                words = f"{position}: {value_text}" + (f", {self.frame}" if marked else "")
                cells.append(Cell(text, value is not None, _shade(value, best, scale), marked, words))
            yield label, cells

    def legend(self) -> str:
        """Return what the shades mean: the best value or the most failures, and the scale; or ""."""
        if not isinstance(self.scale, str):
            return "Shade: each row has a scale of its own, with no colour at its best value."
        scale, best, text = self._best(0)
        if not best:
            return ""
        at = f"{text} {self.unit}".rstrip()
        if scale == "failures":
            return f"Shade: most colour at {at}, none at 0."
        return f"Shade: no colour at the best value, {at}; most at {'twice' if scale == 'little' else 'half'} of it."

    def _best(self, row: int) -> tuple[Scale, float, str]:
        """Return the scale of a row, and its best value, or its most failures, with the text; 0 if none is known."""
        scale = self.scale if isinstance(self.scale, str) else self.scale[row]
        among = range(len(self.rows)) if isinstance(self.scale, str) else [row]
        cells = [cell for index in among for cell in zip(self.values[index], self.texts[index], strict=True)]
        finite = [(abs(value), text) for value, text in cells if value is not None and math.isfinite(value)]
        best, text = (min if scale == "little" else max)(finite, default=(0.0, ""))
        return scale, best, text


def _shade(value: float | None, best: float, scale: Scale) -> float:
    """Return the percent of colour: equal values stay white, so that a slow one is seen."""
    if value is None or not math.isfinite(value) or not best:
        return 0.0
    share = abs(value) / best
    if scale == "failures":  # one failure of a hundred must be seen, too
        return round(_DARKEST * (0.4 + 0.6 * share), 1) if value else 0.0
    lost = share - 1 if scale == "little" else 2 * (1 - share)
    return round(_DARKEST * min(lost, 1.0), 1)


def over_time(
    samples: Sequence[TelemetrySample], checks: Sequence[CheckRun], accused: Collection[int], title: str
) -> str:
    """Return temperature, power and clocks of GPUs over time, with a bar for each check, as an ``<svg>`` element. At
    least one of the `samples`, all of GPUs to draw, has a value for a field of `PANELS`."""
    by_gpu = dict(grouped((sample.gpu, sample) for sample in samples))
    end = max([sample.at for sample in samples] + [run.started + run.seconds for run in checks])
    unit, scale = ("s", 1.0) if end < 180 else ("min", 60.0) if end < 10_800 else ("h", 3600.0)
    panels = []
    for key in PANELS:
        if any(_number(sample.values.get(key)) is not None for sample in samples):
            # Accused GPUs come last, which draws them over the others.
            numbers = sorted(by_gpu, key=lambda number: (number in accused, number))
            lines = [_line(number, by_gpu[number], key, scale, number in accused) for number in numbers]
            held = [line for mine in by_gpu.values() for line in _held(mine, scale)] if key == "sm_clock" else []
            note = "Triangles: clocks are held down" if held else ""
            panels.append(pages.Panel(f"{_TITLES[key]} in {PANELS[key]}", [*lines, *held], note))
    across, span = f"{unit} since the start of the run", (0.0, end / scale or 1.0)
    marked = [(run.started / scale, "") for run in checks if run.seconds]
    return pages.svg(pages.Chart(title, across, span, panels, [_bar(run, end, scale) for run in checks], marked))


def _number(value: Value | None) -> float | None:
    number = number_of(value)
    return number if number is not None and math.isfinite(number) else None


def _line(number: int, samples: Sequence[TelemetrySample], key: str, scale: float, accused: bool) -> pages.Line:
    chosen = samples[:: max(1, math.ceil(len(samples) / _POINTS))]
    points = [(sample.at / scale, _number(sample.values.get(key))) for sample in chosen]
    dash = f" dash{number // _SERIES % _DASHES}"
    if accused:
        return pages.Line(f"GPU {number} (accused)", points, f"accused{dash}")
    return pages.Line(f"GPU {number}", points, f"series{number % _SERIES}{dash}")


def _held(samples: Sequence[TelemetrySample], scale: float) -> Iterator[pages.Line]:
    throttled = [sample for sample in samples if reasons(sample)]
    chosen = throttled[:: max(1, math.ceil(len(throttled) / _HELD))]
    if chosen:
        points = [(sample.at / scale, _number(sample.values.get("sm_clock"))) for sample in chosen]
        yield pages.Line("", points, "held", "triangle")


def reasons(sample: TelemetrySample) -> list[str]:
    """Return the throttle reasons of a sample that are signs of a defect."""
    return [reason for reason in str(sample.values.get("throttle") or "").split(", ") if reason in THROTTLED]


def _bar(run: CheckRun, end: float, scale: float) -> pages.Bar:
    least = end / 400  # a shorter bar would be invisible
    start = min(run.started, end - least) / scale if run.seconds else None
    words = f"{run.name}: {run.outcome}, {run.seconds:.4g} s from {run.started:.4g} s on"
    return pages.Bar(run.name, start, (start or 0.0) + max(run.seconds, least) / scale, _LOOKS[run.outcome], words)
