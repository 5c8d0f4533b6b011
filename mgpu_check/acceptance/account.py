"""The account of one acceptance run: all that its verdict stands on, and all that a report shows. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mgpu_check.devices.observations import Measurement, Observation, Outcome, Part, Work
from mgpu_check.devices.telemetry.values import TelemetrySample

__all__ = ["EXIT_CODES", "Account", "Accusation", "CheckRun", "Gpu", "Host", "Verdict"]

_NONE = Work()

Kind = Literal["ACCEPTED", "REJECTED", "INCONCLUSIVE"]

EXIT_CODES: Mapping[Kind, int] = {"ACCEPTED": 0, "REJECTED": 1, "INCONCLUSIVE": 2}
"""Of a run with such a verdict, and of a merge whose worst verdict it is."""


@dataclass(frozen=True)
class Host:
    """One machine of a run.

    Attributes:
        number: from 0.
        software: name -> version: torch, cuda, nccl, driver, python, mgpu-check.
    """

    number: int
    name: str
    software: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Gpu:
    """One GPU of a run.

    Attributes:
        number: in the run, from 0, host by host.
        host: number of its host.
        index: of the device there, as in ``cuda:<index>``.
        memory: total, in bytes.
        serial, pci: empty where nobody knows.
        facts: what else is known of it, by name: VBIOS, ECC mode, MIG, power limit in W, clocks in MHz, ...
    """

    number: int
    host: int
    index: int
    name: str
    uuid: str
    memory: int = 0
    serial: str = ""
    pci: str = ""
    facts: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckRun:
    """What one check has done in a run.

    Attributes:
        started: seconds since the start of the run.
        outcome: the worst of its observations; "unknown" where it did less than its floor.
        floor: the least work for each subject, below which nothing is known.
        least: the work of the subject that has least.
        why: why it is unknown or skipped, in one line.
        host: of which this is said, where the accounts of several runs were joined; None: of all of this run.
    """

    name: str
    started: float
    seconds: float
    outcome: Outcome
    floor: Work = _NONE
    least: Work = _NONE
    why: str = ""
    host: int | None = None


@dataclass(frozen=True)
class Accusation:
    """A part that explains failures.

    Attributes:
        because: what was seen, in lines, the most telling first.
        observations: numbers of the failed observations that it explains, in `Account.observations`.
        arm: what a second look has shown: "follows the device", "follows the rank", "only over the direct path", ... or "".
        advice: what to do, in one line.
        repeat: the command that looks again at this part.
    """

    part: Part
    because: tuple[str, ...]
    observations: tuple[int, ...]
    arm: str = ""
    advice: str = ""
    repeat: str = ""


@dataclass(frozen=True)
class Verdict:
    """The end of a run, or of one host of it.

    Attributes:
        accusations: the smallest set of parts that explains what failed; none unless it is REJECTED.
        unknown: what could not be checked, and why, in lines.
        unexplained: numbers of failed observations that no part explains.
        partial: names of the checks that ran, where not all were asked for; else empty.
    """

    kind: Kind
    accusations: tuple[Accusation, ...] = ()
    unknown: tuple[str, ...] = ()
    unexplained: tuple[int, ...] = ()
    partial: tuple[str, ...] = ()


@dataclass(frozen=True)
class Account:
    """See the module.

    Attributes:
        started: ISO 8601, UTC.
        seconds: how long the run took.
        level: "quick", "standard" or "long".
        simulated: backing device of the simulated node; None on real GPUs.
        planted: defects that were planted on purpose, as they were named on the command line.
        seed: with which the run is repeated.
        verdicts: of each host, by its number.
    """

    started: str
    seconds: float
    command: str
    level: str
    verdict: Verdict
    verdicts: Mapping[int, Verdict]
    hosts: tuple[Host, ...]
    gpus: tuple[Gpu, ...]
    checks: tuple[CheckRun, ...]
    observations: tuple[Observation, ...]
    measurements: tuple[Measurement, ...]
    samples: tuple[TelemetrySample, ...] = ()
    simulated: str | None = None
    planted: tuple[str, ...] = ()
    seed: int | None = None
    versions: Mapping[str, Any] = field(default_factory=dict)
