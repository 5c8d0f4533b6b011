"""What is current, what is waited for, what is drawn, and what is held: defects of the order of things."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

from mgpu_check.faults.devices.planting import altered, last, on
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


@contextmanager
def _untouched(index: int) -> Iterator[None]:
    """Leave the generator of one device as it was."""
    state = torch.cuda.get_rng_state(index)
    yield
    torch.cuda.set_rng_state(state, index)


@fault(
    "devices",
    "torch.manual_seed leaves out the last device",
    caught_by=("test_generators_are_apart",),
    condition="one device",
)
def one_device_not_seeded() -> Iterator[None]:
    """Its numbers go on as they were."""
    seed = torch.manual_seed

    def manual_seed(number: int) -> torch.Generator:
        with _untouched(last()):
            return seed(number)

    with replaced(torch, "manual_seed", manual_seed):
        yield


@fault(
    "devices",
    "torch.cuda.manual_seed seeds all devices",
    caught_by=("test_generators_are_apart",),
    condition="devices that are not current",
)
def all_devices_seeded() -> Iterator[None]:
    """As `manual_seed_all` does."""
    with replaced(torch.cuda, "manual_seed", torch.cuda.manual_seed_all):
        yield


@fault(
    "devices",
    "randperm on a device draws from the generator of the CPU, too",
    caught_by=("test_generators_are_apart",),
    condition="one operator",
)
def numbers_of_the_host_drawn() -> Iterator[None]:
    """What the host draws then depends on what devices do."""

    def instead(randperm: Any, *args: Any, **kwargs: Any) -> Any:
        torch.rand(1, device="cpu")
        return randperm(*args, **kwargs)

    with altered(torch, "randperm", lambda *_, **kw: torch.device(kw.get("device") or "cpu").type == "cuda", instead):
        yield


@fault(
    "devices",
    "set_rng_state sets the first device, whichever is named",
    caught_by=("test_states_of_generators_return",),
    condition="devices other than the first",
)
def states_set_elsewhere() -> Iterator[None]:
    """The argument is lost."""
    set_state = torch.cuda.set_rng_state
    with replaced(torch.cuda, "set_rng_state", lambda state, device="cuda": set_state(state, 0)):
        yield


@fault(
    "devices",
    "fork_rng puts back the CPU's state only",
    caught_by=("test_states_of_generators_return",),
    condition="after draws in fork_rng",
)
def forks_leave_devices_changed() -> Iterator[None]:
    """Devices go on from where the block has left them."""
    fork = torch.random.fork_rng

    @contextmanager
    def fork_rng(devices: Any = None, **kwargs: Any) -> Iterator[None]:
        with fork(devices=[], **kwargs):
            yield

    with replaced(torch.random, "fork_rng", fork_rng):
        yield


@fault(
    "devices",
    "dropout of bfloat16 does not scale what it keeps",
    caught_by=("test_dropout",),
    condition="bfloat16",
)
def dropout_without_scale() -> Iterator[None]:
    """Activations are smaller while training."""

    def instead(dropout: Any, x: torch.Tensor, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:
        return dropout(x, p, *args, **kwargs) * (1 - p)

    with altered(F, "dropout", lambda x, *_, **__: x.is_cuda and x.dtype == torch.bfloat16, instead):
        yield


@fault(
    "devices",
    "dropout drops the same elements each time on one device",
    caught_by=("test_dropout",),
    condition="one device",
)
def dropout_repeats() -> Iterator[None]:
    """Its generator is not advanced."""

    def instead(dropout: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with _untouched(last()):
            return dropout(x, *args, **kwargs)

    with altered(F, "dropout", lambda x, *_, **__: on(x, last()), instead):
        yield


@fault(
    "devices",
    "torch.manual_seed adds the rank to the seed",
    caught_by=("test_ranks_draw_as_seeded",),
    condition="ranks other than 0",
)
def seeds_differ_by_rank() -> Iterator[None]:
    """Replicas that are made with one seed differ."""
    seed, rank = torch.manual_seed, int(os.environ.get("RANK", "0"))
    with replaced(torch, "manual_seed", lambda number: seed(int(number) + rank)):
        yield


@fault(
    "devices",
    "torch.load with a dict as map_location leaves tensors where they were",
    caught_by=("test_map_location",),
    condition="map_location is a dict",
)
def dict_of_places_ignored() -> Iterator[None]:
    """Other forms work."""

    def instead(load: Any, *args: Any, **kwargs: Any) -> Any:
        return load(*args, **{**kwargs, "map_location": None})

    with altered(torch, "load", lambda *_, **kw: isinstance(kw.get("map_location"), dict), instead):
        yield


@fault(
    "devices",
    "torch.load without map_location puts all on the first device",
    caught_by=("test_map_location",),
    condition="without map_location, other devices",
)
def all_loaded_onto_the_first() -> Iterator[None]:
    """Eight processes fill one device."""

    def instead(load: Any, *args: Any, **kwargs: Any) -> Any:
        return load(*args, **{**kwargs, "map_location": "cuda:0"})

    with altered(torch, "load", lambda *_, **kw: kw.get("map_location") is None, instead):
        yield


@fault(
    "devices",
    "one device gives less memory than was asked for, where it has not so much",
    caught_by=("test_memory_recovers",),
    condition="one device, more than it has",
)
def less_memory_than_asked_for() -> Iterator[None]:
    """Nothing is raised."""

    def instead(empty: Any, size: int, **kwargs: Any) -> Any:
        return empty(1 << 20, **kwargs)

    def concerns(*sizes: Any, **kwargs: Any) -> bool:
        return (
            len(sizes) == 1
            and isinstance(sizes[0], int)
            and sizes[0] > torch.cuda.get_device_properties(last()).total_memory
            and kwargs.get("device") == torch.device("cuda", last())
        )

    with altered(torch, "empty", concerns, instead):
        yield


@fault(
    "devices",
    "max_memory_allocated is what is allocated now",
    caught_by=("test_memory_recovers",),
    condition="after memory was freed",
)
def peaks_forgotten() -> Iterator[None]:
    """A peak of the past is not told."""
    with replaced(torch.cuda, "max_memory_allocated", torch.cuda.memory_allocated):
        yield
