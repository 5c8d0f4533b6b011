"""The ledger of a run: what its tests have seen, test by test, in the order in which it came."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mgpu_check.devices.observations import Entry, Measurement, Observation

__all__ = ["Ledger", "Page"]


@dataclass
class Page:
    """The entries of one test.

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

    @property
    def failed(self) -> list[Observation]:
        return [entry for entry in self.entries if isinstance(entry, Observation) and entry.outcome == "failed"]


class Ledger:
    """See the module."""

    def __init__(self) -> None:
        self.pages: list[Page] = []
        self._zero = time.monotonic()

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return time.monotonic() - self._zero

    def open(self, check: str, test: str) -> Page:
        """Begin the page of a test."""
        page = Page(check, test, self.now())
        self.pages.append(page)
        return page

    def note(self, entries: Iterable[Entry]) -> None:
        """Write entries on the page of the test that runs."""
        if not self.pages:
            self.open("", "")
        self.pages[-1].entries.extend(entries)

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
