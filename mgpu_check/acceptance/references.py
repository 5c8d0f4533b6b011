"""References of facts and speeds: baselines, recorded on a healthy node, and the table of floors of GPU models.

The dataclasses `Baseline`, `Entry` and `Recorded` are the format of the file of a baseline. `Floors`, `Sku`, `Pcie`,
`Nominal` and `Floor` are that of the table of floors: the least speed and the facts of each known GPU model, with the
source of every figure.

Speed depends on driver and libraries. A measurement is compared only with an entry of the same software; without such
an entry it is unknown. Facts are compared with any entry of the model, because a different driver is itself a fact that
differs.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from mgpu_check.acceptance.comparison import (
    DEVIATIONS,
    NORMAL,
    UNUSABLE,
    Comparison,
    least_shortfall,
    models,
    same_memory,
    shortfall,
    useless,
)
from mgpu_check.acceptance.documents import (
    Amount,
    Count,
    DocumentType,
    Positive,
    Spread,
    Text,
    Texts,
    read_document,
    write_whole,
)
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.devices.observations import Measurement, SubjectKind, Unit, median_and_spread
from mgpu_check.devices.telemetry.fields import Value, names, pair_field

SOFTWARE = ("driver", "cuda", "nccl", "torch")
"""Versions that affect speed: kernels come from torch and CUDA, collectives from NCCL, clocks and copies from the
driver."""


@dataclass(frozen=True)
class Recorded:
    """One quantity of one kind of subject."""

    subject: SubjectKind
    quantity: Text
    unit: Unit
    size: Count
    value: Amount  # median over all subjects
    spread: Spread  # MAD over all subjects
    subjects: Positive  # how many were measured
    repeats: Positive  # the least number of repeats over all subjects
    places: Mapping[str, Amount]  # indices of GPUs on their host, such as ``"0>1"`` -> value


@dataclass(frozen=True)
class Entry:
    """One model with one version of software."""

    name: Text
    memory: Count  # in bytes
    recorded: Text  # time, ISO 8601
    gpus: Count  # number of GPUs on one host; 0 if not all of them were in the run
    facts: Mapping[str, Value]  # name -> value that all GPUs, or all pairs of GPUs, of this model had
    measurements: tuple[Recorded, ...]
    software: Mapping[str, str] = field(default_factory=dict)  # version of each of `SOFTWARE`

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.name, self.memory, *(self.software.get(name, "") for name in SOFTWARE))


@dataclass(frozen=True)
class Baseline:
    file: str
    entries: tuple[Entry, ...]

    def of(self, gpu: Gpu) -> list[Entry]:
        entries = [entry for entry in self.entries if entry.name == gpu.name and same_memory(entry.memory, gpu.memory)]
        return sorted(entries, key=lambda entry: entry.recorded, reverse=True)

    def entry(self, gpu: Gpu, software: Mapping[str, str]) -> Entry | str:
        """Return the entry of the same model and software, or why the file has no such entry."""
        entries = self.of(gpu)
        if not entries:
            gpu_names = sorted({f"{entry.name} ({entry.memory} B)" for entry in self.entries})
            return f"{self.file} has no {gpu.name} ({gpu.memory} B), only {', '.join(gpu_names) or 'nothing'}"
        differences = [_differences(entry.software, software) for entry in entries]
        if not (fewest := min(differences, key=len)):
            return entries[differences.index(fewest)]
        return f"{self.file} was recorded with other software: {', '.join(fewest)}"

    def expected(
        self, gpus: Sequence[Gpu], software: Mapping[str, str] | None = None
    ) -> tuple[dict[str, Value], str | None]:
        """Return the facts that the GPUs of one host should have and None, or no facts and the reason.

        The facts come from the entry with the same software, or else from the latest one: a driver that differs is
        itself a fact to compare.
        """
        kinds = set(models(gpus).values())
        if len(kinds) != 1:
            return {}, f"the host has GPUs of {len(kinds)} models, and facts are recorded of one"
        entry, entries = self.entry(gpus[0], software or {}), self.of(gpus[0])
        if isinstance(entry, str):
            return (dict(entries[0].facts), None) if entries else ({}, entry)
        return dict(entry.facts), None

    def count(self, gpus: Sequence[Gpu]) -> int | None:
        """Return how many GPUs one host had when this model was last recorded; None if the file does not say."""
        entries = self.of(gpus[0]) if gpus else []
        return entries[0].gpus or None if entries else None

    def compare(
        self, measurement: Measurement, gpus: Mapping[int, Gpu], software: Mapping[int, Mapping[str, str]]
    ) -> Comparison:
        """Compare a measurement with the recorded value at the same GPU indices, or else with the recorded median.

        Args:
            gpus: all GPUs of the run, by number.
            software: versions by host number.
        """
        subject = measurement.subject
        members = [gpus[member] for member in subject.members] if subject.kind != "host" else list(gpus.values())
        if len(set(models(members).values())) != 1:
            return Comparison("baseline", "unknown", why="it is of GPUs of several models")
        entry = self.entry(members[0], software.get(members[0].host, {}))
        if isinstance(entry, str):
            return Comparison("baseline", "unknown", why=entry)
        key = (subject.kind, measurement.quantity, measurement.unit, measurement.size)
        position = place_of(measurement, gpus)
        same = [r for r in entry.measurements if (r.subject, r.quantity, r.unit, r.size) == key]
        recorded = next((r for r in same if position in r.places), next(iter(same), None))
        if recorded is None:
            reason = f"{self.file} has no {measurement.quantity} of size {measurement.size}"
            return Comparison("baseline", "unknown", why=reason)
        least = least_shortfall(measurement.kind)
        scatter = DEVIATIONS * NORMAL * recorded.spread / recorded.value
        at_place = recorded.places.get(position)
        if at_place is None and (scatter > UNUSABLE or subject.kind == "group"):
            reason = f"{self.file} has no {subject.kind} at {position}, and its others differ"
            return Comparison("baseline", "unknown", why=reason)
        reference = recorded.value if at_place is None else at_place
        # A value at the same place has no scatter between places; the least share covers the noise of a run.
        limit = least if at_place is not None else max(least, scatter)
        missing = shortfall(measurement.value, reference, measurement.unit)
        reason = f"recorded at {entry.recorded}" + ("" if at_place is None else f" at {position}")
        place = None if at_place is None else position
        numbers = {"recorded": recorded.value, "spread": recorded.spread, "place": place}
        outcome: Any = "failed" if missing > limit else "passed"
        return Comparison("baseline", outcome, reference, missing, limit, reason, numbers)


FORM = DocumentType("mgpu-check baseline", 1, Baseline, "`mgpu-check accept --record-baseline=FILE` writes such a file")


def _differences(recorded: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    pairs = ((name, recorded.get(name, ""), now.get(name, "")) for name in SOFTWARE)
    return [f"{name} {old or 'unknown'} there, {new or 'unknown'} here" for name, old, new in pairs if old != new]


def place_of(measurement: Measurement, gpus: Mapping[int, Gpu]) -> str:
    """Return the place of a subject by GPU indices: ``"0>1"`` on one host, ``"0.0>1.0"`` from one host to the next.
    The numbers of the hosts do not count, so that the same place on another host has the same name."""
    if measurement.subject.kind == "host":
        return "host"
    members = [gpus[member] for member in measurement.subject.members]
    hosts = sorted({gpu.host for gpu in members})
    many = len(hosts) > 1
    return ">".join(f"{hosts.index(gpu.host)}.{gpu.index}" if many else str(gpu.index) for gpu in members)


def read_baseline(path: Path) -> Baseline:
    """Read a baseline file, or raise ValueError that names the key, its value and the valid values."""
    return FORM.decoded(read_document(path), str(path))


def entries_of(
    measurements: Sequence[Measurement],
    gpus: Sequence[Gpu],
    software: Mapping[str, str],
    recorded: str,
    visible: Mapping[int, int] | None = None,
) -> list[Entry]:
    """Make the baseline entries of a run, one for each model.

    Leave out measurements over several models, with too few repeats, or with an invalid value. `recorded` is the time
    of the run, ISO 8601. `visible` is the number of GPUs of each host, including those outside the run; by default all
    are in the run.
    """
    by_number = {gpu.number: gpu for gpu in gpus}
    entries = []
    model = models(gpus)
    for name, memory in sorted(set(model.values())):
        mine = [gpu for gpu in gpus if model[gpu.number] == (name, memory)]
        numbers = {gpu.number for gpu in mine}
        hosts = {gpu.host for gpu in mine}
        own = (m for m in measurements if m.subject.kind != "host" and set(m.subject.members) <= numbers)
        usable = [m for m in own if not useless(m)]
        of_hosts = {host: sum(gpu.host == host for gpu in gpus) for host in hosts}
        is_complete = visible is None or all(visible.get(host) == count for host, count in of_hosts.items())
        count = max(sum(gpu.host == host for gpu in mine) for host in hosts) if is_complete else 0
        versions = {fact: value for fact, value in software.items() if fact in SOFTWARE and value}
        entries.append(Entry(name, memory, recorded, count, _facts(mine), _recorded(usable, by_number), versions))
    return entries


def _facts(gpus: Sequence[Gpu]) -> dict[str, Value]:
    numbers = {gpu.number for gpu in gpus}
    values: defaultdict[str, list[Value | None]] = defaultdict(list)
    for gpu in gpus:
        for name in names("fact"):
            values[name].append(gpu.facts.get(name))
        for name in names("pair"):
            values[name] += [gpu.facts.get(pair_field(name, peer)) for peer in numbers - {gpu.number}]
    equal = {name: several for name, several in values.items() if several and several.count(several[0]) == len(several)}
    return {name: several[0] for name, several in equal.items() if several[0] is not None}


def _recorded(measurements: Sequence[Measurement], gpus: Mapping[int, Gpu]) -> tuple[Recorded, ...]:
    groups: defaultdict[tuple[Any, ...], list[Measurement]] = defaultdict(list)
    for m in measurements:
        groups[(m.subject.kind, m.quantity, m.unit, m.size, len(m.subject.members))].append(m)
    recorded = []
    for (subject_kind, quantity, unit, size, _), group in sorted(groups.items()):
        middle, spread = median_and_spread([m.value for m in group])
        places: defaultdict[str, list[float]] = defaultdict(list)
        for m in group:
            places[place_of(m, gpus)].append(m.value)
        by_place = {position: median(several) for position, several in sorted(places.items())}
        repeats = min(m.repeats for m in group)
        recorded.append(Recorded(subject_kind, quantity, unit, size, middle, spread, len(by_place), repeats, by_place))
    return tuple(recorded)


def record(path: Path, entries: Sequence[Entry]) -> None:
    """Add entries to a baseline file, or create it. They replace entries of the same model and software."""
    existing = read_baseline(path).entries if path.exists() else ()
    new = {entry.key for entry in entries}
    write(path, Baseline(str(path), (*(entry for entry in existing if entry.key not in new), *entries)))


def write(path: Path, baseline: Baseline) -> None:
    ordered = sorted(baseline.entries, key=lambda entry: entry.key)
    document = {"format": FORM.name, "version": FORM.version, "entries": [asdict(entry) for entry in ordered]}
    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


TABLE = "floors_of_skus.json"


@dataclass(frozen=True)
class Floor:
    """The least speed of one quantity."""

    subject: SubjectKind
    quantity: Text
    unit: Unit
    data_sheet: Amount  # figure of the vendor, in `unit`, for dense data and in one direction
    fraction: Amount  # share of `data_sheet` that must be reached
    # source, reason: where the figure comes from, and why the fraction has its value: names in `Floors`
    source: Text
    reason: Text
    least_size: Count = 0  # measurements of a smaller size do not count
    overhead: Spread = 0.0  # seconds that an operation takes in addition to its work

    def at(self, size: int) -> float:
        """Return the floor for a measurement of `size` bytes, or elements along a side."""
        amount = 2.0 * size**3 if self.unit == "FLOP/s" else float(size)
        if self.unit == "s":
            return self.data_sheet / self.fraction
        return self.fraction * amount / (self.overhead + amount / self.data_sheet)


@dataclass(frozen=True)
class Pcie:
    generation: Positive
    width: Positive
    source: Text = field(compare=False)

    def __str__(self) -> str:
        return f"Gen{self.generation} x{self.width}"


@dataclass(frozen=True)
class Nominal:
    """The facts that each GPU of a model has on a host that is wired and set as the vendor intends."""

    source: Text = field(compare=False)  # where the facts come from: a name in `Floors`
    # name of a telemetry fact -> its value, or the least value of facts that may be better
    facts: Mapping[str, Value] = field(default_factory=dict)
    # the same, for hosts with several GPUs: a single one of a larger board has its NVLinks switched off
    of_several: Mapping[str, Value] = field(default_factory=dict)
    counts: tuple[Positive, ...] = ()  # the numbers of GPUs that hosts have; empty for any number


@dataclass(frozen=True)
class Sku:
    """One GPU model with its floors."""

    names: Texts  # the names that the driver gives it; a final ``*`` matches anything
    pcie: Pcie | None  # None for a device without PCIe
    floors: tuple[Floor, ...]
    memory: Positive | None = None  # nominal bytes; None for any. A part of a GPU (MIG) has less, and no floors.
    absent: Mapping[str, str] = field(default_factory=dict)  # quantity -> why the model has no floor for it
    nominal: Nominal | None = None  # facts besides the PCIe link; None for none

    def facts(self, gpus: int) -> dict[str, Value]:
        facts: dict[str, Value] = {}
        if self.pcie is not None:
            facts |= {"pcie_generation_max": self.pcie.generation, "pcie_width_max": self.pcie.width}
        if self.nominal is not None:
            facts |= {**self.nominal.facts, **(self.nominal.of_several if gpus > 1 else {})}
        return facts

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of GPUs that hosts have; empty for any number."""
        return self.nominal.counts if self.nominal is not None else ()

    def why_not(self, gpu: Gpu) -> str | None:
        """Return None if `gpu` is of this model, "" if its name differs, or else the difference in memory."""
        if not any(fnmatchcase(gpu.name, name) for name in self.names):
            return ""
        if self.memory is not None and not 0.9 * self.memory <= gpu.memory <= 1.1 * self.memory:
            return f"it has {gpu.memory / 1e9:.1f} GB of memory, the floors are for {self.memory / 1e9:.0f} GB"
        return None


