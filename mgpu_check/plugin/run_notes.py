"""What the end of a run reports besides its tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mgpu_check.processes.rank_lists import few


@dataclass
class RunNotes:
    """Facts about a run that belong to no test.

    Attributes:
        remarks: lines for the end of the run.
        not_seen: what passes of gates do not show -> the steps that passed.
        deaths: lines about ranks that died while no test used them; any line makes the run fail.
        waits: seconds that each delayed test waited for devices.
        interrupted: the positions of the ranks when Ctrl-C interrupted a call; "" if it interrupted no call.
    """

    remarks: list[str] = field(default_factory=list)
    not_seen: dict[str, list[str]] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    interrupted: str = ""

    @property
    def lines(self) -> list[str]:
        """The lines for the end of the run."""
        limits = [f"not seen by the gate of {few(steps)}: {line}" for line, steps in self.not_seen.items()]
        return [*self.remarks, *limits]

    def told(self) -> dict[str, Any]:
        """Return the notes as plain values, for the process that distributes the tests."""
        return asdict(self)

    def add(self, told: Mapping[str, Any]) -> None:
        """Add the notes that another process has `told`. Its positions at Ctrl-C are its own."""
        self.remarks += [line for line in told.get("remarks", []) if line not in self.remarks]
        for line, steps in told.get("not_seen", {}).items():
            self.not_seen.setdefault(line, []).extend(steps)
        self.deaths += told.get("deaths", [])
        self.waits += told.get("waits", [])
