"""Simulate streams and events, hold back the results that a real device delivers late, and track which streams record
a CUDA graph.

Operators run at once. Late results are those of a ``non_blocking`` copy to pinned host memory, and of a collective
with ``async_op=True``. Their destination holds poison until the caller waits for the stream that they were queued
on. Streams take time only in ``sleep`` and on simulated hardware: a stream knows until when it is busy, and an
event when it is reached.

A capture begins on one stream. A stream that waits for a capturing one joins its capture. It must be waited for
before the capture ends. CUDA refuses to wait for results of the device, and to order captured work after other
work.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn, Self

import torch

from mgpu_check.simulated.node import (
    cuda_error,
    current_index,
    device_index,
    invalid_ordinal,
    present_node,
    set_current_index,
)

_MODES = ("global", "thread_local", "relaxed")
_UNSUPPORTED = 900, "operation not permitted when stream is capturing"
_INVALIDATED = 901, "operation failed due to a previous error during capture"
_MERGE = 902, "operation would result in a merge of separate capture sequences"
_UNJOINED = 904, "capturing stream has unjoined work"
_ISOLATION = 905, "dependency created on uncaptured work in another stream"
_CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream"

_under_way: list[Capture] = []


class Capture:
    """A capture of one graph: its streams, and whether an error has invalidated it.

    `CUDAGraph.capture_begin` makes it and begins it on the current stream. Other streams join when they wait for one of
    its streams. `capture_end` ends it; `abandon` releases it if the program never does.
    """

    def __init__(self, mode: str) -> None:
        if mode not in _MODES:
            raise RuntimeError(
                "Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got " + str(mode)
            )
        self.mode = mode
        self.branches: list[Branch] = []
        self._streams: list[Waiting] = []
        self.broken = False
        self.ended = False
        self.thread = threading.get_ident()

    def begin_on(self, stream: Waiting) -> Branch:
        """Start recording on a stream, and return its empty branch. The first stream is the origin of the capture."""
        if not self.branches:
            _under_way.append(self)
        stream.branch = branch = Branch(self, id(stream))
        self.branches.append(branch)
        self._streams.append(stream)
        return branch

    def fail(self, error: tuple[int, str]) -> NoReturn:
        self.broken = True
        raise cuda_error(*error)

    def end(self) -> None:
        """Stop recording, as cudaStreamEndCapture does on the stream of the first branch."""
        self.release()
        origin = self.branches[0]
        if self.broken:
            raise cuda_error(*_INVALIDATED)
        if any(branch.work > origin.preceding.get(branch.stream, 0) for branch in self.branches[1:]):
            raise cuda_error(*_UNJOINED)

    def release(self) -> None:
        self.ended = True
        _under_way.remove(self)
        for stream in self._streams:
            stream.branch = None
        self._streams.clear()


@dataclass(eq=False)
class Branch:
    """The part of a capture that one stream has recorded so far, or up to an event."""

    capture: Capture
    stream: int
    work: int = 0  # number of operations that it has recorded
    # stream -> number of its operations that come before the next operation of this stream
    preceding: dict[int, int] = field(default_factory=dict)

    def mark(self) -> Branch:
        """Return the branch for an event that is recorded now."""
        return Branch(self.capture, self.stream, self.work, {**self.preceding, self.stream: self.work})


class Waiting:
    """The base class of streams and events: their branch of a capture, late results, the time when all work is done."""

    _late: list[Late]
    _reached: float
    device: torch.device | None
    branch: Branch | None = None
    marks_only = False  # True for an event, which only marks the work of a stream

    def refuse_wait(self) -> None:
        if self.branch is None:
            return
        if self.marks_only:
            raise cuda_error(*_CAPTURED_EVENT)
        self.branch.capture.fail(_UNSUPPORTED)

    def follow(self, predecessor: Waiting) -> None:
        """Order the later work of this stream after the recorded work of another stream or event."""
        mine, theirs = self.branch, predecessor.branch
        if theirs is None:
            if mine is not None:
                mine.capture.fail(_ISOLATION)
            return
        if theirs.capture.ended:
            raise cuda_error(*_CAPTURED_EVENT)
        if mine is None:
            mine = theirs.capture.begin_on(self)
        elif mine.capture is not theirs.capture:
            mine.capture.fail(_MERGE)
        for stream, work in theirs.mark().preceding.items():
            mine.preceding[stream] = max(mine.preceding.get(stream, 0), work)

    def query(self) -> bool:
        """Return whether all work is done. If its time has come, deliver late results: the next query returns True."""
        self.refuse_wait()
        refuse_in_thread()
        _clock.touch(self.device)
        if not _clock.past(self._reached, self):
            return False
        done = all(late.done for late in self._late)
        self.synchronize()
        return done

    def synchronize(self) -> None:
        self.refuse_wait()
        _clock.touch(self.device)
        _clock.wait_until(self._reached)
        late, self._late = self._late, []
        for late_copy in late:
            late_copy.deliver()


def abandon() -> None:
    for capture in list(_under_way):
        capture.release()


def refuse_in_thread() -> None:
    """Refuse a call that may be unsafe while a stream captures, such as a wait for a whole device."""
    for capture in _under_way:
        if capture.mode == "global" or (capture.mode == "thread_local" and capture.thread == threading.get_ident()):
            capture.fail(_UNSUPPORTED)


class WorkClock:
    """The clock of streams and events: wall time in seconds."""

    def now(self) -> float:
        return time.perf_counter()

    def past(self, moment: float, whose: object) -> bool:
        """Return whether ``moment``, when the stream or event ``whose`` is done, has passed."""
        return moment <= self.now()

    def wait_until(self, moment: float) -> None:
        remaining = moment - self.now()
        if remaining > 0:
            time.sleep(remaining)

    def touch(self, device: torch.device | None) -> None:
        """Call the driver of a device; simulated hardware raises here if the device is lost."""


_wall = WorkClock()
_clock = _wall


def clock() -> WorkClock:
    return _clock


def poison(t: torch.Tensor) -> None:
    """Fill a plain tensor with NaN, or with the least integer (the greatest if unsigned); invert booleans."""
    with torch.no_grad():
        if t.is_floating_point() or t.is_complex():
            t.fill_(float("nan"))
        elif t.dtype is torch.bool:
            t.logical_not_()
        else:
            info = torch.iinfo(t.dtype)
            t.fill_(info.min or info.max)


class Late:
    """A result that is delivered once, when something waits for it.

    A non-blocking copy to the host or an asynchronous collective makes it, and queues it on a stream or for the whole
    device. The first wait delivers it; after that the queues drop it.
    """

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


_LONGEST_SLEEP = 1e6  # seconds; `time.sleep` raises OverflowError for much longer times
_PRIORITIES = (0, -3)  # the lowest and the highest that torch supports
_ids = itertools.count(1)
external: dict[tuple[int, int], Stream] = {}  # streams of other libraries, by handle and device
_by_id: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()


class Stream(Waiting):
    """``torch.cuda.Stream`` of a simulated device.

    The program makes it; the default stream of a device is made at its first use. Operators run at once, so a stream
    holds only late results and the time when it is done. The exit of the node forgets all streams.
    """

    device: torch.device
    device_type = 1  # kCUDA
    priority_range = staticmethod(lambda: _PRIORITIES)
    native_handle = property(lambda self: self.cuda_stream)

    def __new__(cls, device: object = None, priority: int = 0, **identity: object) -> Self:
        if "stream_id" in identity:
            return stream_by_id(**identity)  # type: ignore[arg-type, return-value]
        return super().__new__(cls)

    def __init__(self, device: object = None, priority: int = 0, **identity: object) -> None:
        if "stream_id" in identity:
            return
        target = None if isinstance(device, int) and device < 0 else device
        node = present_node()
        node.initialize()
        index = device_index(target)
        if not 0 <= index < node.n:
            raise invalid_ordinal()
        self.device = node.devices[index]
        self.priority = max(min(priority, _PRIORITIES[0]), _PRIORITIES[1])
        self.stream_id = next(_ids)
        _by_id[self.stream_id] = self
        self._late: list[Late] = []
        self._reached = 0.0
        self._previous: list[tuple[int, Stream]] = []

    @property
    def device_index(self) -> int:
        return int(self.device.index)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id and id(self)

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.cuda_stream)

    def sleep(self, seconds: float) -> None:
        """Queue a delay of ``seconds`` behind the present work."""
        self.busy_until(self.reached + seconds)

    @property
    def reached(self) -> float:
        return max(self._reached, clock().now())

    def busy_until(self, moment: float) -> None:
        self._reached = max(self._reached, moment)
        _busy[self.device_index] = max(_busy.get(self.device_index, 0.0), moment)

    def hold(self, late: Late) -> None:
        self._late = [kept for kept in self._late if not kept.done]
        self._late.append(late)

    def holds(self, late: Late) -> bool:
        """Return whether this late result is queued here, so that later work comes after it."""
        return any(queued is late for queued in self._late)

    def wait_stream(self, stream: Stream) -> None:
        self._follow(stream)

    def wait_event(self, event: Event) -> None:
        self._follow(event)

    def _follow(self, predecessor: Waiting) -> None:
        # An event that was never recorded holds no work.
        if not isinstance(predecessor, Event) or predecessor._recorded:
            self.follow(predecessor)
        # Each once: streams that follow each other in turn would double the list each time.
        self._late = list(dict.fromkeys(late for late in (*self._late, *predecessor._late) if not late.done))
        self._reached = max(self._reached, predecessor._reached)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        return self.branch is not None

    def __enter__(self) -> Self:
        self._previous.append((current_index(), current_stream(self.device)))
        set_current_index(self.device_index)
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        index, stream = self._previous.pop()
        set_stream(stream)
        set_current_index(index)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[int, int]:
        return self.device_index, self.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the CUDA stream protocol, and the handle."""
        return 0, self.cuda_stream

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class Event(Waiting):
    """``torch.cuda.Event``: records the pending results of a stream, and the time when its work is done.

    The program makes it, records it on a stream, as often as it likes, and lets the host or other streams wait for it.
    """

    marks_only = True

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
        self.enable_timing, self.blocking, self.interprocess = enable_timing, blocking, interprocess
        self._recorded = False
        self._reached = 0.0
        self._late: list[Late] = []
        self.device: torch.device | None = None

    @property
    def cuda_event(self) -> int:
        return id(self) if self._recorded else 0

    event_id = cuda_event

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        if self.device is not None and self.device != stream.device:
            raise RuntimeError(
                f"Event device {self.device.index} does not match recording stream's device {stream.device.index}."
            )
        self.device = stream.device
        self._recorded = True
        self.branch = None if stream.branch is None else stream.branch.mark()
        self._late = [late for late in stream._late if not late.done]
        self._reached = stream.reached

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds between the two records."""
        if not self.enable_timing or not end_event.enable_timing:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not self._recorded or not end_event._recorded:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        if self.device != end_event.device:
            raise cuda_error(400, "invalid resource handle")
        return (end_event._reached - self._reached) * 1000

    @classmethod
    def from_ipc_handle(cls, device: object, handle: object) -> Event:
        raise RuntimeError("CUDA IPC is not available on a simulated node")

    def ipc_handle(self) -> bytes:
        raise RuntimeError("CUDA IPC is not available on a simulated node")

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {self.cuda_event:#x}>"


class _Streams(threading.local):
    def __init__(self) -> None:
        self.current: dict[int, Stream] = {}


_streams = _Streams()
_sync_debug_mode = 0
_defaults: dict[int, Stream] = {}
_busy: dict[int, float] = {}  # device -> time when all its streams are done
# device -> late results of all its streams, for synchronize(): work of a stream continues after the stream is dropped.
_outstanding: dict[int, list[Late]] = {}


def forget_streams() -> None:
    """Drop all streams, and reset the sync debug mode. A stream that is still held keeps its late results."""
    global _streams
    set_sync_debug_mode(0)
    _defaults.clear()
    external.clear()
    _outstanding.clear()
    _busy.clear()
    _by_id.clear()
    _streams = _Streams()


def reset_streams() -> None:
    """Make default streams current in this thread, and reset the sync debug mode, as in a fresh process."""
    set_sync_debug_mode(0)
    _streams.current.clear()


def go_by(clock: WorkClock | None) -> None:
    """Use another clock for streams and events (None: wall time), and mark all streams as idle."""
    global _clock
    _clock = clock or _wall
    _busy.clear()
    for stream in (*_by_id.values(), *_defaults.values()):
        stream._reached = 0.0


def default_stream(device: object = None) -> Stream:
    index = device_index(device)
    stream = _defaults.get(index)
    if stream is None:
        created = Stream(torch.device("cuda", index))
        created.stream_id = 0
        stream = _defaults.setdefault(index, created)
    return stream


def stream_by_id(stream_id: int, device_index: int, device_type: int = 1) -> Stream:
    stream = default_stream(torch.device("cuda", device_index)) if stream_id == 0 else _by_id.get(stream_id)
    if stream is None or stream.device_index != device_index:
        raise ValueError(f"stream_id={stream_id!r} names no stream of cuda:{device_index}")
    return stream


def current_stream(device: object = None) -> Stream:
    index = device_index(device)
    return _streams.current.get(index) or default_stream(index)


def is_capturing(index: int | None = None) -> bool:
    """Return whether the current stream of a device (by default the current one) captures; do not initialize CUDA."""
    stream = _streams.current.get(current_index() if index is None else index)
    return stream is not None and stream.branch is not None


def chosen_streams() -> dict[int, Stream]:
    """Return this thread's current streams that are not default streams, by device."""
    return {index: stream for index, stream in _streams.current.items() if stream.stream_id}


