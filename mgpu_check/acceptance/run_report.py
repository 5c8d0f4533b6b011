"""The report of one acceptance run as plain values, and the log that it is made of.

The log has the observations and measurements of the tests, test by test, in order of arrival. The writers in `report`
make files and lines from the report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mgpu_check.acceptance.findings import ReportedFinding, judged
from mgpu_check.devices.observations import Measurement, Number, Observation, Outcome, Part, Ruling, SubjectResult, Work
from mgpu_check.devices.telemetry.sampler import TelemetrySample, Values
from mgpu_check.option_values import Level

_NONE = Work()

Kind = Literal["ACCEPTED", "REJECTED", "INCONCLUSIVE", "SUSPECT"]
"""SUSPECT: only a merge of reports gives this verdict, to a node that is slower than the others of its model."""

EXIT_CODES: Mapping[Kind, int] = {"ACCEPTED": 0, "REJECTED": 1, "INCONCLUSIVE": 2, "SUSPECT": 5}
"""Exit code for each verdict. A merge of reports ends with the code of its worst verdict."""

INTERRUPTED = 130  # exit code of an interrupted run, with any verdict


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


@dataclass(frozen=True, eq=False)
class RepeatableCall:
    """A call ``fn(rank, *args)`` on ranks, or in a node process, that returned results and can be repeated.
    `Node` makes it for each call. The log keeps it beside the results, and controls and second looks repeat it."""

    check: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    gpus: tuple[int, ...]  # numbers of the GPUs, in the order of the ranks
    timeout: float | None
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that the ranks start with
    # the host whose node process made the call ``fn(devices, *args)``; None for a call on ranks
    host: int | None = None

    @property
    def case(self) -> str:
        """The function and its arguments as text; calls of the same work have the same text."""
        return f"{getattr(self.fn, '__name__', self.fn)}({', '.join(map(str, self.args))})"


@dataclass
class Section:
    """The results of one test."""

    check: str  # the check that the test belongs to
    test: str
    # started, ended: seconds since the start of the run
    started: float
    ended: float = 0.0
    results: list[SubjectResult] = field(default_factory=list)
    # for each result the call that returned it; None if no call can be repeated
    calls: list[RepeatableCall | None] = field(default_factory=list)

    @property
    def observations(self) -> list[Observation]:
        return [result for result in self.results if isinstance(result, Observation)]

    @property
    def failed(self) -> list[Observation]:
        return [observation for observation in self.observations if observation.outcome == "failed"]


class RunLog:
    """Collect the results of a run in one section per test.

    `Run` makes it. `conftest.py` begins a section for each test, and `Node` adds the results of calls to the last one.
    The verdict and the report read all of it when the tests have ended.
    """

    def __init__(self) -> None:
        self.sections: list[Section] = []
        # called with the new results after each `add`
        self.on_added: Callable[[Sequence[SubjectResult]], None] = lambda results: None
        # returns an observation with its finding and ruling
        self.judge: Callable[[Observation], Observation] = lambda entry: judged(entry, {})
        self.zero = time.monotonic()  # start of the run, by `time.monotonic`

    def now(self) -> float:
        return time.monotonic() - self.zero

    def begin(self, check: str, test: str) -> Section:
        section = Section(check, test, self.now())
        self.sections.append(section)
        return section

    def add(self, results: Iterable[SubjectResult], call: RepeatableCall | None = None) -> None:
        """Add results that `call` returned to the section of the current test."""
        if not self.sections:
            self.begin("", "")
        section = self.sections[-1]
        new = [self.judge(result) if isinstance(result, Observation) else result for result in results]
        section.results += new
        section.calls += [call] * len(new)
        self.on_added(new)

    def times(self, check: str) -> tuple[float, float]:
        """Return when the first test of a check began, or now, and how long its tests took together."""
        sections = [section for section in self.sections if section.check == check]
        started = min((section.started for section in sections), default=self.now())
        return started, sum(section.ended - section.started for section in sections)

    def failed_calls(self) -> Iterator[tuple[Observation, RepeatableCall]]:
        """Yield the failed observations whose call can be repeated, with that call."""
        for section in self.sections:
            for result, call in zip(section.results, section.calls, strict=True):
                if isinstance(result, Observation) and result.outcome == "failed" and call is not None:
                    yield result, call

    def observations(self) -> Iterator[Observation]:
        for section in self.sections:
            yield from section.observations

    def measurements(self) -> Iterator[Measurement]:
        for section in self.sections:
            yield from (result for result in section.results if isinstance(result, Measurement))
