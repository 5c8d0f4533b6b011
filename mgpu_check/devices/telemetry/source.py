"""The interface of a telemetry source; `nvml` and `simulated` implement it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mgpu_check.devices.telemetry.fields import Value


class NoTelemetry(Exception):
    """No telemetry on this machine: the library or the driver is missing or does not work."""


class Unsupported(Exception):
    """The GPU or its driver does not support a field, or denies it to this user."""


class QueryError(Exception):
    """A query of a supported field failed.

    Attributes:
        code: error code of the driver's library.
    """

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


class GpuLost(QueryError):
    """The GPU does not answer any more: it has fallen off the bus, or must be reset."""


@dataclass(frozen=True)
class XidEvent:
    """An error event (Xid) of the driver.

    Attributes:
        gpu: number in the run.
    """

    gpu: int
    xid: int


class Source(Protocol):
    """A source of telemetry. Several threads query it at once, each for one GPU."""

    unmatched: dict[int, str]
    """GPUs of the run that this source cannot find, and the reason."""

    def query(self, gpu: int, field: str) -> Value:
        """Return the value of a field.

        Raises:
            Unsupported: the field is not available. QueryError: the query failed. GpuLost: the GPU is gone.
        """

    def events(self, seconds: float) -> Sequence[XidEvent]:
        """Wait at most `seconds` for events, and return them.

        Raises:
            Unsupported: this source reports no events. QueryError: waiting failed.
        """

    def close(self) -> None:
        """Release the driver."""
