"""Where telemetry comes from: one interface, two sources (`nvml`, `simulated`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mgpu_check.devices.telemetry.fields import Value

__all__ = ["Absent", "Event", "GpuLost", "QueryError", "Source", "Unsupported"]


class Absent(Exception):
    """There is no telemetry here: no library, no driver, or none that works."""


class Unsupported(Exception):
    """The GPU, or its driver, does not know a field, or does not tell this user."""


class QueryError(Exception):
    """A query failed, though the field is known.

    Attributes:
        code: of the driver's library.
    """

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


class GpuLost(QueryError):
    """The GPU does not answer any more: it has fallen off the bus, or must be reset."""


@dataclass(frozen=True)
class Event:
    """What the driver has reported by itself.

    Attributes:
        gpu: number in the run.
        xid: number of the error.
    """

    gpu: int
    xid: int


class Source(Protocol):
    """What is asked. Several threads ask at once, each about one GPU."""

    unmatched: dict[int, str]
    """GPUs of the run that this source does not find, and why."""

    def query(self, gpu: int, field: str) -> Value:
        """Return the value of a field.

        Raises:
            Unsupported: nobody knows it. QueryError: asking failed. GpuLost: the GPU is gone.
        """

    def events(self, seconds: float) -> Sequence[Event]:
        """Wait for events, at most so long, and return those that came.

        Raises:
            Unsupported: this source tells of none. QueryError: waiting failed.
        """

    def close(self) -> None:
        """Let go of the driver."""
