"""What telemetry gives: snapshots, samples and troubles, as plain values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mgpu_check.devices.telemetry.fields import Value

__all__ = ["Snapshot", "TelemetrySample", "Trouble", "TroubleKind", "Values"]

Values = Mapping[str, Value | None]
"""By name of a field; None where the GPU, or its driver, does not know it."""

TroubleKind = Literal["hang", "blocked", "error", "lost", "xid", "sampler"]
"""Hang: a query does not return. Blocked: nor does this one, but another has hung before it, and may hold the driver.
Error: a query failed. Lost: the GPU is gone. Xid: the driver has reported an error of the GPU. Sampler: the process that
asks has ended, or says nothing.
"""


@dataclass(frozen=True)
class Snapshot:
    """All that is known of all GPUs at one time. Maps are by number of a GPU in the run.

    Attributes:
        at: seconds since the start of the run.
        facts: identities, facts, facts of pairs, and states; none of a GPU in a snapshot that is not full.
        counters: counters.
        gauges: gauges.
        unknown: why a field is None, by name: "not supported", "not permitted", an error; of "xid", why none is told.
        missing: GPUs that have not answered, and why.
        absent: why there is no telemetry at all; empty where there is.
    """

    at: float = 0.0
    facts: Mapping[int, Values] = field(default_factory=dict)
    counters: Mapping[int, Mapping[str, int | None]] = field(default_factory=dict)
    gauges: Mapping[int, Values] = field(default_factory=dict)
    unknown: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    missing: Mapping[int, str] = field(default_factory=dict)
    absent: str = ""

    def only(self, gpus: Collection[int]) -> Snapshot:
        """Return the same of these GPUs alone."""

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
        )


@dataclass(frozen=True)
class TelemetrySample:
    """Gauges and counters of one GPU at one time.

    Attributes:
        at: seconds since the start of the run.
    """

    at: float
    gpu: int
    values: Values


@dataclass(frozen=True)
class Trouble:
    """Something that went wrong with a GPU, or with asking it.

    Attributes:
        kind: see `TroubleKind`.
        gpu: its number in the run; None where nobody knows.
        field: that was asked; empty of an Xid.
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
