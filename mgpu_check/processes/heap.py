"""Tune the heap of a process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

# Constants of <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT, _LARGEST = 256 << 20, 32 << 20
"""Bytes of free memory to keep, and of the largest block on the heap. 32 MiB is the maximum that mallopt allows."""


def keep_freed_memory() -> None:
    """Make glibc reuse freed memory; other C libraries are not changed.

    By default glibc returns large tensors to the system, which must then map and zero pages for each new tensor. In a
    gate of a ResNet-18 these pages took a third of the time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_MMAP_THRESHOLD, _LARGEST)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import modules within the context without garbage collection, and exempt all objects from later collections.

    Collections take a quarter of the time of importing torch, and find almost nothing. Later ones would visit these
    objects again and again, and copy their pages in each forked process.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        freeze()
        if collecting:
            gc.enable()


def freeze() -> None:
    """Exempt all objects from later garbage collections.

    Hypothesis makes its generator at the first example, and warns of it if the objects that refer to it are exempt:
    `gc.get_referrers` does not find them (hypothesis/internal/entropy.py, register_random, 6.170). So a Hypothesis that
    is imported makes it here.
    """
    if "hypothesis.core" in sys.modules:
        with sys.modules["hypothesis.internal.entropy"].deterministic_PRNG():
            pass
    gc.freeze()
