"""Find floors in the table of GPU models that cannot detect a broken GPU or link.

A floor in the wrong unit, far below the data sheet, or of the previous PCIe generation passes every broken machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from mgpu_check.acceptance.comparison import amount
from mgpu_check.acceptance.health.checks import TRANSFERS
from mgpu_check.acceptance.references import Floor, Floors, Sku
from mgpu_check.devices.telemetry.fields import names

_SCALES: Mapping[str, tuple[float, float]] = {
    "memory bandwidth": (1e11, 3e13),  # from an old laptop's GDDR to three times HBM3e
    "bandwidth": (1e9, 2e12),  # from PCIe Gen3 x1 to NVLink of two generations ahead
    "matrix product": (1e11, 1e17),  # from float64 on a GeForce to FP4 of the next generation
    "": (1e-7, 1.0),  # seconds, from one instruction to an unusable link
}
"""Lowest and highest plausible figure, by the start or the end of the name of the quantity."""

_VACUOUS = {"B/s": 0.5, "FLOP/s": 0.2, "s": 0.2}
"""Least useful floor as a share of the data sheet: a link at half its width has half the bandwidth, and a GPU at its
lowest clock computes a fifth of the products."""

_WIDTHS = (1, 2, 4, 8, 12, 16, 32)
_DATA: Mapping[int, float] = {1: 8 / 10, 2: 8 / 10, 3: 128 / 130, 4: 128 / 130, 5: 128 / 130, 6: 242 / 256}
"""Share of the bits on a lane that carry data, by PCIe generation; the others encode or correct."""


def bytes_per_second(generation: int, width: int) -> float:
    """Return the bytes of data per second that a PCIe link carries in one direction, before packet overhead."""
    return TRANSFERS[generation] * _DATA[generation] / 8 * width


def lint_floors(table: Floors) -> list[str]:
    """Return a line for each error: the model, the quantity, and what is wrong."""
    listed = Counter((name, sku.memory) for sku in table.skus for name in sku.names)
    errors = [f"{name}: the model is listed {count} times" for (name, _), count in listed.items() if count > 1]
    for sku in table.skus:
        errors += [f"{sku.names[0]}: {text}" for text in _of_sku(sku, table)]
        for floor in sku.floors:
            errors += [f"{sku.names[0]}, {floor.quantity}: {text}" for text in _of_floor(floor, sku, table)]
    return errors


def _of_sku(sku: Sku, table: Floors) -> Iterator[str]:
    kinds = Counter((floor.subject, floor.quantity, floor.least_size) for floor in sku.floors)
    for (kind, quantity, _), count in kinds.items():
        if count > 1:
            yield f"{quantity} of a {kind} is listed {count} times"
    if not sku.floors:
        yield "the model has no floors"
    if sku.pcie is not None and (sku.pcie.generation not in TRANSFERS or sku.pcie.width not in _WIDTHS):
        yield f"there is no PCIe {sku.pcie}"
    for part in (sku.pcie, sku.nominal):
        if part is not None and part.source not in table.sources:
            yield f"source {part.source!r} is not among the sources"
    facts = {**sku.nominal.facts, **sku.nominal.of_several} if sku.nominal is not None else {}
    for name in sorted(facts.keys() - names("fact")):
        yield f"{name} is no fact of a GPU"


def _of_floor(floor: Floor, sku: Sku, table: Floors) -> Iterator[str]:
    if floor.source not in table.sources:
        yield f"source {floor.source!r} is not among the sources"
    if floor.reason not in table.reasons:
        yield f"reason {floor.reason!r} is not among the reasons"
    if floor.fraction > 1:
        yield f"fraction is {floor.fraction:g}: every GPU fails"
    elif floor.fraction < _VACUOUS[floor.unit]:
        yield f"fraction is {floor.fraction:g}: every GPU that works at all passes"
    low, high = next(
        scale for name, scale in _SCALES.items() if floor.quantity.endswith(name) or floor.quantity.startswith(name)
    )
    if not low <= floor.data_sheet <= high:
        yield f"data_sheet is {amount(floor.data_sheet, floor.unit)}, which no hardware has"
    if floor.subject in ("upload", "download") and sku.pcie is not None and sku.pcie.generation in TRANSFERS:
        yield from _against_generation(floor, sku.pcie.generation, sku.pcie.width)


def _against_generation(floor: Floor, generation: int, width: int) -> Iterator[str]:
    """Yield an error if a host link that was trained one generation lower, or at half its width, reaches the floor."""
    rate = bytes_per_second(generation, width)
    if floor.data_sheet > 1.02 * rate:
        yield f"data_sheet is more than {amount(rate, 'B/s')}; vendors give both directions together"
    # A generation is at most twice as fast as the previous one, so half the width is never faster than that.
    below = bytes_per_second(generation - 1, width) if generation > 1 else rate / 2
    if floor.fraction * floor.data_sheet <= below:
        yield f"a link that was trained at less, with {amount(below, 'B/s')}, passes"
    if floor.fraction * floor.data_sheet >= 0.75 * rate:
        yield f"a healthy link, with {amount(rate, 'B/s')} at most, fails"
