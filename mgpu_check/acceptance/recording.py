"""Write a baseline: what the GPUs of a run were like, added to a file at once."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from mgpu_check.acceptance.account import Gpu
from mgpu_check.acceptance.baseline import (
    FORMAT,
    SOFTWARE,
    VERSION,
    Baseline,
    Entry,
    Recorded,
    Value,
    place_of,
    read_baseline,
)
from mgpu_check.acceptance.comparison import models, useless
from mgpu_check.acceptance.documents import write_whole
from mgpu_check.devices.observations import Measurement, median_and_spread
from mgpu_check.devices.telemetry.fields import names, pair_field

__all__ = ["entries_of", "record", "write"]


def entries_of(
    measurements: Sequence[Measurement],
    gpus: Sequence[Gpu],
    software: Mapping[str, str],
    recorded: str,
    visible: Mapping[int, int] | None = None,
) -> list[Entry]:
    """Make what is recorded of a run: one entry for each model.

    Measurements over several models, of too few repeats, or that are no speed, are left out.

    Args:
        recorded: when, ISO 8601.
        visible: number of GPUs of each host, whether they are in the run or not; default those of the run.
    """
    by_number = {gpu.number: gpu for gpu in gpus}
    found = []
    model = models(gpus)
    for name, memory in sorted(set(model.values())):
        mine = [gpu for gpu in gpus if model[gpu.number] == (name, memory)]
        numbers = {gpu.number for gpu in mine}
        hosts = {gpu.host for gpu in mine}
        usable = [
            m for m in measurements if m.subject.kind != "host" and set(m.subject.members) <= numbers and not useless(m)
        ]
        whole = visible is None or all(visible.get(host) == sum(gpu.host == host for gpu in gpus) for host in hosts)
        count = max(sum(gpu.host == host for gpu in mine) for host in hosts) if whole else 0
        known = {fact: value for fact, value in software.items() if fact in SOFTWARE and value}
        facts = _facts(mine)
        found.append(Entry(name, memory, known, recorded, count, facts, _recorded(usable, by_number)))
    return found


def _facts(gpus: Sequence[Gpu]) -> dict[str, Value]:
    """Return what these GPUs, and the pairs among them, have in common."""
    numbers = {gpu.number for gpu in gpus}
    values: defaultdict[str, list[Value | None]] = defaultdict(list)
    for gpu in gpus:
        for name in names("fact"):
            values[name].append(gpu.facts.get(name))
        for name in names("pair"):
            values[name] += [gpu.facts.get(pair_field(name, peer)) for peer in numbers - {gpu.number}]
    found: dict[str, Value] = {}
    for name, several in values.items():
        if several and several[0] is not None and all(value == several[0] for value in several):
            found[name] = several[0]
    return found


def _recorded(measurements: Sequence[Measurement], gpus: Mapping[int, Gpu]) -> tuple[Recorded, ...]:
    groups: defaultdict[tuple[Any, ...], list[Measurement]] = defaultdict(list)
    for m in measurements:
        groups[(m.subject.kind, m.quantity, m.unit, m.size, len(m.subject.members))].append(m)
    found = []
    for (kind, quantity, unit, size, _), group in sorted(groups.items()):
        values = [m.value for m in group]
        middle, spread = median_and_spread(values)
        places: defaultdict[str, list[float]] = defaultdict(list)
        for m in group:
            places[place_of(m, gpus)].append(m.value)
        by_place = {place: median(several) for place, several in sorted(places.items())}
        repeats = min(m.repeats for m in group)
        found.append(Recorded(kind, quantity, unit, size, middle, spread, len(by_place), repeats, by_place))
    return tuple(found)


def record(path: Path, entries: Sequence[Entry]) -> None:
    """Add entries to a file, in the place of those of the same model and software; make it if there is none.

    Raises:
        ValueError: there is a file, which is no baseline; it stays as it is.
        OSError: it cannot be written.
    """
    there = read_baseline(path).entries if path.exists() else ()
    new = {entry.key for entry in entries}
    write(path, Baseline(str(path), (*(entry for entry in there if entry.key not in new), *entries)))


def write(path: Path, baseline: Baseline) -> None:
    """Write a file at once: whoever reads it sees the old one or the new one, whole.

    Raises:
        OSError: it cannot be written.
    """
    ordered = sorted(baseline.entries, key=lambda entry: entry.key)
    document = {"format": FORMAT, "version": VERSION, "entries": [asdict(entry) for entry in ordered]}
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    write_whole(path, text)
