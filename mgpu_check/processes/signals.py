"""Ask a rank for its stacks, and let it say goodbye; apart from the worker, which imports torch."""

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
    """Count the threads of a process that do not take a signal now: it is blocked there, or pending.

    A handler in C blocks its signal while it runs: it has ended once there are no more such threads than before. Always 0
    where proc(5) is not at hand.
    """
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            masks = _BLOCKED_OR_PENDING.findall(status.read_text(encoding="utf-8", errors="replace"))
            count += any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
    return count
