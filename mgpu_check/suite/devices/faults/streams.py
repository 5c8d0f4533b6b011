"""Defects of the current device and stream, and of synchronization."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch

from mgpu_check.suite.common.faults.breaking import around, returned
from mgpu_check.suite.common.faults.operators import call, first, last
from mgpu_check.suite.common.faults.registry import FaultRow, caught_by, entered, fault, register
from mgpu_check.torch_hooks.patches import replaced

guards = caught_by("test_guards_restore")
threads = caught_by("test_threads_have_their_own_device")
waiting = caught_by("test_host_waits_for_streams")

OTHER_CURRENT = "another current device"
FOREIGN_STREAMS = "streams of a device that is not current"


@guards("torch.cuda.device does not restore the device after an exception", entered, "left by an exception")
def guards_left_by_exceptions() -> Any:
    """As in a guard without `finally`."""

    class Guard(torch.cuda.device):
        def __exit__(self, kind: Any, value: Any, traceback: Any) -> Any:
            return super().__exit__(kind, value, traceback) if kind is None else None

    return replaced(torch.cuda, "device", Guard)


@guards("torch.cuda.stream restores the stream but not the device", entered, FOREIGN_STREAMS)
def devices_of_streams_stay() -> Any:
    class Context(torch.cuda.StreamContext):
        def __exit__(self, *exception: Any) -> None:
            current = torch.cuda.current_device()
            super().__exit__(*exception)
            torch.cuda.set_device(current)

    return replaced(torch.cuda, "stream", Context)


@guards("torch.cuda.stream leaves its stream current on another device than the current one", entered, FOREIGN_STREAMS,
    least_gpus=2)  # fmt: skip
def foreign_streams_stay() -> Any:
    class Context(torch.cuda.StreamContext):
        def __enter__(self) -> None:
            self._outside = torch.cuda.current_device()
            super().__enter__()

        def __exit__(self, *exception: Any) -> None:
            inside = torch.cuda.current_stream()
            super().__exit__(*exception)
            if inside.device.index != self._outside:
                with torch.cuda.device(inside.device):
                    torch.cuda.set_stream(inside)

    return replaced(torch.cuda, "stream", Context)


@guards("synchronizing a device makes it current", around(torch.cuda, "synchronize"), OTHER_CURRENT)
def waiting_changes_the_device(synchronize: Any, device: Any = None) -> None:
    synchronize(device)
    if device is not None:
        torch.cuda.set_device(device)


@fault("all threads share one current device", "test_threads_have_their_own_device", when="several threads")
def one_current_device_for_all_threads() -> Iterator[None]:
    """As if it were stored per process."""
    set_device, chosen = torch.cuda.set_device, [torch.cuda.current_device()]

    def sets(device: Any) -> None:
        set_device(device)
        chosen[0] = torch.device("cuda", device).index if isinstance(device, int) else torch.device(device).index

    with replaced(torch.cuda, "set_device", sets), replaced(torch.cuda, "current_device", lambda: chosen[0]):
        yield


@threads("a new thread inherits the current device of its parent", around(threading.Thread, "start"),
    "a current device other than the first", least_gpus=2)  # fmt: skip
def threads_inherit_the_device(start: Any, thread: threading.Thread) -> None:
    """Later changes are per thread."""
    device, run = torch.cuda.current_device(), thread.run

    def run_there() -> None:
        torch.cuda.set_device(device)
        run()

    thread.run = run_there  # type: ignore[method-assign]  # of this thread alone, which runs what it has
    start(thread)


@waiting("torch.cuda.synchronize waits for the default stream only", around(torch.cuda, "synchronize"),
    "streams other than the default one")  # fmt: skip
def other_streams_not_waited_for(_: Any, device: Any = None) -> None:
    torch.cuda.default_stream(device).synchronize()


@waiting("an event that is recorded again keeps its first recording", entered, "from its second record on")
def events_recorded_once() -> Any:
    """Loops that reuse one event in each step wait only for the first recording."""
    recorded: WeakSet[torch.cuda.Event] = WeakSet()

    def record(real: Any, event: torch.cuda.Event, *stream: Any) -> None:
        if event not in recorded:
            recorded.add(event)
            real(event, *stream)

    return around(torch.cuda.Event, "record")(record)


@fault("record_stream does not keep the memory from reuse", "test_streams_wait_for_each_other", by=entered,
       when="above 64 KiB")  # fmt: skip
def memory_in_use_given_away() -> Any:
    """Another tensor overwrites it."""

    def record(real: Any, x: torch.Tensor, stream: Any) -> None:
        real(x, stream)
        if x.nbytes > 1 << 16:
            x.fill_(-1)

    # Simulated tensors have a record_stream of their own.
    return around(type(torch.empty(0, device="cuda")), "record_stream")(record)


@fault("a graph is replayed once only", "test_graphs_replay", by=around("torch.cuda:CUDAGraph", "replay"))
def graphs_replayed_once(replay: Any, graph: Any) -> None:
    if not getattr(graph, "_replayed", False):
        graph._replayed = True
        replay(graph)


register(
    __name__,
    # `set_device` has no effect on it.
    FaultRow("cuda-is-the-first-device", "Tensor.cuda() without an index uses the first device",
        "test_cuda_follows_the_current_device", around(torch.Tensor, "cuda"), lambda cuda, x: cuda(x, 0),
        call(OTHER_CURRENT, lambda _, *args, **kwargs: not args and not kwargs)),
    FaultRow("one-factory-on-the-first-device", "torch.arange on 'cuda' makes its tensor on the first device",
        "test_cuda_follows_the_current_device", around(torch, "arange"),
        lambda arange, *args, **kwargs: arange(*args, **kwargs | {"device": "cuda:0"}),
        call(OTHER_CURRENT, lambda *_, device=None, **__: str(device) == "cuda")),
    # The index after the colon is lost.
    FaultRow("devices-as-text-misread", "set_device with a string sets the first device",
        "test_cuda_follows_the_current_device", around(torch.cuda, "set_device"), lambda set_device, _: set_device(0),
        first("devices given as strings", lambda device: isinstance(device, str))),
    # Work queued before the event may still run.
    FaultRow("events-not-waited-for", "Event.synchronize returns at once on one device", "test_host_waits_for_streams",
        around(torch.cuda.Event, "synchronize"), lambda *_: None,
        first("one device", lambda event: event.device.index == last())),
    # The second stream starts at once.
    FaultRow("streams-do-not-wait", "wait_stream between two streams of one device does nothing",
        "test_host_waits_for_streams", around(torch.cuda.Stream, "wait_stream"), lambda *_: None,
        call("two streams of one device", lambda stream, other: stream.device == other.device)),
    # Losses are read, and results are copied, before a side stream has written them.
    FaultRow("default-stream-does-not-wait", "the default stream of one device waits for no stream",
        "test_host_waits_for_streams", around(torch.cuda.Stream, "wait_stream"), lambda *_: None,
        call("the default stream, one device", lambda stream, _: stream == torch.cuda.default_stream(last()))),
    FaultRow("events-done-too-early", "Event.query returns True while the stream is busy", "test_events_tell_the_time",
        around(torch.cuda.Event, "query"), lambda *_: True,
        first("one device", lambda event: event.device is not None and event.device.index == last())),
    # As if the clock of the device had stopped.
    FaultRow("no-time-passes", "elapsed_time is always 0", "test_events_tell_the_time",
        around(torch.cuda.Event, "elapsed_time"), lambda *_: 0.0),
    # As if the unit of the driver had been converted twice.
    FaultRow("time-is-in-seconds", "elapsed_time returns seconds", "test_events_tell_the_time",
        returned(torch.cuda.Event, "elapsed_time"), lambda milliseconds, *_: milliseconds / 1000),
)  # fmt: skip
