"""Compare one measured value with one reference: peers on the node, a baseline, or a floor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from mgpu_check.acceptance.robust import DEVIATIONS, LEAST_PEERS, NORMAL, deviation, shortfall
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.devices.observations import MeasuredKind, Measurement, Outcome

LEAST_REPEATS = 3
"""With at least 3 repeats, the median ignores one repeat that was slowed down by something else."""

LEAST_SHORTFALL: Mapping[str, float] = {
    "FLOP/s": 0.20, "B/s": 0.15, "host B/s": 0.25, "pageable B/s": 0.40, "s": 0.40
}  # fmt: skip
"""The least share of the speed, by unit, that a value must miss before it can fail.

FLOP/s: GPUs of one SKU differ by 8 % on average. The slowest of a cluster is at most 22 % behind the fastest, because
chips differ in their speed within the power limit. Outliers were slower by a third (Sinha et al., "Not All GPUs Are
Created Equal", SC 2022). B/s: three times the noise of burn-in tools (SuperBench accuses from 5 % on). Host links: host
memory is nearer to some GPUs than to others; a link at half its width or one generation below loses half. Pageable
memory is copied by the host's processor. s: latencies contain the driver; a part at half its speed fails.
"""

UNUSABLE = 0.50
"""A limit above this share proves nothing: a part at half its speed would still pass."""

Against = Literal["peers", "itself", "baseline", "floor"]


@dataclass(frozen=True)
class Comparison:
    """The comparison of one value with one reference.

    Attributes:
        reference: the reference in the unit of the measurement; None without a reference.
        missing: the share of the reference's speed that is missing, negative if the value is faster.
        limit: the share that may be missing.
        why: why the outcome is unknown, or else the origin of the reference, in one line.
        numbers: further figures for the JSON report.
    """

    against: Against
    outcome: Outcome
    reference: float | None = None
    missing: float | None = None
    limit: float | None = None
    why: str = ""
    numbers: Mapping[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        mine = {"against": self.against, "outcome": self.outcome, "reference": self.reference, "missing": self.missing}
        return {**mine, "limit": self.limit, "why": self.why, **(self.numbers or {})}


def same_memory(one: int, other: int) -> bool:
    """Return whether two GPUs of one name are one model, by memory in bytes: firmware reserves up to 1 % of it."""
    return abs(one - other) <= 0.01 * max(one, other)


def models(gpus: Iterable[Gpu]) -> dict[int, tuple[str, int]]:
    """Return the model of each GPU by number, as name and memory; all GPUs of one model get the same value."""
    found: dict[int, tuple[str, int]] = {}
    for gpu in gpus:
        known = (m for m in found.values() if m[0] == gpu.name and same_memory(m[1], gpu.memory))
        found[gpu.number] = next(known, (gpu.name, gpu.memory))
    return found


def least_shortfall(kind: MeasuredKind) -> float:
    if kind.unit == "B/s" and kind.subject in ("upload", "download"):
        return LEAST_SHORTFALL["pageable B/s" if kind.quantity.startswith("pageable") else "host B/s"]
    return LEAST_SHORTFALL[kind.unit]


def amount(value: float, unit: str) -> str:
    """Format a value with its unit: ``25.3 GB/s``, ``312 TFLOP/s``, ``4.2 us``."""
    if unit == "s":
        steps = [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")]
    else:
        steps = [(1e12, "T" + unit), (1e9, "G" + unit), (1e6, "M" + unit), (1e3, "k" + unit), (1.0, unit)]
    scale, name = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    return f"{value / scale:.3g} {name}"


def beside_peers(value: float, others: Sequence[float], unit: str, least: float, noise: float = 0.0) -> Comparison:
    """Compare a value with those of its peers.

    Args:
        least: the least share of the speed that must be missing.
        noise: the standard deviation of `value`, estimated from its own repeats.
    """
    if len(others) < LEAST_PEERS:
        alone = (
            "there is no other of its kind"
            if not others
            else "there is only one other, and two values do not show which is right"
        )
        return Comparison("peers", "unknown", why=alone)
    middle = median(others)
    scatter = max(deviation(others), noise)
    limit = max(least, DEVIATIONS * scatter / middle)
    numbers = {"peers": len(others), "median": middle, "mad": deviation(others) / NORMAL, "noise": noise}
    missing = shortfall(value, middle, unit)
    if missing <= limit and limit > UNUSABLE and limit > least:
        why = f"values scatter by {scatter / middle:.0%} of their median: a part at half its speed would still pass"
        return Comparison("peers", "unknown", middle, missing, limit, why, numbers)
    why = f"median of {len(others)} others"
    return Comparison("peers", "failed" if missing > limit else "passed", middle, missing, limit, why, numbers)


def wrong(measurement: Measurement) -> str:
    """Return why the measurement is invalid, or "" if it is valid."""
    if not math.isfinite(measurement.value) or measurement.value <= 0:
        return f"{measurement.value} {measurement.unit} is not a valid speed or time: the measurement itself went wrong"
    return ""


def useless(measurement: Measurement) -> str:
    """Return why a measurement cannot be compared with a reference, or "" if it can."""
    if measurement.repeats < LEAST_REPEATS:
        return wrong(measurement) or f"{measurement.repeats} repeats are too few, at least {LEAST_REPEATS} are needed"
    return wrong(measurement)
