"""What came of each pair of fault and check in a selftest, as a table and as a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mgpu_check.faults.registry import Fault

__all__ = ["ALONE", "CAUGHT", "ERROR", "PASSED", "SKIPPED", "Matrix", "of_properties"]

CAUGHT, PASSED, SKIPPED, ERROR = "x", ".", "s", "e"
ALONE = "X"
"""In the table, in place of `CAUGHT`: by this check, and by no other."""
_OF_SEEDS = 19, 20
"""A check must catch a fault that it is proven by with so many of so many seeds."""


@dataclass
class Matrix:
    """The faults and checks of one property, and what came of each pair that was tried.

    Attributes:
        name: of the property.
        faults: those that were planted.
        checks: those that have run, in their order.
        cells: (fault, check) -> what came of each try: `CAUGHT`, `PASSED`, `SKIPPED` or `ERROR`.
        complete: no fault of the property is left out, so each check must catch one.
        deselected: pairs of (fault, check) that are not to be tried, as by ``-k``.
        all_pairs: each fault is tried on all checks, so each check must catch one that no other catches.
    """

    name: str
    faults: Sequence[Fault]
    checks: list[str] = field(default_factory=list)
    cells: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    complete: bool = True
    deselected: set[tuple[str, str]] = field(default_factory=set)
    all_pairs: bool = False

    def add(self, fault: str, check: str, outcome: str) -> None:
        """Note what came of a try."""
        self.cells.setdefault((fault, check), []).append(outcome)

    def caught(self, fault: Fault, check: str) -> bool:
        """Return whether the check catches the fault: with 19 of 20 seeds, where several were tried."""
        tries = self.cells.get((fault.name, check), [])
        least, of = _OF_SEEDS
        return bool(tries) and tries.count(CAUGHT) * of >= least * len(tries)

    def caught_alone(self, fault: Fault, check: str) -> bool:
        """Return whether the check catches the fault, and no other check of the property does, of which all were tried."""
        all_tried = self.all_pairs and not any(fault.name == name for name, _ in self.deselected)
        return all_tried and [one for one in self.checks if self.caught(fault, one)] == [check]

    @property
    def pairs_caught(self) -> int:
        """Number of pairs of fault and check of which the check catches the fault."""
        return sum(self.caught(fault, check) for fault in self.faults for check in self.checks)

    @property
    def planted(self) -> Sequence[Fault]:
        """The faults that were not deselected from every check."""
        tried = {fault for fault, _ in self.cells}
        left_out = {fault for fault, _ in self.deselected} - tried
        return [fault for fault in self.faults if fault.name not in left_out]

    def lines(self) -> Iterator[str]:
        """Yield the table: a row for each fault that was planted, a column for each check."""
        width = max((len(fault.name) for fault in self.planted), default=0)
        yield ""
        yield self.name
        for number, check in enumerate(self.checks, 1):
            yield f"  {number:>2}  {check}"
        yield f"  {'':<{width}} {''.join(f'{number:>3}' for number in range(1, len(self.checks) + 1))}"
        for fault in self.planted:
            row = "".join(f"{self._shown(fault, check):>3}" for check in self.checks)
            when = f" ({fault.condition})" if fault.condition else ""
            yield f"  {fault.name:<{width}} {row}   {fault.summary}{when}"

    def _shown(self, fault: Fault, check: str) -> str:
        """Return a cell: one letter for one try, and how many have caught it for several."""
        tries = self.cells.get((fault.name, check), [" "])
        if len(tries) > 1:
            return str(tries.count(CAUGHT))
        return ALONE if self.caught_alone(fault, check) else tries[0]

    def not_proven(self) -> Iterator[str]:
        """Yield what is missing: a check that misses what it must catch, a fault that no check catches, or a check that
        catches none, or none alone where all pairs were tried. Of what was deselected nothing is asked.
        """
        for fault in self.faults:
            if not set(self.checks) & set(fault.caught_by):
                continue
            partly = any((fault.name, check) in self.deselected for check in fault.caught_by)
            for check in fault.caught_by:
                tries = self.cells.get((fault.name, check))
                if tries and not self.caught(fault, check):
                    often = f" with {len(tries) - tries.count(CAUGHT)} of {len(tries)} seeds" if len(tries) > 1 else ""
                    yield f"{check} does not catch the fault {fault.name}, which it must{often}"
            if not partly and not any(self.caught(fault, check) for check in self.checks):
                yield f"no check of {self.name} catches the fault {fault.name}"
        some = {check for _, check in self.deselected}
        for check in self.checks if self.complete else ():
            if check in some:
                continue
            if not any(self.caught(fault, check) for fault in self.faults):
                yield f"{check} catches no fault of {self.name}"
            elif self.all_pairs and not some and not any(self.caught_alone(fault, check) for fault in self.faults):
                yield f"{check} catches no fault of {self.name} that no other check catches"


def of_properties(
    names: Sequence[str], faults: Mapping[str, Fault], chosen: set[str], *, all_pairs: bool = False
) -> dict[str, Matrix]:
    """Return an empty matrix for each property, with those of its faults that are in `chosen`."""
    found = {}
    for name in names:
        all_of_it = [fault for fault in faults.values() if fault.property == name]
        some = [fault for fault in all_of_it if fault.name in chosen]
        found[name] = Matrix(name, some, complete=len(some) == len(all_of_it), all_pairs=all_pairs)
    return found
