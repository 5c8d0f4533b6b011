"""Signals and exit codes that the pytest process and ranks agree on.

The worker is no place for them: it imports torch.
"""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path

# Training code uses SIGUSR1 and SIGUSR2 for preemption; a real-time signal is free on Linux.
STACKS_SIGNAL: int = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2

CONNECTION_LOST = 74
"""Exit code of a rank whose connection is broken at its own end (EX_IOERR)."""

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
