"""Telemetry of a machine that a run only calls: a look, or samples while something runs there, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mgpu_check.devices.telemetry.sampler import Sampler
from mgpu_check.devices.telemetry.simulated import SimulatedTelemetry
from mgpu_check.devices.telemetry.values import Snapshot, TelemetrySample, Trouble

__all__ = ["Visit", "visit"]

_PATIENCE = 60.0


@dataclass(frozen=True)
class Visit:
    """What telemetry said in one call. Times are seconds since the call began."""

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
    """Listen to the driver of this machine for as long as `meanwhile` runs, and ask it then.

    Args:
        gpus, simulated, interval: see `Sampler.start`.
        full: see `Sampler.snapshot`.
    """
    with Sampler.start(gpus, simulated, interval) as sampler:
        if meanwhile is not None:
            meanwhile()
        snapshot = sampler.snapshot(_PATIENCE, full=full)
    return Visit(snapshot, tuple(sampler.samples()), tuple(sampler.troubles()))
