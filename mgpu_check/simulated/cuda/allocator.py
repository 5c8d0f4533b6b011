"""CUDA's caching allocator under ``torch.cuda.memory``, from the memory figures of the simulated devices, and the
pinned memory of the host, from torch's allocator and ``cudaHostRegister``.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import torch

from mgpu_check.simulated.cuda.streams import clock
from mgpu_check.simulated.node import (
    BLOCK,
    Block,
    DeviceMemory,
    Pool,
    active_node,
    current_index,
    invalid_ordinal,
    present_node,
)

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

    def add(self, statistic: str, amount: int) -> None:
        self.current[statistic] += amount
        self.allocated[statistic] += amount
        self.peak[statistic] = max(self.peak[statistic], self.current[statistic])

    def remove(self, statistic: str, amount: int) -> None:
        self.current[statistic] -= amount
        self.freed[statistic] += amount


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
        return any(base <= start < end for base, end in _registered.items())


def register(pointer: int, size: int) -> int:
    """Register memory as pinned; return CUDA's error code, 0 for success."""
    with _lock:
        if size <= 0 or not pointer:
            return 1
        if any(base < pointer + size and pointer < end for base, end in _registered.items()):
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
            statistic: {name: getattr(_figures, name)[statistic] for name in ("current", "peak", "allocated", "freed")}
            for statistic in _KINDS
        }
        allocations, given_back = _figures.taken, _figures.given_back

    def times(count: int) -> dict[str, int]:
        return {"total": 0, "max": 0, "min": 0, "count": count, "avg": 0}

    return {
        **counts,
        "num_host_alloc": allocations,
        "num_host_free": given_back,
        "host_alloc_time": times(allocations),
        "host_free_time": times(given_back),
    }


def forget_pinned() -> None:
    """Reset the statistics and the registered memory, as for a new node."""
    global _figures
    with _lock:
        _registered.clear()
        _figures = _Figures()


Counts = dict[str, int]


def _all() -> tuple[DeviceMemory, ...]:
    node = active_node()
    return () if node is None else node.memory


def device_memory(index: int | None = None) -> DeviceMemory:
    memory = _all()
    wanted = current_index() if index is None else int(index)
    if not 0 <= wanted < len(memory):
        raise invalid_ordinal()
    return memory[wanted]


def empty_cache(mempool: object = None) -> None:
    for memory in _all():
        memory.empty_cache()


def memory_info(index: int | None = None) -> tuple[int, int]:
    memory = device_memory(index)
    clock().touch(torch.device("cuda", memory.index))
    return max(memory.limit - memory.reserved, 0), memory.total


def _counts(current: int, peak: int, total: int, allocated: int = 0, freed: int = 0) -> Counts:
    """Return torch's four counts; ``allocated`` and ``freed`` are the totals at the last reset."""
    return {"current": current, "peak": peak, "allocated": total - allocated, "freed": total - current - freed}


def _block_counts(pool: Pool) -> Counts:
    return _counts(pool.blocks, pool.blocks_peak, pool.blocks_given, *pool.since[:2])


def _byte_counts(pool: Pool) -> Counts:
    return _counts(pool.bytes, pool.bytes_peak, pool.bytes_given, *pool.since[2:])


def _unfreed(now: int) -> Counts:
    """Return the counts of what has only grown, to ``now``."""
    return _counts(now, now, now)


def _memory_stats(index: int) -> dict[str, object]:
    memory = device_memory(index)

    def by_pool(counts_of: Callable[[Pool], Counts], peak: int | None = None) -> dict[str, Counts]:
        small, large = counts_of(memory.small), counts_of(memory.large)
        both = {key: small[key] + large[key] for key in small}
        if peak is not None:
            both["peak"] = peak
        return {"all": both, "small_pool": small, "large_pool": large}

    stats: dict[str, object] = {
        "allocation": by_pool(_block_counts),
        "segment": by_pool(lambda pool: _unfreed(int(pool.reserved > 0))),
        "active": by_pool(_block_counts),
        "inactive_split": by_pool(lambda pool: _unfreed(0)),
        "allocated_bytes": by_pool(_byte_counts, memory.peak),
        "reserved_bytes": by_pool(lambda pool: _unfreed(pool.reserved), memory.reserved_peak),
        "active_bytes": by_pool(_byte_counts, memory.peak),
        "inactive_split_bytes": by_pool(lambda pool: _unfreed(0)),
    }
    small, large = memory.small.requested, memory.large.requested
    pools = {"all": small + large, "small_pool": small, "large_pool": large}
    stats["requested_bytes"] = {name: _unfreed(now) for name, now in pools.items()}
    return {
        **stats,
        "oversize_allocations": _unfreed(0),
        "oversize_segments": _unfreed(0),
        "max_split_size": -1,
        "num_alloc_retries": 0,
        "num_ooms": memory.exhausted,
        "num_sync_all_streams": memory.emptied,
        "num_device_alloc": memory.taken,
        "num_device_free": memory.freed,
        "reserved_bytes_by_private_pools": {},
    }


