"""The table of floors: what a GPU of a known model must reach at least, as data with sources.

Format of the file, JSON: ``format``, ``version``; ``sources``: name -> title of what a figure was read from; ``reasons``: name ->
why a fraction is what it is; ``measured_by``: quantity -> names under which checks measure it, where they differ, without what
follows a comma; ``skus``, a list of models, each with

- ``names``: as the driver names it; a final ``*`` stands for anything;
- ``memory``: nominal bytes; null for any. A part of a GPU (MIG) has less, and no floors;
- ``pcie``: ``generation``, ``width`` and ``source``; null for a device that has none;
- ``floors``: a list of ``subject`` (kind), ``quantity``, ``unit``, ``data_sheet`` (the figure for dense data, in one direction),
  ``source``, ``fraction`` (of the figure, below which it is too slow), ``reason``, ``least_size`` (below which it does not count),
  ``overhead`` (seconds that one operation takes beside its work);
- ``absent``: quantity -> why there is no floor for it.
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
        data_sheet: what the vendor promises, in `unit`, for dense data and in one direction.
        fraction: of it that must be reached.
        least_size: of the measurement, below which it does not count.
        overhead: seconds that an operation takes beside its work.
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
    """One model."""

    names: tuple[str, ...]
    memory: int | None
    pcie: tuple[int, int] | None
    pcie_source: str
    floors: tuple[Floor, ...]
    absent: Mapping[str, str] = field(default_factory=dict)

    def why_not(self, gpu: Gpu) -> str | None:
        """Return None if `gpu` is one, "" if its name is another, and what else differs."""
        if not any(fnmatchcase(gpu.name, name) for name in self.names):
            return ""
        if self.memory is not None and not 0.9 * self.memory <= gpu.memory <= 1.1 * self.memory:
            return f"it has {gpu.memory / 1e9:.1f} GB of memory, the floors are for {self.memory / 1e9:.0f} GB"
        return None


@dataclass(frozen=True)
class Floors:
    """A table of floors.

    Attributes:
        file: where it was read.
        sources, reasons: name -> text.
        measured_by: quantity -> names of what measures it.
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
        """Return why there are no floors for this GPU; empty where there are."""
        reasons = [sku.why_not(gpu) for sku in self.skus]
        if None in reasons:
            return ""
        return next((reason for reason in reasons if reason), f"{Path(self.file).name} does not have this model")

    def pcie(self, gpu: Gpu) -> tuple[int, int] | None:
        """Return generation and width that the PCIe link of this GPU should have under load; None where nobody knows."""
        sku = self.sku(gpu)
        return sku.pcie if sku is not None else None

    def compare(self, measurement: Measurement, gpus: Mapping[int, Gpu]) -> list[Comparison]:
        """Compare a measurement with the lowest floor of its GPUs; nothing where one of them has none.

        Args:
            gpus: by number, all of the run.
        """
        subject = measurement.subject
        members = [] if subject.kind == "host" else [gpus[member] for member in subject.members]
        if not members or len({gpu.host for gpu in members}) > 1:
            return []  # data sheets know nothing of the network
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
    """Read a table.

    Raises:
        ValueError: naming the file, the key, its value, and what is valid.
    """
    return floors_from(read_document(path), str(path))


def floors_from(document: Any, file: str) -> Floors:
    """Make a table of what was read as JSON. See `read_floors`."""
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
