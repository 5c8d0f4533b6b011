"""Generators of simulated devices, with a seed and an offset like CUDA's Philox generators, and one per device for
``torch.cuda.manual_seed`` and similar functions.

The backing device draws the numbers. For each operator it is seeded with a hash of seed and offset. So the numbers
of an operator depend only on these two, and the offset can be set. The numbers differ from those of CUDA.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from mgpu_check.simulated.cuda.streams import is_capturing
from mgpu_check.simulated.node import (
    active_node,
    current_index,
    device_index,
    present_node,
    simulated_device,
    untraced_device,
)
from mgpu_check.torch_hooks.patches import Patches, entered, replaced

_base = torch._C.Generator
_STATE = struct.Struct("<QQ")  # seed and offset, in the layout of CUDA's state
_STEP = 4  # offsets are multiples of 4: Philox draws four numbers at a time
# Elements that one wave of threads of a device with one multiprocessor draws by four numbers each.
_PER_STEP = 4 * 256 * 8
_MASK = 2**64 - 1
_GOLDEN_RATIO = 0x9E3779B97F4A7C15  # of 2^64, as splitmix64 steps


@dataclass(eq=False)
class _GeneratorState:
    """The seed and the offset of a generator. Several generators may share them."""

    seed: int = 0
    offset: int = 0

    def mixed(self) -> int:
        """Return the seed of the next operator, by the finalizer of splitmix64."""
        z = (self.seed + _GOLDEN_RATIO * (self.offset // _STEP + 1)) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)


def _refuse_while_capturing(action: str) -> None:
    if is_capturing():
        raise RuntimeError(
            f"{action} during CUDA graph capture. If you need this call to be captured, please file an issue. Current "
            "cudaStreamCaptureStatus: cudaStreamCaptureStatusActive"
        )


class DeviceGenerator(_base):
    """A generator that belongs to a simulated device.

    Entering a node makes one for each device; the program may make others by ``torch.Generator``. Each random operator
    seeds it for itself, in `drawing`. Its state may be exchanged, so that a replay of a graph draws from its own.
    """

    _dev: torch.device
    state: _GeneratorState

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute in the stubs
        return self._dev

    def manual_seed(self, seed: int) -> DeviceGenerator:
        _refuse_while_capturing("Cannot call CUDAGeneratorImpl::set_current_seed")
        _base.manual_seed(self, seed)
        self.state.seed, self.state.offset = _base.initial_seed(self) & _MASK, 0
        return self

    def seed(self) -> int:
        _refuse_while_capturing("Cannot call CUDAGeneratorImpl::seed")
        drawn = _base.seed(self)
        self.state.seed, self.state.offset = drawn & _MASK, 0
        return drawn

    def initial_seed(self) -> int:
        _refuse_while_capturing("Cannot call CUDAGeneratorImpl::current_seed")
        return self.state.seed

    def get_offset(self) -> int:
        _refuse_while_capturing("Cannot call CUDAGeneratorImpl::get_offset")
        return self.state.offset

    def set_offset(self, offset: int) -> DeviceGenerator:
        _refuse_while_capturing("Cannot call CUDAGeneratorImpl::set_offset")
        self._set(self.state.seed, offset)
        return self

    def _set(self, seed: int, offset: int) -> None:
        if offset % _STEP:
            raise RuntimeError("offset must be a multiple of 4")
        self.state.seed, self.state.offset = seed, offset

    def get_state(self) -> torch.Tensor:
        packed = _STATE.pack(self.initial_seed(), self.state.offset)
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> DeviceGenerator:
        _refuse_while_capturing(
            "Please ensure to utilize the CUDAGeneratorImpl::set_state_index method during capturing."
        )
        if not isinstance(new_state, torch.Tensor) or new_state.dtype != torch.uint8 or new_state.device.type != "cpu":
            raise TypeError("RNG state must be a torch.ByteTensor")
        content = bytes(new_state.flatten().tolist())
        if len(content) not in (_STATE.size, _STATE.size // 2):
            raise RuntimeError("RNG state is wrong size")
        self._set(*_STATE.unpack(content.ljust(_STATE.size, b"\0")))
        return self

    def clone_state(self) -> DeviceGenerator:
        return made_on(self._dev, _base.device.__get__(self), _GeneratorState(self.state.seed, self.state.offset))

    def graphsafe_get_state(self) -> DeviceGenerator:
        return made_on(self._dev, _base.device.__get__(self), self.state)

    def graphsafe_set_state(self, state: torch.Generator) -> DeviceGenerator:
        if not isinstance(state, DeviceGenerator):
            raise RuntimeError("Expected a CUDA Generator")
        self.state = state.state
        return self


_own: weakref.WeakValueDictionary[int, DeviceGenerator] = weakref.WeakValueDictionary()
"""Address of torch's generator -> its object here: operators get theirs from C++, which wraps it in a plain object."""


def made_on(device: torch.device, backing: torch.device, state: _GeneratorState | None = None) -> DeviceGenerator:
    """Make a generator that belongs to the simulated device `device`.

    `backing`: the real device that computes for it. `state`: the seed and the offset, shared and not copied; None for a
    new state with torch's default seed.
    """
    generator: DeviceGenerator = DeviceGenerator.__new__(DeviceGenerator, device=backing)  # type: ignore[call-arg]  # not in the stubs
    generator._dev = device
    generator.state = state or _GeneratorState(_base.initial_seed(generator) & _MASK)
    _own[_address(generator)] = generator
    return generator


