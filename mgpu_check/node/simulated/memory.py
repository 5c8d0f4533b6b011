"""Memory figures of a simulated device, true by construction: every storage reports its birth and its death.

A :class:`Block` hangs on the Python object of a storage, which lives exactly as long as the storage does, however many
tensors view it and whether Python or C++ holds them.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["BLOCK", "Block", "DeviceMemory", "block_of"]

BLOCK = "_mgpu_check_block"
_ROUND = 512  # the caching allocator of CUDA hands out multiples of this many bytes
_SEGMENT = 2 << 20  # and takes memory from the driver in multiples of this many
_TOTAL = 16 << 30
# One for all devices, and re-entrant: a garbage collection inside may end other blocks.
_lock = threading.RLock()


class DeviceMemory:
    """Bytes of one simulated device: ``allocated`` by live storages, ``reserved`` from its ``total``."""

    __slots__ = ("allocated", "allocations", "index", "limit", "peak", "reserved", "reserved_peak", "total")

    def __init__(self, index: int, total: int = _TOTAL) -> None:
        self.index = index
        self.total = total
        self.limit = total
        self.allocations = 0
        self.allocated = self.peak = 0
        self.reserved = self.reserved_peak = 0

    def take(self, nbytes: int) -> None:
        """Count ``nbytes`` as allocated; raises ``torch.OutOfMemoryError`` past the limit."""
        with _lock:
            wanted = self.allocated + nbytes
            if wanted > self.limit:
                raise torch.OutOfMemoryError(self._exhausted(nbytes))
            self.allocated = wanted
            self.allocations += 1
            self.peak = max(self.peak, wanted)
            if wanted > self.reserved:
                self.reserved = -(-wanted // _SEGMENT) * _SEGMENT
                self.reserved_peak = max(self.reserved_peak, self.reserved)

    def give_back(self, nbytes: int) -> None:
        with _lock:
            self.allocated -= nbytes

    def empty_cache(self) -> None:
        with _lock:
            self.reserved = -(-self.allocated // _SEGMENT) * _SEGMENT

    def reset_peak(self) -> None:
        with _lock:
            self.peak = self.allocated
            self.reserved_peak = self.reserved

    def _exhausted(self, nbytes: int) -> str:
        def size(count: int) -> str:
            return f"{count / 2**30:.2f} GiB" if count >= 1 << 30 else f"{count / 2**20:.2f} MiB"

        return (
            f"CUDA out of memory. Tried to allocate {size(nbytes)}. GPU {self.index} has a total capacity of "
            f"{size(self.total)} of which {size(self.limit - self.allocated)} is free. Of the allocated memory "
            f"{size(self.allocated)} is allocated by PyTorch, and {size(self.reserved - self.allocated)} is reserved "
            "by PyTorch but unallocated."
        )


class Block:
    """What one storage takes of a device, given back when the storage dies."""

    __slots__ = ("device", "memory", "nbytes")

    def __init__(self, device: torch.device, memory: DeviceMemory, nbytes: int) -> None:
        self.nbytes = 0
        self.device = device
        self.memory = memory
        self.resize(nbytes)

    def resize(self, nbytes: int) -> None:
        rounded = -(-nbytes // _ROUND) * _ROUND
        if rounded > self.nbytes:
            self.memory.take(rounded - self.nbytes)
        else:
            self.memory.give_back(self.nbytes - rounded)
        self.nbytes = rounded

    def __del__(self) -> None:
        if self.nbytes:
            self.memory.give_back(self.nbytes)


def block_of(storage: torch.UntypedStorage) -> Block | None:
    """The block of a storage on a simulated device; None for any other storage."""
    block: Block | None = storage.__dict__.get(BLOCK)
    return block
