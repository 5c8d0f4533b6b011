"""One value beside one reference: the peers of a node, a baseline, a floor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from mgpu_check.acceptance.account import Gpu
from mgpu_check.acceptance.robust import DEVIATIONS, LEAST_PEERS, NORMAL, deviation, shortfall
from mgpu_check.devices.observations import Measurement, Outcome

__all__ = [
    "LEAST_REPEATS",
    "LEAST_SHORTFALL",
    "UNUSABLE",
    "Against",
    "Comparison",
    "amount",
    "beside_peers",
    "least_shortfall",
    "models",
    "same_memory",
    "useless",
    "wrong",
]

LEAST_REPEATS = 3
"""The least number from which a median leaves out a repeat that something else has slowed down."""

LEAST_SHORTFALL: Mapping[str, float] = {"FLOP/s": 0.20, "B/s": 0.15, "host B/s": 0.25, "s": 0.50}
"""The least share of the speed that must be missing, by unit, before a value can stand out among healthy ones.

FLOP/s: GPUs of one SKU differ by 8 % on average, at most 22 % between the fastest and the slowest of a cluster, for chips differ
in how fast they are within their power limit (Sinha et al., "Not All GPUs Are Created Equal", SC 2022; its outliers were slower
by a third). B/s: three times what burn-in tools call noise (SuperBench accuses from 5 % on). Host links: memory of the host lies
nearer to some GPUs than to others; a link at half its width or one generation below loses half. s: latencies contain the driver.
"""

UNUSABLE = 0.50
"""A limit above this share says nothing: half the speed could be missing."""

Against = Literal["peers", "itself", "baseline", "floor"]


@dataclass(frozen=True)
class Comparison:
    """One value beside one reference.

    Attributes:
        reference: what it is compared with, in the unit of the measurement; None where there is nothing.
        missing: the share of the reference's speed that is missing, negative if the value is faster.
        limit: the share that may be missing.
        why: why it is unknown, or what the reference is, in one line.
    """

    against: Against
    outcome: Outcome
    reference: float | None = None
    missing: float | None = None
    limit: float | None = None
    why: str = ""
    numbers: Mapping[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as values that JSON has."""
        mine = {"against": self.against, "outcome": self.outcome, "reference": self.reference, "missing": self.missing}
        return {**mine, "limit": self.limit, "why": self.why, **(self.numbers or {})}


def same_memory(one: int, other: int) -> bool:
    """Return whether GPUs of one name and with so many bytes are of one model: firmware keeps a little for itself."""
    return abs(one - other) <= 0.01 * max(one, other)


def models(gpus: Iterable[Gpu]) -> dict[int, tuple[str, int]]:
    """Return number of GPU -> name and memory of its model, the same for all GPUs of the model."""
    found: dict[int, tuple[str, int]] = {}
    for gpu in gpus:
        known = (m for m in found.values() if m[0] == gpu.name and same_memory(m[1], gpu.memory))
        found[gpu.number] = next(known, (gpu.name, gpu.memory))
    return found


def least_shortfall(measurement: Measurement) -> float:
    """Return the entry of `LEAST_SHORTFALL` for it."""
    host = measurement.unit == "B/s" and measurement.subject.kind in ("upload", "download")
    return LEAST_SHORTFALL["host B/s" if host else measurement.unit]


def amount(value: float, unit: str) -> str:
    """Return a value with its unit as people read it: ``25.3 GB/s``, ``312 TFLOP/s``, ``4.2 us``."""
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
        noise: the standard deviation of `value` by its own repeats.
    """
    if len(others) < LEAST_PEERS:
        alone = (
            "there is no other of its kind"
            if not others
            else "there is one other, and of two nobody knows which is right"
        )
        return Comparison("peers", "unknown", why=alone)
    middle = median(others)
    scatter = max(deviation(others), noise)
    limit = max(least, DEVIATIONS * scatter / middle)
    numbers = {"peers": len(others), "median": middle, "mad": deviation(others) / NORMAL, "noise": noise}
    missing = shortfall(value, middle, unit)
    if missing <= limit and limit > UNUSABLE and limit > least:
        why = f"values scatter by {scatter / middle:.0%} of their median: half the speed could be missing"
        return Comparison("peers", "unknown", middle, missing, limit, why, numbers)
    why = f"median of {len(others)} others"
    return Comparison("peers", "failed" if missing > limit else "passed", middle, missing, limit, why, numbers)


def wrong(measurement: Measurement) -> str:
    """Return why a measurement is none: its value is no speed or time; empty where it is one."""
    if not math.isfinite(measurement.value) or measurement.value <= 0:
        return f"{measurement.value} {measurement.unit} is no speed or time: the measurement itself went wrong"
    return ""


def useless(measurement: Measurement) -> str:
    """Return why nothing can be compared with a measurement; empty where it can."""
    if measurement.repeats < LEAST_REPEATS:
        return wrong(measurement) or f"{measurement.repeats} repeats are too few, at least {LEAST_REPEATS} are needed"
    return wrong(measurement)
