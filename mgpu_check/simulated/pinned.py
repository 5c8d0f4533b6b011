"""Track the pinned memory of the host, from torch's allocator and ``cudaHostRegister``, and the allocator's
statistics."""

from __future__ import annotations

import threading

import torch

_PINNED = "_mgpu_check_pinned"
_lock = threading.RLock()
_registered: dict[int, int] = {}  # address -> end
_KINDS = ("allocations", "allocated_bytes", "active_requests", "active_bytes")


class _Figures:
    """Counts of the host's caching allocator: ``active`` memory is in use, ``allocated`` memory may also be cached."""

    def __init__(self) -> None:
        self.current = dict.fromkeys(_KINDS, 0)
        self.peak = dict.fromkeys(_KINDS, 0)
        self.allocated = dict.fromkeys(_KINDS, 0)
        self.freed = dict.fromkeys(_KINDS, 0)
        self.cached: dict[int, int] = {}  # size -> free blocks
        self.taken = 0
        self.given_back = 0

    def add(self, kind: str, amount: int) -> None:
        self.current[kind] += amount
        self.allocated[kind] += amount
        self.peak[kind] = max(self.peak[kind], self.current[kind])

    def remove(self, kind: str, amount: int) -> None:
        self.current[kind] -= amount
        self.freed[kind] += amount


_figures = _Figures()


class PinnedBlock:
    """The pinned memory of one storage, counted until the storage is freed; sizes are powers of two."""

    __slots__ = ("_figures", "size")

    def __init__(self, nbytes: int) -> None:
        self.size = 1 << max(nbytes - 1, 0).bit_length()
        self._figures = _figures
        with _lock:
            if _figures.cached.get(self.size):
                _figures.cached[self.size] -= 1
            else:
                _figures.taken += 1
                _figures.add("allocations", 1)
                _figures.add("allocated_bytes", self.size)
            _figures.add("active_requests", 1)
            _figures.add("active_bytes", self.size)

    def __del__(self) -> None:
        with _lock:
            self._figures.remove("active_requests", 1)
            self._figures.remove("active_bytes", self.size)
            self._figures.cached[self.size] = self._figures.cached.get(self.size, 0) + 1


def pin(t: torch.Tensor) -> torch.Tensor:
    attributes = t.untyped_storage().__dict__
    if _PINNED not in attributes and t.untyped_storage().nbytes():
        attributes[_PINNED] = PinnedBlock(t.untyped_storage().nbytes())
    return t


def is_pinned(storage: torch.UntypedStorage) -> bool:
    if _PINNED in storage.__dict__:
        return True
    if not _registered:
        return False
    start = storage.data_ptr()
    with _lock:
        return any(first <= start < end for first, end in _registered.items())


def register(pointer: int, size: int) -> int:
    """Register memory as pinned; return CUDA's error code, 0 for success."""
    with _lock:
        if size <= 0 or not pointer:
            return 1
        if any(first < pointer + size and pointer < end for first, end in _registered.items()):
            return 712
        _registered[pointer] = pointer + size
    return 0


def unregister(pointer: int) -> int:
    """Unregister memory that `register` pinned; return CUDA's error code, 0 for success."""
    with _lock:
        return 0 if _registered.pop(pointer, None) is not None else 713


def empty_host_cache(*_: object) -> None:
    with _lock:
        for size, count in _figures.cached.items():
            _figures.given_back += count
            _figures.remove("allocations", count)
            _figures.remove("allocated_bytes", count * size)
        _figures.cached.clear()


def reset_peak() -> None:
    with _lock:
        _figures.peak = dict(_figures.current)


def reset_accumulated() -> None:
    with _lock:
        _figures.allocated = dict.fromkeys(_KINDS, 0)
        _figures.freed = dict.fromkeys(_KINDS, 0)
        _figures.taken = _figures.given_back = 0


def host_stats() -> dict[str, object]:
    with _lock:
        counts = {
            kind: {name: getattr(_figures, name)[kind] for name in ("current", "peak", "allocated", "freed")}
            for kind in _KINDS
        }
        taken, given_back = _figures.taken, _figures.given_back

    def times(count: int) -> dict[str, int]:
        return {"total": 0, "max": 0, "min": 0, "count": count, "avg": 0}

    return {
        **counts,
        "num_host_alloc": taken,
        "num_host_free": given_back,
        "host_alloc_time": times(taken),
        "host_free_time": times(given_back),
    }


def forget_pinned() -> None:
    """Reset the statistics and the registered memory, as for a new node."""
    global _figures
    with _lock:
        _registered.clear()
        _figures = _Figures()
