"""The report of one acceptance run as plain values. The writers in `report` make files and lines from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mgpu_check.acceptance.findings import ReportedFinding
from mgpu_check.devices.observations import Measurement, Number, Observation, Outcome, Part, Ruling, Work
from mgpu_check.devices.telemetry.values import TelemetrySample, Values
from mgpu_check.option_values import Level

_NONE = Work()

Kind = Literal["ACCEPTED", "REJECTED", "INCONCLUSIVE", "SUSPECT"]
"""SUSPECT: only a merge of reports gives this verdict, to a node that is slower than the others of its model."""

EXIT_CODES: Mapping[Kind, int] = {"ACCEPTED": 0, "REJECTED": 1, "INCONCLUSIVE": 2, "SUSPECT": 5}
"""Exit code for each verdict. A merge of reports ends with the code of its worst verdict."""

INTERRUPTED = 130
"""Exit code of an interrupted run, with any verdict."""


@dataclass(frozen=True)
class Host:
    """One machine of a run.

    Attributes:
        number: from 0.
        software: name -> version: torch, cuda, nccl, driver, python, mgpu-check.
        boot: boot id of its kernel, which tells hosts of one name apart; empty if unknown.
    """

    number: int
    name: str
    software: Mapping[str, str] = field(default_factory=dict)
    boot: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU of a run.

    Attributes:
        number: in the run, from 0, host by host.
        host: number of its host.
        index: of the device there, as in ``cuda:<index>``.
        memory: total, in bytes.
        serial, pci: empty if unknown.
        facts: other properties by name: VBIOS, ECC mode, MIG, power limit in W, clocks in MHz, ...
    """

    number: int
    host: int
    index: int
    name: str
    uuid: str
    memory: int = 0
    serial: str = ""
    pci: str = ""
    facts: Values = field(default_factory=dict)


@dataclass(frozen=True)
class CheckRun:
    """The work and the outcome of one check in a run.

    Attributes:
        started: seconds since the start of the run.
        outcome: the worst of its observations; "unknown" if it did less work than its floor.
        floor: the least work for each subject; below it the check proves nothing.
        least: the work on the subject with the least.
        why: why the check is unknown or skipped, in one line.
        host: number of the host, if the report joins several runs; None if it covers all hosts.
    """

    name: str
    started: Number
    seconds: Number
    outcome: Outcome
    floor: Work = _NONE
    least: Work = _NONE
    why: str = ""
    host: int | None = None


@dataclass(frozen=True)
class Accusation:
    """A part that explains failures.

    Attributes:
        because: the evidence in lines, the strongest first.
        observations: indices into the observations of the report, of the failed ones that the part explains.
        shared: those of `observations` that another accused part explains, too.
        arm: result of the second look: "follows the device", "follows the rank", "only over the direct path", ... or
            "".
        advice: what to do, in one line.
        repeat: the command that repeats the failed checks.
        findings: ids of the kinds of findings in the observations, the most severe first.
        severity, action: what to do with the part, not with the subject of a symptom; empty in a report of an older
            version.
    """

    part: Part
    because: tuple[str, ...]
    observations: tuple[int, ...]
    arm: str = ""
    advice: str = ""
    repeat: str = ""
    findings: tuple[str, ...] = ()
    severity: str = ""
    action: str = ""
    shared: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run, or on one of its hosts.

    Attributes:
        accusations: the parts that every smallest explanation of the failures contains, and in a merge the hosts that
            are slower than the others; empty unless the verdict is REJECTED or SUSPECT.
        unknown: a line for each thing that could not be checked, with the reason.
        unexplained: indices of failed observations that no accused part explains.
        rivals: for each run, sets of parts that explain its unexplained observations equally well, if several do.
        partial: names of the checks that ran, if only some were selected; else empty.
    """

    kind: Kind
    accusations: tuple[Accusation, ...] = ()
    unknown: tuple[str, ...] = ()
    unexplained: tuple[int, ...] = ()
    partial: tuple[str, ...] = ()
    rivals: tuple[tuple[tuple[Part, ...], ...], ...] = ()


@dataclass(frozen=True)
class RunReport:
    """All results of one run, or of several runs joined.

    Attributes:
        started: ISO 8601, UTC.
        seconds: how long the run took.
        simulated: backing device of the simulated node; None on real GPUs.
        planted: defects planted on purpose, in the words of the command line.
        seed: Hypothesis seed that repeats the run; None if it was not a number.
        verdicts: verdict of each host, by host number.
        findings: what was found, by kind and subject, warnings included; the most severe first.
        policy: id of a kind of finding -> its ruling, where a policy file has changed it.
    """

    started: str
    seconds: Number
    command: str
    level: Level
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
    findings: tuple[ReportedFinding, ...] = ()
    policy: Mapping[str, Ruling] = field(default_factory=dict)
