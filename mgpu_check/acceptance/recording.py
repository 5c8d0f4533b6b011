"""Record the facts and speeds of the GPUs of a run in a baseline file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from mgpu_check.acceptance.baseline import FORM, SOFTWARE, Baseline, Entry, Recorded, place_of, read_baseline
from mgpu_check.acceptance.comparison import models, useless
from mgpu_check.acceptance.documents import write_whole
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.devices.observations import Measurement, median_and_spread
from mgpu_check.devices.telemetry.fields import Value, names, pair_field


def entries_of(
    measurements: Sequence[Measurement],
    gpus: Sequence[Gpu],
    software: Mapping[str, str],
    recorded: str,
    visible: Mapping[int, int] | None = None,
) -> list[Entry]:
    """Make the baseline entries of a run, one for each model.

    Leave out measurements over several models, with too few repeats, or with an invalid value.

    Args:
        recorded: time of the run, ISO 8601.
        visible: number of GPUs of each host, including those outside the run; by default all are in the run.
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
        found.append(Entry(name, memory, recorded, count, facts, _recorded(usable, by_number), known))
    return found


def _facts(gpus: Sequence[Gpu]) -> dict[str, Value]:
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
    """Add entries to a baseline file, or create it. They replace entries of the same model and software."""
    there = read_baseline(path).entries if path.exists() else ()
    new = {entry.key for entry in entries}
    write(path, Baseline(str(path), (*(entry for entry in there if entry.key not in new), *entries)))


def write(path: Path, baseline: Baseline) -> None:
    ordered = sorted(baseline.entries, key=lambda entry: entry.key)
    document = {"format": FORM.name, "version": FORM.version, "entries": [asdict(entry) for entry in ordered]}
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    write_whole(path, text)
