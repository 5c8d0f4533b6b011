"""The log of a run: the observations and measurements of its tests, test by test, in order of arrival."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgpu_check.acceptance.findings import judged
from mgpu_check.devices.observations import Measurement, Observation, SubjectResult


@dataclass(frozen=True, eq=False)
class RepeatableCall:
    """A call ``fn(rank, *args)`` on ranks, or in a node process, that returned results and can be repeated.

    Attributes:
        gpus: numbers of the GPUs, in the order of the ranks.
        environment: variables that the ranks start with.
        host: the host whose node process made the call ``fn(devices, *args)``; None for a call on ranks.
    """

    check: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    gpus: tuple[int, ...]
    timeout: float | None
    environment: Mapping[str, str] = field(default_factory=dict)
    host: int | None = None

    @property
    def case(self) -> str:
        """The function and its arguments as text; calls of the same work have the same text."""
        return f"{getattr(self.fn, '__name__', self.fn)}({', '.join(map(str, self.args))})"


@dataclass
class Section:
    """The results of one test.

    Attributes:
        check: the check that the test belongs to.
        calls: for each result the call that returned it; None if no call can be repeated.
        started, ended: seconds since the start of the run.
    """

    check: str
    test: str
    started: float
    ended: float = 0.0
    results: list[SubjectResult] = field(default_factory=list)
    calls: list[RepeatableCall | None] = field(default_factory=list)

    @property
    def observations(self) -> list[Observation]:
        return [result for result in self.results if isinstance(result, Observation)]

    @property
    def failed(self) -> list[Observation]:
        return [observation for observation in self.observations if observation.outcome == "failed"]


class RunLog:
    """Collect the results of a run in one section per test.

    Attributes:
        on_added: called with the new results after each `add`.
        judge: returns an observation with its finding and ruling.
        zero: start of the run, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.sections: list[Section] = []
        self.on_added: Callable[[Sequence[SubjectResult]], None] = lambda results: None
        self.judge: Callable[[Observation], Observation] = lambda entry: judged(entry, {})
        self.zero = time.monotonic()

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
