"""``mgpu-check accept lint FILE...``: find thresholds that cannot detect a broken machine.

A floor of zero, in the wrong unit, or of the previous PCIe generation passes every broken machine without a sign. The
lint therefore checks tables of floors and baselines against plausible ranges, data sheets and their own entries.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mgpu_check.acceptance import baseline, skus
from mgpu_check.acceptance.baseline import Baseline, Recorded
from mgpu_check.acceptance.comparison import LEAST_REPEATS, UNUSABLE, amount
from mgpu_check.acceptance.documents import read_document
from mgpu_check.acceptance.performance.checks import judge
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.acceptance.skus import Floor, Floors, Nominal, Sku, packaged_floors
from mgpu_check.devices.observations import Measurement, Subject
from mgpu_check.devices.pcie import TRANSFERS, bytes_per_second
from mgpu_check.devices.telemetry.fields import names

_SCALES: Mapping[str, tuple[float, float]] = {
    "memory bandwidth": (1e11, 3e13),  # from an old laptop's GDDR to three times HBM3e
    "bandwidth": (1e9, 2e12),  # from PCIe Gen3 x1 to NVLink of two generations ahead
    "matrix product": (1e11, 1e17),  # from float64 on a GeForce to FP4 of the next generation
    "s": (1e-7, 1.0),  # from one instruction to an unusable link
}
"""Lowest and highest plausible value. The key is the unit "s", or the start or end of the name of the quantity."""

_VACUOUS = {"B/s": 0.5, "FLOP/s": 0.2, "s": 0.2}
"""Least useful floor as a share of the data sheet: a link at half its width has half the bandwidth, and a GPU at its
lowest clock computes a fifth of the products."""

_WIDTHS = (1, 2, 4, 8, 12, 16, 32)
_FALLS = 0.5  # a larger size may have half the speed of a smaller one, because caches help small sizes


@dataclass(frozen=True)
class Remark:
    """One error that the lint found in a file.

    Attributes:
        at: model and quantity.
        rule: name of the violated rule: "scale", "vacuous", "generation", ...
    """

    file: str
    at: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.at}: {self.text} [{self.rule}]"


def lint(path: Path) -> list[Remark]:
    document = read_document(path)
    name = document.get("format") if isinstance(document, dict) else None
    if name == skus.FORM.name:
        return lint_floors(skus.FORM.decoded(document, str(path)))
    if name == baseline.FORM.name:
        return lint_baseline(baseline.FORM.decoded(document, str(path)))
    raise ValueError(
        f'{path}: format is {name!r}; give a file whose format is "{skus.FORM.name}" or "{baseline.FORM.name}"'
    )


def _scale(quantity: str, unit: str) -> tuple[float, float] | None:
    if unit == "s":
        return _SCALES["s"]
    for name, scale in _SCALES.items():
        if quantity.endswith(name) or quantity.startswith(name):
            return scale
    return None


def _wrong_number(value: float, what: str) -> str:
    if not math.isfinite(value):
        return f"{what} is {value}: no comparison with it ever fails"
    if value < 0:
        return f"{what} is {value:g}, below zero"
    if value == 0:
        return f"{what} is 0: everything passes"
    return ""


def _off_scale(value: float, quantity: str, unit: str, what: str) -> str:
    scale = _scale(quantity, unit)
    if scale is None or scale[0] <= value <= scale[1]:
        return ""
    text = (
        f"{what} is {amount(value, unit)}, outside of {amount(scale[0], unit)} to {amount(scale[1], unit)} that "
        "hardware has"
    )
    units = ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T"))
    fitting = [(factor, name) for factor, name in units if scale[0] <= value * factor <= scale[1]]
    if fitting:
        usual = math.sqrt(scale[0] * scale[1])
        _, name = min(fitting, key=lambda unit: abs(math.log(value * unit[0] / usual)))
        return f"{text}; is it in {name}{unit}? Give {unit}"
    for factor in (1e3, 1e6):
        if scale[0] <= value / factor <= scale[1]:
            return f"{text}; it is {factor:g} times too large"
    return text


# --- floors ---


def lint_floors(table: Floors) -> list[Remark]:
    found: list[Remark] = []
    names = Counter((name, sku.memory) for sku in table.skus for name in sku.names)
    for (name, _), count in names.items():
        if count > 1:
            found.append(
                Remark(table.file, name, "twice", f"the model is listed {count} times; only the first entry counts")
            )
    for sku in table.skus:
        at = sku.names[0]
        found += [Remark(table.file, at, rule, text) for rule, text in _of_sku(sku, table)]
        for floor in sku.floors:
            place = f"{at}, {floor.quantity}"
            found += [Remark(table.file, place, rule, text) for rule, text in _of_floor(floor, sku, table)]
    return found


def _of_sku(sku: Sku, table: Floors) -> Iterator[tuple[str, str]]:
    known = _known(sku)
    kinds = Counter((floor.subject, floor.quantity, floor.least_size) for floor in sku.floors)
    for (kind, quantity, _), count in kinds.items():
        if count > 1:
            yield "twice", f"{quantity} of a {kind} is listed {count} times; only the first entry counts"
    if sku.pcie is not None:
        generation, width = sku.pcie.generation, sku.pcie.width
        if generation not in TRANSFERS:
            yield "generation", f"PCIe generation is {generation}; give one of {', '.join(map(str, TRANSFERS))}"
        if width not in _WIDTHS:
            yield "width", f"PCIe width is {width}; give one of {', '.join(map(str, _WIDTHS))}"
        if sku.pcie.source not in table.sources:
            yield "source", f"source {sku.pcie.source!r} of its PCIe link is not among the sources"
        if known is not None and known.pcie is not None and sku.pcie != known.pcie:
            what = f"PCIe {sku.pcie}, but the data sheet says {known.pcie}"
            yield "generation", f"{what}: a link that was trained at less passes"
    yield from _of_nominal(sku.nominal, known.nominal if known is not None else None, table)
    for quantity in sorted({floor.quantity for floor in (known.floors if known is not None else ())}):
        if quantity not in {floor.quantity for floor in sku.floors} | set(sku.absent):
            yield "missing", f"there is no floor for {quantity}; give one, or give the reason in absent"
    if not sku.floors:
        yield "missing", "the model has no floors, so none of its measurements is compared"


def _of_nominal(nominal: Nominal | None, known: Nominal | None, table: Floors) -> Iterator[tuple[str, str]]:
    facts = {**nominal.facts, **nominal.of_several} if nominal is not None else {}
    if nominal is not None and nominal.source not in table.sources:
        yield "source", f"source {nominal.source!r} of its facts is not among the sources"
    for name in sorted(facts.keys() - names("fact")):
        yield "fact", f"{name} is no fact of a GPU; give some of {', '.join(names('fact'))}"
    for name, value in {**known.facts, **known.of_several}.items() if known is not None else ():
        if name not in facts:
            yield "missing", f"{name} has no value, and the data sheet says {value}"
        elif facts[name] != value and (isinstance(value, str) or float(facts[name]) < float(value)):
            yield "data sheet", f"{name} is {facts[name]}, and the data sheet says {value}"


def _known(sku: Sku) -> Sku | None:
    return next((known for known in packaged_floors().skus if set(known.names) & set(sku.names)), None)


def _of_floor(floor: Floor, sku: Sku, table: Floors) -> Iterator[tuple[str, str]]:
    wrong = _wrong_number(floor.data_sheet, "data_sheet") or _wrong_number(floor.fraction, "fraction")
    if wrong:
        yield "number", wrong
        return
    if floor.source not in table.sources:
        yield "source", f"source {floor.source!r} is not among the sources; say where the figure was read"
    if floor.reason not in table.reasons:
        yield "reason", f"reason {floor.reason!r} is not among the reasons; say why the fraction is {floor.fraction:g}"
    if floor.fraction > 1:
        yield "fraction", f"fraction is {floor.fraction:g}: more than the data sheet promises; every GPU fails"
    if floor.overhead < 0 or not math.isfinite(floor.overhead):
        yield "number", f"overhead is {floor.overhead:g} s; give 0 or more"
        return
    off = _off_scale(floor.data_sheet, floor.quantity, floor.unit, "data_sheet")
    if off:
        yield "scale", off
        return
    least = floor.fraction * floor.data_sheet
    if floor.fraction < _VACUOUS[floor.unit]:
        share = f"{floor.fraction:.0%} of the data sheet, below {_VACUOUS[floor.unit]:.0%}"
        yield "vacuous", f"the floor is {share}: every GPU that works at all passes"
    yield from _against_known(floor, sku, least)
    yield from _against_generation(floor, sku, least)


def _against_known(floor: Floor, sku: Sku, least: float) -> Iterator[tuple[str, str]]:
    known = _known(sku)
    for other in known.floors if known is not None else ():
        if (other.subject, other.quantity, other.unit) != (floor.subject, floor.quantity, floor.unit):
            continue
        ratio = floor.data_sheet / other.data_sheet
        what = (
            f"data_sheet is {amount(floor.data_sheet, floor.unit)}, and {amount(other.data_sheet, floor.unit)} is "
            "published"
        )
        if not 0.5 <= ratio <= 2.5:
            tens = round(math.log10(ratio))
            hint = f": a digit is missing or too many, 10^{tens}" if tens and 0.7 < ratio / 10**tens < 1.4 else ""
            yield "data sheet", what + hint
        elif least < _VACUOUS[floor.unit] * other.data_sheet and floor.fraction >= _VACUOUS[floor.unit]:
            yield (
                "vacuous",
                f"the floor is {amount(least, floor.unit)}, and {amount(other.data_sheet, floor.unit)} is published",
            )


def _against_generation(floor: Floor, sku: Sku, least: float) -> Iterator[tuple[str, str]]:
    """Yield an error if a host link that was trained one generation lower, or at half its width, reaches the floor."""
    if floor.subject not in ("upload", "download") or sku.pcie is None or sku.pcie.generation not in TRANSFERS:
        return
    generation, width = sku.pcie.generation, sku.pcie.width
    rate = bytes_per_second(generation, width)
    if floor.data_sheet > 1.02 * rate:
        yield (
            "scale",
            (
                f"data_sheet is {amount(floor.data_sheet, 'B/s')}, more than the {amount(rate, 'B/s')} of PCIe "
                f"{sku.pcie} in one direction; vendors give both directions together"
            ),
        )
    # A generation is at most twice as fast as the previous one, so half the width is never faster than one generation
    # less.
    below, worse = rate / 2, f"Gen{generation} x{width / 2:g}"
    if generation > 1:
        below, worse = bytes_per_second(generation - 1, width), f"Gen{generation - 1} x{width}"
    if least <= below:
        yield (
            "generation",
            (
                f"the floor is {amount(least, 'B/s')}, and PCIe {worse} gives {amount(below, 'B/s')}: "
                "a link that was trained at less passes"
            ),
        )


# --- baselines ---


def lint_baseline(recorded: Baseline) -> list[Remark]:
    found: list[Remark] = []
    counts = Counter(entry.key for entry in recorded.entries)
    for entry in recorded.entries:
        at = entry.name + (f" (torch {entry.software['torch']})" if entry.software.get("torch") else "")
        say = [*_of_entry(entry, counts[entry.key])]
        for measurement in entry.measurements:
            say += [
                (f"{measurement.quantity} of size {measurement.size}: {text}", rule)
                for text, rule in _of_recorded(measurement)
            ]
        sound = [m for m in entry.measurements if not list(_of_recorded(m))]
        say += [(text, "sizes") for text in _falling(sound)]
        say += [(text, rule) for text, rule in _of_node(entry, sound)]
        found += [Remark(recorded.file, at, rule, text) for text, rule in say]
    if not recorded.entries:
        found.append(Remark(recorded.file, "entries", "missing", "the baseline has no entries, so nothing is compared"))
    return found


def _of_entry(entry: baseline.Entry, count: int) -> Iterator[tuple[str, str]]:
    if count > 1:
        yield f"model and software are listed {count} times; only one of the entries counts", "twice"
    missing = [name for name in baseline.SOFTWARE if not entry.software.get(name)]
    if missing:
        yield f"versions of {', '.join(missing)} are missing: a different version would count as the same", "software"
    if not entry.measurements:
        yield "the entry has no measurements, so no speed is compared", "missing"
    if not entry.facts:
        yield "the entry has no facts, so no facts are compared", "missing"


def _of_recorded(measurement: Recorded) -> Iterator[tuple[str, str]]:
    wrong = [
        _wrong_number(value, name)
        for name, value in (
            ("value", measurement.value),
            *((f"value at {place}", v) for place, v in measurement.places.items()),
        )
    ]
    if any(wrong):
        yield next(filter(None, wrong)), "number"
        return
    if not math.isfinite(measurement.spread) or measurement.spread < 0:
        yield f"spread is {measurement.spread:g}; give 0 or more", "number"
        return
    off = _off_scale(measurement.value, measurement.quantity, measurement.unit, "value")
    if off:
        yield off, "scale"
    if measurement.repeats < LEAST_REPEATS:
        yield f"{measurement.repeats} repeats are too few; record with at least {LEAST_REPEATS}", "repeats"
    if not measurement.places and measurement.spread > UNUSABLE / 8 * measurement.value:
        yield (
            f"values scatter by {measurement.spread / measurement.value:.0%}: a part at half its speed would still "
            "pass",
            "spread",
        )


def _falling(measurements: Sequence[Recorded]) -> Iterator[str]:
    """Yield quantities that fall as sizes grow: neither bandwidth nor time does so in a correct measurement."""
    by_size: defaultdict[tuple[Any, ...], list[Recorded]] = defaultdict(list)
    for m in measurements:
        by_size[(m.subject, m.quantity, m.unit, len(next(iter(m.places), "").split(">")))].append(m)
    for (_, quantity, unit, _), several in by_size.items():
        ordered = sorted(several, key=lambda m: m.size)
        for small, large in pairwise(ordered):
            if large.value < _FALLS * small.value:
                values = (
                    f"{amount(small.value, unit)} at size {small.size} to {amount(large.value, unit)} at {large.size}"
                )
                yield f"{quantity} falls from {values}: one of the two measurements is wrong"


def _of_node(entry: baseline.Entry, measurements: Sequence[Recorded]) -> Iterator[tuple[str, str]]:
    """Judge the recorded node as in an acceptance, and yield its failures."""
    indices = sorted({index for m in measurements for index in _indices(m)})
    gpus = [Gpu(index, 0, index, entry.name, str(index), entry.memory) for index in indices]
    made = [
        Measurement("lint", Subject(m.subject, place), m.quantity, m.unit, value, m.repeats, m.size)
        for m in measurements
        for place, value in ((_place(text), value) for text, value in m.places.items())
        if place is not None
    ]
    for observation in judge(made, gpus):
        if observation.outcome == "failed":
            yield (f"{observation.subject}: {observation.seen}: the recorded node is itself broken", "broken node")


def _place(text: str) -> tuple[int, ...] | None:
    """Return the GPU indices of a place on one host; None for a place on several hosts."""
    parts = text.split(">")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else None


def _indices(measurement: Recorded) -> set[int]:
    return {index for place in map(_place, measurement.places) if place is not None for index in place}
