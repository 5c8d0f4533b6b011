"""The interface of a telemetry source (`nvml` implements it for real GPUs), the source of simulated GPUs, and the
turnstile for queries.

Simulated GPUs are all of one model and healthy, except for planted overrides. The turnstile serializes the queries
to a driver, so that a query that hangs is known; later queries bypass it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mgpu_check.devices.telemetry.fields import FIELDS, Value, peer_of


class NoTelemetry(Exception):
    """No telemetry on this machine: the library or the driver is missing or does not work."""


class Unsupported(Exception):
    """The GPU or its driver does not support a field, or denies it to this user."""


class QueryError(Exception):
    """A query of a supported field failed."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code  # error code of the driver's library


class GpuLost(QueryError):
    """The GPU does not answer any more: it has fallen off the bus, or must be reset."""


@dataclass(frozen=True)
class XidEvent:
    """An error event (Xid) of the driver."""

    gpu: int  # number in the run
    xid: int


class Source(Protocol):
    """A source of telemetry. Several threads query it at once, each for one GPU."""

    unmatched: dict[int, str]  # GPUs of the run that this source cannot find, and the reason

    def query(self, gpu: int, field: str) -> Value:
        """Return the value of a field.
        Raises `Unsupported`: the field is not available. `QueryError`: the query failed. `GpuLost`: the GPU is gone."""

    def events(self, seconds: float) -> Sequence[XidEvent]:
        """Wait at most `seconds` for events, and return them.
        Raises `Unsupported`: this source reports no events. `QueryError`: waiting failed."""

    def close(self) -> None:
        """Release the driver."""


PATIENCE = 3  # factor on the deadline of a call without a GPU: initializing the driver's library may wake all GPUs

_TICKS = 20  # per deadline: measures it to within 5 %


@dataclass(eq=False)
class Query:
    """One call of the driver."""

    gpu: int | None  # number in the run; None for a call without a GPU, such as the initialization
    field: str
    ticks: int = 0  # number of times that the watch has found it in progress
    hung: bool = False  # whether it has exceeded its deadline


class Turnstile:
    """A lock that admits one query at a time: the next may enter when the current one has returned or hangs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: Query | None = None
        self._hanging: set[Query] = set()

    def enter(self, query: Query) -> None:
        """Wait until no other query is in progress, except for those that hang."""
        with self._changed:
            while self._holder is not None and not self._holder.hung:
                self._changed.wait()
            self._holder = query

    def leave(self, query: Query) -> None:
        with self._changed:
            self._hanging.discard(query)
            if self._holder is query:
                self._holder = None
            self._changed.notify_all()

    def tick(self) -> tuple[Query, Literal["hang", "blocked"]] | None:
        """Count one more tick of the current query.
        Return it when it exceeds its deadline, with the kind of trouble."""
        with self._changed:
            query = self._holder
            if query is None or query.hung:
                return None
            query.ticks += 1
            if query.ticks < (_TICKS if query.gpu is not None else PATIENCE * _TICKS):
                return None
            query.hung = True
            state: Literal["hang", "blocked"] = "blocked" if self._hanging else "hang"
            self._hanging.add(query)
            self._changed.notify_all()
            return query, state


def watch(
    turnstile: Turnstile, deadline: float, report: Callable[[Query, Literal["hang", "blocked"]], None]
) -> threading.Thread:
    """Start a thread that reports the queries that take longer than `deadline` seconds.

    The thread counts its own wake-ups as time. On a machine too busy to run this process, the count stops as well, so a
    busy machine does not make a query count as hanging.
    """
    pause = threading.Event()

    def go() -> None:
        while True:
            pause.wait(deadline / _TICKS)
            overdue = turnstile.tick()
            if overdue is not None:
                report(*overdue)

    thread = threading.Thread(target=go, name="watch", daemon=True)
    thread.start()
    return thread


PROFILE: Mapping[str, Value] = {field.name: field.healthy for field in FIELDS.values()}
"""The values of a healthy simulated GPU, by field name."""

LAG = 0.05  # seconds; well below the time that the sampler waits for events at once


@dataclass(frozen=True)
class Override:
    """A false value that simulated telemetry reports for a field of a GPU."""

    gpu: int  # its number in the run
    # a name in `fields.FIELDS`, or a pair name from `fields.pair_field`; "xid" makes the driver report the error
    # `value` once; "" overrides every field
    field: str
    value: Any = None  # the reported value; with `grows`, the first value
    grows: float = 0  # the increment per query
    after: float = 0.0  # seconds since telemetry began after which the override takes effect
    # the error of the query: "lost", "timeout" (never answers), or the text of another error; None for no error
    error: str | None = None


@dataclass(frozen=True)
class SimulatedTelemetry:
    """The configuration of simulated telemetry."""

    # values that replace those of `PROFILE` on all GPUs, by field name, such as the memory
    profile: Mapping[str, Value] = field(default_factory=dict)
    overrides: Sequence[Override] = ()
    absent: str = ""  # the reason why there is no telemetry at all; "" if there is telemetry
    elapsed: float = 0.0  # seconds that count as elapsed when telemetry starts

    def __post_init__(self) -> None:
        unknown = set(self.profile) - set(FIELDS)
        if unknown:
            raise ValueError(f"profile={sorted(unknown)} are not telemetry fields; choose from {', '.join(FIELDS)}")


class SimulatedSource:
    """See `source.Source`. `gpus`: number in the run -> UUID."""

    def __init__(self, gpus: Mapping[int, str], made_of: SimulatedTelemetry) -> None:
        self.unmatched: dict[int, str] = {}
        self._gpus = dict(gpus)
        self._profile = {**PROFILE, **made_of.profile}
        self._overrides = made_of.overrides
        self._began = time.monotonic() - made_of.elapsed
        self._steps = int(made_of.elapsed / LAG)
        self._asked: dict[int, int] = {}  # place of an override -> number of its answers
        self._told: set[int] = set()
        self._lock = threading.Lock()

    def query(self, gpu: int, field: str) -> Value:
        """Return the value of a field: that of the last override in effect, or else the healthy value."""
        for index, override in reversed(list(enumerate(self._overrides))):
            if override.gpu == gpu and override.field in ("", field) and self._begun(override):
                return self._overridden(index, override)
        if field == "uuid":
            return self._gpus[gpu]
        if field == "serial":
            return f"SIMULATED-{gpu}"
        if field == "pci":
            return f"00000000:{gpu:02X}:00.0"
        return self._profile[field if peer_of(field) is None else field.rpartition("_")[0]]

    def events(self, seconds: float) -> list[XidEvent]:
        """Return the planted Xids that are due."""
        events = []
        for index, override in enumerate(self._overrides):
            mine = override.field == "xid" and override.gpu in self._gpus
            if mine and index not in self._told and self._begun(override):
                self._told.add(index)
                events.append(XidEvent(override.gpu, int(override.value)))
        if not events:
            time.sleep(min(seconds, LAG))
        return events

    def close(self) -> None:
        """Do nothing."""

    def _begun(self, override: Override) -> bool:
        return time.monotonic() - self._began >= override.after

    def _overridden(self, index: int, override: Override) -> Value:
        if override.error == "timeout":
            threading.Event().wait()
        if override.error == "lost":
            raise GpuLost("GPU is lost", 15)
        if override.error is not None:
            raise QueryError(override.error, 999)
        if not override.grows:
            return override.value
        with self._lock:
            step = self._asked.get(index, self._steps)
            self._asked[index] = step + 1
        return int((override.value or 0) + step * override.grows)
