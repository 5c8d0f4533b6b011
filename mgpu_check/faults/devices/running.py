"""What is current, and what is waited for: defects of the order of things."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch

from mgpu_check.faults.breaking import replaced_method
from mgpu_check.faults.devices.planting import altered, last
from mgpu_check.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced


@fault(
    "devices",
    "Tensor.cuda() without an index takes the first device",
    caught_by=("test_cuda_follows_the_current_device",),
    condition="where another device is current",
)
def cuda_is_the_first_device() -> Iterator[None]:
    """`set_device` is of no effect on it."""
    with altered(torch.Tensor, "cuda", lambda x, *args, **kw: not args and not kw, lambda cuda, x: cuda(x, 0)):
        yield


@fault(
    "devices",
    "torch.arange on 'cuda' makes its tensor on the first device",
    caught_by=("test_cuda_follows_the_current_device",),
    condition="where another device is current",
)
def one_factory_on_the_first_device() -> Iterator[None]:
    """Other factories follow the current device."""

    def instead(arange: Any, *args: Any, **kwargs: Any) -> Any:
        return arange(*args, **{**kwargs, "device": "cuda:0"})

    with altered(torch, "arange", lambda *_, **kw: str(kw.get("device")) == "cuda", instead):
        yield


@fault(
    "devices",
    "set_device with a text sets the first device",
    caught_by=("test_cuda_follows_the_current_device",),
    condition="devices given as text",
)
def devices_as_text_misread() -> Iterator[None]:
    """The index after the colon is lost."""
    with altered(
        torch.cuda, "set_device", lambda device: isinstance(device, str), lambda set_device, device: set_device(0)
    ):
        yield


@fault(
    "devices",
    "torch.cuda.device leaves its device current when an exception passes",
    caught_by=("test_guards_restore",),
    condition="left by an exception",
)
def guards_left_by_exceptions() -> Iterator[None]:
    """As where a guard is written without `finally`."""

    class Guard(torch.cuda.device):
        def __exit__(self, kind: Any, value: Any, traceback: Any) -> Any:
            return super().__exit__(kind, value, traceback) if kind is None else None

    with replaced(torch.cuda, "device", Guard):
        yield


@fault(
    "devices",
    "torch.cuda.stream puts the stream back and leaves its device current",
    caught_by=("test_guards_restore",),
    condition="streams of another device than the current one",
)
def devices_of_streams_stay() -> Iterator[None]:
    """The current device is that of the stream from then on."""

    class Context(torch.cuda.StreamContext):
        def __exit__(self, *exception: Any) -> None:
            current = torch.cuda.current_device()
            super().__exit__(*exception)
            torch.cuda.set_device(current)

    with replaced(torch.cuda, "stream", Context):
        yield


@fault(
    "devices",
    "the host's wait for a device leaves it current",
    caught_by=("test_guards_restore",),
    condition="where another device is current",
)
def waiting_changes_the_device() -> Iterator[None]:
    """`torch.cuda.synchronize` sets the device, and does not put it back."""
    synchronize = torch.cuda.synchronize

    def waits(device: Any = None) -> None:
        synchronize(device)
        if device is not None:
            torch.cuda.set_device(device)

    with replaced(torch.cuda, "synchronize", waits):
        yield


@fault(
    "devices",
    "the current device is the same for all threads: the one that any of them set last",
    caught_by=("test_threads_have_their_own_device",),
    condition="several threads",
)
def one_current_device_for_all_threads() -> Iterator[None]:
    """It is kept per process."""
    set_device, chosen = torch.cuda.set_device, [torch.cuda.current_device()]

    def sets(device: Any) -> None:
        set_device(device)
        chosen[0] = torch.device("cuda", device).index if isinstance(device, int) else torch.device(device).index

    with replaced(torch.cuda, "set_device", sets), replaced(torch.cuda, "current_device", lambda: chosen[0]):
        yield


@fault(
    "devices",
    "a new thread begins on the device that is current in the one that starts it",
    caught_by=("test_threads_have_their_own_device",),
    condition="where another device than the first is current",
    least_gpus=2,
)
def threads_inherit_the_device() -> Iterator[None]:
    """From then on it has one of its own."""

    def start(real: Any, thread: threading.Thread) -> None:
        device, run = torch.cuda.current_device(), thread.run

        def run_there() -> None:
            torch.cuda.set_device(device)
            run()

        thread.run = run_there  # type: ignore[method-assign]  # of this thread alone, which runs what it has
        real(thread)

    with replaced_method(threading.Thread, "start", start):
        yield


@fault(
    "devices",
    "Event.synchronize returns at once on one device",
    caught_by=("test_host_waits_for_streams",),
    condition="one device",
)
def events_not_waited_for() -> Iterator[None]:
    """What was queued before it may be under way."""
    with altered(torch.cuda.Event, "synchronize", lambda event: event.device.index == last(), lambda *_: None):
        yield


@fault(
    "devices",
    "wait_stream between two streams of one device does nothing",
    caught_by=("test_host_waits_for_streams",),
    condition="two streams of one device",
)
def streams_do_not_wait() -> Iterator[None]:
    """The second one begins at once."""
    with altered(torch.cuda.Stream, "wait_stream", lambda self, other: self.device == other.device, lambda *_: None):
        yield


@fault(
    "devices",
    "torch.cuda.synchronize waits for the default stream only",
    caught_by=("test_host_waits_for_streams",),
    condition="streams other than the default one",
)
def other_streams_not_waited_for() -> Iterator[None]:
    """What was queued on others may be under way."""
    with replaced(torch.cuda, "synchronize", lambda device=None: torch.cuda.default_stream(device).synchronize()):
        yield


@fault(
    "devices",
    "record_stream gives the memory away at once",
    caught_by=("test_streams_wait_for_each_other",),
    condition="above 64 KiB",
)
def memory_in_use_given_away() -> Iterator[None]:
    """Another tensor is written there."""

    def instead(record: Any, x: torch.Tensor, stream: Any) -> None:
        record(x, stream)
        x.fill_(-1)

    # Simulated tensors have one of their own.
    with altered(type(torch.empty(0, device="cuda")), "record_stream", lambda x, _: x.nbytes > 1 << 16, instead):
        yield


@fault(
    "devices",
    "events say that they are done while their stream is at work",
    caught_by=("test_events_tell_the_time",),
    condition="one device",
)
def events_done_too_early() -> Iterator[None]:
    """The last device answers before it has looked."""
    with altered(
        torch.cuda.Event,
        "query",
        lambda event: event.device is not None and event.device.index == last(),
        lambda *_: True,
    ):
        yield


@fault("devices", "elapsed_time is 0 whatever happened", caught_by=("test_events_tell_the_time",))
def no_time_passes() -> Iterator[None]:
    """The clock of the device stands."""
    with replaced(torch.cuda.Event, "elapsed_time", lambda self, end: 0.0):
        yield


@fault(
    "devices",
    "an event that is recorded again keeps its first record",
    caught_by=("test_host_waits_for_streams",),
    condition="from its second record on",
)
def events_recorded_once() -> Iterator[None]:
    """Loops that use one event for each step wait for the first."""
    recorded: WeakSet[torch.cuda.Event] = WeakSet()

    def record(real: Any, event: torch.cuda.Event, *stream: Any) -> None:
        if event not in recorded:
            recorded.add(event)
            real(event, *stream)

    with replaced_method(torch.cuda.Event, "record", record):
        yield


@fault(
    "devices",
    "torch.cuda.stream leaves its stream current on another device than the current one",
    caught_by=("test_guards_restore",),
    condition="streams of another device than the current one",
    least_gpus=2,
)
def foreign_streams_stay() -> Iterator[None]:
    """The current device is put back, and what was current on the other is not."""

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
