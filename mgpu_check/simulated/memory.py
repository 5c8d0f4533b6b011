"""Memory figures of a simulated device, true by construction: every storage reports its birth and its death.

A :class:`Block` hangs on the Python object of a storage, which lives exactly as long as the storage does, however many
tensors view it and whether Python or C++ holds them.
"""

from __future__ import annotations

import threading
from typing import NoReturn

import torch

from mgpu_check.simulated.addresses import Addresses

__all__ = ["BLOCK", "Block", "DeviceMemory", "Pool", "block_of"]

BLOCK = "_mgpu_check_block"
_ROUND = 512  # the caching allocator of CUDA hands out multiples of this many bytes
_SEGMENT = 2 << 20  # and takes memory from the driver in multiples of this many
_SMALL = 1 << 20  # what is larger comes from the other pool
_TOTAL = 16 << 30
_EXABYTE = 1 << 60  # as much, or more, is refused before the driver is asked
# One for all devices, and re-entrant: a garbage collection inside may end other blocks.
_lock = threading.RLock()


def _segments(nbytes: int) -> int:
    return -(-nbytes // _SEGMENT) * _SEGMENT


class Pool:
    """Counts of one pool of a device: blocks and bytes, now, at most, and all that were ever handed out."""

    __slots__ = (
        "blocks",
        "blocks_given",
        "blocks_peak",
        "bytes",
        "bytes_given",
        "bytes_peak",
        "requested",
        "reserved",
        "since",
    )

    def __init__(self) -> None:
        self.blocks = self.blocks_peak = self.blocks_given = 0
        self.bytes = self.bytes_peak = self.bytes_given = 0
        self.reserved = self.requested = 0
        self.since = (0, 0, 0, 0)  # what was given and freed before the last reset: blocks, then bytes

    def reset_peak(self) -> None:
        self.blocks_peak, self.bytes_peak = self.blocks, self.bytes

    def reset_accumulated(self) -> None:
        given, size = self.blocks_given, self.bytes_given
        self.since = (given, given - self.blocks, size, size - self.bytes)


class DeviceMemory:
    """Bytes of one simulated device: ``allocated`` by live storages, ``reserved`` from its ``total``.

    ``addresses`` says where blocks lie, on a device whose hardware is simulated, too.
    """

    __slots__ = (
        "addresses",
        "allocated",
        "emptied",
        "exhausted",
        "freed",
        "index",
        "large",
        "limit",
        "peak",
        "reserved",
        "reserved_peak",
        "small",
        "taken",
        "total",
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
        self.taken = self.freed = 0  # how often the driver was asked for memory, and was given it back
        self.addresses: Addresses | None = None

    def take(self, nbytes: int, requested: int) -> None:
        """Count a block of ``nbytes``, of which so many were asked for; raises ``torch.OutOfMemoryError`` past the limit."""
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
        """Return the pool that hands out blocks of this size."""
        return self.small if nbytes <= _SMALL else self.large

    def require(self, nbytes: int) -> None:
        """Raise ``torch.OutOfMemoryError`` where a storage of ``nbytes`` would not fit, before anybody allocates it."""
        if self.allocated + nbytes > self.limit:
            self._refuse(nbytes)

    def give_back(self, nbytes: int, requested: int) -> None:
        """Count a block no more."""
        with _lock:
            self.allocated -= nbytes
            pool = self.small if nbytes <= _SMALL else self.large
            pool.blocks -= 1
            pool.bytes -= nbytes
            pool.requested -= requested

    def ask_again(self, nbytes: int, more: int) -> None:
        """Count that a block of ``nbytes`` was asked for with so many bytes more, or fewer, than before."""
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
            self.emptied += 1  # each time the device is waited for
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
        """Raise the error of CUDA's allocator for ``nbytes`` that do not fit."""
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
    """The memory that one storage takes of a device, given back when the storage dies.

    ``address`` is where it lies, if that is known.
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
        """Take another block and give this one back, as the storage of a device does that is resized."""
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
        """Lie where there is room for the bytes of now, and no longer where the bytes of before were."""
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