@contextlib.contextmanager
def as_on(index: int, streams: dict[int, Stream]) -> Iterator[None]:
    """Make device ``index`` and ``streams`` current inside the context; other devices use their default streams."""
    before, device = _streams.current, current_index()
    _streams.current = dict(streams)
    set_current_index(index)
    try:
        yield
    finally:
        _streams.current = before
        set_current_index(device)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        set_current_index(stream.device_index)
        _streams.current[stream.device_index] = stream


def synchronize(device: object = None) -> None:
    refuse_in_thread()
    time_of = clock()
    index = device_index(device)
    time_of.touch(torch.device("cuda", index))
    time_of.wait_until(_busy.pop(index, 0.0))
    for late in _outstanding.pop(index, ()):
        late.deliver()


def wait_until_idle(seconds: float) -> bool:
    end = time.perf_counter() + seconds
    while (remaining := min(max(_busy.values(), default=0.0), end) - time.perf_counter()) > 0:
        time.sleep(min(remaining, _LONGEST_SLEEP))
    return max(_busy.values(), default=0.0) <= time.perf_counter()


def hold_outstanding(late: Late, device: torch.device) -> None:
    """Register a late result that ``synchronize(device)`` delivers, even if no stream of the caller holds it."""
    waiting = [kept for kept in _outstanding.get(device.index, ()) if not kept.done]
    _outstanding[device.index] = [*waiting, late]


