"""Check single devices: the current one with its streams and events, memory, loaded tensors, and random generators.

"cuda" means the current device, and guards restore device and stream. Work that waits for other work must see its
results, on one device and between two. Statistics and refused allocations are those of one device. Each generator is
independent, and only seeds and states determine its numbers.
"""

from __future__ import annotations

import contextlib
import gc
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mgpu_check.asserts.models import gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import DeviceMismatch
from mgpu_check.oracles.agreement import WrongCase, difference, named_wrong
from mgpu_check.oracles.generated_data import ALL, anything, digest
from mgpu_check.suite.devices.seeded_ranks import DrawnBy
from mgpu_check.torch_hooks.patches import temporarily
from mgpu_check.torch_hooks.tensors import indices_of, name_of


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
    return torch.load(buffer, map_location=location)


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


def current_device_kept() -> AbstractContextManager[int]:
    before = torch.cuda.current_device()
    return temporarily(torch.cuda.set_device, before, before)


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


_BLOCK = (4 << 20) + 4096  # bytes: a multiple of 512, because torch rounds its statistics to that
_LARGE_BLOCK = (16 << 20) + 4096  # bytes: the allocator treats blocks above a few MiB in another way

_FIGURES: dict[str, Callable[[Any], object]] = {
    "memory_allocated": lambda device: torch.cuda.memory_allocated(device),
    "max_memory_allocated": lambda device: torch.cuda.max_memory_allocated(device),
    "max_memory_reserved": lambda device: torch.cuda.max_memory_reserved(device),
    "memory_reserved": lambda device: torch.cuda.memory_reserved(device),
    "mem_get_info": lambda device: torch.cuda.mem_get_info(device),
}
"""Statistics of a device, or of the current one for None.

Each call looks its function up, because `selftest` replaces it.
"""


def assert_memory_recovers(devices: Sequence[torch.device]) -> None:
    """Assert that each device counts current and peak memory, refuses what it cannot hold, and still works then."""
    for device in reversed(devices):
        _recovers(device)


def _require(device: torch.device, condition: bool, text: str) -> None:
    require(condition, f"{device}: {text}", device)


