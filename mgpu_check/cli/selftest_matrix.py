"""Results of a selftest: a table of each pair of fault and check, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mgpu_check.suite.common.faults.registry import Fault

CAUGHT, PASSED, SKIPPED, ERROR = "x", ".", "s", "e"
ALONE = "X"
"""In the table, in place of `CAUGHT`: caught by this check and by no other."""
_OF_SEEDS = 19, 20
"""A check must catch each of its faults on at least 19 of 20 seeds."""


@dataclass
class PropertyMatrix:
    """The faults and checks of one property, and the outcomes of each pair that was tried.

    Attributes:
        checks: the checks that have run, in their order.
        cells: (fault, check) -> the outcome of each try: `CAUGHT`, `PASSED`, `SKIPPED` or `ERROR`.
        complete: whether all faults of the property are planted, so that each check must catch at least one.
        deselected: pairs of (fault, check) that were deselected, as by ``-k``.
        all_pairs: whether each fault is tried on all checks, so that each check must catch one that no other catches.
    """

    name: str
    faults: Sequence[Fault]
    checks: list[str] = field(default_factory=list)
    cells: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    complete: bool = True
    deselected: set[tuple[str, str]] = field(default_factory=set)
    all_pairs: bool = False

    def add(self, fault: str, check: str, outcome: str) -> None:
        """Record the outcome of a try."""
        self.cells.setdefault((fault, check), []).append(outcome)

    def caught(self, fault: Fault, check: str) -> bool:
        """Return whether the check catches the fault; with several seeds, on at least 19 of 20."""
        tries = self.cells.get((fault.name, check), [])
        least, of = _OF_SEEDS
        return bool(tries) and tries.count(CAUGHT) * of >= least * len(tries)

    def caught_alone(self, fault: Fault, check: str) -> bool:
        """Return whether all checks of the property were tried on the fault, and only this check catches it."""
        all_tried = self.all_pairs and not any(fault.name == name for name, _ in self.deselected)
        return all_tried and [one for one in self.checks if self.caught(fault, one)] == [check]

    @property
    def pairs_caught(self) -> int:
        """Number of pairs whose check catches the fault."""
        return sum(self.caught(fault, check) for fault in self.faults for check in self.checks)

    @property
    def planted(self) -> Sequence[Fault]:
        """The faults that were planted: all except those deselected from every check."""
        tried = {fault for fault, _ in self.cells}
        left_out = {fault for fault, _ in self.deselected} - tried
        return [fault for fault in self.faults if fault.name not in left_out]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table: a row per planted fault, a column per check."""
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
        """Return a cell: a letter for one try; for several tries, the number that caught the fault."""
        tries = self.cells.get((fault.name, check), [" "])
        if len(tries) > 1:
            return str(tries.count(CAUGHT))
        return ALONE if self.caught_alone(fault, check) else tries[0]

    def not_proven(self) -> Iterator[str]:
        """Yield a line for each missed fault, each fault that no check catches, and each check that catches no fault.

        If all pairs were tried, also for each check that catches no fault alone. Deselected pairs are ignored.
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
) -> dict[str, PropertyMatrix]:
    found = {}
    for name in names:
        all_of_it = [fault for fault in faults.values() if fault.property == name]
        some = [fault for fault in all_of_it if fault.name in chosen]
        found[name] = PropertyMatrix(name, some, complete=len(some) == len(all_of_it), all_pairs=all_pairs)
    return found
