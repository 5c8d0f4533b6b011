"""Limit how much of a rank's output is kept, on the disk and in reports.

The beginning and the end are kept. The middle of a large file becomes a hole, which frees its disk space. The size of
the file does not change, so processes may read and write it at the same time.
"""

from __future__ import annotations

import ctypes
import os
import sys

MOST_OUTPUT = 64 * 1024
"""Maximum bytes of each stream of a rank in a report."""

LOOK = 0.25
"""Seconds between two checks of the sizes of running ranks' files."""

_HEAD = MOST_OUTPUT // 4
_TAIL = MOST_OUTPUT - _HEAD
_MOST_ON_DISK = 16 * 1024 * 1024
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)


def kept(file: int) -> str:
    """Return the text of a file; of a long file, the beginning and the end."""
    size = os.fstat(file).st_size
    if size <= MOST_OUTPUT:
        return os.pread(file, size, 0).decode(errors="replace")
    head, tail = os.pread(file, _HEAD, 0), os.pread(file, _TAIL, size - _TAIL)
    left_out = f"\n[{size - MOST_OUTPUT} bytes are left out here]\n"
    return head.decode(errors="replace") + left_out + tail.decode(errors="replace")


def thin_out(file: int) -> None:
    """Free the disk space of the part that `kept` omits, if the file is large and the file system supports holes."""
    found = os.fstat(file)
    if sys.platform == "linux" and found.st_blocks * 512 > _MOST_ON_DISK:
        hole = ctypes.c_int64(_HEAD), ctypes.c_int64(found.st_size - MOST_OUTPUT)
        ctypes.CDLL(None).fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, *hole)
