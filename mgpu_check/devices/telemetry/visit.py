"""Take telemetry of a remote machine in one call: a snapshot, or samples while a function runs there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mgpu_check.devices.telemetry.sampler import TelemetrySampler
from mgpu_check.devices.telemetry.simulated import SimulatedTelemetry
from mgpu_check.devices.telemetry.values import Snapshot, TelemetrySample, Trouble

_PATIENCE = 60.0


@dataclass(frozen=True)
class Visit:
    """The telemetry of one call. Times are seconds since the call began."""

    snapshot: Snapshot
    samples: tuple[TelemetrySample, ...]
    troubles: tuple[Trouble, ...]


def visit(
    gpus: Sequence[tuple[int, str]],
    simulated: SimulatedTelemetry | None,
    interval: float,
    *,
    full: bool = True,
    meanwhile: Callable[[], object] | None = None,
) -> Visit:
    """Sample the GPUs of this machine while `meanwhile` runs, then take a snapshot.

    Args:
        gpus, simulated, interval: see `TelemetrySampler`.
        full: see `TelemetrySampler.snapshot`.
        meanwhile: the work to run; None takes the snapshot at once.
    """
    with TelemetrySampler(gpus, simulated, interval) as sampler:
        if meanwhile is not None:
            meanwhile()
        snapshot = sampler.snapshot(_PATIENCE, full=full)
    return Visit(snapshot, tuple(sampler.samples()), tuple(sampler.troubles()))
