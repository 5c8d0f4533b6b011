"""Check the current device and streams: the meaning of "cuda", and that guards restore both."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mgpu_check.errors import DeviceMismatch
from mgpu_check.torch_hooks.tensors import indices_of


class _LeftGuard(Exception):
    """Raised to leave a guard by an exception."""


def _saved() -> torch.Tensor:
    return torch.ones(2, device="cpu")


def _loaded(where: str) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(_saved(), buffer)
    buffer.seek(0)
    loaded: torch.Tensor = torch.load(buffer, map_location=where)
    return loaded


def _worked_out(where: str) -> torch.Tensor:
    x = torch.ones(3, device=where, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None
    return x.grad


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


def _orders(devices: Sequence[torch.device]) -> list[torch.device]:
    """Return each device twice, once in descending order, and then the odd ones before the even ones."""
    return [*reversed(devices), *devices[1::2], *devices[::2]]


def assert_cuda_follows(devices: Sequence[torch.device]) -> None:
    """Assert that "cuda" without an index means the device that `set_device` or a guard has made current."""
    with current_device_kept():
        for number, device in enumerate(_orders(devices)):
            form: Any = (device, str(device), device.index)[number % 3]
            torch.cuda.set_device(device if number % 3 == 0 else form)
            _require_current(device, f"after torch.cuda.set_device({form!r})")
        _require_counted(devices[-1])
        torch.cuda.set_device(devices[0])
        for device in devices[::-1]:
            with torch.cuda.device(device):
                _require_current(device, f"in torch.cuda.device({str(device)!r})")


def _require_current(device: torch.device, when: str) -> None:
    for name, place in _PLACED.items():
        got = place().device
        if got != device:
            raise DeviceMismatch(f"{when}: {name} is on {got}, expected it on {device}", ranks=indices_of(device, got))
    for name, tell in _TOLD.items():
        told = tell()
        if told != device.index:
            raise DeviceMismatch(f"{when}: {name} is {told}, expected {device.index}", ranks=indices_of(device))


def _require_counted(device: torch.device) -> None:
    """Require that memory statistics without an argument are those of the current device."""
    torch.cuda.set_device(device)
    before = torch.cuda.memory_allocated()
    block = torch.empty(1 << 12, dtype=torch.uint8, device="cuda")
    rose = torch.cuda.memory_allocated() - before
    if rose < block.nbytes:
        raise DeviceMismatch(
            f"after torch.cuda.set_device({str(device)!r}): {block.nbytes} bytes were allocated, and "
            f"torch.cuda.memory_allocated() rose by {rose}; the number is that of another device",
            ranks=indices_of(device),
        )


def assert_guards_restore(devices: Sequence[torch.device]) -> None:
    """Assert that guards of devices and streams restore the previous ones, after a normal end and after an exception.

    Guards are nested too. Work on a device other than the current one must not change the current device.
    """
    with current_device_kept():
        for start in devices:
            for other in devices:
                torch.cuda.set_device(start)
                before = [torch.cuda.current_stream(device) for device in devices]
                for name, work in _guards(other, start).items():
                    for how in ("normally", "by an exception"):
                        try:
                            work(how != "normally")
                        except _LeftGuard:
                            pass
                        _require_restored(f"{name}, left {how}", devices, start, before)
                        torch.cuda.set_device(start)
                for name, job in _works(other, start).items():
                    job()
                    _require_restored(name, devices, start, before)


def _require_restored(
    what: str, devices: Sequence[torch.device], start: torch.device, before: Sequence[torch.cuda.Stream]
) -> None:
    if torch.cuda.current_device() != start.index:
        got = torch.device("cuda", torch.cuda.current_device())
        raise DeviceMismatch(f"after {what}: {got} is current, expected {start}", ranks=indices_of(start, got))
    for device, stream in zip(devices, before, strict=True):
        if torch.cuda.current_stream(device) != stream:
            raise DeviceMismatch(
                f"after {what}: another stream of {device} is current than before", ranks=indices_of(device)
            )


Leave = Callable[[bool], None]


def _leave(escape: bool) -> None:
    if escape:
        raise _LeftGuard


def _guards(other: torch.device, start: torch.device) -> dict[str, Leave]:
    """Return functions that enter and leave guards of `other`; their argument selects leaving by an exception."""

    def require(device: torch.device, name: str) -> None:
        got = torch.device("cuda", torch.cuda.current_device())
        if got != device:
            raise DeviceMismatch(f"in {name}: {got} is current, expected {device}", ranks=indices_of(device, got))

    def device(escape: bool) -> None:
        with torch.cuda.device(other):
            require(other, f"torch.cuda.device({str(other)!r})")
            torch.ones(2, device="cuda").sum()
            _leave(escape)

    def index(escape: bool) -> None:
        with torch.cuda.device(other.index):
            require(other, f"torch.cuda.device({other.index})")
            _leave(escape)

    def device_of(escape: bool) -> None:
        with torch.cuda.device_of(torch.empty(1, device=other)):
            require(other, f"torch.cuda.device_of(a tensor on {other})")
            _leave(escape)

    def of_host(escape: bool) -> None:
        with torch.cuda.device_of(torch.empty(1, device="cpu")):
            require(start, "torch.cuda.device_of(a tensor on the CPU)")
            _leave(escape)

    def nothing(escape: bool) -> None:
        with torch.cuda.device(None):
            require(start, "torch.cuda.device(None)")
            _leave(escape)

    def nested(escape: bool) -> None:
        with torch.cuda.device(other):
            try:
                with torch.cuda.device(start):
                    _leave(escape)
            except _LeftGuard:
                pass
            require(other, f"torch.cuda.device({str(other)!r}), after an inner guard was left")
            _leave(escape)

    def set_inside(escape: bool) -> None:
        with torch.cuda.device(other):
            torch.cuda.set_device(start)
            torch.cuda.set_device(other)
            _leave(escape)

    def stream(escape: bool) -> None:
        with torch.cuda.stream(torch.cuda.Stream(other)):
            require(other, f"torch.cuda.stream(a stream of {other})")
            _leave(escape)

    def streams(escape: bool) -> None:
        first, second = torch.cuda.Stream(other), torch.cuda.Stream(start)
        with torch.cuda.stream(first), torch.cuda.stream(second):
            require(start, f"torch.cuda.stream(a stream of {start}) in one of a stream of {other}")
            if torch.cuda.current_stream(start) != second or (
                other != start and torch.cuda.current_stream(other) != first
            ):
                raise DeviceMismatch("two streams were entered, and others are current", ranks=indices_of(start, other))
            _leave(escape)

    return {
        f"torch.cuda.device({str(other)!r})": device,
        f"torch.cuda.device({other.index})": index,
        f"torch.cuda.device_of(a tensor on {other})": device_of,
        "torch.cuda.device_of(a tensor on the CPU)": of_host,
        "torch.cuda.device(None)": nothing,
        f"torch.cuda.device({str(start)!r}) in one of {other}": nested,
        f"set_device in torch.cuda.device({str(other)!r})": set_inside,
        f"torch.cuda.stream(a stream of {other})": stream,
        f"a stream of {start} in one of {other}": streams,
    }


def _works(other: torch.device, start: torch.device) -> dict[str, Callable[[], object]]:
    """Return kinds of work on `other`, which must not change the current device."""
    return {
        f"arithmetic on {other}": lambda: torch.ones(3, device=other) * 2,
        f"a copy to {other}": lambda: torch.ones(3, device=start).to(other),
        f"a gradient on {other}": lambda: _worked_out(str(other)),
        f"torch.cuda.synchronize({str(other)!r})": lambda: torch.cuda.synchronize(other),
        f"torch.cuda.get_rng_state({str(other)!r})": lambda: torch.cuda.get_rng_state(other),
        f"an event on {other}": lambda: torch.cuda.Event().record(torch.cuda.current_stream(other)),
        f"a reduction to the host on {other}": lambda: float(torch.ones(3, device=other).sum()),
    }


def assert_threads_apart(devices: Sequence[torch.device]) -> None:
    """Assert that each thread has its own current device: a new one starts on cuda:0, and affects no other thread."""
    wrong: list[tuple[str, int, int]] = []
    raised: list[BaseException] = []
    barrier = threading.Barrier(len(devices), timeout=60)

    def work(device: torch.device) -> None:
        try:
            started = torch.cuda.current_device()
            if started != 0:
                wrong.append(("a new thread begins", 0, started))
            barrier.wait()
            torch.cuda.set_device(device)
            barrier.wait()  # every thread has set its device now
            for _ in range(3):
                placed = torch.ones(2, device="cuda") + 1
                if placed.device != device:
                    wrong.append(("what a thread puts on 'cuda' is", device.index, placed.device.index))
            with torch.cuda.device(devices[0]):
                barrier.wait()
            if torch.cuda.current_device() != device.index:
                wrong.append(("after its guard a thread is", device.index, torch.cuda.current_device()))
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
            wrong.append(
                (
                    "after other threads have set theirs, the main thread is",
                    devices[-1].index,
                    torch.cuda.current_device(),
                )
            )
    if raised:
        raise raised[0]
    if wrong:
        what, expected, got = wrong[0]
        raise DeviceMismatch(f"{what} on cuda:{got}, expected on cuda:{expected}", ranks=sorted({expected, got}))