def _recovers(device: torch.device) -> None:
    free, total = torch.cuda.mem_get_info(device)
    specified_total = torch.cuda.get_device_properties(device).total_memory
    text = f"{free} bytes are free of {total}, and its properties say {specified_total}"
    _require(device, 0 <= free <= total and total <= specified_total, text)
    gc.collect()  # or cycles of earlier tests could be freed during the measurement
    # Cached memory could make the free memory of two devices equal, and so hide that one device's number is the
    # other's.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    block = torch.full((_LARGE_BLOCK,), 7, dtype=torch.uint8, device=device)
    wanted = total + (1 << 20)
    try:
        torch.empty(wanted, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        pass
    except RuntimeError as error:
        _require(device, False, f"an allocation beyond its memory raised {type(error).__name__}: {error}")
    else:
        _require(device, False, f"{wanted} bytes were allocated, of {total} that it has")
    _require(device, bool((block == 7).all()), "a failed allocation has changed the memory that was held before")
    after = torch.full((_LARGE_BLOCK,), 9, dtype=torch.uint8, device=device)
    distinct = bool((after == 9).all()) and bool((block == 7).all())
    _require(device, distinct, "two blocks are the same memory, after an allocation failed")
    _figures_follow_the_argument(device)
    now = torch.cuda.memory_allocated(device)
    text = f"{2 * _LARGE_BLOCK} bytes are held, and memory_allocated rose by {now - before}"
    _require(device, now - before >= 2 * _LARGE_BLOCK, text)
    del block, after
    peak = torch.cuda.max_memory_allocated(device)
    _require(device, peak >= now, f"max_memory_allocated is {peak}, and {now} bytes were allocated at one time")
    remaining = torch.cuda.memory_allocated(device)
    _peaks_begin_anew(device)
    _require(device, remaining <= before, f"all was freed, and {remaining - before} bytes still count as allocated")


def _forms(device: torch.device) -> tuple[Any, ...]:
    return device, device.index, str(device)


def _figures_follow_the_argument(device: torch.device) -> None:
    """Require that each statistic is that of its device, for each form of the argument; None is the current device."""
    for form in (*_forms(device)[1:], None):
        for name, figure in _FIGURES.items():
            expected = figure(device)
            with torch.cuda.device(device if form is None else -1):  # -1 keeps the current device
                got = figure(form)
            # Others may allocate between two calls, so compare only if the number did not change meanwhile.
            text = f"{name}({form!r}) is {got}, but with a torch.device it is {expected}"
            _require(device, expected != figure(device) or got == expected, text)


def _peaks_begin_anew(device: torch.device) -> None:
    """Require that a reset peak equals the allocated memory, for every form of the argument."""
    for form in _forms(device):
        torch.full((_BLOCK,), 7, dtype=torch.uint8, device=device)
        torch.cuda.reset_peak_memory_stats(form)
        torch.cuda.reset_accumulated_memory_stats(form)
        counted = torch.cuda.memory_stats(device).get("allocated_bytes.all.allocated", 0)
        _require(device, counted == 0, f"reset_accumulated_memory_stats({form!r}) leaves {counted} allocated bytes")
        peak, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        text = f"max_memory_allocated is {peak} after reset_peak_memory_stats({form!r}), and {now} is allocated"
        _require(device, peak == now, text)


def assert_loads_arrive(devices: Sequence[torch.device], seed: int = 0) -> None:
    """Assert that `torch.load` puts tensors on the device that `map_location` selects.

    `map_location` is None, a text, a device, a dict that rotates devices, or a callable. Every bit of each dtype must
    arrive, and tensors that share memory must share it again.
    """
    state = {device.index: _kept(device, seed) for device in devices}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    turned = {str(device): str(devices[number - 1]) for number, device in enumerate(devices)}
    last, host = devices[-1], torch.device("cpu")
    forms: dict[str, tuple[Any, Callable[[torch.device], torch.device]]] = {
        "nothing": (None, lambda device: device),
        "'cpu'": ("cpu", lambda device: host),
        f"{str(last)!r}": (str(last), lambda device: last),
        f"torch.device({str(last)!r})": (last, lambda device: last),
        f"the dict {turned}": (turned, lambda device: torch.device(turned[str(device)])),
        "a callable that returns the storage on the CPU": (lambda storage, location: storage, lambda device: host),
        f"a callable that calls cuda({last.index})": (
            lambda storage, location: storage.cuda(last.index),
            lambda device: last,
        ),
    }
    errors: list[WrongCase] = []
    for name, (form, target_of) in forms.items():
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=form)
        for device in devices:
            if message := _found(loaded[device.index], target_of(device), seed + device.index):
                case = f"torch.load with {name} as map_location, of tensors saved on {device}"
                errors.append(WrongCase(device, case, message))
    if errors:
        raise named_wrong(errors, devices, len(forms), "the saved data")


def _kept(device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    state = {name_of(dtype): anything(40, dtype, seed + device.index).to(device) for dtype in ALL}
    # A view with gaps into the memory of another tensor.
    state["view"] = state["float32"].view(8, 5)[1:6, ::2]
    return state


def _found(state: dict[str, torch.Tensor], device: torch.device, seed: int) -> str | None:
    for name, tensor in state.items():
        if tensor.device != device:
            return f"{name} is on {tensor.device}, expected it on {device}"
        if name != "view" and (message := difference(tensor, anything(40, tensor.dtype, seed), "bits")):
            return message
    if message := difference(state["view"], state["float32"].view(8, 5)[1:6, ::2], "bits"):
        return f"a view: {message}"
    before = state["float32"].clone()
    state["view"].fill_(3.0)
    if torch.equal(before[5:10].nan_to_num(), state["float32"][5:10].nan_to_num()):
        return "two tensors that shared memory do not"
    return None


_COUNT = 257

_DRAWS: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "rand": lambda device: torch.rand(_COUNT, device=device),
    "randn": lambda device: torch.randn(_COUNT, device=device),
    "randn of float16": lambda device: torch.randn(_COUNT, device=device, dtype=torch.float16),
    "randint": lambda device: torch.randint(0, 1 << 40, (_COUNT,), device=device),
    "randperm": lambda device: torch.randperm(_COUNT, device=device),
    "bernoulli": lambda device: torch.empty(_COUNT, device=device).bernoulli_(0.5),
    "normal_": lambda device: torch.empty(_COUNT, device=device).normal_(),
    "uniform_": lambda device: torch.empty(_COUNT, device=device, dtype=torch.float64).uniform_(),
    "multinomial": lambda device: torch.multinomial(torch.ones(_COUNT, device=device), 31),
    "rand_like": lambda device: torch.rand_like(torch.empty(_COUNT, device=device)),
    "dropout": lambda device: F.dropout(torch.ones(_COUNT, device=device), 0.5),
}


