"""Measure bandwidth and latency of copies between devices, and between devices and the host."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mgpu_check.devices.observations import Subject, SubjectResult, Unit
from mgpu_check.oracles.devices.cases import Laps
from mgpu_check.oracles.devices.operations import measured, second_longest, seconds_of

_LATENCY_BYTES = 16


@dataclass(frozen=True)
class _MeasuredCopy:
    subject: Subject
    name: str  # begins the names of its quantities
    clock: torch.device  # the device whose clock is used
    ends: tuple[torch.device | None, torch.device | None]  # source and destination; None is the host
    pinned: bool = True
    kernel: bool = False  # whether a kernel copies, because the dtype changes; else a copy engine does


def measure_copies(devices: Sequence[torch.device], size: int, repeats: int, laps: Laps) -> list[SubjectResult]:
    """Measure copies on every path: the bandwidth of up to `size` bytes, and the latency of small copies. With `laps`
    also the second longest copy, except from and to pageable memory: there the host sets the pace."""
    results: list[SubjectResult] = []
    torch.cuda.empty_cache()
    size = min(size, *(torch.cuda.mem_get_info(device)[0] // 8 for device in devices))
    for way in _ways(devices):
        source, target = (_memory(size, end, way.pinned) for end in way.ends)
        if way.kernel:
            target = target.view(torch.int16)
        of_both: list[tuple[str, Unit, int]] = [("bandwidth", "B/s", target.numel()), ("latency", "s", _LATENCY_BYTES)]
        for quantity, unit, count in of_both:
            into, out = target[:count], source[:count]
            times = seconds_of(functools.partial(into.copy_, out, non_blocking=way.pinned), way.clock, repeats)
            name, bytes_ = f"{way.name} {quantity}", into.nbytes
            results += measured("links", way.subject, name, unit, bytes_, times, bytes_)
        if way.pinned:
            copy = functools.partial(target[: laps.bytes].copy_, source[: laps.bytes], non_blocking=True)
            times = seconds_of(copy, way.clock, laps.count)
            results += second_longest("links", way.subject, way.name, times, laps.bytes)
    return results


def _ways(devices: Sequence[torch.device]) -> Iterator[_MeasuredCopy]:
    for index, device in enumerate(devices):
        for pinned, memory in ((True, ""), (False, "pageable ")):
            yield _MeasuredCopy(Subject("upload", (index,)), f"{memory}upload", device, (None, device), pinned)
            yield _MeasuredCopy(Subject("download", (index,)), f"{memory}download", device, (device, None), pinned)
    for source, target in itertools.permutations(range(len(devices)), 2):
        # A copy between devices runs on a stream of the source.
        for kernel in (False, True):
            pair, name = Subject("copy", (source, target)), "copy by kernel" if kernel else "copy"
            yield _MeasuredCopy(pair, name, devices[source], (devices[source], devices[target]), kernel=kernel)


def _memory(size: int, device: torch.device | None, pinned: bool) -> torch.Tensor:
    if device is None:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
    return torch.zeros(size, dtype=torch.uint8, device=device)
