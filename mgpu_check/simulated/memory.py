"""Count the memory of simulated devices exactly: every storage reports when it is created and when it is freed.

A :class:`Block` is an attribute of the Python object of a storage. The object lives exactly as long as the storage, no
matter how many tensors view the storage, and whether Python or C++ holds them.
"""

from __future__ import annotations

import threading
from typing import NoReturn

import torch

from mgpu_check.simulated.addresses import Addresses

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

    def reset_peak(self) -> None:
        self.blocks_peak, self.bytes_peak = self.blocks, self.bytes

    def reset_accumulated(self) -> None:
        given, size = self.blocks_given, self.bytes_given
        self.since = (given, given - self.blocks, size, size - self.bytes)


class DeviceMemory:
    """Bytes of one simulated device: ``allocated`` by live storages, ``reserved`` from its ``total``.

    ``addresses`` assigns addresses to blocks if the hardware of the device is simulated too, else it is None.
    """

    __slots__ = (
        *("addresses", "allocated", "emptied", "exhausted", "freed", "index", "large", "limit", "peak", "reserved"),
        *("reserved_peak", "small", "taken", "total"),
    )

    def __init__(self, index: int, total: int = _TOTAL) -> None:
        self.index = index
        self.total = total
        self.limit = total
        self.small, self.large = Pool(), Pool()
        self.allocated = self.peak = 0
        self.reserved = self.reserved_peak = 0
        self.exhausted = 0
        self.emptied = 0
        self.taken = self.freed = 0  # how often memory was taken from the driver, and returned to it
        self.addresses: Addresses | None = None

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

    def ask_again(self, nbytes: int, more: int) -> None:
        """Add ``more`` (may be negative) to the requested bytes of a block of ``nbytes`` that keeps its size."""
        with _lock:
            self.pool_of(nbytes).requested += more

    def _reserve(self, pool: Pool) -> None:
        self.taken += 1
        more = _segments(pool.bytes) - pool.reserved
        pool.reserved += more
        self.reserved += more
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
                pool.reset_peak()

    def reset_accumulated(self) -> None:
        with _lock:
            self.exhausted = 0
            for pool in (self.small, self.large):
                pool.reset_accumulated()

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
    """The memory of a device that one storage uses, returned when the storage is freed.

    ``address`` is None on a device without simulated hardware.
    """

    __slots__ = ("_addresses", "address", "device", "memory", "nbytes", "requested")

    def __init__(self, device: torch.device, memory: DeviceMemory, nbytes: int) -> None:
        self.nbytes = self.requested = 0
        self.device = device
        self.memory = memory
        self.address: int | None = None
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
    block: Block | None = storage.__dict__.get(BLOCK)
    return block