def _address(generator: torch.Generator) -> int:
    return int(generator._cdata)  # type: ignore[attr-defined]  # not in the stubs


def owner_of(generator: torch.Generator) -> torch.Generator:
    """Return the simulated generator over the same state as `generator`, or `generator` itself."""
    return _own.get(_address(generator), generator)


def device_of(generator: torch.Generator) -> torch.device:
    return owner_of(generator).device


class Draws:
    """The generators that an operation used, with their states and offsets before it.

    A `GraphRecorder` makes it for each operation of a capture. The end of the capture undoes the draws, and each replay
    draws from the recorded states.
    """

    def __init__(self) -> None:
        self._states: list[tuple[DeviceGenerator, _GeneratorState, int]] = []

    def add(self, generator: DeviceGenerator) -> None:
        self._states.append((generator, generator.state, generator.state.offset))

    def noted(self) -> contextlib.AbstractContextManager[None]:
        """Add every generator that this thread uses inside the context."""
        return replaced(_noting, "draws", self)

    def undo(self) -> None:
        for _, state, offset in reversed(self._states):
            state.offset = offset

    def states(self) -> contextlib.AbstractContextManager[None]:
        """Use the recorded states inside the context, with their present offsets."""
        return entered(*(replaced(generator, "state", state) for generator, state, _ in self._states))


class _Noting(threading.local):
    draws: Draws | None = None


_noting = _Noting()
_drawing = threading.RLock()  # threads share the generators: DataParallel's replicas, backward


@contextlib.contextmanager
def drawing(
    generator: torch.Generator, ambient: torch.Generator | None = None, variant: int = 0
) -> Iterator[list[torch.Tensor]]:
    """Seed `generator` for one operator, or `ambient` instead, whose state is restored at the exit.

    Yields a list; the caller adds the drawn tensors to it. The offset advances by their size. Each `variant` of a state
    has other numbers.
    """
    generator = owner_of(generator)
    assert isinstance(generator, DeviceGenerator)
    drawn: list[torch.Tensor] = []
    with _drawing:
        if _noting.draws is not None:
            _noting.draws.add(generator)
        source = generator if ambient is None else ambient
        kept = None if ambient is None else ambient.get_state()
        _base.manual_seed(source, (generator.state.mixed() ^ variant * _GOLDEN_RATIO) & _MASK)
        fresh = _base.get_state(source)
        try:
            yield drawn
        finally:
            with torch._C._DisableTorchDispatch():
                if not torch.equal(fresh, _base.get_state(source)):  # dropout with probability 0 draws nothing
                    largest = max((t.numel() for t in drawn), default=1)
                    generator.state.offset += -(-largest // _PER_STEP) * _STEP
            if kept is not None:
                source.set_state(kept)


class _GeneratorMeta(type(_base)):  # type: ignore[misc]
    """Metaclass of the replacement of ``torch.Generator``, which makes both kinds; all generators are its instances."""

    def __call__(cls, device: object = "cpu") -> torch.Generator:
        target = simulated_device(device)
        if target is None:
            return _base(device)  # type: ignore[arg-type]
        node = active_node()
        return made_on(target, torch.device("cpu") if node is None else node.backing)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _base)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _base)


def drawn_permutation(n: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return a permutation of n, int64 `[n]`, that only the seed decides."""
    generator = _base()
    _base.manual_seed(generator, seed & _MASK)
    permutation: torch.Tensor = torch.ops.aten.randperm.generator(n, generator=generator)
    return permutation.to(device)


def device_generators(devices: Iterable[torch.device], backing: torch.device) -> tuple[torch.Generator, ...]:
    """Make one generator per device, with the seed of the CPU's default generator."""
    seed = torch.initial_seed() & (2**63 - 1)
    return tuple(made_on(device, backing).manual_seed(seed) for device in devices)


def ambient_generator(backing: torch.device) -> torch.Generator:
    """Return the generator of the backing device itself; call this before entering the node replaces these names."""
    return torch.default_generator if backing.type == "cpu" else torch.cuda.default_generators[backing.index]


def _generator(device: object = None) -> torch.Generator:
    node = present_node()
    resolved = untraced_device(device)
    if resolved is None:
        node.initialize()
    else:
        simulated_device(resolved)  # raises for an invalid ordinal
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


def _set_rng_state(new_state: torch.Tensor, device: object = "cuda") -> None:
    _generator(device).set_state(new_state)


def _set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(_generators(), new_states, strict=False):
        generator.set_state(state)


def install_random(patches: Patches) -> None:
    patches.replace(torch.Generator, _GeneratorMeta("Generator", (_base,), {"__module__": "torch._C"}))
    functions: dict[str, Callable[..., object]] = {
        "initial_seed": lambda: _generator().initial_seed(),
        "get_rng_state": lambda device="cuda": _generator(device).get_state(),
        "get_rng_state_all": lambda: [generator.get_state() for generator in _generators()],
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed_all,
        "seed": _seed,
        "seed_all": lambda: _manual_seed_all(_seeded()[current_index()].seed()),
        "set_rng_state": _set_rng_state,
        "set_rng_state_all": _set_rng_state_all,
    }
    for name, function in functions.items():
        for owner in (torch.cuda, torch.cuda.random):
            patches.set(owner, name, function)
    patches.set(torch.cuda, "default_generators", ())
