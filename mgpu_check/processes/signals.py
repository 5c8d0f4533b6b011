"""Ask a rank for its stacks, and let it say goodbye; apart from the worker, which imports torch."""

from __future__ import annotations

import signal

# Training code uses SIGUSR1 and SIGUSR2 for preemption; a real-time signal is free on Linux.
STACKS_SIGNAL: int = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2

CONNECTION_LOST = 74
"""Exit code of a rank whose connection is broken at its own end (EX_IOERR)."""
