"""Results of telemetry as plain values: snapshots, samples and troubles."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mgpu_check.devices.observations import Number
from mgpu_check.devices.telemetry.fields import Value

Values = Mapping[str, Value | None]
"""By field name; None where the GPU or its driver does not support the field."""

TroubleKind = Literal["hang", "blocked", "error", "lost", "xid", "sampler"]
"""Hang: a query does not return. Blocked: a query does not return, but an earlier one hung and may hold the driver.
Error: a query failed. Lost: the GPU is gone. Xid: the driver reported an error of the GPU. Sampler: the process that
queries the driver has failed or ended.
"""


@dataclass(frozen=True)
class Snapshot:
    """The telemetry of all GPUs at one time. Maps are keyed by a GPU's number in the run.

    Attributes:
        at: seconds since the start of the run.
        facts: identities, facts, pairs, limits and states; empty for each GPU in a snapshot that is not full.
        counters: counters.
        gauges: gauges.
        unknown: why a field is None, by name: "not supported", "not permitted", an error; for "xid", why no events are
            reported.
        missing: GPUs without an answer, and the reason.
        absent: why there is no telemetry at all; "" if there is telemetry.
        identity: UUID, serial number and PCI bus id as first read, also of GPUs that do not answer any more.
    """

    at: float = 0.0
    facts: Mapping[int, Values] = field(default_factory=dict)
    counters: Mapping[int, Mapping[str, int | None]] = field(default_factory=dict)
    gauges: Mapping[int, Values] = field(default_factory=dict)
    unknown: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    missing: Mapping[int, str] = field(default_factory=dict)
    absent: str = ""
    identity: Mapping[int, Values] = field(default_factory=dict)

    def by_model(self) -> list[list[int]]:
        """Return the GPUs with facts, those of each model together, in ascending order."""
        models: dict[Value | None, list[int]] = {}
        for gpu, facts in sorted(self.facts.items()):
            models.setdefault(facts.get("name"), []).append(gpu)
        return list(models.values())

    def only(self, gpus: Collection[int]) -> Snapshot:
        """Return the same snapshot, restricted to these GPUs."""

        def of(values: Mapping[int, Any]) -> dict[int, Any]:
            return {gpu: value for gpu, value in values.items() if gpu in gpus}

        return Snapshot(
            self.at,
            of(self.facts),
            of(self.counters),
            of(self.gauges),
            of(self.unknown),
            of(self.missing),
            self.absent,
            of(self.identity),
        )


@dataclass(frozen=True)
class TelemetrySample:
    """Gauges and counters of one GPU at one time.

    Attributes:
        at: seconds since the start of the run.
    """

    at: Number
    gpu: int
    values: Values


@dataclass(frozen=True)
class Trouble:
    """A failure of a GPU, or of a query to it.

    Attributes:
        kind: see `TroubleKind`.
        gpu: its number in the run; None if it is unknown.
        field: the queried field; "" for an Xid.
        text: what happened, in one line that does not repeat GPU and field.
        at: seconds since the start of the run.
        code: number of an Xid, or of an error of the driver's library.
    """

    kind: TroubleKind
    gpu: int | None
    field: str
    text: str
    at: float
    code: int | None = None
