"""Pictures of nodes: GPUs, the links between them, and the host, with the accused parts marked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mgpu_check.acceptance.report import view
from mgpu_check.acceptance.run_report import Gpu, Host, RunReport
from mgpu_check.devices.observations import Part, PartKind, Subject, SubjectKind

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
_PARTS: Mapping[SubjectKind, PartKind] = {
    "gpu": "gpu",
    "copy": "link",
    "upload": "host-link",
    "download": "host-link",
    "host": "host",
}

_WIDTH, _TALL, _HEAD, _STUB = 360, 52, 34, 20  # a box and its text are readable at the width of a telephone
_COLUMNS = 4
_MESH = 8
"""Most GPUs of a host whose links are all drawn; with more only the marked ones."""


@dataclass(frozen=True)
class Wire:
    """A link, or the link of a GPU to its host.

    Attributes:
        at: the point to mark.
        label: GPUs of an accused direction; "" for a link to the host.
    """

    path: str
    at: tuple[float, float]
    state: State
    words: str
    label: str = ""


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
    """A host with its GPUs.

    Attributes:
        buses: heights of the lines that stand for the host.
        wires: the marked ones last, so that no other wire hides them.
        legend: what the marks mean.
    """

    host: str
    state: State
    height: float
    buses: Sequence[float]
    boxes: Sequence[Box]
    wires: Sequence[Wire]
    legend: str


def pictures(report: RunReport) -> list[Picture]:
    known = states(report)
    return [
        _picture(report, host, [gpu for gpu in report.gpus if gpu.host == host.number], known)
        for host in view.in_detail(report)
    ]


def states(report: RunReport) -> dict[Part, State]:
    """Return the state of each part that was checked, accused or suspected. Other parts were not checked."""
    found: dict[Part, State] = {}

    def raise_to(part: Part, state: State) -> None:
        if _STATES.index(state) > _STATES.index(found.get(part, "none")):
            found[part] = state

    for entry in report.observations:
        if entry.subject.kind in _PARTS and entry.outcome in ("passed", "failed"):
            raise_to(_part_of(entry.subject), "good")
    for entry in view.failed_of(report, report.verdict):
        if entry.subject.kind in _PARTS:
            raise_to(_part_of(entry.subject), "open")
    for part in (part for sets in report.verdict.rivals for some in sets for part in some):
        raise_to(part, "open")
    for accusation in report.verdict.accusations:
        raise_to(accusation.part, "bad")
    return found


def _part_of(subject: Subject) -> Part:
    return Part(_PARTS[subject.kind], subject.members)


def _picture(report: RunReport, host: Host, gpus: Sequence[Gpu], known: Mapping[Part, State]) -> Picture:
    columns = max(1, min(_COLUMNS, math.ceil(len(gpus) / 2)))
    gap = 30 + 14 * columns if len(gpus) > 1 else 0
    block = 2 * (_STUB + _TALL) + gap if len(gpus) > 1 else _STUB + _TALL + 8
    blocks = max(1, math.ceil(len(gpus) / (2 * columns)))
    places = {}
    for place, gpu in enumerate(gpus):
        row, column = divmod(place, columns)
        top = _HEAD + block * (row // 2) + _STUB + row % 2 * (_TALL + gap)
        places[gpu.number] = (_WIDTH * (column + 0.5) / columns, float(top), row)
    boxes = [_box(report, gpu, places[gpu.number], known) for gpu in gpus]
    wires = [_host_wire(gpu, places[gpu.number], known) for gpu in gpus]
    wires += _peer_wires(places, known, gap, len(gpus) <= _MESH)
    wires.sort(key=lambda wire: _STATES.index(wire.state))
    state = known.get(Part("host", (host.number,)), "good")
    shown: set[State] = {state, *(one.state for one in boxes), *(one.state for one in wires)}
    legend = " ".join(text for one, text in _LEGEND.items() if one in shown)
    if len(gpus) > _MESH:
        legend += " Links between GPUs are drawn only if they are marked."
    name = view.host_name(report, host.number)
    buses = [_HEAD + block * number for number in range(blocks)]
    return Picture(name, state, _HEAD + block * blocks, buses, boxes, wires, legend)


def _box(report: RunReport, gpu: Gpu, place: tuple[float, float, int], known: Mapping[Part, State]) -> Box:
    state = known.get(Part("gpu", (gpu.number,)), "none")
    host = {one.number: one.host for one in report.gpus}
    away = [
        f"link {part.members[0]} → {part.members[-1]}"
        for part, other in known.items()
        if other == "bad"
        and part.kind == "link"
        and gpu.number in part.members
        and len({host.get(m) for m in part.members}) > 1
    ]
    said = _SAID[state] or ", ".join(away[:1])  # a link to another host has no place in the picture
    domain, _, slot = gpu.pci.partition(":")
    lines = (f"GPU {gpu.number}", gpu.pci if domain.strip("0") else slot, said)
    return Box(place[0], place[1], lines, "open" if away and state != "bad" else state, view.describe_gpu(report, gpu))


def _host_wire(gpu: Gpu, place: tuple[float, float, int], known: Mapping[Part, State]) -> Wire:
    x, y, row = place
    start, way = (y + _TALL, 1) if row % 2 else (y, -1)
    part = Part("host-link", (gpu.number,))
    state = known.get(part, "none")
    return Wire(f"M{x:g} {start:g}v{way * _STUB}", (x, start + way * _STUB / 2), state, _words(str(part), state))


def _peer_wires(
    places: Mapping[int, tuple[float, float, int]], known: Mapping[Part, State], gap: float, whole: bool
) -> Iterator[Wire]:
    numbers = sorted(places)
    for index, one in enumerate(numbers):
        for other in numbers[index + 1 :]:
            ways = {pair: known.get(Part("link", pair), "none") for pair in ((one, other), (other, one))}
            state = max(ways.values(), key=_STATES.index)
            if not whole and state in ("none", "good"):
                continue
            marked = [pair for pair, way in ways.items() if way == state] if state in ("bad", "open") else []
            arrow = "↔" if len(marked) == 2 else "→"
            label = f"{marked[0][0]} {arrow} {marked[0][1]}" if marked else ""
            path, at = _course(places[one], places[other], gap)
            yield Wire(path, at, state, _words(f"link GPU {label or f'{one} ↔ {other}'}", state), label)


def _course(
    one: tuple[float, float, int], other: tuple[float, float, int], gap: float
) -> tuple[str, tuple[float, float]]:
    """Return the path of a link between two boxes and its middle: a curve in the gap between their rows."""
    (x, y, row), (u, v, line) = one, other
    if row // 2 != line // 2:  # in another block of rows
        y += _TALL
        return f"M{x:g} {y:g}L{u:g} {v:g}", ((x + u) / 2, (y + v) / 2)
    if row == line:
        start, way = (y, -1) if row % 2 else (y + _TALL, 1)
        deep = start + way * min(gap, 0.3 * abs(u - x))
        return f"M{x:g} {start:g}C{x:g} {deep:g} {u:g} {deep:g} {u:g} {start:g}", ((x + u) / 2, (start + 3 * deep) / 4)
    start, end, pull = y + _TALL, v, gap / 3
    return f"M{x:g} {start:g}C{x:g} {start + pull:g} {u:g} {end - pull:g} {u:g} {end:g}", (
        (x + u) / 2,
        (start + end) / 2,
    )


def _words(name: str, state: State) -> str:
    return f"{name}: {_SAID[state].lower() or 'checked, not accused'}"
