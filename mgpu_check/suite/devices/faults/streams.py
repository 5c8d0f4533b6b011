"""Defects of the current device and stream, and of synchronization."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch

from mgpu_check.suite.common.faults.breaking import replaced_method
from mgpu_check.suite.common.faults.operators import altered, last
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced


@fault(
    "Tensor.cuda() without an index uses the first device",
    "test_cuda_follows_the_current_device",
    condition="another current device",
)
def cuda_is_the_first_device() -> Iterator[None]:
    """`set_device` has no effect on it."""
    with altered(torch.Tensor, "cuda", lambda x, *args, **kw: not args and not kw, lambda cuda, x: cuda(x, 0)):
        yield


@fault(
    "torch.arange on 'cuda' makes its tensor on the first device",
    "test_cuda_follows_the_current_device",
    condition="another current device",
)
def one_factory_on_the_first_device() -> Iterator[None]:
    """Other factories follow the current device."""

    def instead(arange: Any, *args: Any, **kwargs: Any) -> Any:
        return arange(*args, **{**kwargs, "device": "cuda:0"})

    with altered(torch, "arange", lambda *_, **kw: str(kw.get("device")) == "cuda", instead):
        yield


@fault(
    "set_device with a string sets the first device",
    "test_cuda_follows_the_current_device",
    condition="devices given as strings",
)
def devices_as_text_misread() -> Iterator[None]:
    """The index after the colon is lost."""
    with altered(
        torch.cuda, "set_device", lambda device: isinstance(device, str), lambda set_device, device: set_device(0)
    ):
        yield


@fault(
    "torch.cuda.device does not restore the device after an exception",
    "test_guards_restore",
    condition="left by an exception",
)
def guards_left_by_exceptions() -> Iterator[None]:
    """As in a guard without `finally`."""

    class Guard(torch.cuda.device):
        def __exit__(self, kind: Any, value: Any, traceback: Any) -> Any:
            return super().__exit__(kind, value, traceback) if kind is None else None

    with replaced(torch.cuda, "device", Guard):
        yield


@fault(
    "torch.cuda.stream restores the stream but not the device",
    "test_guards_restore",
    condition="streams of a device that is not current",
)
def devices_of_streams_stay() -> Iterator[None]:
    """The current device remains that of the stream."""

    class Context(torch.cuda.StreamContext):
        def __exit__(self, *exception: Any) -> None:
            current = torch.cuda.current_device()
            super().__exit__(*exception)
            torch.cuda.set_device(current)

    with replaced(torch.cuda, "stream", Context):
        yield


@fault("synchronizing a device makes it current", "test_guards_restore", condition="another current device")
def waiting_changes_the_device() -> Iterator[None]:
    """`torch.cuda.synchronize` sets the device and does not restore the previous one."""
    synchronize = torch.cuda.synchronize

    def waits(device: Any = None) -> None:
        synchronize(device)
        if device is not None:
            torch.cuda.set_device(device)

    with replaced(torch.cuda, "synchronize", waits):
        yield


@fault("all threads share one current device", "test_threads_have_their_own_device", condition="several threads")
def one_current_device_for_all_threads() -> Iterator[None]:
    """As if it were stored per process."""
    set_device, chosen = torch.cuda.set_device, [torch.cuda.current_device()]

    def sets(device: Any) -> None:
        set_device(device)
        chosen[0] = torch.device("cuda", device).index if isinstance(device, int) else torch.device(device).index

    with replaced(torch.cuda, "set_device", sets), replaced(torch.cuda, "current_device", lambda: chosen[0]):
        yield


@fault(
    "a new thread inherits the current device of its parent",
    "test_threads_have_their_own_device",
    condition="a current device other than the first",
    least_gpus=2,
)
def threads_inherit_the_device() -> Iterator[None]:
    """Later changes are per thread."""

    def start(real: Any, thread: threading.Thread) -> None:
        device, run = torch.cuda.current_device(), thread.run

        def run_there() -> None:
            torch.cuda.set_device(device)
            run()

        thread.run = run_there  # type: ignore[method-assign]  # of this thread alone, which runs what it has
        real(thread)

    with replaced_method(threading.Thread, "start", start):
        yield


@fault("Event.synchronize returns at once on one device", "test_host_waits_for_streams", condition="one device")
def events_not_waited_for() -> Iterator[None]:
    """Work queued before the event may still run."""
    with altered(torch.cuda.Event, "synchronize", lambda event: event.device.index == last(), lambda *_: None):
        yield


@fault(
    "wait_stream between two streams of one device does nothing",
    "test_host_waits_for_streams",
    condition="two streams of one device",
)
def streams_do_not_wait() -> Iterator[None]:
    """The second stream starts at once."""
    with altered(torch.cuda.Stream, "wait_stream", lambda self, other: self.device == other.device, lambda *_: None):
        yield


@fault(
    "torch.cuda.synchronize waits for the default stream only",
    "test_host_waits_for_streams",
    condition="streams other than the default one",
)
def other_streams_not_waited_for() -> Iterator[None]:
    """Work queued on other streams may still run."""
    with replaced(torch.cuda, "synchronize", lambda device=None: torch.cuda.default_stream(device).synchronize()):
        yield


@fault(
    "record_stream does not keep the memory from reuse", "test_streams_wait_for_each_other", condition="above 64 KiB"
)
def memory_in_use_given_away() -> Iterator[None]:
    """Another tensor overwrites it."""

    def instead(record: Any, x: torch.Tensor, stream: Any) -> None:
        record(x, stream)
        x.fill_(-1)

    # Simulated tensors have a record_stream of their own.
    with altered(type(torch.empty(0, device="cuda")), "record_stream", lambda x, _: x.nbytes > 1 << 16, instead):
        yield


@fault("Event.query returns True while the stream is busy", "test_events_tell_the_time", condition="one device")
def events_done_too_early() -> Iterator[None]:
    """On the last device, the answer does not depend on the stream."""
    with altered(
        torch.cuda.Event,
        "query",
        lambda event: event.device is not None and event.device.index == last(),
        lambda *_: True,
    ):
        yield


@fault("elapsed_time is always 0", "test_events_tell_the_time")
def no_time_passes() -> Iterator[None]:
    """As if the clock of the device had stopped."""
    with replaced(torch.cuda.Event, "elapsed_time", lambda self, end: 0.0):
        yield


@fault(
    "an event that is recorded again keeps its first recording",
    "test_host_waits_for_streams",
    condition="from its second record on",
)
def events_recorded_once() -> Iterator[None]:
    """Loops that reuse one event in each step wait only for the first recording."""
    recorded: WeakSet[torch.cuda.Event] = WeakSet()

    def record(real: Any, event: torch.cuda.Event, *stream: Any) -> None:
        if event not in recorded:
            recorded.add(event)
            real(event, *stream)

    with replaced_method(torch.cuda.Event, "record", record):
        yield


@fault(
    "torch.cuda.stream leaves its stream current on another device than the current one",
    "test_guards_restore",
    condition="streams of a device that is not current",
    least_gpus=2,
)
def foreign_streams_stay() -> Iterator[None]:
    """The current device is restored, but the stream of the other device is not."""

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

    with replaced(torch.cuda, "stream", Context):
        yield
