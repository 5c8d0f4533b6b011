"""Provide one generator per simulated device, for ``torch.cuda.manual_seed`` and similar functions."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mgpu_check.simulated.generators import made_on
from mgpu_check.simulated.state import active_node, current_index, device_index, simulated_device, untraced_device
from mgpu_check.torch_hooks.patches import Patches

_base = torch._C.Generator


class _GeneratorMeta(type(_base)):  # type: ignore[misc]
    """Metaclass of the replacement of ``torch.Generator``, which makes both kinds; all generators are its instances."""

    def __call__(cls, device: object = "cpu") -> torch.Generator:
        target = simulated_device(device)
        if target is None:
            return _base(device)  # type: ignore[arg-type]
        return _make(target)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _base)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _base)


def _make(device: torch.device) -> torch.Generator:
    node = active_node()
    return made_on(device, torch.device("cpu") if node is None else node.backing)


def device_generators(devices: Iterable[torch.device], backing: torch.device) -> tuple[torch.Generator, ...]:
    """Make one generator per device, with the seed of the CPU's default generator."""
    made = []
    for device in devices:
        generator = made_on(device, backing)
        generator.manual_seed(torch.initial_seed() & (2**63 - 1))
        made.append(generator)
    return tuple(made)


def ambient_generator(backing: torch.device) -> torch.Generator:
    """Return the generator of the backing device itself.

    Call this before the node is entered: entering replaces the names that this function reads.
    """
    return torch.default_generator if backing.type == "cpu" else torch.cuda.default_generators[backing.index]


def _generator(device: object = None) -> torch.Generator:
    node = active_node()
    if node is None:
        raise RuntimeError("the simulated node is not active")
    made = untraced_device(device)
    if made is None:
        node.initialize()
    else:
        simulated_device(made)  # raises for an invalid ordinal
    return node.generators[device_index(device)]


def _generators() -> tuple[torch.Generator, ...]:
    node = active_node()
    if node is None:
        return ()
    node.initialize()
    return node.generators


def _seeded() -> tuple[torch.Generator, ...]:
    """Return the generators to seed, one per device of the machine.

    Seeding does not initialize CUDA, and must take effect on devices that are used later.
    """
    node = active_node()
    return () if node is None else node.seeded


def _manual_seed(seed: int) -> None:
    _seeded()[current_index()].manual_seed(int(seed))


def _manual_seed_all(seed: int) -> None:
    for generator in _seeded():
        generator.manual_seed(int(seed))


def _seed() -> None:
    _seeded()[current_index()].seed()


def _seed_all() -> None:
    _manual_seed_all(_seeded()[current_index()].seed())


def _initial_seed() -> int:
    return _generator().initial_seed()


def _get_rng_state(device: object = "cuda") -> torch.Tensor:
    return _generator(device).get_state()


def _get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in _generators()]


def _set_rng_state(new_state: torch.Tensor, device: object = "cuda") -> None:
    _generator(device).set_state(new_state)


def _set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(_generators(), new_states, strict=False):
        generator.set_state(state)


def install_random(patches: Patches) -> None:
    generator = _GeneratorMeta("Generator", (_base,), {"__module__": "torch._C"})
    patches.replace(torch.Generator, generator)
    for function in (
        *(_manual_seed, _manual_seed_all, _seed, _seed_all, _initial_seed),
        *(_get_rng_state, _get_rng_state_all, _set_rng_state, _set_rng_state_all),
    ):
        for owner in (torch.cuda, torch.cuda.random):
            patches.set(owner, function.__name__[1:], function)
    patches.set(torch.cuda, "default_generators", ())
