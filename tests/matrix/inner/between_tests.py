"""A rank is hit from outside while no test uses it. Nothing that a test leaves could do it: see the state faults."""

import os
import select
import signal
from pathlib import Path
from typing import Any

import aftermath
import faults

SIGNALS = {
    "sigkill": signal.SIGKILL,
    "sigsegv": signal.SIGSEGV,
    "sigterm": signal.SIGTERM,
    "abort": signal.SIGABRT,
    "cpu-limit": signal.SIGXCPU,
    "kills-the-fork-server": signal.SIGKILL,
    "sigstop": signal.SIGSTOP,
}
NAMES = list(SIGNALS)
PIDS: dict[str, Any] = {}


def test_before(name, warm):
    PIDS[name] = warm


def test_fault(name):
    rank, server = PIDS[name][faults.CULPRIT]
    end = os.pidfd_open(rank)
    os.kill(server if name == "kills-the-fork-server" else rank, SIGNALS[name])
    if name == "sigstop":
        while Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            os.sched_yield()
    else:
        select.select([end], [], [])
    os.close(end)


test_next = aftermath.after
