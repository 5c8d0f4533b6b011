"""Check the random generators of devices: each is independent, and only seeds and states determine its numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.oracles.generated_data import digest
from mgpu_check.suite.devices.seeded_ranks import DrawnBy
from mgpu_check.suite.devices.streams import current_device_kept, require

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
