"""The heap of a process."""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

# Of <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT, _LARGEST = 256 << 20, 32 << 20
"""Bytes at the end of the heap, and of the largest block that it takes: the most that mallopt allows."""


def keep_freed_memory() -> None:
    """Have glibc keep memory that was freed for what is allocated next; other C libraries are left as they are.

    By default it gives large tensors back to the system, which makes their pages anew, and empty, whenever one is allocated: a third
    of the time of a gate of a ResNet-18.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_MMAP_THRESHOLD, _LARGEST)
