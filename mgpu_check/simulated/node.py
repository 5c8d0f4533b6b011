"""The simulated node of this process: its devices, their order by `CUDA_VISIBLE_DEVICES`, the current device of each
thread, the memory of the devices, and the errors for parts of CUDA that it lacks.

Memory is counted exactly: every storage reports when it is created and when it is freed, and has an address on
devices whose hardware is simulated too. A :class:`Block` is an attribute of the Python object of a storage. The
object lives exactly as long as the storage, no matter how many tensors view the storage, and whether Python or C++
holds them.
"""

from __future__ import annotations

import bisect
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn

import torch


def uuid_of(physical: int) -> str:
    """Return the UUID of a device of the machine, without NVML's prefix "GPU-"."""
    return f"5107a7ed-0000-0000-0000-{physical:012d}"


def visible(listed: str | None, total: int) -> tuple[int, ...]:
    """Return the visible devices, of ``total`` in the machine, for this value of the variable, in its order.

    An entry is an index, or "GPU-" and the beginning of a UUID that only one device has. The driver stops at the first
    invalid entry. If a device is listed twice, no device is visible. None means that the variable is not set.
    """
    if listed is None:
        return tuple(range(total))
    devices: list[int] = []
    for entry in listed.split(","):
        device = _device(entry.strip(), total)
        if device is None:
            break
        if device in devices:
            return ()
        devices.append(device)
    return tuple(devices)


def _device(entry: str, total: int) -> int | None:
    if entry.startswith("GPU-"):
        matches = [i for i in range(total) if f"GPU-{uuid_of(i)}".startswith(entry.lower().replace("gpu-", "GPU-", 1))]
        return matches[0] if len(matches) == 1 else None
    index = re.match(r"\+?\d+", entry)
    return int(index[0]) if index is not None and int(index[0]) < total else None


