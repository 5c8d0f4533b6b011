"""Measure time on a device, by its own clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mgpu_check.devices.observations import Measurement, Subject, Unit, median_and_spread

_WARM_UP = 2


class Stopwatch:
    """A stopwatch for the work that a device gets between `start` and `stop`; it does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """Start a lap."""
        if self._stream is not None:
            self._pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self._pairs[-1][0].record(self._stream)

    def stop(self) -> None:
        """End the lap."""
        if self._stream is not None:
            self._pairs[-1][1].record(self._stream)

    def laps(self) -> list[float]:
        """Wait for the device, and return the seconds of each lap; empty for the CPU."""
        if self._stream is not None:
            self._stream.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in self._pairs]


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int, *, inner: int = 1) -> list[float]:
    """Return `repeats` measurements of the seconds that `work` takes on `device`, after a warm-up.

    Args:
        inner: the number of calls per measurement, which is their mean.
    """
    with torch.cuda.device(device):
        watch = Stopwatch(device)
        for _ in range(_WARM_UP):
            work()
        for _ in range(repeats):
            watch.start()
            for _ in range(inner):
                work()
            watch.stop()
        return [lap / inner for lap in watch.laps()]


def measured(
    check: str,
    subject: Subject,
    quantity: str,
    unit: Unit,
    amount: float,
    laps: Sequence[float],
    size: int,
) -> list[Measurement]:
    """Return the rate of `subject`, which did `amount` bytes or operations in each of `laps` seconds; in the unit "s",
    the time of a lap.

    Empty if there are no laps, or if one was too short for the clock of the device.
    """
    if not laps or min(laps) <= 0:
        return []
    rates = laps if unit == "s" else [amount / lap for lap in laps]
    value, spread = median_and_spread(rates)
    return [Measurement(check, subject, quantity, unit, value, len(rates), size, spread)]
