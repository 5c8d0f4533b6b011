"""Faults in ranks that have answered and wait."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import Any

import faults

# These are about a call.
IN_A_CALL = (
    "unpicklable-result",
    "unpicklable-argument",
    "exit-7-after-the-last-collective",
    "gathers-another-shape",
    "huge-result",
    "sends-what-nobody-receives",
    "is-to-receive-what-nobody-sends",
    "gathers-another-dtype",
)
_AGAIN = 0.1  # seconds


def _strike(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGUSR1)


class Armed:
    """Ranks that have a fault when `go` is called."""

    def __init__(self, ranks: Any, name: str, pipe: str) -> None:
        self.fault = faults.FAULTS[name]
        for rank in self.fault.culprits:
            os.mkfifo(f"{pipe}{rank}")
        self.told = [os.open(f"{pipe}{rank}", os.O_RDONLY | os.O_NONBLOCK) for rank in self.fault.culprits]
        pids = ranks.run(faults.arm, name, pipe, size=faults.SIZE)
        self.pids = [pids[rank] for rank in self.fault.culprits]

    def go(self) -> None:
        """Returns when it is over, or has begun and is never over, or the rank is dead."""
        ends = [os.pidfd_open(pid) for pid in self.pids]
        for end in ends:
            _strike(end)
        for told, end in zip(self.told, ends, strict=True):
            said, files = b"", [told, end]
            while not (said and self.fault.kind == "hang"):
                ready, _, _ = select.select(files, [], [], None if said else _AGAIN)
                if end in ready:
                    break
                if not ready:
                    # Python runs no handler of a signal that comes just before a system call blocks, until that
                    # returns.
                    _strike(end)
                    continue
                data = os.read(told, 2)
                said += data
                if not data and b"2" in said:
                    break
                if not data:
                    files = [end]  # it has closed its end because it dies
        for file in (*self.told, *ends):
            os.close(file)
