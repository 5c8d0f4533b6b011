"""The table of floors: the least speed and the facts of each known GPU model, with the source of every figure.

The dataclasses `Floors`, `Sku`, `Pcie`, `Nominal` and `Floor` are the format of the file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any

from mgpu_check.acceptance.comparison import Comparison
from mgpu_check.acceptance.documents import Amount, Count, DocumentType, Positive, Spread, Text, Texts
from mgpu_check.acceptance.robust import shortfall
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.devices.observations import Measurement, SubjectKind, Unit
from mgpu_check.devices.telemetry.fields import Value

TABLE = "floors_of_skus.json"


@dataclass(frozen=True)
class Floor:
    """The least speed of one quantity.

    Attributes:
        data_sheet: figure of the vendor, in `unit`, for dense data and in one direction.
        fraction: share of `data_sheet` that must be reached.
        source, reason: where the figure comes from, and why the fraction has its value: names in `Floors`.
        least_size: measurements of a smaller size do not count.
        overhead: seconds that an operation takes in addition to its work.
    """

    subject: SubjectKind
    quantity: Text
    unit: Unit
    data_sheet: Amount
    fraction: Amount
    source: Text
    reason: Text
    least_size: Count = 0
    overhead: Spread = 0.0

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
    """The facts that each GPU of a model has on a host that is wired and set as the vendor intends.

    Attributes:
        facts: name of a telemetry fact -> its value, or the least value of facts that may be better.
        of_several: the same, for hosts with several GPUs: a single one of a larger board has its NVLinks switched off.
        counts: the numbers of GPUs that hosts have; empty for any number.
        source: where the facts come from: a name in `Floors`.
    """

    source: Text = field(compare=False)
    facts: Mapping[str, Value] = field(default_factory=dict)
    of_several: Mapping[str, Value] = field(default_factory=dict)
    counts: tuple[Positive, ...] = ()


@dataclass(frozen=True)
class Sku:
    """One GPU model with its floors.

    Attributes:
        names: the names that the driver gives it; a final ``*`` matches anything.
        memory: nominal bytes; None for any. A part of a GPU (MIG) has less, and no floors.
        pcie: None for a device without PCIe.
        absent: quantity -> why the model has no floor for it.
        nominal: facts besides the PCIe link; None for none.
    """

    names: Texts
    pcie: Pcie | None
    floors: tuple[Floor, ...]
    memory: Positive | None = None
    absent: Mapping[str, str] = field(default_factory=dict)
    nominal: Nominal | None = None

    def facts(self, gpus: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        if self.pcie is not None:
            found |= {"pcie_generation_max": self.pcie.generation, "pcie_width_max": self.pcie.width}
        if self.nominal is not None:
            found |= {**self.nominal.facts, **(self.nominal.of_several if gpus > 1 else {})}
        return found

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
    """A table of floors.

    Attributes:
        sources: name -> title of the document that a figure comes from.
        reasons: name -> why a fraction has its value.
        measured_by: quantity -> names under which checks measure it, if they differ, without the part after a comma.
    """

    file: str
    skus: tuple[Sku, ...]
    sources: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    measured_by: Mapping[str, Texts] = field(default_factory=dict)

    def sku(self, gpu: Gpu) -> Sku | None:
        return next((sku for sku in self.skus if sku.why_not(gpu) is None), None)

    def about(self, gpu: Gpu) -> str:
        """Return why the table has no floors for this GPU, or "" if it has."""
        reasons = [sku.why_not(gpu) for sku in self.skus]
        if None in reasons:
            return ""
        return next((reason for reason in reasons if reason), f"{Path(self.file).name} does not have this model")

    def compare(self, measurement: Measurement, gpus: Mapping[int, Gpu]) -> list[Comparison]:
        """Compare a measurement with the lowest floor of its GPUs, if all of them have one."""
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


FORM = DocumentType("mgpu-check floors", 1, Floors, f"{TABLE} in the package is such a file")


@functools.cache
def packaged_floors() -> Floors:
    text = files("mgpu_check.acceptance").joinpath(TABLE).read_text(encoding="utf-8")
    return FORM.decoded(json.loads(text), TABLE)