def host_waits(device: torch.device) -> None:
    if _sync_debug_mode:
        message = "called a synchronizing CUDA operation"
        if _sync_debug_mode == 2:
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=2)
    current_stream(device).synchronize()


def set_sync_debug_mode(mode: int) -> None:
    """Set the reaction to a wait of the host for a device: 0 none, 1 a warning, 2 an error."""
    global _sync_debug_mode
    _sync_debug_mode = mode


def get_sync_debug_mode() -> int:
    return _sync_debug_mode


class ExternalStream(Stream):
    """A stream of another library; it holds only work that this process queues through torch."""

    def __new__(cls, stream_ptr: int, device: object = None, **_: object) -> Self:
        return super().__new__(cls)

    def __init__(self, stream_ptr: int = 0, device: object = None, **identity: object) -> None:
        if "stream_id" in identity:  # an existing stream
            return
        super().__init__(device)
        self._pointer = int(stream_ptr)

    @property
    def cuda_stream(self) -> int:
        return self._pointer


def external_stream(pointer: int, device: int | None) -> Stream:
    """Return the stream of another library with this handle; it is kept until the node exits."""
    index = device_index(device)
    stream = external.get((pointer, index))
    if stream is None:
        stream = external.setdefault((pointer, index), ExternalStream(pointer, torch.device("cuda", index)))
    return stream


_LATE = "_mgpu_check_late"


def late_host_copy(copy: torch.Tensor, source: torch.device, non_blocking: bool) -> None:
    """Make the host wait after a copy from a device, or with ``non_blocking`` hold the values back until it waits."""
    if not non_blocking:
        host_waits(source)
        return
    values = copy.clone()
    poison(copy)
    target = copy.detach()

    def deliver() -> None:
        with torch.no_grad():
            target.copy_(values)

    late = Late(deliver)
    current_stream(source).hold(late)
    hold_outstanding(late, source)
    if copy.layout is torch.strided:
        attributes = copy.untyped_storage().__dict__
        attributes[_LATE] = [*(kept for kept in attributes.get(_LATE, ()) if not kept.done), late]


def deliver_queued(host: torch.Tensor, device: torch.device) -> None:
    """Deliver late copies to ``host`` before it is copied to ``device``, if they precede the copy on the stream."""
    if host.layout is not torch.strided:
        return
    late: list[Late] | None = host.untyped_storage().__dict__.get(_LATE)
    if late:
        stream = current_stream(device)
        for late_copy in late:
            if stream.holds(late_copy):
                late_copy.deliver()
