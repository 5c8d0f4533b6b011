"""Streams and events of simulated devices, and what makes them matter: results that are late.

Operators run at once. What reality delivers late (a ``non_blocking`` copy to pinned host memory, a collective with
``async_op=True``) is held back: until the stream that it was queued on is waited for, its destination holds poison.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self

import torch

from mgpu_check.node.simulated.state import active_node, current_index, device_index, set_current_index, untraced_device

__all__ = [
    "Event",
    "ExternalStream",
    "Late",
    "Stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "forget_streams",
    "hold_on_current",
    "hold_outstanding",
    "late_host_copy",
    "poison",
    "set_stream",
    "synchronize",
]


def poison(t: torch.Tensor) -> None:
    """Fill a plain tensor with what no correct program computes: NaN, or the least integer (0xFF.. where unsigned)."""
    with torch.no_grad():
        if t.is_floating_point() or t.is_complex():
            t.fill_(float("nan"))
        elif t.dtype is torch.bool:
            t.logical_not_()
        else:
            info = torch.iinfo(t.dtype)
            t.fill_(info.min or info.max)


class Late:
    """A result that is delivered once, when something waits for it."""

    __slots__ = ("_deliver", "_lock")

    def __init__(self, deliver: Callable[[], object]) -> None:
        self._deliver: Callable[[], object] | None = deliver
        self._lock = threading.Lock()

    def deliver(self) -> None:
        with self._lock:
            deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver()

    @property
    def done(self) -> bool:
        return self._deliver is None


class _Waiting:
    """What a stream and an event have in common: results that are late, and a wait for all of them."""

    _late: list[Late]

    def query(self) -> bool:
        """Whether all of them are there. Work that is asked about ends: the next question gets yes."""
        done = all(late.done for late in self._late)
        self.synchronize()
        return done

    def synchronize(self) -> None:
        late, self._late = self._late, []
        for one in late:
            one.deliver()


class Stream(_Waiting):
    """``torch.cuda.Stream`` of a simulated device."""

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        made = untraced_device(device)
        if made is not None and made.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")
        index = device_index(device)
        node = active_node()
        if node is None:
            raise RuntimeError("the simulated node is not active")
        self.device = node.devices[index]
        self.priority = priority
        self._late: list[Late] = []
        self._previous: list[tuple[int, Stream]] = []

    @property
    def device_index(self) -> int:
        return int(self.device.index)

    @property
    def device_type(self) -> int:
        return 1  # kCUDA

    @property
    def stream_id(self) -> int:
        return id(self)

    @property
    def cuda_stream(self) -> int:
        return 0 if default_stream(self.device) is self else id(self)

    @property
    def native_handle(self) -> int:
        return self.cuda_stream

    def hold(self, late: Late) -> None:
        """Queue a late result behind what is on this stream."""
        self._late = [kept for kept in self._late if not kept.done]
        self._late.append(late)

    def wait_stream(self, stream: Stream) -> None:
        self._late.extend(late for late in stream._late if not late.done)

    def wait_event(self, event: Event) -> None:
        self._late.extend(late for late in event._late if not late.done)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Self:
        self._previous.append((current_index(), current_stream(self.device)))
        set_current_index(self.device_index)
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        index, stream = self._previous.pop()
        set_stream(stream)
        set_current_index(index)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class ExternalStream(Stream):
    def __init__(self, stream_ptr: int, device: object = None, **_: object) -> None:
        super().__init__(device)


class Event(_Waiting):
    """``torch.cuda.Event``: remembers what a stream had still to do, and when."""

    def __init__(
        self,
        device: object = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        if isinstance(device, bool):  # torch.cuda.Event(enable_timing, ...) takes it first
            enable_timing, device = device, None
        self.enable_timing = enable_timing
        self.blocking = blocking
        self.interprocess = interprocess
        self._time: float | None = None
        self._late: list[Late] = []
        self.device: torch.device | None = None

    @property
    def cuda_event(self) -> int:
        return id(self) if self._time is not None else 0

    @property
    def event_id(self) -> int:
        return self.cuda_event

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self.device = stream.device
        self._late = [late for late in stream._late if not late.done]
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds between the two records."""
        if not self.enable_timing or not end_event.enable_timing:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._time is None or end_event._time is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._time - self._time) * 1000

    def ipc_handle(self) -> bytes:
        raise RuntimeError("CUDA IPC is not available on a simulated node")

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {self.cuda_event:#x}>"


class _Streams(threading.local):
    def __init__(self) -> None:
        self.current: dict[int, Stream] = {}


_streams = _Streams()
_defaults: dict[int, Stream] = {}
# Late results by device, on whichever stream, for synchronize(): a stream that was dropped still has its work to do.
_outstanding: dict[int, list[Late]] = {}


def forget_streams() -> None:
    """Drop all streams; what was late on them stays undelivered."""
    global _streams
    _defaults.clear()
    _outstanding.clear()
    _streams = _Streams()


def default_stream(device: object = None) -> Stream:
    index = device_index(device)
    stream = _defaults.get(index)
    if stream is None:
        stream = _defaults.setdefault(index, Stream(torch.device("cuda", index)))
    return stream


def current_stream(device: object = None) -> Stream:
    index = device_index(device)
    return _streams.current.get(index) or default_stream(index)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        set_current_index(stream.device_index)
        _streams.current[stream.device_index] = stream


def synchronize(device: object = None) -> None:
    """Wait for all work of a device, on whichever stream it was queued."""
    for late in _outstanding.pop(device_index(device), ()):
        late.deliver()


def hold_outstanding(late: Late, device: torch.device) -> None:
    """Have ``synchronize(device)`` deliver a result that no stream of the caller's knows of."""
    waiting = [kept for kept in _outstanding.get(device.index, ()) if not kept.done]
    _outstanding[device.index] = [*waiting, late]


def hold_on_current(late: Late, device: torch.device) -> None:
    """Queue a late result on the current stream of ``device``."""
    current_stream(device).hold(late)
    hold_outstanding(late, device)


class StreamContext:
    """``torch.cuda.stream(s)``: makes ``s`` and its device current inside."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            self.stream.__exit__()


def late_host_copy(copy: torch.Tensor, source: torch.device, non_blocking: bool) -> None:
    """After a copy to the host: without ``non_blocking`` it has waited; with it, the values come with the wait."""
    if not non_blocking:
        current_stream(source).synchronize()
        return
    values = copy.clone()
    poison(copy)
    target = copy.detach()

    def deliver() -> None:
        with torch.no_grad():
            target.copy_(values)

    hold_on_current(Late(deliver), source)
