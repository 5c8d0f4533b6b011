"""The table of floors: the least speed of each known GPU model, with the source of every figure.

Format of the file, JSON:

- ``format``, ``version``;
- ``sources``: name -> title of the document that a figure comes from;
- ``reasons``: name -> why a fraction has its value;
- ``measured_by``: quantity -> names under which checks measure it, if they differ, without the part after a comma;
- ``skus``: a list of models.

Each model has:

- ``names``: the names that the driver gives it; a final ``*`` matches anything;
- ``memory``: nominal bytes; null for any. A part of a GPU (MIG) has less, and no floors;
- ``pcie``: ``generation``, ``width`` and ``source``; null for a device without PCIe;
- ``absent``: quantity -> why the model has no floor for it;
- ``floors``: a list of floors.

Each floor has:

- ``subject`` (kind), ``quantity`` and ``unit``;
- ``data_sheet``: the figure for dense data, in one direction, and its ``source``;
- ``fraction`` of the figure, below which the value is too slow, and its ``reason``;
- ``least_size``: smaller measurements do not count;
- ``overhead``: seconds that one operation takes in addition to its work.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from mgpu_check.acceptance.account import Gpu
from mgpu_check.acceptance.comparison import Comparison
from mgpu_check.acceptance.documents import Reader, read_document
from mgpu_check.acceptance.robust import shortfall
from mgpu_check.devices.observations import Measurement, SubjectKind

__all__ = ["FORMAT", "TABLE", "UNITS", "Floor", "Floors", "Sku", "floors_from", "packaged_floors", "read_floors"]

FORMAT = "mgpu-check floors"
TABLE = "floors_of_skus.json"
UNITS = ("B/s", "FLOP/s", "s")
_VERSION = 1


@dataclass(frozen=True)
class Floor:
    """The least speed of one quantity.

    Attributes:
        data_sheet: figure of the vendor, in `unit`, for dense data and in one direction.
        fraction: share of `data_sheet` that must be reached.
        least_size: measurements of a smaller size do not count.
        overhead: seconds that an operation takes in addition to its work.
    """

    subject: SubjectKind
    quantity: str
    unit: str
    data_sheet: float
    fraction: float
    source: str
    reason: str
    least_size: int = 0
    overhead: float = 0.0

    def at(self, size: int) -> float:
        """Return the floor for a measurement of `size` bytes, or elements along a side."""
        amount = 2.0 * size**3 if self.unit == "FLOP/s" else float(size)
        if self.unit == "s":
            return self.data_sheet / self.fraction
        return self.fraction * amount / (self.overhead + amount / self.data_sheet)


@dataclass(frozen=True)
class Sku:
    """One GPU model with its floors."""

    names: tuple[str, ...]
    memory: int | None
    pcie: tuple[int, int] | None
    pcie_source: str
    floors: tuple[Floor, ...]
    absent: Mapping[str, str] = field(default_factory=dict)

    def why_not(self, gpu: Gpu) -> str | None:
        """Return None if `gpu` is of this model, "" if its name differs, or else the difference in memory."""
        if not any(fnmatchcase(gpu.name, name) for name in self.names):
            return ""
        if self.memory is not None and not 0.9 * self.memory <= gpu.memory <= 1.1 * self.memory:
            return f"it has {gpu.memory / 1e9:.1f} GB of memory, the floors are for {self.memory / 1e9:.0f} GB"
        return None


@dataclass(frozen=True)
class Floors:
    """A table of floors.

    Attributes:
        file: name of the file.
        sources, reasons: name -> text.
        measured_by: quantity -> names under which checks measure it.
    """

    file: str
    skus: tuple[Sku, ...]
    sources: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    measured_by: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def sku(self, gpu: Gpu) -> Sku | None:
        """Return the model of a GPU, or None."""
        return next((sku for sku in self.skus if sku.why_not(gpu) is None), None)

    def about(self, gpu: Gpu) -> str:
        """Return why the table has no floors for this GPU, or "" if it has."""
        reasons = [sku.why_not(gpu) for sku in self.skus]
        if None in reasons:
            return ""
        return next((reason for reason in reasons if reason), f"{Path(self.file).name} does not have this model")

    def pcie(self, gpu: Gpu) -> tuple[int, int] | None:
        """Return the PCIe generation and width that this GPU should have under load; None if the table does not say."""
        sku = self.sku(gpu)
        return sku.pcie if sku is not None else None

    def compare(self, measurement: Measurement, gpus: Mapping[int, Gpu]) -> list[Comparison]:
        """Compare a measurement with the lowest floor of its GPUs. Return an empty list if one of the GPUs has no floor.

        Args:
            gpus: all GPUs of the run, by number.
        """
        subject = measurement.subject
        members = [] if subject.kind == "host" else [gpus[member] for member in subject.members]
        if not members or len({gpu.host for gpu in members}) > 1:
            return []  # data sheets of GPUs do not cover the network
        found = [self._floor(measurement, gpu) for gpu in members]
        known = [floor for floor in found if floor is not None]
        if len(known) < len(found):
            return []
        ats = [(floor.at(measurement.size), floor) for floor in known]
        pick = max if measurement.unit == "s" else min
        at, floor = pick(ats, key=lambda pair: pair[0])
        missing = shortfall(measurement.value, at, measurement.unit)
        why = f"{floor.fraction:.0%} of the data sheet ({self.sources.get(floor.source, floor.source)})"
        numbers = {"data_sheet": floor.data_sheet, "fraction": floor.fraction, "source": floor.source}
        outcome: Any = "failed" if missing > 0 else "passed"
        return [Comparison("floor", outcome, at, missing, 0.0, why, numbers)]

    def _floor(self, measurement: Measurement, gpu: Gpu) -> Floor | None:
        sku = self.sku(gpu)
        name, comma, rest = measurement.quantity.partition(",")
        name = next((quantity for quantity, names in self.measured_by.items() if name in names), name)
        kind = (measurement.subject.kind, name + comma + rest, measurement.unit)
        for floor in sku.floors if sku is not None else ():
            if kind == (floor.subject, floor.quantity, floor.unit) and measurement.size >= floor.least_size:
                return floor
        return None


@functools.cache
def packaged_floors() -> Floors:
    """Return the table that comes with this package."""
    text = files("mgpu_check.acceptance").joinpath(TABLE).read_text(encoding="utf-8")
    return floors_from(json.loads(text), TABLE)


def read_floors(path: Path) -> Floors:
    """Read a table of floors.

    Raises:
        ValueError: the file is not a valid table. The message names the file, the key, its value and the valid values.
    """
    return floors_from(read_document(path), str(path))


def floors_from(document: Any, file: str) -> Floors:
    """Make a table from a parsed JSON document. See `read_floors`."""
    whole = Reader(file, document)
    whole.head(FORMAT, _VERSION)
    skus = tuple(_sku(entry) for entry in whole.objects("skus"))
    measured_by = whole.object("measured_by") if "measured_by" in whole.value else None
    names = {quantity: measured_by.strings(quantity) for quantity in measured_by.value} if measured_by else {}
    return Floors(file, skus, whole.texts("sources"), whole.texts("reasons"), names)


def _sku(entry: Reader) -> Sku:
    link, source = _pcie(entry)
    return Sku(
        names=tuple(entry.strings("names")),
        memory=entry.integer("memory", 1) if entry.value.get("memory") is not None else None,
        pcie=link,
        pcie_source=source,
        floors=tuple(_floor(floor) for floor in entry.objects("floors")),
        absent=entry.texts("absent"),
    )


def _pcie(entry: Reader) -> tuple[tuple[int, int] | None, str]:
    if "pcie" not in entry.value:
        raise entry.wrong("pcie", "an object of generation, width and source, or null")
    if entry.value["pcie"] is None:
        return None, ""
    link = entry.object("pcie")
    return (link.integer("generation", 1), link.integer("width", 1)), link.string("source")


def _floor(entry: Reader) -> Floor:
    return Floor(
        subject=entry.choice("subject", get_args(SubjectKind)),  # type: ignore[arg-type]  # one of them
        quantity=entry.string("quantity"),
        unit=entry.choice("unit", UNITS),
        data_sheet=entry.number("data_sheet"),
        fraction=entry.number("fraction"),
        source=entry.string("source"),
        reason=entry.string("reason"),
        least_size=entry.integer("least_size", 0, default=0),
        overhead=entry.number("overhead", default=0.0),
    )
