"""Count the collectives that each process of a run has entered, to name the rank that the others wait for.

On real devices a collective returns at once, and a rank waits later, for example in ``loss.item()``. The runner reads
the counts while the process hangs.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

_NUMBER = struct.Struct("=Q")


def install(fd: int) -> Callable[[], None]:
    """Record each collective that the script's process enters in the file `fd`.

    Returns:
        A function that also records the operations that the C++ reducer of DistributedDataParallel has entered so far.
    """
    from mgpu_check.engine.rank_side.state import operations
    from mgpu_check.processes import collective_records
    from mgpu_check.torch_hooks import collectives

    collectives.recorder.attach(fd)
    collectives.install()

    def count() -> None:
        os.pwrite(fd, _NUMBER.pack(operations()), collective_records.SIZE)

    return count


def entered(fd: int) -> tuple[int, int]:
    """Read from the file of a process how many operations and collectives it has entered.

    Returns:
        The number of operations that the backends of the default group had counted when it was last written, with those
        of DistributedDataParallel's C++ reducer, and the current number of calls of collectives, in any group. Each is
        0 until the process has written it.
    """
    from mgpu_check.processes import collective_records

    data = os.pread(fd, collective_records.SIZE + _NUMBER.size, 0)
    number = data[collective_records.SIZE :]
    return (_NUMBER.unpack(number)[0] if number else 0), collective_records.parse(data[: collective_records.SIZE]).total