@dataclass(frozen=True)
class Floors:
    """A table of floors."""

    file: str
    skus: tuple[Sku, ...]
    sources: Mapping[str, str] = field(default_factory=dict)  # name -> title of the document that a figure comes from
    reasons: Mapping[str, str] = field(default_factory=dict)  # name -> why a fraction has its value
    # quantity -> names under which checks measure it, if they differ, without the part after a comma
    measured_by: Mapping[str, Texts] = field(default_factory=dict)

    def sku(self, gpu: Gpu) -> Sku | None:
        return next((sku for sku in self.skus if sku.why_not(gpu) is None), None)

    def about(self, gpu: Gpu) -> str | None:
        """Return why the table has no floors for this GPU; None if it has."""
        reasons = [sku.why_not(gpu) for sku in self.skus]
        if None in reasons:
            return None
        return next((reason for reason in reasons if reason), f"{Path(self.file).name} does not have this model")

    def compare(self, measurement: Measurement, gpus: Mapping[int, Gpu]) -> list[Comparison]:
        """Compare a measurement with the lowest floor of its GPUs, if all of them have one."""
        subject = measurement.subject
        members = [] if subject.kind == "host" else [gpus[member] for member in subject.members]
        if not members or len({gpu.host for gpu in members}) > 1:
            return []  # data sheets of GPUs do not cover the network
        candidates = [self._floor(measurement, gpu) for gpu in members]
        floors = [floor for floor in candidates if floor is not None]
        if len(floors) < len(candidates):
            return []
        ats = [(floor.at(measurement.size), floor) for floor in floors]
        pick = max if measurement.unit == "s" else min
        at, floor = pick(ats, key=lambda pair: pair[0])
        missing = shortfall(measurement.value, at, measurement.unit)
        reason = f"{floor.fraction:.0%} of the data sheet ({self.sources.get(floor.source, floor.source)})"
        numbers = {"data_sheet": floor.data_sheet, "fraction": floor.fraction, "source": floor.source}
        outcome: Any = "failed" if missing > 0 else "passed"
        return [Comparison("floor", outcome, at, missing, 0.0, reason, numbers)]

    def _floor(self, measurement: Measurement, gpu: Gpu) -> Floor | None:
        sku = self.sku(gpu)
        name, comma, rest = measurement.quantity.partition(",")
        name = next((quantity for quantity, aliases in self.measured_by.items() if name in aliases), name)
        signature = (measurement.subject.kind, name + comma + rest, measurement.unit)
        for floor in sku.floors if sku is not None else ():
            if signature == (floor.subject, floor.quantity, floor.unit) and measurement.size >= floor.least_size:
                return floor
        return None


FLOORS_FORM = DocumentType("mgpu-check floors", 1, Floors, f"{TABLE} in the package is such a file")


@functools.cache
def packaged_floors() -> Floors:
    text = files("mgpu_check.acceptance").joinpath(TABLE).read_text(encoding="utf-8")
    return FLOORS_FORM.decoded(json.loads(text), TABLE)
