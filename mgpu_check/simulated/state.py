"""Hold the simulated node of this process: its devices, their order, and the current device of each thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from mgpu_check.simulated.masks import visible
from mgpu_check.simulated.memory import DeviceMemory

# The C type, kept because `torch.device` itself is replaced while a simulation is active.
_DEVICE_TYPE: type = type(torch.device("cpu"))

_ERROR = (
    "CUDA error: {}\n"
    "{}"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
_BAD_FORK = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
    "start method"
)


@dataclass(eq=False)
class SimulatedNode:
    """Simulated devices on one backing device.

    The driver reads `CUDA_VISIBLE_DEVICES` at its first call; the visible devices are fixed from then on.

    Attributes:
        total: number of devices of the machine, before `CUDA_VISIBLE_DEVICES`.
        backing: real device that computes.
        seeded: one generator per device; the first belongs to the first visible device.
        ambient: generator of the backing device; operators without a generator argument draw from it.
        pid: process that first called the driver; None before.
        initialized: whether this process, or an ancestor that forked it, has used a device.
        at_first_use: functions to call at the first use of a device.
    """

    total: int
    backing: torch.device
    seeded: tuple[torch.Generator, ...] = ()
    ambient: torch.Generator = torch.default_generator
    pid: int | None = None
    initialized: bool = False
    at_first_use: list[Callable[[], object]] = field(default_factory=list)

    @cached_property
    def physical(self) -> tuple[int, ...]:
        """Index in the machine of each visible device. The first access counts as a call to the driver."""
        self.pid = os.getpid()
        return self.visible()

    @cached_property
    def n(self) -> int:
        return len(self.physical)

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        return tuple(_DEVICE_TYPE("cuda", i) for i in range(self.n))

    @cached_property
    def memory(self) -> tuple[DeviceMemory, ...]:
        return tuple(DeviceMemory(i) for i in range(self.n))

    @cached_property
    def generators(self) -> tuple[torch.Generator, ...]:
        return self.seeded[: self.n]

    def visible(self) -> tuple[int, ...]:
        """Return the devices of the machine that the present `CUDA_VISIBLE_DEVICES` selects."""
        # A real backing device sees the variable itself.
        listed = os.environ.get("CUDA_VISIBLE_DEVICES") if self.backing.type == "cpu" else None
        return visible(listed, self.total)

    def count(self) -> int:
        """Return the number of devices without a call to the driver: before the first use, by the present variable."""
        return self.n if self.initialized else len(self.visible())

    @property
    def in_bad_fork(self) -> bool:
        """True if this process was forked after its parent called the driver, which does not survive a fork."""
        return self.pid is not None and self.pid != os.getpid()

    def initialize(self) -> None:
        """Initialize as torch does before the first use of a device; raise torch's error in a bad fork."""
        if self.in_bad_fork:
            raise RuntimeError(_BAD_FORK)
        if self.initialized:
            return
        if not self.n:
            raise RuntimeError("No CUDA GPUs are available")
        self.initialized = True
        for call in self.at_first_use:
            call()


class _Current(threading.local):
    index: int = 0


_current = _Current()
_node: SimulatedNode | None = None


def active_node() -> SimulatedNode | None:
    """Return the node of this process, or None outside a simulation."""
    return _node


def enter_node(node: SimulatedNode) -> None:
    global _node
    _node = node
    _current.index = 0


def leave_node() -> None:
    global _node
    _node = None
    _current.index = 0


def current_index() -> int:
    """Return the current device of this thread; a new thread starts at 0, as CUDA's does."""
    return _current.index


def cuda_error(code: int, name: str, hint: str = "") -> RuntimeError:
    error: RuntimeError = torch.AcceleratorError(_ERROR.format(name, hint))
    error.error_code = code  # type: ignore[attr-defined]
    return error


def invalid_ordinal() -> RuntimeError:
    hint = "GPU device may be out of range, do you have enough GPUs?\n"
    return cuda_error(101, "invalid device ordinal", hint)  # cudaErrorInvalidDevice


def set_current_index(index: int) -> None:
    node = _node
    if node is not None:
        node.initialize()
        if not 0 <= index < node.n:
            raise invalid_ordinal()
    _current.index = index


def untraced_device(device: object) -> torch.device | None:
    """Return ``device`` as ``torch.device``; None if it is neither an int, a string nor a device."""
    if isinstance(device, _DEVICE_TYPE):
        return device  # type: ignore[return-value]
    if isinstance(device, str):
        made: torch.device = _DEVICE_TYPE(device)
        return made
    if isinstance(device, int) and not isinstance(device, bool):
        if device < 0:
            raise RuntimeError(f"Device index must not be negative, got {device}")
        return _DEVICE_TYPE("cuda", device)  # type: ignore[no-any-return]
    return None


def simulated_device(device: object) -> torch.device | None:
    """Return the simulated device that ``device`` names; None for other devices (the CPU, meta, ...).

    A bare "cuda" is the current device. Raises CUDA's error for an ordinal that does not exist.
    """
    node = _node
    if node is None:
        return None
    made = untraced_device(device)
    if made is None or made.type != "cuda":
        return None
    if not node.initialized or node.pid != os.getpid():
        node.initialize()
    index = _current.index if made.index is None else made.index
    if index >= node.n:
        raise invalid_ordinal()
    return node.devices[index]


def device_index(device: object = None) -> int:
    """Return the index of ``device`` (None: the current one), as the functions of ``torch.cuda`` read it."""
    if device is None:
        return _current.index
    if isinstance(index := getattr(device, "idx", None), int):  # torch.cuda.device(i)
        return index
    made = untraced_device(device)
    if made is None or made.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return _current.index if made.index is None else int(made.index)
