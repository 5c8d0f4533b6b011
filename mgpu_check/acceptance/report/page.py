"""The report as a page: verdict, accused parts with their evidence, a card for each GPU, heat maps, telemetry.

Matrices show measurements and failures, GPU by GPU, and check by GPU. Pictures show nodes: GPUs, the links between
them, and the host, with the accused parts marked.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mgpu_check import pages
from mgpu_check.acceptance.comparison import amount
from mgpu_check.acceptance.report import summary
from mgpu_check.acceptance.report.files import PANELS, encoded, reasons
from mgpu_check.acceptance.report.summary import bytes_text, detected
from mgpu_check.acceptance.run_report import CheckRun, Gpu, Host, RunReport
from mgpu_check.devices.observations import Measurement, Observation, Outcome, Part, PartKind, Subject, SubjectKind
from mgpu_check.devices.telemetry.fields import FIELDS, Value, field_of, number_of, peer_of
from mgpu_check.devices.telemetry.sampler import TelemetrySample, values_of
from mgpu_check.processes.rank_lists import grouped
from mgpu_check.version import __version__

_DARKEST = 45
"""Percent of colour in the darkest cell: the text of the page is readable on it, on light and on dark ground."""
_POINTS = 1200  # most points of a curve; longer curves are thinned out
_HELD = 40  # most triangles of a GPU
_SERIES, _DASHES = 8, 4

_TITLES = {"temperature": "Temperature", "power": "Power", "sm_clock": "SM clock"}
_LOOKS: Mapping[Outcome, str] = {"passed": "good", "failed": "bad", "unknown": "open", "skipped": "none"}

Scale = Literal["much", "little", "failures"]


@dataclass(frozen=True)
class Cell:
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


def _bar(run: CheckRun, end: float, scale: float) -> pages.Bar:
    least = end / 400  # a shorter bar would be invisible
    start = min(run.started, end - least) / scale if run.seconds else None
    words = f"{run.name}: {run.outcome}, {run.seconds:.4g} s from {run.started:.4g} s on"
    return pages.Bar(run.name, start, (start or 0.0) + max(run.seconds, least) / scale, _LOOKS[run.outcome], words)


_RANGES = ("temperature", "memory_temperature", "power", "sm_clock", "memory_clock")
_UNITS: Mapping[str, str] = {"degrees Celsius": "°C"}


def facts_of(gpu: Gpu) -> list[tuple[str, str]]:
    """Return the facts of a GPU other than its identity, as name and value in words."""
    rows = []
    for name, value in gpu.facts.items():
        try:
            field = field_of(name)
        except KeyError:
            text, unit = name, ""
        else:
            if field.kind == "identity":
                continue
            peer = peer_of(name)
            text, unit = field.text + ("" if peer is None else f", GPU {peer}"), field.unit
        if value is None or value == "":
            rows.append((text, "unknown" if value is None else "none"))
        elif isinstance(value, bool):
            rows.append((text, "yes" if value else "no"))
        else:
            of_bytes = unit == "bytes" and isinstance(value, int)
            rows.append((text, bytes_text(float(value)) if of_bytes else f"{value} {unit}".rstrip()))
    return rows


def health_of(samples: Sequence[TelemetrySample]) -> list[tuple[str, str, bool]]:
    """Return the telemetry findings of a GPU: name, value, and whether it is a bad sign."""
    if not samples:
        return [("telemetry", "none", False)]
    rows: list[tuple[str, str, bool]] = []
    for name in _RANGES:
        if values := values_of(samples, name):
            low, high = (f"{value:.4g}" for value in (min(values), max(values)))
            unit = _UNITS.get(FIELDS[name].unit, FIELDS[name].unit)
            shown = low if min(values) == max(values) else f"{low} to {high}"
            rows.append((FIELDS[name].text, f"{shown} {unit}", False))
    generation, width = values_of(samples, "pcie_generation"), values_of(samples, "pcie_width")
    if generation and width:
        rows.append(("PCIe", f"generation {max(generation):g}, {max(width):g} lanes at most", False))
    throttle_reasons = list(dict.fromkeys(reason for sample in samples for reason in reasons(sample)))
    if throttle_reasons:
        share = sum(bool(reasons(sample)) for sample in samples) / len(samples)
        rows.append(("clocks held down", f"{', '.join(throttle_reasons)} ({share:.0%} of the time)", True))
    rows += _counters(samples)
    unknown = sorted(name for name, value in samples[-1].values.items() if value is None)
    if unknown:
        texts = ", ".join(FIELDS[name].text if name in FIELDS else name for name in unknown)
        rows.append(("not known to the device", texts, False))
    return rows


def _counters(samples: Sequence[TelemetrySample]) -> list[tuple[str, str, bool]]:
    grown = []
    counted = False
    for name, field in FIELDS.items():
        values = values_of(samples, name) if field.kind == "counter" else []
        counted = counted or bool(values)
        growth = sum(max(0.0, later - sooner) for sooner, later in itertools.pairwise(values))
        if growth:
            grown.append((field.text, f"{growth:g} more in this run, now {values[-1]:g} {field.unit}", True))
    return grown or ([("counters of errors", "none grew", False)] if counted else [])


State = Literal["none", "good", "open", "bad"]
"""Not checked; checked and not accused; suspected; accused. From the weakest; also a class of the style sheet."""
_STATES: tuple[State, ...] = ("none", "good", "open", "bad")
_SAID: Mapping[State, str] = {"none": "not checked", "good": "", "open": "suspected", "bad": "ACCUSED"}
_LEGEND: Mapping[State, str] = {
    "bad": "Cross and thick line: accused.",
    "open": "Question mark: suspected; several explanations are equally good.",
    "good": "Thin line: checked, not accused.",
    "none": "Dotted: not checked.",
}
_PARTS: Mapping[SubjectKind, PartKind]
_PARTS = {"gpu": "gpu", "copy": "link", "upload": "host-link", "download": "host-link", "host": "host"}

_WIDTH, _TALL, _HEAD, _STUB = 360, 52, 34, 20  # a box and its text are readable at the width of a telephone
_COLUMNS = 4
_MESH = 8  # most GPUs of a host whose links are all drawn; with more only the marked ones


@dataclass(frozen=True)
class Wire:
    """A link, or the link of a GPU to its host."""

    path: str
    at: tuple[float, float]  # the point to mark
    state: State
    words: str
    label: str = ""  # GPUs of an accused direction; "" for a link to the host


@dataclass(frozen=True)
class Box:
    """A GPU: the middle of its upper edge, its lines of text, and what its tooltip says."""

    x: float
    y: float
    lines: tuple[str, ...]
    state: State
    words: str


@dataclass(frozen=True)
class Picture:
    host: str
    state: State
    height: float
    buses: Sequence[float]  # heights of the lines that stand for the host
    boxes: Sequence[Box]
    wires: Sequence[Wire]  # the marked ones last, so that no other wire hides them
    legend: str  # what the marks mean


def pictures(report: RunReport) -> list[Picture]:
    component_states = states(report)
    return [
        _picture(report, host, [gpu for gpu in report.gpus if gpu.host == host.number], component_states)
        for host in summary.in_detail(report)
    ]


def states(report: RunReport) -> dict[Part, State]:
    """Return the state of each part that was checked, accused or suspected. Other parts were not checked."""
    worst_states: dict[Part, State] = {}

    def raise_to(component: Part, state: State) -> None:
        if _STATES.index(state) > _STATES.index(worst_states.get(component, "none")):
            worst_states[component] = state

    for entry in report.observations:
        if entry.subject.kind in _PARTS and entry.outcome in ("passed", "failed"):
            raise_to(_part_of(entry.subject), "good")
    for entry in summary.failed_of(report, report.verdict):
        if entry.subject.kind in _PARTS:
            raise_to(_part_of(entry.subject), "open")
    for component in (component for sets in report.verdict.rivals for rival in sets for component in rival):
        raise_to(component, "open")
    for accusation in report.verdict.accusations:
        raise_to(accusation.part, "bad")
    return worst_states


def _part_of(subject: Subject) -> Part:
    return Part(_PARTS[subject.kind], subject.members)


def _picture(report: RunReport, host: Host, gpus: Sequence[Gpu], component_states: Mapping[Part, State]) -> Picture:
    columns = max(1, min(_COLUMNS, math.ceil(len(gpus) / 2)))
    gap = 30 + 14 * columns if len(gpus) > 1 else 0
    block = 2 * (_STUB + _TALL) + gap if len(gpus) > 1 else _STUB + _TALL + 8
    blocks = max(1, math.ceil(len(gpus) / (2 * columns)))
    places = {}
    for index, gpu in enumerate(gpus):
        row, column = divmod(index, columns)
        top = _HEAD + block * (row // 2) + _STUB + row % 2 * (_TALL + gap)
        places[gpu.number] = (_WIDTH * (column + 0.5) / columns, float(top), row)
    boxes = [_box(report, gpu, places[gpu.number], component_states) for gpu in gpus]
    wires = [_host_wire(gpu, places[gpu.number], component_states) for gpu in gpus]
    wires += _peer_wires(places, component_states, gap, len(gpus) <= _MESH)
    wires.sort(key=lambda wire: _STATES.index(wire.state))
    state = component_states.get(Part("host", (host.number,)), "good")
    shown: set[State] = {state, *(box.state for box in boxes), *(wire.state for wire in wires)}
    legend = " ".join(text for mark, text in _LEGEND.items() if mark in shown)
    if len(gpus) > _MESH:
        legend += " Links between GPUs are drawn only if they are marked."
    name = summary.host_name(report, host.number)
    buses = [_HEAD + block * number for number in range(blocks)]
    return Picture(name, state, _HEAD + block * blocks, buses, boxes, wires, legend)


def _box(
    report: RunReport, gpu: Gpu, position: tuple[float, float, int], component_states: Mapping[Part, State]
) -> Box:
    state = component_states.get(Part("gpu", (gpu.number,)), "none")
    host = {peer.number: peer.host for peer in report.gpus}
    bad = (part.members for part, its in component_states.items() if its == "bad" and part.kind == "link")
    mine = (members for members in bad if gpu.number in members and len({host.get(m) for m in members}) > 1)
    away = [f"link {members[0]} → {members[-1]}" for members in mine]
    caption = _SAID[state] or ", ".join(away[:1])  # a link to another host has no place in the picture
    domain, _, slot = gpu.pci.partition(":")
    lines = (f"GPU {gpu.number}", gpu.pci if domain.strip("0") else slot, caption)
    state = "open" if away and state != "bad" else state
    return Box(position[0], position[1], lines, state, summary.describe_gpu(report, gpu))


def _host_wire(gpu: Gpu, position: tuple[float, float, int], component_states: Mapping[Part, State]) -> Wire:
    x, y, row = position
    start, way = (y + _TALL, 1) if row % 2 else (y, -1)
    link = Part("host-link", (gpu.number,))
    state = component_states.get(link, "none")
    return Wire(f"M{x:g} {start:g}v{way * _STUB}", (x, start + way * _STUB / 2), state, _words(str(link), state))


def _peer_wires(
    places: Mapping[int, tuple[float, float, int]], component_states: Mapping[Part, State], gap: float, draw_all: bool
) -> Iterator[Wire]:
    numbers = sorted(places)
    for index, gpu in enumerate(numbers):
        for peer in numbers[index + 1 :]:
            ways = {pair: component_states.get(Part("link", pair), "none") for pair in ((gpu, peer), (peer, gpu))}
            state = max(ways.values(), key=_STATES.index)
            if not draw_all and state in ("none", "good"):
                continue
            marked = [pair for pair, way in ways.items() if way == state] if state in ("bad", "open") else []
            arrow = "↔" if len(marked) == 2 else "→"
            label = f"{marked[0][0]} {arrow} {marked[0][1]}" if marked else ""
            path, at = _course(places[gpu], places[peer], gap)
            yield Wire(path, at, state, _words(f"link GPU {label or f'{gpu} ↔ {peer}'}", state), label)


def _course(
    source: tuple[float, float, int], target: tuple[float, float, int], gap: float
) -> tuple[str, tuple[float, float]]:
    """Return the path of a link between two boxes and its middle: a curve in the gap between their rows."""
    (x, y, row), (u, v, line) = source, target
    if row // 2 != line // 2:  # in another block of rows
        y += _TALL
        return f"M{x:g} {y:g}L{u:g} {v:g}", ((x + u) / 2, (y + v) / 2)
    if row == line:
        start, way = (y, -1) if row % 2 else (y + _TALL, 1)
        deep = start + way * min(gap, 0.3 * abs(u - x))
        return f"M{x:g} {start:g}C{x:g} {deep:g} {u:g} {deep:g} {u:g} {start:g}", ((x + u) / 2, (start + 3 * deep) / 4)
    start, end, pull = y + _TALL, v, gap / 3
    path = f"M{x:g} {start:g}C{x:g} {start + pull:g} {u:g} {end - pull:g} {u:g} {end:g}"
    return path, ((x + u) / 2, (start + end) / 2)


def _words(name: str, state: State) -> str:
    return f"{name}: {_SAID[state].lower() or 'checked, not accused'}"


Key = tuple[str, str, int]  # quantity, unit and size of comparable measurements

_Kind = Literal["gpu", "upload", "download"]


@dataclass(frozen=True)
class Matrix:
    """A matrix of the page, with its heading and what is to be said of it."""

    heading: str
    grid: Grid
    note: str = ""


def heat_maps(report: RunReport) -> list[Matrix]:
    links = {_pair(accusation.part) for accusation in report.verdict.accusations if accusation.part.kind == "link"}
    by_key = sorted(_most_telling(_by_pair(report)).items())
    speeds = [matrix for key, by_pair in by_key for matrix in _speeds(report, key, by_pair, links)]
    return [*speeds, *_failures_of_pairs(report, links), *_of_gpus(report), *_failures_of_gpus(report)]


def _by_pair(report: RunReport) -> dict[Key, dict[tuple[int, int], Measurement]]:
    pairs: dict[Key, dict[tuple[int, int], Measurement]] = {}
    for measurement in report.measurements:
        if measurement.subject.is_pair:
            mine, pair = pairs.setdefault(measurement.kind[:3], {}), _pair(measurement.subject)
            for way in (pair,) if measurement.subject.kind == "copy" else (pair, pair[::-1]):
                _worst(mine, way, measurement)
    return pairs


def _pair(subject: Subject | Part) -> tuple[int, int]:
    return subject.members[0], subject.members[-1]


def _most_telling(pairs: Mapping[Key, Any]) -> dict[Key, Any]:
    """Keep one size for each quantity: of times the smallest, which shows latency, else the largest."""
    chosen: dict[tuple[str, str], int] = {}
    for quantity, unit, size in pairs:
        best = chosen.get((quantity, unit))
        if best is None or (size < best if unit == "s" else size > best):
            chosen[quantity, unit] = size
    return {key: measurements for key, measurements in pairs.items() if chosen[key[:2]] == key[2]}


def _blocks(report: RunReport) -> list[tuple[str, list[int]]]:
    """Return the GPUs of each matrix with a suffix for its heading: all GPUs, or those of each shown host."""
    numbers = [gpu.number for gpu in report.gpus]
    if len(numbers) <= summary.MATRIX:
        return [("", numbers)]
    return [
        (f" on {summary.host_name(report, host.number)}", [g.number for g in report.gpus if g.host == host.number])
        for host in summary.in_detail(report)
    ]


def _speeds(
    report: RunReport, key: Key, by_pair: Mapping[tuple[int, int], Measurement], links: set[tuple[int, int]]
) -> list[Matrix]:
    quantity, unit, size = key
    scale, prefix = summary.prefix([measurement.value for measurement in by_pair.values()])
    pictures = []
    for suffix, numbers in _blocks(report):
        values = [[by_pair[a, b].value if (a, b) in by_pair else None for b in numbers] for a in numbers]
        if not any(value is not None for row in values for value in row):
            continue
        texts = [[_digits(value, scale) for value in row] for row in values]
        heading = f"{quantity.capitalize()}{suffix}, {summary.bytes_text(size)}, in {prefix}{unit}"
        grid = _square(numbers, values, texts, links, "little" if unit == "s" else "much", prefix + unit)
        pictures.append(Matrix(heading, grid, "A frame: accused." if grid.marked else ""))
    return pictures + _between_hosts(report, key, by_pair)


def _square(
    numbers: Sequence[int], values: Any, texts: Any, links: set[tuple[int, int]], scale: Scale, unit: str
) -> Grid:
    positions = {number: index for index, number in enumerate(numbers)}
    marked = {(positions[a], positions[b]) for a, b in links if a in positions and b in positions}
    labels = [str(number) for number in numbers]
    return Grid(labels, labels, values, texts, marked, scale, "to GPU", "from GPU", unit)


def _between_hosts(report: RunReport, key: Key, by_pair: Mapping[tuple[int, int], Measurement]) -> list[Matrix]:
    """Return a matrix of the slowest pair between any two hosts, if one matrix cannot show all GPUs; else nothing."""
    if len(report.gpus) <= summary.MATRIX or len(report.hosts) > summary.MATRIX:
        return []
    host_of = {gpu.number: gpu.host for gpu in report.gpus}
    worst: dict[tuple[int, int], float] = {}
    for (a, b), measurement in by_pair.items():
        if host_of[a] != host_of[b]:
            pair = (host_of[a], host_of[b])
            worse = max if key[1] == "s" else min
            worst[pair] = worse(worst.get(pair, measurement.value), measurement.value)
    if not worst:
        return []
    scale, prefix = summary.prefix(list(worst.values()))
    numbers = [host.number for host in report.hosts]
    values = [[worst.get((a, b)) for b in numbers] for a in numbers]
    texts = [[_digits(value, scale) for value in row] for row in values]
    labels = [summary.host_name(report, number) for number in numbers]
    columns = [str(number) for number in numbers]
    best: Scale = "little" if key[1] == "s" else "much"
    grid = Grid(labels, columns, values, texts, (), best, "to host", "from host", prefix + key[1])
    size = summary.bytes_text(key[2])
    heading = f"{key[0].capitalize()} between hosts, the worst of all pairs, {size}, in {prefix}{key[1]}"
    return [Matrix(heading, grid)]


def _failures_of_pairs(report: RunReport, links: set[tuple[int, int]]) -> list[Matrix]:
    counts: dict[tuple[int, int], list[Observation]] = defaultdict(list)
    for entry in report.observations:
        if entry.subject.kind == "copy":
            counts[_pair(entry.subject)].append(entry)
    pictures = []
    for suffix, numbers in _blocks(report):
        if not any((a, b) in counts for a in numbers for b in numbers):
            continue
        values = [[_failed(counts.get((a, b), ())) for b in numbers] for a in numbers]
        texts = [[_count(value) for value in row] for row in values]
        grid = _square(numbers, values, texts, links, "failures", "failed")
        pictures.append(Matrix(f"Failures by pair{suffix}", grid, _NOTE))
    return pictures


_SLOW = "A frame: too slow."
_NOTE = "Number of cases that failed. A dash: not checked. A frame: accused."


def _failed(entries: Sequence[Observation]) -> float | None:
    looked = [entry for entry in entries if entry.outcome in ("passed", "failed")]
    return float(sum(entry.outcome == "failed" for entry in looked)) if looked else None


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _failures_of_gpus(report: RunReport) -> list[Matrix]:
    entries: dict[tuple[str, int], list[Observation]] = defaultdict(list)
    for entry in report.observations:
        for number in entry.suspects or summary.gpus_of(report, entry.subject):
            entries[entry.check, number].append(entry)
    check_names = [name for name in summary.check_names(report) if any(check == name for check, _ in entries)]
    explained: set[tuple[str, int]] = set()
    for accusation in report.verdict.accusations:
        if accusation.part.kind in ("gpu", "host-link"):
            number = accusation.part.members[0]
            explained |= {(entry.check, number) for entry in summary.evidence_of(report, accusation)}
    pictures = []
    for suffix, numbers in _blocks(report) if check_names else ():
        values = [[_failed(entries.get((name, number), ())) for number in numbers] for name in check_names]
        cells = itertools.product(enumerate(check_names), enumerate(numbers))
        marked = {(row, column) for (row, name), (column, number) in cells if (name, number) in explained}
        texts = [[_count(value) for value in row] for row in values]
        columns = [str(number) for number in numbers]
        grid = Grid(check_names, columns, values, texts, marked, "failures", "GPU", "", "failed")
        note = f"{_NOTE} A failure between GPUs counts for each of them."
        pictures.append(Matrix(f"Failures by check and GPU{suffix}", grid, note))
    return pictures


def _worst(slowest: dict[Any, Measurement], key: Any, measurement: Measurement) -> None:
    """Keep the slowest of several measurements with the same key."""
    before, sign = slowest.get(key), 1 if measurement.unit == "s" else -1
    if before is None or sign * measurement.value > sign * before.value:
        slowest[key] = measurement


def _by_gpu(report: RunReport) -> dict[_Kind, dict[Key, dict[int, Measurement]]]:
    """Return the measurements of each GPU by itself, and of copies between it and its host."""
    by_kind: dict[_Kind, dict[Key, dict[int, Measurement]]] = {}
    for measurement in report.measurements:
        subject_kind = measurement.subject.kind
        if subject_kind == "gpu" or subject_kind == "upload" or subject_kind == "download":
            mine = by_kind.setdefault(subject_kind, {}).setdefault(measurement.kind[:3], {})
            _worst(mine, measurement.subject.members[0], measurement)
    return by_kind


def _of_gpus(report: RunReport) -> list[Matrix]:
    by_kind = _by_gpu(report).items()
    chosen = [(kind, key, mine) for kind, by_key in by_kind for key, mine in _most_telling(by_key).items()]
    failed = (entry for entry in report.observations if entry.outcome == "failed" and "quantity" in entry.evidence)
    slow = {(entry.subject, entry.evidence["quantity"], entry.evidence.get("size")) for entry in failed}
    pictures = []
    for suffix, numbers in _blocks(report) if chosen else ():
        rows: list[str] = []
        values: list[list[float | None]] = []
        texts: list[list[str]] = []
        scales: list[Scale] = []
        marked = set()
        for subject_kind, (quantity, unit, size), mine in chosen:
            if not set(mine) & set(numbers):
                continue
            scale, prefix = summary.prefix([measurement.value for measurement in mine.values()])
            way = "" if subject_kind == "gpu" or subject_kind in quantity else f"{subject_kind}, "
            for column, number in enumerate(numbers):
                if (Subject(subject_kind, (number,)), quantity, size) in slow:
                    marked.add((len(rows), column))
            rows.append(f"{quantity}, {way}{_extent(unit, size)}, {prefix}{unit}")
            speeds = [mine[number].value if number in mine else None for number in numbers]
            values.append(speeds)
            texts.append([_digits(value, scale) for value in speeds])
            scales.append("little" if unit == "s" else "much")
        columns = [str(number) for number in numbers]
        grid = Grid(rows, columns, values, texts, marked, scales, "GPU", frame="too slow")
        pictures.append(Matrix(f"Speed of each GPU{suffix}", grid, _SLOW if marked else ""))
    return pictures


def _extent(unit: str, size: int) -> str:
    return f"size {size}" if unit == "FLOP/s" else summary.bytes_text(size)


def others(report: RunReport) -> list[dict[str, str]]:
    """Return table rows for the measurements that no matrix shows: of groups, of hosts, and of other sizes.
    For other sizes a row has the median, the lowest and the highest value."""
    rows: list[tuple[str, str, str, str]] = []
    tables: list[tuple[str, Mapping[Key, Mapping[Any, Measurement]]]] = [("pair", _by_pair(report))]
    tables += [("GPU" if kind == "gpu" else kind, mine) for kind, mine in _by_gpu(report).items()]
    for name, by_key in tables:
        for key in sorted(set(by_key) - set(_most_telling(by_key))):
            values = sorted(measurement.value for measurement in by_key[key].values())
            low, middle, high = (amount(value, key[1]) for value in (values[0], values[len(values) // 2], values[-1]))
            range_text = f"{middle} ({low} to {high})" if low != high else middle
            rows.append((key[0], summary.what(len(values), name), _extent(key[1], key[2]), range_text))
    for speed in report.measurements:
        if speed.subject.kind in ("group", "host") and not speed.subject.is_pair:
            extent = _extent(speed.unit, speed.size)
            rows.append((speed.quantity, str(speed.subject), extent, amount(speed.value, speed.unit)))
    return [dict(zip(("what", "subject", "size", "value"), row, strict=True)) for row in rows]


def _digits(value: float | None, scale: float) -> str:
    if value is None:
        return "-"
    scaled = value / scale
    return f"{scaled:.0f}" if abs(scaled) >= 100 else f"{scaled:.1f}" if abs(scaled) >= 10 else f"{scaled:.2f}"


_TEMPLATE = Path(__file__).with_name("page.html")
_EVIDENCE = 20  # most observations to show for an accusation
_LONG = 200  # most characters of a value of the evidence
_CLASSES = {"ACCEPTED": "good", "REJECTED": "bad", "INCONCLUSIVE": "open", "SUSPECT": "open"}


@dataclass(frozen=True)
class Card:
    gpu: Gpu
    host: str
    accused: list[str]  # names of the accused parts that contain the GPU
    is_accused: bool  # the GPU itself is accused
    identity: list[tuple[str, str]]  # names and values that identify the GPU
    outcomes: list[tuple[Outcome, str]]  # the worst outcome of the GPU alone, and of the GPU with others, in words
    # check, outcome, counts in words, and whether the subjects are pairs, groups or the host
    results: list[tuple[str, Outcome, str, bool]]
    health: list[tuple[str, str, bool]]  # name and value of each telemetry finding, and whether it is a bad sign


def render(report: RunReport) -> str:
    """Render the report as HTML. Needs the extra ``report``; see `pages.require`."""
    accused_names: dict[int, list[str]] = {gpu.number: [] for gpu in report.gpus}
    for accusation in report.verdict.accusations:
        component = accusation.part
        for number in component.members if component.kind != "host" else ():
            accused_names.setdefault(number, []).append(summary.name_of(report, component))
    cards = _cards(report, accused_names)
    return pages.render(
        _TEMPLATE,
        version=__version__,
        report=report,
        view=summary,
        detected=detected,
        headline=summary.headline(report),
        shade=_CLASSES[report.verdict.kind],
        shades=_CLASSES,
        accusations=[
            {
                "name": summary.name_of(report, accusation.part),
                "who": summary.describe_part(report, accusation.part),
                "gpus": list(_identities(report, accusation.part)),
                "accusation": accusation,
                "evidence": [_shown(entry) for entry in summary.evidence_of(report, accusation)[:_EVIDENCE]],
                "of": len(accusation.observations),
            }
            for accusation in report.verdict.accusations
        ],
        facts=_facts([card.gpu for card in cards]),
        unexplained=[_shown(entry) for entry in summary.failed_of(report, report.verdict)[:_EVIDENCE]],
        loose=len(report.verdict.unexplained),
        checks=summary.checks_by_name(report),
        tallies=summary.tallies(report),
        cards=cards,
        pictures=pictures(report),
        matrices=heat_maps(report),
        others=others(report),
        charts=_charts(report, _wrong(report)),
        outliers=summary.among_hosts(report),
        folded=len(report.hosts) - len(summary.in_detail(report)),
    )


def _shown(entry: Observation) -> dict[str, Any]:
    values = ((json.dumps(name), json.dumps(value)) for name, value in encoded(entry.evidence).items())
    lines = (f"{name}: {value[:_LONG]}{'...' if len(value) > _LONG else ''}" for name, value in values)
    return {"entry": entry, "evidence": "\n".join(lines)}


def _facts(gpus: Sequence[Gpu]) -> list[tuple[str, list[tuple[str, list[int]]]]]:
    """Return for each fact its values, each with the GPUs that have it; without GPUs if all of them do."""
    facts: dict[str, dict[str, list[int]]] = {}
    for gpu in gpus:
        for name, value in facts_of(gpu):
            facts.setdefault(name, {}).setdefault(value, []).append(gpu.number)
    return [
        (name, [(value, [] if len(mine) == len(gpus) else mine) for value, mine in values.items()])
        for name, values in facts.items()
    ]


def _identities(report: RunReport, component: Part) -> Iterator[list[tuple[str, str]]]:
    """Yield names and values that find each GPU of a part in the machine; nothing for a host."""
    gpus = {gpu.number: gpu for gpu in report.gpus}
    for member in dict.fromkeys(component.members) if component.kind != "host" else ():
        if gpu := gpus.get(member):
            slot = ("slot", f"PCI {gpu.pci or 'unknown'} of {summary.host_name(report, gpu.host)}, cuda:{gpu.index}")
            uuid, serial, _ = summary.identity(gpu)
            yield [(f"GPU {member}", gpu.name), slot, serial, uuid]
        else:
            yield [(f"GPU {member}", "unknown to this run")]


def _wrong(report: RunReport) -> set[int]:
    return {accusation.part.members[0] for accusation in report.verdict.accusations if accusation.part.kind == "gpu"}


def _cards(report: RunReport, accused: dict[int, list[str]]) -> list[Card]:
    own: dict[int, dict[str, list[Outcome]]] = {gpu.number: {} for gpu in report.gpus}
    shared: dict[int, dict[str, list[Outcome]]] = {gpu.number: {} for gpu in report.gpus}
    for entry in report.observations:
        among = own if entry.subject.kind in ("gpu", "upload", "download") else shared
        for number in summary.gpus_of(report, entry.subject):
            if number in among:
                among[number].setdefault(entry.check, []).append(entry.outcome)
    by_gpu = dict(grouped((sample.gpu, sample) for sample in report.samples))
    accused_gpus = _wrong(report)
    check_names = summary.check_names(report)
    cards = []
    shown = {host.number for host in summary.in_detail(report)}
    for gpu in (gpu for gpu in report.gpus if gpu.host in shown or len(report.gpus) <= summary.MATRIX):
        results = _results(check_names, own[gpu.number], shared[gpu.number])
        ways = ((own[gpu.number], "alone"), (shared[gpu.number], "with others"))
        tallies = ((summary.Tally.of(itertools.chain(*checks.values())), how) for checks, how in ways if checks)
        outcomes = [(tally.outcome, how) for tally, how in tallies]
        health = health_of(by_gpu.get(gpu.number, ()))
        host = summary.host_name(report, gpu.host)
        mine, identity = accused[gpu.number], summary.identity(gpu)
        cards.append(Card(gpu, host, mine, gpu.number in accused_gpus, identity, outcomes, results, health))
    return cards


def _results(
    check_names: Iterable[str], own: dict[str, list[Outcome]], shared: dict[str, list[Outcome]]
) -> list[tuple[str, Outcome, str, bool]]:
    rows: list[tuple[str, Outcome, str, bool]] = []
    for name in check_names:
        for check_outcomes, together in ((own.get(name), False), (shared.get(name), True)):
            if check_outcomes:
                tally = summary.Tally.of(check_outcomes)
                counts = [f"{getattr(tally, tally.outcome)} of {tally.total}"]
                for outcome in ("unknown", "skipped"):
                    if outcome != tally.outcome and getattr(tally, outcome):
                        counts.append(f"{getattr(tally, outcome)} {outcome}")
                rows.append((name, tally.outcome, ", ".join(counts), together))
    return rows


def _charts(report: RunReport, accused: Collection[int]) -> list[dict[str, str]]:
    charts = []
    for host in summary.in_detail(report):
        gpus = {gpu.number for gpu in report.gpus if gpu.host == host.number}
        samples = [sample for sample in report.samples if sample.gpu in gpus]
        if not any(isinstance(sample.values.get(key), (int, float)) for sample in samples for key in PANELS):
            continue
        name = summary.host_name(report, host.number)
        checks = summary.in_order(run for run in report.checks if run.host in (None, host.number))
        title = f"Temperature, power and clocks of the GPUs of {name} over time"
        drawn = over_time(samples, checks, accused, title)
        began, ended = (summary.seconds_text(pick(sample.at for sample in samples)) for pick in (min, max))
        charts.append({"host": name, "svg": drawn, "text": f"{len(samples)} samples, from {began} to {ended}"})
    return charts