def refused(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises RuntimeError because ``name`` is not available."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"{name} is not available on a simulated node; run this part on real devices")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    return refuse


def refused_class(name: str) -> type:
    """Return a class whose construction raises RuntimeError; code may import it, annotate with it, and subclass it."""
    refuse = refused(name)
    home, _, short = name.rpartition(".")
    return type(short, (), {"__module__": home, "__new__": lambda cls, *a, **k: refuse()})


class Addresses:
    """The memory of one device, as offsets from 0. The caller must hold `_lock`."""

    def __init__(self, total: int) -> None:
        self._free: list[tuple[int, int]] = [(0, total)]  # start and end of each gap, in order

    def place(self, nbytes: int) -> int | None:
        """Take the lowest gap of at least ``nbytes`` bytes, and return its address; None if no gap is large enough."""
        for position, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                if end - start == nbytes:
                    del self._free[position]
                else:
                    self._free[position] = (start + nbytes, end)
                return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        end = start + nbytes
        position = bisect.bisect(self._free, (start, end))
        if position < len(self._free) and self._free[position][0] == end:
            end = self._free.pop(position)[1]
        if position and self._free[position - 1][1] == start:
            position -= 1
            start = self._free.pop(position)[0]
        self._free.insert(position, (start, end))


BLOCK = "_mgpu_check_block"
_ROUND = 512  # the caching allocator of CUDA hands out multiples of this many bytes
_SEGMENT = 2 << 20  # and takes memory from the driver in multiples of this many
_SMALL = 1 << 20  # bytes; larger blocks come from the other pool
_TOTAL = 16 << 30
_EXABYTE = 1 << 60  # the allocator refuses this many bytes or more without a call to the driver
# One lock for all devices, and re-entrant: a garbage collection under the lock may free other blocks.
_lock = threading.RLock()


def _segments(nbytes: int) -> int:
    return -(-nbytes // _SEGMENT) * _SEGMENT


class Pool:
    """Blocks and bytes of one pool of a device: in use now, at the peak, and allocated in total."""

    __slots__ = (
        *("blocks", "blocks_given", "blocks_peak", "bytes", "bytes_given", "bytes_peak", "requested", "reserved"),
        *("since",),
    )

    def __init__(self) -> None:
        self.blocks = self.blocks_peak = self.blocks_given = 0
        self.bytes = self.bytes_peak = self.bytes_given = 0
        self.reserved = self.requested = 0
        self.since = (0, 0, 0, 0)  # at the last reset: blocks given, blocks freed, bytes given, bytes freed


class DeviceMemory:
    """Bytes of one simulated device: ``allocated`` by live storages, ``reserved`` from its ``total``.

    The node makes one for each visible device when memory is first used. Blocks take bytes from it and give them back,
    even after the node has been left.
    """

    __slots__ = (
        *("addresses", "allocated", "emptied", "exhausted", "freed", "index", "large", "limit", "peak", "reserved"),
        *("reserved_peak", "small", "taken", "total"),
    )

    def __init__(self, index: int, total: int = _TOTAL) -> None:
        self.index, self.total, self.limit = index, total, total
        self.small, self.large = Pool(), Pool()
        self.allocated = self.peak = 0
        self.reserved = self.reserved_peak = 0
        self.exhausted = 0
        self.emptied = 0
        self.taken = self.freed = 0  # how often memory was taken from the driver, and returned to it
        self.addresses: Addresses | None = None  # of blocks, if the hardware of the device is simulated too

    def take(self, nbytes: int, requested: int) -> None:
        """Add a block of ``nbytes`` for a request of ``requested`` bytes, or raise ``torch.OutOfMemoryError``."""
        with _lock:
            wanted = self.allocated + nbytes
            if wanted > self.limit:
                self._refuse(nbytes)
            self.allocated = wanted
            if wanted > self.peak:
                self.peak = wanted
            pool = self.small if nbytes <= _SMALL else self.large
            pool.blocks += 1
            pool.blocks_given += 1
            if pool.blocks > pool.blocks_peak:
                pool.blocks_peak = pool.blocks
            pool.bytes = wanted = pool.bytes + nbytes
            pool.bytes_given += nbytes
            pool.requested += requested
            if wanted > pool.bytes_peak:
                pool.bytes_peak = wanted
            if wanted > pool.reserved:
                self._reserve(pool)

    def pool_of(self, nbytes: int) -> Pool:
        return self.small if nbytes <= _SMALL else self.large

    def require(self, nbytes: int) -> None:
        """Raise ``torch.OutOfMemoryError`` if a storage of ``nbytes`` would not fit; allocate nothing."""
        if self.allocated + nbytes > self.limit:
            self._refuse(nbytes)

    def give_back(self, nbytes: int, requested: int) -> None:
        with _lock:
            self.allocated -= nbytes
            pool = self.small if nbytes <= _SMALL else self.large
            pool.blocks -= 1
            pool.bytes -= nbytes
            pool.requested -= requested

    def ask_again(self, nbytes: int, extra: int) -> None:
        """Add ``extra`` (may be negative) to the requested bytes of a block of ``nbytes`` that keeps its size."""
        with _lock:
            self.pool_of(nbytes).requested += extra

    def _reserve(self, pool: Pool) -> None:
        self.taken += 1
        growth = _segments(pool.bytes) - pool.reserved
        pool.reserved += growth
        self.reserved += growth
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def empty_cache(self) -> None:
        with _lock:
            self.emptied += 1  # CUDA waits for the device each time
            for pool in (self.small, self.large):
                self.freed += pool.reserved > _segments(pool.bytes)
                pool.reserved = _segments(pool.bytes)
            self.reserved = self.small.reserved + self.large.reserved

    def reset_peak(self) -> None:
        with _lock:
            self.peak = self.allocated
            self.reserved_peak = self.reserved
            for pool in (self.small, self.large):
                pool.blocks_peak, pool.bytes_peak = pool.blocks, pool.bytes

    def reset_accumulated(self) -> None:
        with _lock:
            self.exhausted = 0
            for pool in (self.small, self.large):
                blocks, size = pool.blocks_given, pool.bytes_given
                pool.since = (blocks, blocks - pool.blocks, size, size - pool.bytes)

    def _refuse(self, nbytes: int) -> NoReturn:
        if nbytes >= _EXABYTE:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than 1EB memory.")
        self.exhausted += 1

        def size(count: int) -> str:
            return f"{count / 2**30:.2f} GiB" if count >= 1 << 30 else f"{count / 2**20:.2f} MiB"

        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size(nbytes)}. GPU {self.index} has a total capacity of "
            f"{size(self.total)} of which {size(self.limit - self.allocated)} is free. Of the allocated memory "
            f"{size(self.allocated)} is allocated by PyTorch, and {size(self.reserved - self.allocated)} is reserved "
            "by PyTorch but unallocated."
        )


