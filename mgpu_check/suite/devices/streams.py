"""Check streams and events: work that waits for other work must see its results, on one device and between two."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from mgpu_check.errors import DeviceMismatch
from mgpu_check.suite.common.agreement import WrongCase, difference, named_wrong
from mgpu_check.suite.common.values import anything, significands

_CYCLES = 2_000_000
"""Cycles that a stream sleeps, about 1 to 2 ms, so that work without a right wait runs too early."""
_ELEMENTS = (1 << 16) + 3
_CLOCKS_APART = 0.02, 0.05
"""Greatest difference of the clocks of host and device, as a share and in ms: a wrong unit differs by far more."""

Wait = Callable[[torch.cuda.Stream, torch.cuda.Event], object]


def _behind(
    wait: Callable[[torch.cuda.Stream, torch.cuda.Event, torch.cuda.Stream], object],
    make: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream,
) -> Wait:
    """Return a wait of the host for a second stream, which waits for the first; `make` returns the second."""

    def waits(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        second = make(stream.device)
        wait(stream, event, second)
        second.synchronize()

    return waits


_HOST: dict[str, Wait] = {
    "Stream.synchronize": lambda stream, event: stream.synchronize(),
    "Event.synchronize": lambda stream, event: event.synchronize(),
    "torch.cuda.synchronize": lambda stream, event: torch.cuda.synchronize(stream.device),
    "Stream.wait_stream": _behind(lambda stream, event, second: second.wait_stream(stream)),
    "Stream.wait_stream of the default stream": _behind(
        lambda stream, event, second: second.wait_stream(stream), torch.cuda.default_stream
    ),
    "Stream.wait_event": _behind(lambda stream, event, second: second.wait_event(event)),
    "Event.wait": _behind(lambda stream, event, second: event.wait(second)),
}


def assert_host_waits(devices: Sequence[torch.device], seed: int = 0) -> None:
    """Assert that each way to wait for a stream waits for its queued work: a copy to pinned memory behind slow work."""
    wrong: list[WrongCase] = []
    data = significands((_ELEMENTS,), torch.float32, seed)
    for device in devices:
        source = data.to(device)
        for name, wait in _HOST.items():
            target = torch.empty_like(data, pin_memory=True)
            stream, event = torch.cuda.Stream(device), torch.cuda.Event()
            stream.wait_stream(torch.cuda.current_stream(device))
            event.record(stream)  # recorded again below: a wait must wait for the last record
            with torch.cuda.stream(stream):
                torch.cuda._sleep(_CYCLES)
                target.copy_(source * 2, non_blocking=True)
                event.record(stream)
            wait(stream, event)
            if what := difference(target, data * 2, "values"):
                wrong.append(WrongCase(device, f"a copy after {name}", what))
    if wrong:
        raise named_wrong(wrong, devices, len(_HOST), "the queued data")


def assert_devices_wait(devices: Sequence[torch.device], seed: int = 0) -> None:
    """Assert that a stream that waits for another one, on the same or another device, sees its results.

    The source stream sleeps before it writes. `record_stream` passes memory from stream to stream, and new tensors
    reuse it at once.
    """
    wrong: list[WrongCase] = []
    data = anything(_ELEMENTS, torch.float32, seed)
    pairs = [(a, b) for a in devices[::-1] for b in devices]
    for source, target in pairs:
        first, second = torch.cuda.Stream(source), torch.cuda.Stream(target)
        written = torch.zeros(_ELEMENTS, device=source)
        first.wait_stream(torch.cuda.current_stream(source))
        upload = data.to(source)
        with torch.cuda.stream(first):
            first.wait_stream(torch.cuda.default_stream(source))
            torch.cuda._sleep(_CYCLES // 8)
            written.copy_(upload)
            upload.record_stream(first)
            event = first.record_event()
        with torch.cuda.stream(second):
            second.wait_event(event)
            arrived = written.to(target, non_blocking=True)
            written.record_stream(second)
            result = arrived.clone()
            done = second.record_event()
        del upload, written, arrived
        # Allocate the same sizes at once: if the allocator reclaimed memory too early, this overwrites it.
        for device in (source, target):
            torch.full((_ELEMENTS,), -1.0, device=device)
        torch.cuda.current_stream(target).wait_event(done)
        result.record_stream(torch.cuda.current_stream(target))
        if what := difference(result.cpu(), data, "bits"):
            wrong.append(WrongCase(target, f"a read on a stream of {target} after it waited for one of {source}", what))
    if wrong:
        raise named_wrong(wrong, devices, len(pairs), "the written data")


def assert_events_tell(devices: Sequence[torch.device]) -> None:
    """Assert that events are done only after the work before them, in order, and measure its time in milliseconds."""
    for device in devices:
        with torch.cuda.device(device):
            stream, other = torch.cuda.Stream(device), torch.cuda.Stream(device)
            start, end, behind, late = (torch.cuda.Event(enable_timing=True) for _ in range(4))
            began = time.perf_counter()
            start.record(stream)
            start.synchronize()
            reached = time.perf_counter()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(40 * _CYCLES)  # long enough for the host to query the events meanwhile
            end.record(stream)
            other.wait_stream(stream)
            behind.record(other)
            early = [
                name for name, event in (("its own", end), ("that of a stream that waits", behind)) if event.query()
            ]
            if early:
                raise DeviceMismatch(
                    f"{device}: a stream is still at work, but {early[0]} event is done", ranks=(device.index,)
                )
            behind.synchronize()
            if not (start.query() and end.query() and stream.query()):
                raise DeviceMismatch(
                    f"{device}: an event is not done after the host has waited for a later event", ranks=(device.index,)
                )
            lasted, longer = start.elapsed_time(end), start.elapsed_time(behind)
            if not 0 < lasted <= longer + 1e-3:  # events have a resolution of half a microsecond
                raise DeviceMismatch(
                    f"{device}: by its events, work lasted {lasted} ms, and a stream that waited for it continued "
                    f"after {longer} ms",
                    ranks=(device.index,),
                )
            waited = time.perf_counter() - reached
            late.record(stream)
            late.synchronize()
            _agree_with_host(device, start.elapsed_time(late), waited * 1e3, (time.perf_counter() - began) * 1e3)


def _agree_with_host(device: torch.device, measured: float, least: float, most: float) -> None:
    """Raise DeviceMismatch if two events are further apart, or less far, than the host has measured, in ms."""
    share, constant = _CLOCKS_APART
    if not least * (1 - share) - constant <= measured <= most * (1 + share) + constant:
        raise DeviceMismatch(
            f"{device}: Event.elapsed_time is {measured:.6g} ms, but the host waited {least:.6g} to {most:.6g} ms "
            f"between the two events",
            ranks=(device.index,),
        )
