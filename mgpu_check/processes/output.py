"""Keep what a rank prints in a file, and limit how much of it is kept, on the disk and in reports.

The beginning and the end are kept. The middle of a file that grows large is given back to the disk, and reads as if it
were there: so sizes stay true, whoever writes or reads meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["LOOK", "MOST_OUTPUT", "kept", "thin_out"]

MOST_OUTPUT = 64 * 1024
"""Bytes of each stream of a rank that a report shows at most."""

LOOK = 0.25
"""Seconds after which the files of running ranks are looked at again."""

_HEAD = MOST_OUTPUT // 4
_TAIL = MOST_OUTPUT - _HEAD
_MOST_ON_DISK = 16 * 1024 * 1024
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)


def kept(file: int) -> str:
    """Return the text in a file: its beginning and its end, with a line in between that tells how much is left out."""
    size = os.fstat(file).st_size
    if size <= MOST_OUTPUT:
        return os.pread(file, size, 0).decode(errors="replace")
    head, tail = os.pread(file, _HEAD, 0), os.pread(file, _TAIL, size - _TAIL)
    left_out = f"\n[{size - MOST_OUTPUT} bytes are left out here]\n"
    return head.decode(errors="replace") + left_out + tail.decode(errors="replace")


def thin_out(file: int) -> None:
    """Give back to the disk what `kept` leaves out, where that is much, and the file system can."""
    found = os.fstat(file)
    if sys.platform == "linux" and found.st_blocks * 512 > _MOST_ON_DISK:
        hole = ctypes.c_int64(_HEAD), ctypes.c_int64(found.st_size - MOST_OUTPUT)
        ctypes.CDLL(None).fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, *hole)