class Block:
    """The memory of a device that one storage uses.

    Whatever first puts a storage on a device makes it, mostly `tensor.tag`, and stores it in the storage's attributes.
    `resize` follows the storage. When Python frees the storage, the block returns its bytes.
    """

    __slots__ = ("_addresses", "address", "device", "memory", "nbytes", "requested")

    def __init__(self, device: torch.device, memory: DeviceMemory, nbytes: int) -> None:
        self.nbytes = self.requested = 0
        self.device, self.memory = device, memory
        self.address: int | None = None  # none on a device without simulated hardware
        self._addresses: Addresses | None = None
        self.resize(nbytes)

    def resize(self, nbytes: int) -> None:
        """Take a block of the new size and return this one, as CUDA does when a storage is resized."""
        rounded = -(-nbytes // _ROUND) * _ROUND
        if rounded == self.nbytes:
            if rounded:
                self.memory.ask_again(rounded, nbytes - self.requested)
            self.requested = nbytes
            return
        if rounded:
            self.memory.take(rounded, nbytes)
        before, requested = self.nbytes, self.requested
        self.nbytes, self.requested = rounded, nbytes
        if before:
            self.memory.give_back(before, requested)
        if self._addresses is not None or self.memory.addresses is not None:
            self._move(before)

    def _move(self, before: int) -> None:
        """Free the address of the ``before`` bytes, and take one for the present bytes."""
        with _lock:
            if self._addresses is not None and self.address is not None:
                self._addresses.give_back(self.address, before)
            self._addresses, self.address = self.memory.addresses if self.nbytes else None, None
            if self._addresses is not None:
                self.address = self._addresses.place(self.nbytes)

    def __del__(self) -> None:
        if self.nbytes:
            self.memory.give_back(self.nbytes, self.requested)
            if self._addresses is not None and self.address is not None:
                with _lock:
                    self._addresses.give_back(self.address, self.nbytes)


def block_of(storage: torch.UntypedStorage) -> Block | None:
    """Return the block of a storage on a simulated device; None for any other storage."""
    return storage.__dict__.get(BLOCK)


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
    """The simulated devices of one process, on one backing device.

    `simulated_node` makes it and enters it for all threads. The first use of a device calls `initialize`. The exit of
    the context drops it; a forked process inherits it, and may use it if the parent had not called the driver.

    The driver reads `CUDA_VISIBLE_DEVICES` at its first call; the visible devices are fixed from then on.
    """

    total: int  # number of devices of the machine, before `CUDA_VISIBLE_DEVICES`
    backing: torch.device  # real device that computes
    seeded: tuple[torch.Generator, ...] = ()  # one generator per device; the first belongs to the first visible device
    # generator of the backing device; operators without a generator argument draw from it
    ambient: torch.Generator = torch.default_generator
    pid: int | None = None  # process that first called the driver; None before
    initialized: bool = False  # whether this process, or an ancestor that forked it, has used a device
    # functions to call at the first use of a device
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


def present_node() -> SimulatedNode:
    """Return the node of this process; raise RuntimeError outside a simulation."""
    if _node is None:
        raise RuntimeError("the simulated node is not active")
    return _node


def enter_node(node: SimulatedNode | None) -> None:
    """Enter a node; None leaves it."""
    global _node
    _node = node
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
        return _DEVICE_TYPE(device)
    if isinstance(device, int) and not isinstance(device, bool):
        if device < 0:
            raise RuntimeError(f"Device index must not be negative, got {device}")
        return _DEVICE_TYPE("cuda", device)
    return None


def simulated_device(device: object) -> torch.device | None:
    """Return the simulated device that ``device`` names; None for other devices (the CPU, meta, ...).

    A bare "cuda" is the current device. Raises CUDA's error for an ordinal that does not exist.
    """
    node = _node
    if node is None:
        return None
    resolved = untraced_device(device)
    if resolved is None or resolved.type != "cuda":
        return None
    if not node.initialized or node.pid != os.getpid():
        node.initialize()
    index = _current.index if resolved.index is None else resolved.index
    if index >= node.n:
        raise invalid_ordinal()
    return node.devices[index]


def device_index(device: object = None) -> int:
    """Return the index of ``device`` (None: the current one), as the functions of ``torch.cuda`` read it."""
    if device is None:
        return _current.index
    if isinstance(index := getattr(device, "idx", None), int):  # torch.cuda.device(i)
        return index
    resolved = untraced_device(device)
    if resolved is None or resolved.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return _current.index if resolved.index is None else int(resolved.index)
