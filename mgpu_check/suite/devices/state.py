"""Check the state of devices: their memory, tensors that are loaded onto them, and their random generators.

Statistics and refused allocations are those of one device. Each generator is independent, and only seeds and states
determine its numbers.
"""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.oracles.agreement import WrongCase, difference, named_wrong
from mgpu_check.oracles.generated_data import ALL, anything, digest
from mgpu_check.suite.devices.seeded_ranks import DrawnBy
from mgpu_check.suite.devices.streams import current_device_kept, require
from mgpu_check.torch_hooks.tensors import name_of

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
    _refuses(device, total + (1 << 20), total)
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


def _refuses(device: torch.device, wanted: int, total: int) -> None:
    try:
        torch.empty(wanted, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        pass
    except RuntimeError as error:
        _require(device, False, f"an allocation beyond its memory raised {type(error).__name__}: {error}")
    else:
        _require(device, False, f"{wanted} bytes were allocated, of {total} that it has")


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


def _require_same(before: dict[str, int], after: dict[str, int], condition: str, device: torch.device) -> None:
    odd = [name for name in before if before[name] != after[name]]
    require(not odd, f"{device}: {condition}, but {', '.join(odd)} gave different numbers", device)


def assert_generators_apart(devices: Sequence[torch.device], seed: int = 0) -> None:
    """Assert that seeding affects the right generators, and that drawing affects only the generator of its device.
    `torch.manual_seed` and `manual_seed_all` must seed all devices, and `torch.cuda.manual_seed` the current one."""
    with current_device_kept(), _generators_kept():
        _seeds(devices, seed)
        _independence(devices, seed)


def _seeds(devices: Sequence[torch.device], seed: int) -> None:
    torch.manual_seed(seed)
    draws = {device: _draws(device) for device in devices}
    for name, seeding in (
        ("torch.manual_seed", torch.manual_seed),
        ("torch.cuda.manual_seed_all", torch.cuda.manual_seed_all),
    ):
        seeding(seed)
        for device in reversed(devices):
            _require_same(draws[device], _draws(device), f"seeded twice with {seed} by {name}", device)
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
        _require_same(draws[device], _draws(device), f"seeded with {seed} by torch.cuda.manual_seed", device)


def _independence(devices: Sequence[torch.device], seed: int) -> None:
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
            _require_same(draws, _draws(device), "its state was kept and set again", device)
            torch.cuda.set_rng_state_all(every)
            _require_same(draws, _draws(device), "all states were kept and set again", device)
            torch.cuda.set_rng_state_all(every)
            with torch.random.fork_rng(devices=[device]):
                torch.cuda.manual_seed_all(seed + 77)
                _draws(device)
            _require_same(draws, _draws(device), "fork_rng has been left", device)
            torch.cuda.set_rng_state_all(every)
            _own_generator(device, seed)
            _require_same(draws, _draws(device), "a generator of one's own has drawn", device)
            _recomputed(device)
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
        _require_same(draws[device], _draws(device), "fork_rng of several devices has been left", device)


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


def _recomputed(device: torch.device) -> None:
    """Require that recomputed dropout drops the same elements as forward, and keeps the state of the generator."""
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
