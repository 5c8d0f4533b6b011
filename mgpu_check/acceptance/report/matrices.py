"""Matrices of measurements and failures: GPU by GPU, and check by GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mgpu_check.acceptance.comparison import amount
from mgpu_check.acceptance.report import view
from mgpu_check.acceptance.report.figures import Grid, Scale
from mgpu_check.acceptance.run_report import RunReport
from mgpu_check.devices.observations import Measurement, Observation, Part, Subject

Key = tuple[str, str, int]
"""Quantity, unit and size of comparable measurements."""

_Kind = Literal["gpu", "upload", "download"]


@dataclass(frozen=True)
class Matrix:
    """A matrix of the page, with its heading and what is to be said of it."""

    heading: str
    grid: Grid
    note: str = ""


def heat_maps(report: RunReport) -> list[Matrix]:
    links = {_pair(accusation.part) for accusation in report.verdict.accusations if accusation.part.kind == "link"}
    pictures = []
    for key, found in sorted(_most_telling(_by_pair(report)).items()):
        pictures += _speeds(report, key, found, links)
    pictures += _failures_of_pairs(report, links)
    pictures += _of_gpus(report)
    pictures += _failures_of_gpus(report)
    return pictures


def _by_pair(report: RunReport) -> dict[Key, dict[tuple[int, int], Measurement]]:
    pairs: dict[Key, dict[tuple[int, int], Measurement]] = {}
    for one in report.measurements:
        if one.subject.is_pair:
            mine, pair = pairs.setdefault((one.quantity, one.unit, one.size), {}), _pair(one.subject)
            for way in (pair,) if one.subject.kind == "copy" else (pair, pair[::-1]):
                _worst(mine, way, one)
    return pairs


def _pair(one: Subject | Part) -> tuple[int, int]:
    return one.members[0], one.members[-1]


def _most_telling(pairs: Mapping[Key, Any]) -> dict[Key, Any]:
    """Keep one size for each quantity: of times the smallest, which shows latency, else the largest."""
    chosen: dict[tuple[str, str], int] = {}
    for quantity, unit, size in pairs:
        best = chosen.get((quantity, unit))
        wins = best is None or (size < best if unit == "s" else size > best)
        if wins:
            chosen[quantity, unit] = size
    return {key: found for key, found in pairs.items() if chosen[key[:2]] == key[2]}


def _blocks(report: RunReport) -> list[tuple[str, list[int]]]:
    """Return the GPUs of each matrix with a suffix for its heading: all GPUs, or those of each shown host."""
    numbers = [gpu.number for gpu in report.gpus]
    if len(numbers) <= view.MATRIX:
        return [("", numbers)]
    return [
        (f" on {view.host_name(report, host.number)}", [gpu.number for gpu in report.gpus if gpu.host == host.number])
        for host in view.in_detail(report)
    ]


def _speeds(
    report: RunReport, key: Key, found: Mapping[tuple[int, int], Measurement], links: set[tuple[int, int]]
) -> list[Matrix]:
    quantity, unit, size = key
    scale, prefix = view.prefix([one.value for one in found.values()])
    pictures = []
    for where, numbers in _blocks(report):
        values = [[found[a, b].value if (a, b) in found else None for b in numbers] for a in numbers]
        if not any(value is not None for row in values for value in row):
            continue
        texts = [[_digits(value, scale) for value in row] for row in values]
        heading = f"{quantity.capitalize()}{where}, {view.bytes_text(size)}, in {prefix}{unit}"
        grid = _square(numbers, values, texts, links, "little" if unit == "s" else "much", prefix + unit)
        pictures.append(Matrix(heading, grid, "A frame: accused." if grid.marked else ""))
    return pictures + _between_hosts(report, key, found)


def _square(
    numbers: Sequence[int], values: Any, texts: Any, links: set[tuple[int, int]], scale: Scale, unit: str
) -> Grid:
    place = {number: index for index, number in enumerate(numbers)}
    marked = {(place[a], place[b]) for a, b in links if a in place and b in place}
    labels = [str(number) for number in numbers]
    return Grid(labels, labels, values, texts, marked, scale, "to GPU", "from GPU", unit)


def _between_hosts(report: RunReport, key: Key, found: Mapping[tuple[int, int], Measurement]) -> list[Matrix]:
    """Return a matrix of the slowest pair between any two hosts, if one matrix cannot show all GPUs; else nothing."""
    if len(report.gpus) <= view.MATRIX or len(report.hosts) > view.MATRIX:
        return []
    host = {gpu.number: gpu.host for gpu in report.gpus}
    worst: dict[tuple[int, int], float] = {}
    for (a, b), one in found.items():
        if host[a] != host[b]:
            pair = (host[a], host[b])
            worse = max if key[1] == "s" else min
            worst[pair] = worse(worst.get(pair, one.value), one.value)
    if not worst:
        return []
    scale, prefix = view.prefix(list(worst.values()))
    numbers = [one.number for one in report.hosts]
    values = [[worst.get((a, b)) for b in numbers] for a in numbers]
    texts = [[_digits(value, scale) for value in row] for row in values]
    labels = [view.host_name(report, number) for number in numbers]
    columns = [str(number) for number in numbers]
    best: Scale = "little" if key[1] == "s" else "much"
    grid = Grid(labels, columns, values, texts, (), best, "to host", "from host", prefix + key[1])
    heading = (
        f"{key[0].capitalize()} between hosts, the worst of all pairs, {view.bytes_text(key[2])}, in {prefix}{key[1]}"
    )
    return [Matrix(heading, grid)]


def _failures_of_pairs(report: RunReport, links: set[tuple[int, int]]) -> list[Matrix]:
    counts: dict[tuple[int, int], list[Observation]] = defaultdict(list)
    for entry in report.observations:
        if entry.subject.kind == "copy":
            counts[_pair(entry.subject)].append(entry)
    pictures = []
    for where, numbers in _blocks(report):
        if not any((a, b) in counts for a in numbers for b in numbers):
            continue
        values = [[_failed(counts.get((a, b), ())) for b in numbers] for a in numbers]
        texts = [[_count(value) for value in row] for row in values]
        grid = _square(numbers, values, texts, links, "failures", "failed")
        pictures.append(Matrix(f"Failures by pair{where}", grid, _NOTE))
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
        for number in entry.suspects or view.gpus_of(report, entry.subject):
            entries[entry.check, number].append(entry)
    names = [name for name in view.check_names(report) if any(check == name for check, _ in entries)]
    explained = {
        (entry.check, accusation.part.members[0])
        for accusation in report.verdict.accusations
        if accusation.part.kind in ("gpu", "host-link")
        for entry in view.evidence_of(report, accusation)
    }
    pictures = []
    for where, numbers in _blocks(report) if names else ():
        values = [[_failed(entries.get((name, number), ())) for number in numbers] for name in names]
        marked = {
            (row, column)
            for row, name in enumerate(names)
            for column, number in enumerate(numbers)
            if (name, number) in explained
        }
        texts = [[_count(value) for value in row] for row in values]
        grid = Grid(names, [str(number) for number in numbers], values, texts, marked, "failures", "GPU", "", "failed")
        note = f"{_NOTE} A failure between GPUs counts for each of them."
        pictures.append(Matrix(f"Failures by check and GPU{where}", grid, note))
    return pictures


def _worst(found: dict[Any, Measurement], key: Any, one: Measurement) -> None:
    """Keep the slowest of several measurements with the same key."""
    before = found.get(key)
    slower = before is None or (one.value > before.value if one.unit == "s" else one.value < before.value)
    if slower:
        found[key] = one


def _by_gpu(report: RunReport) -> dict[_Kind, dict[Key, dict[int, Measurement]]]:
    """Return the measurements of each GPU by itself, and of copies between it and its host."""
    found: dict[_Kind, dict[Key, dict[int, Measurement]]] = {}
    for one in report.measurements:
        kind = one.subject.kind
        if kind == "gpu" or kind == "upload" or kind == "download":
            mine = found.setdefault(kind, {}).setdefault((one.quantity, one.unit, one.size), {})
            _worst(mine, one.subject.members[0], one)
    return found


def _of_gpus(report: RunReport) -> list[Matrix]:
    chosen = [
        (kind, key, mine) for kind, found in _by_gpu(report).items() for key, mine in _most_telling(found).items()
    ]
    slow = {
        (entry.subject, entry.evidence.get("quantity"), entry.evidence.get("size"))
        for entry in report.observations
        if entry.outcome == "failed" and "quantity" in entry.evidence
    }
    pictures = []
    for where, numbers in _blocks(report) if chosen else ():
        rows: list[str] = []
        values: list[list[float | None]] = []
        texts: list[list[str]] = []
        scales: list[Scale] = []
        marked = set()
        for kind, (quantity, unit, size), mine in chosen:
            if not set(mine) & set(numbers):
                continue
            scale, prefix = view.prefix([one.value for one in mine.values()])
            way = "" if kind == "gpu" or kind in quantity else f"{kind}, "
            marked |= {
                (len(rows), column)
                for column, number in enumerate(numbers)
                if (Subject(kind, (number,)), quantity, size) in slow
            }
            rows.append(f"{quantity}, {way}{_extent(unit, size)}, {prefix}{unit}")
            here = [mine[number].value if number in mine else None for number in numbers]
            values.append(here)
            texts.append([_digits(value, scale) for value in here])
            scales.append("little" if unit == "s" else "much")
        columns = [str(number) for number in numbers]
        grid = Grid(rows, columns, values, texts, marked, scales, "GPU", frame="too slow")
        pictures.append(Matrix(f"Speed of each GPU{where}", grid, _SLOW if marked else ""))
    return pictures


def _extent(unit: str, size: int) -> str:
    return f"size {size}" if unit == "FLOP/s" else view.bytes_text(size)


def others(report: RunReport) -> list[dict[str, str]]:
    """Return table rows for the measurements that no matrix shows: of groups, of hosts, and of other sizes.

    For other sizes a row has the median, the lowest and the highest value.
    """
    rows = []
    found: list[tuple[str, Mapping[Key, Mapping[Any, Measurement]]]] = [("pair", _by_pair(report))]
    found += [("GPU" if kind == "gpu" else kind, mine) for kind, mine in _by_gpu(report).items()]
    for name, told in found:
        for key in sorted(set(told) - set(_most_telling(told))):
            values = sorted(one.value for one in told[key].values())
            low, middle, high = (amount(value, key[1]) for value in (values[0], values[len(values) // 2], values[-1]))
            said = f"{middle} ({low} to {high})" if low != high else middle
            extent = _extent(key[1], key[2])
            rows.append({"what": key[0], "subject": view.what(len(values), name), "size": extent, "value": said})
    for one in report.measurements:
        if one.subject.kind in ("group", "host") and not one.subject.is_pair:
            value, extent = amount(one.value, one.unit), _extent(one.unit, one.size)
            rows.append({"what": one.quantity, "subject": str(one.subject), "size": extent, "value": value})
    return rows


def _digits(value: float | None, scale: float) -> str:
    if value is None:
        return "-"
    scaled = value / scale
    return f"{scaled:.0f}" if abs(scaled) >= 100 else f"{scaled:.1f}" if abs(scaled) >= 10 else f"{scaled:.2f}"
