"""Telemetry of simulated GPUs: all of one model and well, but for what is planted."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgpu_check.devices.telemetry.fields import FIELDS, Value, peer_of
from mgpu_check.devices.telemetry.source import Event, GpuLost, QueryError

__all__ = ["LAG", "PROFILE", "Override", "SimulatedSource", "SimulatedTelemetry"]

PROFILE: Mapping[str, Value] = {
    "name": "SIMULATED",
    "part_number": "000-00000-0000-000",
    "memory": 16 << 20,
    "driver": "000.00",
    "cuda": "13.0",
    "vbios": "00.00.00.00.00",
    "inforom": "G000.0000.00.00",
    "ecc": "on",
    "mig": "off",
    "virtualization": "none",
    "compute_mode": "default",
    "persistence": "on",
    "power_limit": 700,
    "sm_clock_max": 1980,
    "memory_clock_max": 2619,
    "pcie_generation_max": 5,
    "pcie_width_max": 16,
    "nvlinks": 18,
    "nvlink_speed": 26562,
    "p2p": "read+write+nvlink+atomics",
    "topology": "system",
    "nvlinks_down": "",
    "ecc_pending": "on",
    "remap_pending": False,
    "remap_failed": False,
    "retired_pending": False,
    "repair_pending": False,
    "sram_threshold": False,
    "unrepairable_memory": False,
    "recovery_action": "none",
    "fabric": "completed",
    "temperature": 42,
    "memory_temperature": 48,
    "power": 420.0,
    "utilization": 100,
    "sm_clock": 1980,
    "memory_clock": 2619,
    "throttle": "",
    "pcie_generation": 5,
    "pcie_width": 16,
}
"""What a simulated GPU says of itself, by name of a field; counters are 0."""

LAG = 0.05  # seconds; no slower than the sampler asks for events


@dataclass(frozen=True)
class Override:
    """What simulated telemetry says of a GPU in the place of the truth.

    Attributes:
        gpu: its number in the run.
        field: as in `fields.FIELDS`, of a pair as `fields.pair_field` makes it; "xid": the driver reports the error `value`,
            once; empty: every field.
        value: what it says; with `grows`, the first value.
        grows: what is added each time it is asked.
        after: seconds since telemetry began, before which all is well.
        error: what the query raises, if it is not empty: "lost", "timeout" (never answers), or the text of another error.
    """

    gpu: int
    field: str
    value: Any = None
    grows: float = 0
    after: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class SimulatedTelemetry:
    """What the telemetry of a simulated node is made of.

    Attributes:
        profile: what differs from `PROFILE` on all GPUs, by name of a field: the memory, say.
        overrides: what is planted.
        absent: if not empty, why there is no telemetry at all.
        elapsed: seconds for which telemetry has been going when it begins.
    """

    profile: Mapping[str, Value] = field(default_factory=dict)
    overrides: Sequence[Override] = ()
    absent: str = ""
    elapsed: float = 0.0

    def __post_init__(self) -> None:
        unknown = set(self.profile) - set(FIELDS)
        if unknown:
            raise ValueError(f"profile={sorted(unknown)} are no fields; choose from {', '.join(FIELDS)}")


class SimulatedSource:
    """See `source.Source`.

    Args:
        gpus: number in the run -> UUID.
    """

    def __init__(self, gpus: Mapping[int, str], made_of: SimulatedTelemetry) -> None:
        self.unmatched: dict[int, str] = {}
        self._gpus = dict(gpus)
        self._profile = {**PROFILE, **made_of.profile}
        self._overrides = made_of.overrides
        self._began = time.monotonic() - made_of.elapsed
        self._steps = int(made_of.elapsed / LAG)
        self._asked: dict[int, int] = {}  # place of an override -> how often it has answered
        self._told: set[int] = set()
        self._lock = threading.Lock()

    def query(self, gpu: int, field: str) -> Value:
        """Return the value of a field: what was planted last and has begun, or the truth."""
        for place, override in reversed(list(enumerate(self._overrides))):
            if override.gpu == gpu and override.field in ("", field) and self._begun(override):
                return self._overridden(place, override, field)
        return self._truth(gpu, field)

    def events(self, seconds: float) -> list[Event]:
        """Return the Xids whose time has come."""
        found = []
        for place, override in enumerate(self._overrides):
            mine = override.field == "xid" and override.gpu in self._gpus
            if mine and place not in self._told and self._begun(override):
                self._told.add(place)
                found.append(Event(override.gpu, int(override.value)))
        if not found:
            time.sleep(min(seconds, LAG))
        return found

    def close(self) -> None:
        """Do nothing."""

    def _begun(self, override: Override) -> bool:
        return time.monotonic() - self._began >= override.after

    def _overridden(self, place: int, override: Override, field: str) -> Value:
        if override.error == "timeout":
            threading.Event().wait()
        if override.error == "lost":
            raise GpuLost("GPU is lost", 15)
        if override.error:
            raise QueryError(override.error, 999)
        if not override.grows:
            value: Value = override.value
            return value
        with self._lock:
            step = self._asked.get(place, self._steps)
            self._asked[place] = step + 1
        return int((override.value or 0) + step * override.grows)

    def _truth(self, gpu: int, field: str) -> Value:
        if field == "uuid":
            return self._gpus[gpu]
        if field == "serial":
            return f"SIMULATED-{gpu}"
        if field == "pci":
            return f"00000000:{gpu:02X}:00.0"
        name = field if peer_of(field) is None else field.rpartition("_")[0]
        if FIELDS[name].kind == "counter":
            return 0
        return self._profile[name]
