"""Count the collectives that each process of a run has entered, to tell who keeps the others waiting.

On real devices a collective returns at once, and whoever waits does so somewhere else: in ``loss.item()``. What is written
here is read while the process hangs.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

__all__ = ["entered", "install"]

_NUMBER = struct.Struct("=Q")


def install(fd: int) -> Callable[[], None]:
    """Write down, in the script's process, each collective that it enters, to the file `fd`.

    Returns:
        What also counts those that the reducer of DistributedDataParallel has entered by now, in C++.
    """
    from mgpu_check.processes import record
    from mgpu_check.rank_side.state import operations
    from mgpu_check.torch_hooks import collectives

    collectives.recorder.attach(fd)
    collectives.install()

    def count() -> None:
        os.pwrite(fd, _NUMBER.pack(operations()), record.SIZE)

    return count


def entered(fd: int) -> tuple[int, int]:
    """Return, by the file of a process, the operations of its default group when it was last counted, and calls of
    collectives.
    """
    from mgpu_check.processes import record

    data = os.pread(fd, record.SIZE + _NUMBER.size, 0)
    number = data[record.SIZE :]
    return (_NUMBER.unpack(number)[0] if number else 0), record.parse(data[: record.SIZE]).total