def _draws(device: torch.device) -> dict[str, int]:
    """Call each drawing function with the default generator of a device; return name of the function -> digest."""
    return {name: digest(draw(device)) for name, draw in _DRAWS.items()}


def drawn_by(rank: Rank, seed: int) -> DrawnBy:
    """Return the digests of a rank's numbers on its GPU, once with the seed of all ranks, once with its own seed."""
    device = rank.device
    torch.manual_seed(seed)
    same = _draws(device)
    torch.manual_seed(seed + 1 + rank.index)
    return DrawnBy(torch.cuda.get_device_name(device), same, own=_draws(device))


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the states of all generators, of devices and of the CPU, at the end of the context."""
    devices, host = torch.cuda.get_rng_state_all(), torch.get_rng_state()
    try:
        yield
    finally:
        torch.cuda.set_rng_state_all(devices)
        torch.set_rng_state(host)


def _require_same(before: dict[str, int], condition: str, device: torch.device) -> None:
    after = _draws(device)
    odd = [name for name in before if before[name] != after[name]]
    require(not odd, f"{device}: {condition}, but {', '.join(odd)} gave different numbers", device)


def assert_generators_apart(devices: Sequence[torch.device], seed: int = 0) -> None:
    """Assert that seeding affects the right generators, and that drawing affects only the generator of its device.
    `torch.manual_seed` and `manual_seed_all` must seed all devices, and `torch.cuda.manual_seed` the current one."""
    with current_device_kept(), _generators_kept():
        _seeds(devices, seed)
        torch.manual_seed(seed)
        for device in devices:
            for name, draw in _DRAWS.items():
                before = {peer: torch.cuda.get_rng_state(peer) for peer in devices}
                host = torch.get_rng_state()
                draw(device)
                after = {peer: torch.cuda.get_rng_state(peer) for peer in devices}
                text = f"{device}: {name} did not change the generator, so the same numbers will repeat"
                require(not torch.equal(after[device], before[device]), text, device)
                for peer in devices:
                    kept = peer == device or torch.equal(after[peer], before[peer])
                    require(kept, f"{name} on {device} has changed the generator of {peer}", device, peer)
                kept = torch.equal(torch.get_rng_state(), host)
                require(kept, f"{name} on {device} has changed the generator of the CPU", device)


def _seeds(devices: Sequence[torch.device], seed: int) -> None:
    torch.manual_seed(seed)
    draws = {device: _draws(device) for device in devices}
    for name, seeding in (
        ("torch.manual_seed", torch.manual_seed),
        ("torch.cuda.manual_seed_all", torch.cuda.manual_seed_all),
    ):
        seeding(seed)
        for device in reversed(devices):
            _require_same(draws[device], f"seeded twice with {seed} by {name}", device)
    torch.cuda.seed_all()
    chosen = {torch.cuda.default_generators[device.index].initial_seed() for device in devices}
    seeds = f"the seeds {sorted(chosen)}, expected one seed other than {seed}, that of before"
    require(len(chosen) == 1 and seed not in chosen, f"torch.cuda.seed_all() has left devices with {seeds}", *devices)
    with torch.cuda.device(devices[0]):
        torch.cuda.seed()
        again = torch.cuda.initial_seed() in chosen
        require(not again, f"{devices[0]}: torch.cuda.seed() has chosen the seed of before", devices[0])
    torch.manual_seed(seed + 1)
    for device in devices:
        same = [name for name, word in _draws(device).items() if word == draws[device][name]]
        require(not same, f"{device}: seeds {seed} and {seed + 1} gave the same {', '.join(same)}", device)
    for device in reversed(devices):
        torch.cuda.set_device(device)
        others = {peer: torch.cuda.get_rng_state(peer) for peer in devices if peer != device}
        for new_seed in (seed + (1 << 40), seed):
            torch.cuda.manual_seed(new_seed)
            text = f"{device}: torch.cuda.initial_seed() is {torch.cuda.initial_seed()}, expected {new_seed}"
            require(torch.cuda.initial_seed() == new_seed, text, device)
        for peer, state in others.items():
            text = f"torch.cuda.manual_seed with {device} current has changed the generator of {peer}"
            require(torch.equal(torch.cuda.get_rng_state(peer), state), text, device, peer)
        _require_same(draws[device], f"seeded with {seed} by torch.cuda.manual_seed", device)


def assert_states_return(devices: Sequence[torch.device], seed: int = 0) -> None:
    """Assert that a restored generator state gives the same numbers again, and that generators are independent.

    The check covers `get_rng_state` and `set_rng_state` of one device and of all, `fork_rng`, `torch.Generator`, and
    `torch.utils.checkpoint`, also on devices that are not current.
    """
    with _generators_kept():
        for number, device in enumerate(devices):
            torch.cuda.manual_seed_all(seed + number)
            _draws(device)  # so that the state is not just a seed
            state, every = torch.cuda.get_rng_state(device), torch.cuda.get_rng_state_all()
            draws = _draws(device)
            torch.cuda.set_rng_state(state, device)
            _require_same(draws, "its state was kept and set again", device)
            torch.cuda.set_rng_state_all(every)
            _require_same(draws, "all states were kept and set again", device)
            torch.cuda.set_rng_state_all(every)
            with torch.random.fork_rng(devices=[device]):
                torch.cuda.manual_seed_all(seed + 77)
                _draws(device)
            _require_same(draws, "fork_rng has been left", device)
            torch.cuda.set_rng_state_all(every)
            _own_generator(device, seed)
            _require_same(draws, "a generator of one's own has drawn", device)
            for name, call in _RECOMPUTED.items():
                x = torch.ones(_COUNT, device=device, requires_grad=True)
                out = call(x)
                after = torch.cuda.get_rng_state(device)
                out.sum().backward()
                assert x.grad is not None
                same = torch.equal(out, x.grad)
                require(same, f"{device}: dropout in a checkpoint, {name}, drops different elements backward", device)
                restored = torch.equal(after, torch.cuda.get_rng_state(device))
                require(restored, f"{device}: a checkpoint, {name}, did not restore the state of the generator", device)
        _forks(devices, seed)


def _forks(devices: Sequence[torch.device], seed: int) -> None:
    torch.cuda.manual_seed_all(seed)
    every = torch.cuda.get_rng_state_all()
    draws = {device: _draws(device) for device in devices}
    torch.cuda.set_rng_state_all(every)
    with torch.random.fork_rng(devices=devices):
        torch.cuda.manual_seed_all(seed + 78)
        for device in devices:
            torch.rand(_COUNT, device=device)
    for device in devices:
        _require_same(draws[device], "fork_rng of several devices has been left", device)


def _own_generator(device: torch.device, seed: int) -> None:
    generator = torch.Generator(device=device).manual_seed(seed)
    require(generator.device == device, f"a generator made for {device} is one of {generator.device}", device)
    state = generator.get_state()
    first_draw, second_draw = (torch.rand(_COUNT, device=device, generator=generator) for _ in range(2))
    repeats = torch.equal(first_draw, second_draw)
    require(not repeats, f"{device}: a generator has given the same numbers twice", device)
    generator.set_state(state)
    repeated_draw = torch.rand(_COUNT, device=device, generator=generator)
    reseeded_draw = torch.rand(_COUNT, device=device, generator=torch.Generator(device=device).manual_seed(seed))
    same = torch.equal(first_draw, repeated_draw) and torch.equal(first_draw, reseeded_draw)
    require(same, f"{device}: generators with the same state, or with the same seed, gave different numbers", device)


_RECOMPUTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "use_reentrant=True": lambda x: checkpoint(F.dropout, x, use_reentrant=True),
    "use_reentrant=False": lambda x: checkpoint(F.dropout, x, use_reentrant=False),
    "use_reentrant=False, of a list": lambda x: checkpoint(lambda xs: F.dropout(xs[0]), [x], use_reentrant=False),
    "use_reentrant=False, of a dict": lambda x: checkpoint(
        lambda batch: F.dropout(batch["x"]), {"x": x}, use_reentrant=False
    ),
}
