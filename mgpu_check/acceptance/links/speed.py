"""Measure bandwidth and latency of copies between devices, and between devices and the host."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch

from mgpu_check.devices.observations import Measurement, Subject, SubjectResult, Unit, median_and_spread
from mgpu_check.suite.common.timing import seconds_of

__all__ = ["measure_copies"]

_LATENCY_BYTES = 16


def measure_copies(devices: Sequence[torch.device], size: int, repeats: int) -> list[SubjectResult]:
    """Measure the bandwidth of copies of `size` bytes, or of what fits, and the latency of small ones, on every
    path."""
    found: list[SubjectResult] = []
    torch.cuda.empty_cache()
    size = min(size, *(torch.cuda.mem_get_info(device)[0] // 8 for device in devices))
    for subject, clock, ends, kind in _ways(devices):
        source, target = (_memory(size, end) for end in ends)
        of_both: list[tuple[str, Unit, int]] = [
            (f"{kind} bandwidth", "B/s", size),
            (f"{kind} latency", "s", _LATENCY_BYTES),
        ]
        for quantity, unit, count in of_both:
            into, out = target[:count], source[:count]
            times = seconds_of(functools.partial(into.copy_, out, non_blocking=True), clock, repeats)
            if min(times) <= 0:
                continue  # below the resolution of the clock
            value, spread = median_and_spread([count / time for time in times] if unit == "B/s" else times)
            found.append(Measurement("links", subject, quantity, unit, value, repeats, count, spread))
    return found


def _ways(
    devices: Sequence[torch.device],
) -> Iterator[tuple[Subject, torch.device, tuple[torch.device | None, torch.device | None], str]]:
    """Yield subject, device whose clock is used, both ends (None: pinned memory of the host), and name of each path."""
    for index, device in enumerate(devices):
        yield Subject("upload", (index,)), device, (None, device), "upload"
        yield Subject("download", (index,)), device, (device, None), "download"
    for one, other in itertools.permutations(range(len(devices)), 2):
        # A copy between devices runs on a stream of the source.
        yield Subject("copy", (one, other)), devices[one], (devices[one], devices[other]), "copy"


def _memory(size: int, device: torch.device | None) -> torch.Tensor:
    if device is None:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    return torch.zeros(size, dtype=torch.uint8, device=device)
