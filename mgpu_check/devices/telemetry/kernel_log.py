"""Read the Xids of the past from the kernel log: the driver's library reports only those that come while it listens."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_KMSG = Path("/dev/kmsg")
_FILES = (Path("/var/log/kern.log"), Path("/var/log/messages"))
_MOST = 16 << 20
"""Bytes from the end of a log file: a few weeks of a server."""
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?\): (\d+)")


def past_xids() -> dict[tuple[str, int], int] | None:
    """Return how often each Xid is in the kernel log, by PCI bus id and number; None if no log can be read.

    The ring buffer of the kernel is preferred: it begins with the boot. Log files are older, and may be kept for root.
    """
    lines = _ring(_KMSG)
    if lines is None:
        lines = next((some for path in _FILES if (some := _end_of(path)) is not None), None)
    return None if lines is None else xids_in(lines)


def xids_in(lines: Iterable[str]) -> dict[tuple[str, int], int]:
    """Return how often each Xid is in these lines of a log, by PCI bus id as the driver's library writes it."""
    found: Counter[tuple[str, int]] = Counter()
    for line in lines:
        if match := _XID.search(line):
            domain, bus, device, number = match.groups()
            found[f"{int(domain, 16):08X}:{bus.upper()}:{device.upper()}.0", int(number)] += 1
    return dict(found)


def _ring(path: Path) -> list[str] | None:
    """Return the records of the kernel's ring buffer without waiting for more."""
    lines = []
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # for root only, as by default on many systems
        return None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while True:
            try:
                record = os.read(file.fileno(), 8192)
            except BrokenPipeError:  # the record was overwritten; the next read gets the oldest that is left
                continue
            except OSError:  # no more records
                break
            if not record:
                break
            lines += record.decode(errors="replace").splitlines()
    return lines


def _end_of(path: Path) -> list[str] | None:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST))
        return file.read().decode(errors="replace").splitlines()
    return None