def _snapshot_of(memory: DeviceMemory, pool: Pool, name: str) -> dict[str, object]:
    base = (1 << 40) * (2 * memory.index + (pool is memory.large) + 1)
    blocks: list[dict[str, object]] = []
    occupied = requested = 0

    def add(size: int, requested_size: int, state: str) -> None:
        sizes = {"size": size, "requested_size": requested_size}
        blocks.append({"address": base + occupied, **sizes, "state": state, "frames": []})

    for block in (o for o in gc.get_objects() if type(o) is Block and o.memory is memory and o.nbytes):
        if memory.pool_of(block.nbytes) is pool:
            add(block.nbytes, block.requested, "active_allocated")
            occupied, requested = occupied + block.nbytes, requested + block.requested
    if pool.reserved > occupied:
        add(pool.reserved - occupied, 0, "inactive")
    return {
        "device": memory.index,
        "address": base,
        "total_size": pool.reserved,
        "allocated_size": occupied,
        "active_size": occupied,
        "requested_size": requested,
        "stream": 0,
        "segment_type": name,
        "segment_pool_id": (0, 0),
        "is_expandable": True,
        "frames": [],
        "blocks": blocks,
    }


def _snapshot(*_: object) -> dict[str, object]:
    segments = [
        _snapshot_of(memory, pool, name)
        for memory in _all()
        for pool, name in ((memory.small, "small"), (memory.large, "large"))
        if pool.reserved
    ]
    return {
        "segments": segments,
        "device_traces": [[] for _ in _all()],
        "allocator_settings": {"expandable_segments": True},
        "external_annotations": [],
    }


def _set_fraction(fraction: float, index: int) -> None:
    memory = device_memory(index)
    memory.limit = int(memory.total * fraction)


class _Raw:
    """Memory that the caller allocates by size and frees by address."""

    def __init__(self) -> None:
        self.held: dict[int, torch.UntypedStorage] = {}

    def allocate(self, size: int, stream: object = None) -> int:
        node = present_node()
        memory = device_memory()
        memory.require(size)
        storage = torch.UntypedStorage(max(size, 1), device=node.backing)
        storage.__dict__[BLOCK] = Block(node.devices[memory.index], memory, size)
        address = storage.data_ptr()
        self.held[address] = storage
        return address

    def delete(self, address: int) -> None:
        if self.held.pop(address, None) is None:
            raise RuntimeError(f"invalid device pointer: {address:#x}")


def _nothing() -> Callable[..., None]:
    """Return a new function that does nothing: `Patches` can restore a name only if its replacement is unique."""
    return lambda *_, **__: None


def allocator_functions() -> dict[str, object]:
    raw = _Raw()
    return {
        "_cuda_memoryStats": _memory_stats,
        "_accelerator_getDeviceStats": lambda index: _memory_stats(index),
        "_cuda_resetPeakMemoryStats": lambda index: device_memory(index).reset_peak(),
        "_cuda_resetAccumulatedMemoryStats": lambda index: device_memory(index).reset_accumulated(),
        "_accelerator_resetPeakStats": lambda index=None: device_memory(index).reset_peak(),
        "_accelerator_resetAccumulatedStats": lambda index=None: device_memory(index).reset_accumulated(),
        "_cuda_hostMemoryStats": lambda: host_stats(),
        "_cuda_resetPeakHostMemoryStats": lambda: reset_peak(),
        "_cuda_resetAccumulatedHostMemoryStats": lambda: reset_accumulated(),
        "_cuda_emptyCache": empty_cache,
        "_accelerator_emptyCache": lambda *_: empty_cache(),
        "_accelerator_emptyHostCache": lambda *_: empty_host_cache(),
        "_host_emptyCache": lambda *_: empty_host_cache(),
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_getMemoryInfo": memory_info,
        "_cuda_setMemoryFraction": _set_fraction,
        "_cuda_getMemoryFraction": lambda index: device_memory(index).limit / device_memory(index).total,
        "_cuda_memorySnapshot": _snapshot,
        "_cuda_record_memory_history": _nothing(),
        "_cuda_record_memory_history_legacy": _nothing(),
        "_cuda_isHistoryEnabled": lambda: False,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_raw_alloc": raw.allocate,
        "_cuda_cudaCachingAllocator_raw_delete": raw.delete,
        "_cuda_cudaCachingAllocator_enable": _nothing(),
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_memoryMetadataSupported": lambda: False,
        "_cuda_setMemoryMetadata": _nothing(),
        "_cuda_getMemoryMetadata": lambda: "",
        "_cuda_annotateMemory": _nothing(),
        "_cuda_clearCublasWorkspaces": _nothing(),
        "_cuda_ipc_collect": _nothing(),
        "_cuda_lock_mutex": _nothing(),
        "_cuda_unlock_mutex": _nothing(),
    }
