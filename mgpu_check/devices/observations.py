"""What checks of hardware have seen: of which GPU, pair of GPUs, group or host, after how much work.

In a process that runs a check, a GPU is its position there: the index in its devices, or the number of a rank.
`Entry.on` makes of it the number of a GPU in the run, which counts the GPUs of all hosts, host by host, from 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

__all__ = [
    "Entry",
    "Measurement",
    "Observation",
    "Outcome",
    "Part",
    "Subject",
    "SubjectKind",
    "Unit",
    "Work",
    "median_and_spread",
]

Outcome = Literal["passed", "failed", "skipped", "unknown"]
"""Skipped: the device does not have what the check is about. Unknown: nobody knows whether it is right."""

SubjectKind = Literal["gpu", "copy", "upload", "download", "group", "host"]
Unit = Literal["B/s", "FLOP/s", "s"]
PartKind = Literal["gpu", "link", "host-link", "host"]


_NAMES: Mapping[SubjectKind | PartKind, str] = {
    "gpu": "GPU {first}",
    "copy": "copy GPU {first} -> GPU {last}",
    "upload": "copy host -> GPU {first}",
    "download": "copy GPU {first} -> host",
    "group": "group of GPUs {all}",
    "link": "link GPU {first} -> GPU {last}",
    "host-link": "link host - GPU {first}",
    "host": "host {first}",
}


def _named(kind: SubjectKind | PartKind, members: Sequence[int]) -> str:
    return _NAMES[kind].format(first=members[0], last=members[-1], all=", ".join(map(str, members)))


@dataclass(frozen=True, order=True)
class Subject:
    """What a check has looked at.

    Attributes:
        kind: "gpu"; "copy" from the first to the second of two GPUs; "upload" from the host to a GPU, "download" back;
            "group" of ranks in a collective, in the order of their ranks; "host" as a whole.
        members: GPUs; of a host its number among the hosts.
    """

    kind: SubjectKind
    members: tuple[int, ...]

    def __str__(self) -> str:
        return _named(self.kind, self.members)


@dataclass(frozen=True, order=True)
class Part:
    """A part of a machine that can be sent back.

    Attributes:
        kind: "gpu"; "link" from the first to the second of two GPUs; "host-link" between the host and a GPU; "host": what
            its GPUs have in common, software included.
        members: GPUs; of a host its number among the hosts.
    """

    kind: PartKind
    members: tuple[int, ...]

    def __str__(self) -> str:
        return _named(self.kind, self.members)


@dataclass(frozen=True)
class Work:
    """The work that an observation stands on.

    Attributes:
        bytes: moved, or written and read back.
        operations: operators, copies or collectives whose result was looked at.
        seconds: under load, by the clock of the device.
    """

    bytes: int = 0
    operations: int = 0
    seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.operations + other.operations, self.seconds + other.seconds)


@dataclass(frozen=True)
class Entry:
    """What stands in the account of a run.

    Attributes:
        check: "memory", "links", ...: the check that makes it.
        subject: what was looked at.
    """

    check: str
    subject: Subject

    def on(self, gpus: Sequence[int], host: int = 0) -> Self:
        """Return the same with positions in a process replaced: position i is GPU ``gpus[i]``, and its host is `host`."""
        return replace(self, subject=_on(self.subject, gpus, host))


def _on(subject: Subject, gpus: Sequence[int], host: int) -> Subject:
    if subject.kind == "host":
        return Subject("host", (host,))
    return Subject(subject.kind, tuple(gpus[member] for member in subject.members))


@dataclass(frozen=True)
class Observation(Entry):
    """Whether a subject was right in one case.

    Attributes:
        outcome: see `Outcome`.
        seen: what was seen, in one line that does not repeat the subject; empty where all was right.
        case: what was drawn: operation, dtype, size, seed, ... in one line.
        work: what was done for it.
        evidence: what a program can use, as values that JSON has: offsets, bits, values.
        suspects: GPUs that the data point at, by position: whose contribution is wrong, say; others than those may be
            at fault, too.
    """

    outcome: Outcome
    seen: str = ""
    case: str = ""
    work: Work = Work()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    suspects: tuple[int, ...] = ()

    def on(self, gpus: Sequence[int], host: int = 0) -> Self:
        moved = super().on(gpus, host)
        return replace(moved, suspects=tuple(gpus[member] for member in self.suspects))


@dataclass(frozen=True)
class Measurement(Entry):
    """How fast a subject was.

    Attributes:
        quantity: what was measured, with what distinguishes it: "copy bandwidth", "matrix product float16".
        unit: "B/s", "FLOP/s" or "s". More is better, but of seconds.
        value: the median of `repeats`.
        repeats: how often it was measured.
        size: bytes, or elements along a side, with which it was measured: values of one size are compared.
        spread: median absolute deviation of the repeats from `value`, in `unit`; None where it was not kept. See
            `median_and_spread`.
    """

    quantity: str
    unit: Unit
    value: float
    repeats: int
    size: int
    spread: float | None = None


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of `values`, at least one, and the median of their absolute deviations from it."""
    middle = statistics.median(values)
    return middle, statistics.median(abs(value - middle) for value in values)
