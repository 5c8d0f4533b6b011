"""Signals and exit codes that the pytest process and ranks agree on, and signals that ask a process to end.

The worker is no place for them: it imports torch.
"""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals of Slurm, Kubernetes, systemd or a closed terminal that ask a process to end; Ctrl-C is separate."""

FROM_OUTSIDE = (*ENDING, signal.SIGINT)
"""Signals that a process gets from a person or a program, and never from an error of its own or of a device."""

# Training code uses SIGUSR1 and SIGUSR2 for preemption; a real-time signal is free on Linux.
STACKS_SIGNAL: int = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2

CONNECTION_LOST = 74
"""Exit code of a rank whose connection is broken at its own end (EX_IOERR)."""


class EndOnRequest:
    """Let signals that ask for the end interrupt the main thread as Ctrl-C does, once.

    Attributes:
        by: name of the signal that has interrupted the process; "" if none has.
    """

    def __init__(self) -> None:
        self.by = ""
        self._kept: dict[signal.Signals, signal.Handlers] = {}

    def begin(self) -> None:
        """Handle these signals from now on. Leave those that this process or its parent (nohup) handles otherwise."""
        for number in ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._interrupt)
                self._kept[number] = signal.SIG_DFL

    def hold_off(self) -> None:
        """Ignore these signals from now on: what remains, such as writing a report, takes little time."""
        for number in self._kept:
            signal.signal(number, signal.SIG_IGN)

    def end(self) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)
        self._kept.clear()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.by = signal.Signals(number).name
        self.hold_off()
        raise KeyboardInterrupt(self.by)


_BLOCKED_OR_PENDING = re.compile(r"^(?:SigBlk|SigPnd|ShdPnd):\s*([0-9a-f]+)$", re.MULTILINE)


def held_back(pid: int, number: int) -> int:
    """Return the number of a process's threads that block a signal or have it pending; 0 without proc(5).

    A handler in C blocks its signal while it runs. So the handler has ended once the number is back at its earlier
    value.
    """
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            masks = _BLOCKED_OR_PENDING.findall(status.read_text(encoding="utf-8", errors="replace"))
            count += any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
    return count
