"""Keep a bounded number of telemetry samples, however long the run is."""

from __future__ import annotations

from mgpu_check.devices.telemetry.values import TelemetrySample

MOST = 4096
"""Samples kept per GPU."""


class History:
    """Samples by GPU. A GPU with too many loses every second sample; samples with throttling are dropped last."""

    def __init__(self) -> None:
        self._of: dict[int, list[TelemetrySample]] = {}

    def add(self, sample: TelemetrySample) -> None:
        """Add the next sample of a GPU."""
        kept = self._of.setdefault(sample.gpu, [])
        kept.append(sample)
        if len(kept) > MOST:
            thinned = [s for place, s in enumerate(kept) if place % 2 == 0 or s.values.get("throttle")]
            self._of[sample.gpu] = thinned if len(thinned) <= 3 * MOST // 4 else kept[::2]

    def samples(self) -> list[TelemetrySample]:
        """Return all kept samples, by time."""
        return sorted((s for kept in self._of.values() for s in kept), key=lambda sample: (sample.at, sample.gpu))
