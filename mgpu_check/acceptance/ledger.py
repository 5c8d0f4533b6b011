"""The ledger of a run: what its tests have seen, test by test, in the order in which it came."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgpu_check.devices.observations import Entry, Measurement, Observation

__all__ = ["Call", "Ledger", "Page"]


@dataclass(frozen=True, eq=False)
class Call:
    """What has made entries, to be called again: ``fn(rank, *args)`` on ranks.

    Attributes:
        gpus: numbers, in the order of the ranks.
        environment: variables that the ranks have from their start.
    """

    check: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    gpus: tuple[int, ...]
    timeout: float | None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def case(self) -> str:
        """What tells it from calls that do something else."""
        return f"{getattr(self.fn, '__name__', self.fn)}({', '.join(map(str, self.args))})"


@dataclass
class Page:
    """The entries of one test, each with the call that can be repeated, if one has made it.

    Attributes:
        check: the check that the test belongs to.
        test: its name.
        started, ended: seconds since the start of the run.
    """

    check: str
    test: str
    started: float
    ended: float = 0.0
    entries: list[Entry] = field(default_factory=list)
    calls: list[Call | None] = field(default_factory=list)

    @property
    def failed(self) -> list[Observation]:
        return [entry for entry in self.entries if isinstance(entry, Observation) and entry.outcome == "failed"]


class Ledger:
    """See the module.

    Attributes:
        on_note: called with what was just noted.
        zero: start of the run, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.pages: list[Page] = []
        self.on_note: Callable[[Sequence[Entry]], None] = lambda entries: None
        self.zero = time.monotonic()

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return time.monotonic() - self.zero

    def open(self, check: str, test: str) -> Page:
        """Begin the page of a test."""
        page = Page(check, test, self.now())
        self.pages.append(page)
        return page

    def note(self, entries: Iterable[Entry], call: Call | None = None) -> None:
        """Write entries, which `call` has made, on the page of the test that runs."""
        if not self.pages:
            self.open("", "")
        page = self.pages[-1]
        new = list(entries)
        page.entries += new
        page.calls += [call] * len(new)
        self.on_note(new)

    def failed_calls(self) -> Iterator[tuple[Observation, Call]]:
        """Yield the observations that failed in calls that can be repeated."""
        for page in self.pages:
            for entry, call in zip(page.entries, page.calls, strict=True):
                if isinstance(entry, Observation) and entry.outcome == "failed" and call is not None:
                    yield entry, call

    def observations(self) -> Iterator[Observation]:
        for page in self.pages:
            for entry in page.entries:
                if isinstance(entry, Observation):
                    yield entry

    def measurements(self) -> Iterator[Measurement]:
        for page in self.pages:
            for entry in page.entries:
                if isinstance(entry, Measurement):
                    yield entry
