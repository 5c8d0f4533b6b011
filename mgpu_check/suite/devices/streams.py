"""Check the current device and its streams and events.

"cuda" means the current device, and guards restore device and stream. Work that waits for other work must see its
results, on one device and between two.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from mgpu_check.asserts.models import gradient_or_zeros
from mgpu_check.errors import DeviceMismatch
from mgpu_check.oracles.agreement import WrongCase, difference, named_wrong
from mgpu_check.oracles.generated_data import anything
from mgpu_check.torch_hooks.tensors import indices_of


def require(condition: bool, text: str, *devices: torch.device) -> None:
    """Raise a `DeviceMismatch` about these devices unless the condition holds."""
    if not condition:
        raise DeviceMismatch(text, ranks=indices_of(*devices))


class _LeftGuard(Exception):
    """Raised to leave a guard by an exception."""


def _saved() -> torch.Tensor:
    return torch.ones(2, device="cpu")


def _loaded(location: str) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(_saved(), buffer)
    buffer.seek(0)
    loaded: torch.Tensor = torch.load(buffer, map_location=location)
    return loaded


def _worked_out(device: str) -> torch.Tensor:
    x = torch.ones(3, device=device, requires_grad=True)
    (x * 2).sum().backward()
    return gradient_or_zeros(x)


_PLACED: dict[str, Callable[[], torch.Tensor]] = {
    'torch.empty(device="cuda")': lambda: torch.empty(2, device="cuda"),
    'torch.tensor(device="cuda")': lambda: torch.tensor([1, 2], device="cuda"),
    'torch.arange(device="cuda")': lambda: torch.arange(3, device="cuda"),
    'torch.randn(device="cuda")': lambda: torch.randn(3, device="cuda"),
    'torch.full(device=torch.device("cuda"))': lambda: torch.full((2,), 1.0, device=torch.device("cuda")),
    'torch.zeros_like(device="cuda")': lambda: torch.zeros_like(_saved(), device="cuda"),
    'Tensor.to("cuda")': lambda: _saved().to("cuda"),
    'Tensor.to(torch.device("cuda"))': lambda: _saved().to(torch.device("cuda")),
    'Tensor.to(device="cuda", dtype=)': lambda: _saved().to(device="cuda", dtype=torch.float64),
    "Tensor.cuda()": lambda: _saved().cuda(),
    'Tensor.new_zeros(device="cuda")': lambda: _saved().new_zeros(2, device="cuda"),
    'torch.as_tensor(device="cuda")': lambda: torch.as_tensor(_saved(), device="cuda"),
    'nn.Linear(device="cuda")': lambda: torch.nn.Linear(2, 2, device="cuda").weight,
    "Module.cuda()": lambda: torch.nn.BatchNorm1d(2).cuda().get_buffer("running_mean"),
    'Module.to("cuda")': lambda: torch.nn.Linear(2, 2).to("cuda").bias,
    'torch.load(map_location="cuda")': lambda: _loaded("cuda"),
    "a gradient": lambda: _worked_out("cuda"),
}

_TOLD: dict[str, Callable[[], Any]] = {
    "torch.cuda.current_device()": lambda: torch.cuda.current_device(),
    "torch.cuda.current_stream().device": lambda: torch.cuda.current_stream().device.index,
    "torch.cuda.Stream().device": lambda: torch.cuda.Stream().device.index,
    "torch.cuda.default_stream().device": lambda: torch.cuda.default_stream().device.index,
    "torch.accelerator.current_device_index()": lambda: torch.accelerator.current_device_index(),
}


@contextlib.contextmanager
def current_device_kept() -> Iterator[None]:
    """Restore the current device at the end of the context."""
    before = torch.cuda.current_device()
    try:
        yield
    finally:
        torch.cuda.set_device(before)


def assert_cuda_follows(devices: Sequence[torch.device]) -> None:
    """Assert that "cuda" without an index means the device that `set_device` or a guard has made current."""
    with current_device_kept():
        # In descending order, and then the odd ones before the even ones.
        for number, device in enumerate([*reversed(devices), *devices[1::2], *devices[::2]]):
            form: Any = (device, str(device), device.index)[number % 3]
            torch.cuda.set_device(device if number % 3 == 0 else form)
            _require_followed(device, f"after torch.cuda.set_device({form!r})")
        _require_counted(devices[-1])
        torch.cuda.set_device(devices[0])
        for device in devices[::-1]:
            with torch.cuda.device(device):
                _require_followed(device, f"in torch.cuda.device({str(device)!r})")


def _require_followed(device: torch.device, when: str) -> None:
    for name, create in _PLACED.items():
        got = create().device
        require(got == device, f"{when}: {name} is on {got}, expected it on {device}", device, got)
    for name, tell in _TOLD.items():
        index = tell()
        require(index == device.index, f"{when}: {name} is {index}, expected {device.index}", device)


def _require_counted(device: torch.device) -> None:
    torch.cuda.set_device(device)
    before = torch.cuda.memory_allocated()
    block = torch.empty(1 << 12, dtype=torch.uint8, device="cuda")
    rose = torch.cuda.memory_allocated() - before
    require(
        rose >= block.nbytes,
        f"after torch.cuda.set_device({str(device)!r}): {block.nbytes} bytes were allocated, and "
        f"torch.cuda.memory_allocated() rose by {rose}; the number is that of another device",
        device,
    )


def assert_guards_restore(devices: Sequence[torch.device]) -> None:
    """Assert that guards of devices and streams restore the previous ones, after a normal end and after an exception.
    Guards are nested too. Work on a device other than the current one must not change the current device."""
    with current_device_kept():
        for start in devices:
            for target in devices:
                torch.cuda.set_device(start)
                before = [torch.cuda.current_stream(device) for device in devices]
                for name, (enter, inside) in _guards(target, start).items():
                    for how in ("normally", "by an exception"):
                        with contextlib.suppress(_LeftGuard), enter():
                            _require_current(inside, f"in {name}")
                            torch.ones(2, device="cuda").sum()
                            _leave(how != "normally")
                        _require_restored(f"{name}, left {how}", devices, start, before)
                        torch.cuda.set_device(start)
                for name, job in _works(target, start).items():
                    job()
                    _require_restored(name, devices, start, before)


def _require_current(device: torch.device, when: str) -> None:
    got = torch.device("cuda", torch.cuda.current_device())
    require(got == device, f"{when}: {got} is current, expected {device}", device, got)


def _require_restored(
    action: str, devices: Sequence[torch.device], start: torch.device, before: Sequence[torch.cuda.Stream]
) -> None:
    _require_current(start, f"after {action}")
    for device, stream in zip(devices, before, strict=True):
        same = torch.cuda.current_stream(device) == stream
        require(same, f"after {action}: another stream of {device} is current than before", device)


def _leave(escape: bool) -> None:
    if escape:
        raise _LeftGuard


def _guards(
    target: torch.device, start: torch.device
) -> dict[str, tuple[Callable[[], AbstractContextManager[Any]], torch.device]]:
    """Return guards by name, each with the device that must be current in it."""

    @contextlib.contextmanager
    def nested() -> Iterator[None]:
        with torch.cuda.device(target):
            for escape in (False, True):
                with contextlib.suppress(_LeftGuard), torch.cuda.device(start):
                    _leave(escape)
            yield

    @contextlib.contextmanager
    def set_inside() -> Iterator[None]:
        with torch.cuda.device(target):
            torch.cuda.set_device(start)
            torch.cuda.set_device(target)
            yield

    @contextlib.contextmanager
    def streams() -> Iterator[None]:
        outer, inner = torch.cuda.Stream(target), torch.cuda.Stream(start)
        with torch.cuda.stream(outer), torch.cuda.stream(inner):
            same = target == start or torch.cuda.current_stream(target) == outer
            require(
                same and torch.cuda.current_stream(start) == inner,
                "two streams were entered, and others are current",
                start,
                target,
            )
            yield

    guard, of_tensor = torch.cuda.device, torch.cuda.device_of
    return {
        f"torch.cuda.device({str(target)!r})": (lambda: guard(target), target),
        f"torch.cuda.device({target.index})": (lambda: guard(target.index), target),
        f"torch.cuda.device_of(a tensor on {target})": (lambda: of_tensor(torch.empty(1, device=target)), target),
        "torch.cuda.device_of(a tensor on the CPU)": (lambda: of_tensor(torch.empty(1, device="cpu")), start),
        "torch.cuda.device(None)": (lambda: guard(None), start),
        f"torch.cuda.device({str(target)!r}) around one of {start}, which was left": (nested, target),
        f"set_device in torch.cuda.device({str(target)!r})": (set_inside, target),
        f"torch.cuda.stream(a stream of {target})": (lambda: torch.cuda.stream(torch.cuda.Stream(target)), target),
        f"torch.cuda.stream(a stream of {start}) in one of a stream of {target}": (streams, start),
    }


def _works(target: torch.device, start: torch.device) -> dict[str, Callable[[], object]]:
    """Return kinds of work on `target`, which must not change the current device."""
    return {
        f"arithmetic on {target}": lambda: torch.ones(3, device=target) * 2,
        f"a copy to {target}": lambda: torch.ones(3, device=start).to(target),
        f"a gradient on {target}": lambda: _worked_out(str(target)),
        f"torch.cuda.synchronize({str(target)!r})": lambda: torch.cuda.synchronize(target),
        f"torch.cuda.get_rng_state({str(target)!r})": lambda: torch.cuda.get_rng_state(target),
        f"an event on {target}": lambda: torch.cuda.Event().record(torch.cuda.current_stream(target)),
        f"a reduction to the host on {target}": lambda: float(torch.ones(3, device=target).sum()),
    }


def assert_threads_apart(devices: Sequence[torch.device]) -> None:
    """Assert that each thread has its own current device: a new one starts on cuda:0, and affects no other thread."""
    errors: list[tuple[str, int, int]] = []
    raised: list[BaseException] = []
    barrier = threading.Barrier(len(devices), timeout=60)

    def work(device: torch.device) -> None:
        try:
            started = torch.cuda.current_device()
            if started != 0:
                errors.append(("a new thread begins", 0, started))
            barrier.wait()
            torch.cuda.set_device(device)
            barrier.wait()  # every thread has set its device now
            for _ in range(3):
                placed = torch.ones(2, device="cuda") + 1
                if placed.device != device:
                    errors.append(("what a thread puts on 'cuda' is", device.index, placed.device.index))
            with torch.cuda.device(devices[0]):
                barrier.wait()
            if torch.cuda.current_device() != device.index:
                errors.append(("after its guard a thread is", device.index, torch.cuda.current_device()))
        except BaseException as error:
            raised.append(error)  # the first is the cause: the other threads then find the barrier broken
            barrier.abort()

    with current_device_kept():
        torch.cuda.set_device(devices[-1])
        threads = [threading.Thread(target=work, args=(device,)) for device in devices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if torch.cuda.current_device() != devices[-1].index:
            subject = "after other threads have set theirs, the main thread is"
            errors.append((subject, devices[-1].index, torch.cuda.current_device()))
    if raised:
        raise raised[0]
    if errors:
        subject, expected, got = errors[0]
        raise DeviceMismatch(f"{subject} on cuda:{got}, expected on cuda:{expected}", ranks=sorted({expected, got}))


_CYCLES = 2_000_000  # cycles that a stream sleeps, about 1 to 2 ms, so that work without a right wait runs too early
_ELEMENTS = (1 << 16) + 3


def assert_devices_wait(devices: Sequence[torch.device], seed: int = 0) -> None:
    """Assert that a stream that waits for another one, on the same or another device, sees its results.

    The source stream sleeps before it writes. `record_stream` passes memory from stream to stream, and new tensors
    reuse it at once.
    """
    errors: list[WrongCase] = []
    data = anything(_ELEMENTS, torch.float32, seed)
    pairs = [(a, b) for a in devices[::-1] for b in devices]
    for source, target in pairs:
        source_stream, target_stream = torch.cuda.Stream(source), torch.cuda.Stream(target)
        written = torch.zeros(_ELEMENTS, device=source)
        source_stream.wait_stream(torch.cuda.current_stream(source))
        upload = data.to(source)
        with torch.cuda.stream(source_stream):
            source_stream.wait_stream(torch.cuda.default_stream(source))
            torch.cuda._sleep(_CYCLES // 8)
            written.copy_(upload)
            upload.record_stream(source_stream)
            event = source_stream.record_event()
        with torch.cuda.stream(target_stream):
            target_stream.wait_event(event)
            arrived = written.to(target, non_blocking=True)
            written.record_stream(target_stream)
            result = arrived.clone()
            done = target_stream.record_event()
        del upload, written, arrived
        # Allocate the same sizes at once: if the allocator reclaimed memory too early, this overwrites it.
        for device in (source, target):
            torch.full((_ELEMENTS,), -1.0, device=device)
        torch.cuda.current_stream(target).wait_event(done)
        result.record_stream(torch.cuda.current_stream(target))
        if message := difference(result.cpu(), data, "bits"):
            case = f"a read on a stream of {target} after it waited for one of {source}"
            errors.append(WrongCase(target, case, message))
    if errors:
        raise named_wrong(errors, devices, len(pairs), "the written data")
