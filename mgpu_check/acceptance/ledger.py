"""The ledger of a run: the observations and measurements of its tests, test by test, in order of arrival."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgpu_check.devices.observations import Entry, Measurement, Observation

__all__ = ["Call", "Ledger", "Page"]


@dataclass(frozen=True, eq=False)
class Call:
    """A call ``fn(rank, *args)`` on ranks that made entries and can be repeated.

    Attributes:
        gpus: numbers of the GPUs, in the order of the ranks.
        environment: variables that the ranks start with.
    """

    check: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    gpus: tuple[int, ...]
    timeout: float | None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def case(self) -> str:
        """The function and its arguments as text; calls of the same work have the same text."""
        return f"{getattr(self.fn, '__name__', self.fn)}({', '.join(map(str, self.args))})"


@dataclass
class Page:
    """The entries of one test.

    Attributes:
        check: the check that the test belongs to.
        test: name of the test.
        calls: for each entry the call that made it; None if no call can be repeated.
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
    """Collect the entries of a run on one page per test.

    Attributes:
        on_note: called with the new entries after each `note`.
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
        """Open the page of a test."""
        page = Page(check, test, self.now())
        self.pages.append(page)
        return page

    def note(self, entries: Iterable[Entry], call: Call | None = None) -> None:
        """Add entries that `call` made to the page of the current test."""
        if not self.pages:
            self.open("", "")
        page = self.pages[-1]
        new = list(entries)
        page.entries += new
        page.calls += [call] * len(new)
        self.on_note(new)

    def failed_calls(self) -> Iterator[tuple[Observation, Call]]:
        """Yield the failed observations whose call can be repeated, with that call."""
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
