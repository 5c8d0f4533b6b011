"""Results of hardware checks: observations and measurements of a GPU, a pair of GPUs, a group or a host.

In a process that runs a check, a GPU is identified by its position: the index in the process's devices, or the rank.
`SubjectResult.on` replaces positions by the numbers of GPUs in the run, counted over all hosts, host by host, from 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

if TYPE_CHECKING:
    Number = float
else:

    class Number(float):
        """A float that may be NaN or infinite. In a JSON report, which has no such numbers, it may be a text."""


Outcome = Literal["passed", "failed", "skipped", "unknown"]
"""Skipped: the device lacks the feature that the check tests. Unknown: the check could not decide."""

Ruling = Literal["", "accept", "warn", "reject"]
"""Accept: the finding is known and wanted. Warn: it is listed. Reject: it makes the verdict REJECTED."""

SubjectKind = Literal["gpu", "copy", "upload", "download", "group", "host"]
Unit = Literal["B/s", "FLOP/s", "s"]
PartKind = Literal["gpu", "link", "host-link", "host"]


EXCHANGED = "exchanged"
"""Evidence of a failed group: false if its GPUs exchanged no data, so that no link between them is at fault."""

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


def _named(category: SubjectKind | PartKind, members: Sequence[int]) -> str:
    return _NAMES[category].format(first=members[0], last=members[-1], all=", ".join(map(str, members)))


@dataclass(frozen=True, order=True)
class Subject:
    """The object of a check: a GPU, a copy between two, a group or a host.

    Attributes:
        kind: "gpu"; "copy" from the first to the second of two GPUs; "upload" from the host to a GPU, "download" back;
            "group" of ranks in a collective, in the order of their ranks; "host" as a whole.
        members: the GPUs; for a host, its number among the hosts.
    """

    kind: SubjectKind
    members: tuple[int, ...]

    @property
    def is_pair(self) -> bool:
        """True for a copy between two GPUs, and for a group of two."""
        return self.kind == "copy" or (self.kind == "group" and len(self.members) == 2)

    @property
    def in_any_order(self) -> Subject:
        """The same group with its ranks in order; any other subject unchanged."""
        return Subject(self.kind, tuple(sorted(self.members))) if self.kind == "group" else self

    def __str__(self) -> str:
        return _named(self.kind, self.members)


@dataclass(frozen=True, order=True)
class Part:
    """A part of a machine that can be replaced.

    Attributes:
        kind: "gpu"; "link" from the first to the second of two GPUs; "host-link" between the host and a GPU; "host":
            everything that its GPUs share, software included.
        members: the GPUs; for a host, its number among the hosts.
    """

    kind: PartKind
    members: tuple[int, ...]

    def __str__(self) -> str:
        return _named(self.kind, self.members)


@dataclass(frozen=True)
class Work:
    """The amount of work behind an observation.

    Attributes:
        bytes: moved, or written and read back.
        operations: operators, copies or collectives whose result was checked.
        seconds: under load, by the clock of the device.
    """

    bytes: int = 0
    operations: int = 0
    seconds: Number = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.operations + other.operations, self.seconds + other.seconds)


@dataclass(frozen=True)
class SubjectResult:
    """What a check found out about one subject: an observation or a measurement.

    Attributes:
        check: the check: "memory", "links", ...
        subject: the object of the check.
    """

    check: str
    subject: Subject

    def on(self, gpus: Sequence[int], host: int = 0) -> Self:
        """Return a copy for GPU numbers: position i is GPU ``gpus[i]``, and its host is `host`."""
        subject = self.subject
        moved = (host,) if subject.kind == "host" else tuple(gpus[member] for member in subject.members)
        return replace(self, subject=Subject(subject.kind, moved))


@dataclass(frozen=True)
class Observation(SubjectResult):
    """The outcome of one case for one subject.

    Attributes:
        outcome: see `Outcome`.
        seen: the error, in one line that does not repeat the subject; "" if the case passed.
        case: the drawn case in one line: operation, dtype, size, seed, ...
        work: the work behind the outcome.
        evidence: details for programs, as JSON values: offsets, bits, values.
        suspects: positions of the GPUs that the data point at, such as the source of a wrong contribution. Other GPUs
            may be at fault, too.
        finding: id of the kind of finding; "" if nothing is wrong.
        ruling: what the finding means for the verdict; with "warn" and "accept" the outcome is "passed".
        times: number of like cases that it stands for.
    """

    outcome: Outcome
    seen: str = ""
    case: str = ""
    work: Work = Work()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    suspects: tuple[int, ...] = ()
    finding: str = ""
    ruling: Ruling = ""
    times: int = 1

    def on(self, gpus: Sequence[int], host: int = 0) -> Self:
        moved = super().on(gpus, host)
        return replace(moved, suspects=tuple(gpus[member] for member in self.suspects))


class MeasuredKind(NamedTuple):
    """The key that two measurements must share to be compared, apart from the hardware."""

    quantity: str
    unit: Unit
    size: int
    subject: SubjectKind
    members: int


@dataclass(frozen=True)
class Measurement(SubjectResult):
    """The speed of one subject.

    Attributes:
        quantity: the measured quantity and its variant: "copy bandwidth", "matrix product float16".
        unit: "B/s", "FLOP/s" or "s". More is better, except for seconds.
        value: the median of `repeats`.
        repeats: the number of repeated measurements.
        size: bytes, or elements along a side; only measurements of the same size are compared.
        spread: median absolute deviation of the repeats from `value`, in `unit`; None if it was not kept. See
            `median_and_spread`.
    """

    quantity: str
    unit: Unit
    value: Number
    repeats: int
    size: int
    spread: Number | None = None

    def on(self, gpus: Sequence[int], host: int = 0) -> Self:
        moved = super().on(gpus, host)  # the ranks of a group may have had another order before
        return replace(moved, subject=moved.subject.in_any_order)

    @property
    def kind(self) -> MeasuredKind:
        return MeasuredKind(self.quantity, self.unit, self.size, self.subject.kind, len(self.subject.members))


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of `values` and the median of their absolute deviations from it. `values` must not be empty."""
    middle = statistics.median(values)
    return middle, statistics.median(abs(value - middle) for value in values)
