"""Baselines: facts and speeds of a GPU model, recorded on a healthy node and compared with other nodes.

The dataclasses `Baseline`, `Entry` and `Recorded` are the format of the file.

Speed depends on driver and libraries. A measurement is compared only with an entry of the same software; without such
an entry it is unknown. Facts are compared with any entry of the model, because a different driver is itself a fact that
differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgpu_check.acceptance.comparison import UNUSABLE, Comparison, least_shortfall, models, same_memory
from mgpu_check.acceptance.documents import Amount, Count, DocumentType, Positive, Spread, Text, read_document
from mgpu_check.acceptance.robust import DEVIATIONS, NORMAL, shortfall
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.devices.observations import Measurement, SubjectKind, Unit
from mgpu_check.devices.telemetry.fields import Value

SOFTWARE = ("driver", "cuda", "nccl", "torch")
"""Versions that affect speed: kernels come from torch and CUDA, collectives from NCCL, clocks and copies from the
driver."""


@dataclass(frozen=True)
class Recorded:
    """One quantity of one kind of subject.

    Attributes:
        value: median over all subjects.
        spread: MAD over all subjects.
        subjects: how many were measured.
        repeats: the least number of repeats over all subjects.
        places: indices of GPUs on their host, such as ``"0>1"`` -> value.
    """

    subject: SubjectKind
    quantity: Text
    unit: Unit
    size: Count
    value: Amount
    spread: Spread
    subjects: Positive
    repeats: Positive
    places: Mapping[str, Amount]


@dataclass(frozen=True)
class Entry:
    """One model with one version of software.

    Attributes:
        memory: in bytes.
        software: version of each of `SOFTWARE`.
        recorded: time, ISO 8601.
        gpus: number of GPUs on one host; 0 if not all of them were in the run.
        facts: name -> value that all GPUs, or all pairs of GPUs, of this model had.
    """

    name: Text
    memory: Count
    recorded: Text
    gpus: Count
    facts: Mapping[str, Value]
    measurements: tuple[Recorded, ...]
    software: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.name, self.memory, *(self.software.get(name, "") for name in SOFTWARE))


@dataclass(frozen=True)
class Baseline:
    file: str
    entries: tuple[Entry, ...]

    def of(self, gpu: Gpu) -> list[Entry]:
        found = [entry for entry in self.entries if entry.name == gpu.name and same_memory(entry.memory, gpu.memory)]
        return sorted(found, key=lambda entry: entry.recorded, reverse=True)

    def entry(self, gpu: Gpu, software: Mapping[str, str]) -> tuple[Entry | None, str]:
        """Return the entry of the same model and software and "", or None and why the file has no such entry."""
        entries = self.of(gpu)
        if not entries:
            names = sorted({f"{entry.name} ({entry.memory} B)" for entry in self.entries})
            return None, f"{self.file} has no {gpu.name} ({gpu.memory} B), only {', '.join(names) or 'nothing'}"
        differences = [_differences(entry.software, software) for entry in entries]
        for entry, difference in zip(entries, differences, strict=True):
            if not difference:
                return entry, ""
        return None, f"{self.file} was recorded with other software: " + min(
            differences, key=lambda text: text.count(",")
        )

    def expected(self, gpus: Sequence[Gpu], software: Mapping[str, str] | None = None) -> tuple[dict[str, Value], str]:
        """Return the facts that the GPUs of one host should have and "", or no facts and the reason.

        The facts come from the entry with the same software, or else from the latest one: a driver that differs is
        itself a fact to compare.
        """
        kinds = set(models(gpus).values())
        if len(kinds) != 1:
            return {}, f"the host has GPUs of {len(kinds)} models, and facts are recorded of one"
        gpu = gpus[0]
        same, why = self.entry(gpu, software or {})
        entries = self.of(gpu)
        return (dict((same or entries[0]).facts), "") if entries else ({}, why)

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
        entry, why = self.entry(members[0], software.get(members[0].host, {}))
        if entry is None:
            return Comparison("baseline", "unknown", why=why)
        key = (subject.kind, measurement.quantity, measurement.unit, measurement.size)
        place = place_of(measurement, gpus)
        same = [r for r in entry.measurements if (r.subject, r.quantity, r.unit, r.size) == key]
        recorded = next((r for r in same if place in r.places), next(iter(same), None))
        if recorded is None:
            return Comparison(
                "baseline", "unknown", why=f"{self.file} has no {measurement.quantity} of size {measurement.size}"
            )
        least = least_shortfall(measurement.kind)
        scatter = DEVIATIONS * NORMAL * recorded.spread / recorded.value
        at_place = recorded.places.get(place)
        if at_place is None and (scatter > UNUSABLE or subject.kind == "group"):
            return Comparison(
                "baseline", "unknown", why=f"{self.file} has no {subject.kind} at {place}, and its others differ"
            )
        reference = recorded.value if at_place is None else at_place
        # A value at the same place has no scatter between places; the least share covers the noise of a run.
        limit = least if at_place is not None else max(least, scatter)
        missing = shortfall(measurement.value, reference, measurement.unit)
        why = f"recorded at {entry.recorded}" + ("" if at_place is None else f" at {place}")
        numbers = {
            "recorded": recorded.value,
            "spread": recorded.spread,
            "place": place if at_place is not None else None,
        }
        outcome: Any = "failed" if missing > limit else "passed"
        return Comparison("baseline", outcome, reference, missing, limit, why, numbers)


FORM = DocumentType("mgpu-check baseline", 1, Baseline, "`mgpu-check accept --record-baseline=FILE` writes such a file")


def _differences(recorded: Mapping[str, str], now: Mapping[str, str]) -> str:
    return ", ".join(
        f"{name} {recorded.get(name) or 'unknown'} there, {now.get(name) or 'unknown'} here"
        for name in SOFTWARE
        if recorded.get(name, "") != now.get(name, "")
    )


def place_of(measurement: Measurement, gpus: Mapping[int, Gpu]) -> str:
    """Return the place of a subject by GPU indices: ``"0>1"`` on one host, ``"0.0>1.0"`` from one host to the next.

    The numbers of the hosts do not count, so that the same place on another host has the same name.
    """
    if measurement.subject.kind == "host":
        return "host"
    members = [gpus[member] for member in measurement.subject.members]
    hosts = sorted({gpu.host for gpu in members})
    many = len(hosts) > 1
    return ">".join(f"{hosts.index(gpu.host)}.{gpu.index}" if many else str(gpu.index) for gpu in members)


def read_baseline(path: Path) -> Baseline:
    """Read a baseline file, or raise ValueError that names the key, its value and the valid values."""
    return FORM.decoded(read_document(path), str(path))
