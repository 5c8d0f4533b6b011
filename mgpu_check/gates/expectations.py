"""Measure the results of one device for each scenario, on ranks that are alone in their world, and keep them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto

from mgpu_check.diagnosis.observed import Expected
from mgpu_check.errors import RankDied, RankFailure, RankHang
from mgpu_check.gates.measuring import (
    measure,
    measure_in_parts,
    measure_provisionally,
    measure_slightly_moved,
    of_parts,
)
from mgpu_check.gates.program import Program, raise_unusable, wants_world_size
from mgpu_check.gates.rounding import RUNS, rounding_seen
from mgpu_check.gates.runs import LARGE
from mgpu_check.gates.scenario import Scenario
from mgpu_check.gates.worlds import RanksFixture
from mgpu_check.numerics.steps import granted_with
from mgpu_check.torch_hooks.nested import tensors_of
from mgpu_check.torch_hooks.tensors import digest_of

_KEPT = 64
"""Most scenarios whose expected results are kept for other world sizes."""
_KEPT_ELEMENTS = 100_000_000
"""Most elements of all kept results together: they take less than a gigabyte."""


class Effort(Enum):
    """How thoroughly to measure the error that a right step may have.

    Efforts are tried in this order: each one grants more than the one before, and takes longer.
    """

    PROVISIONAL = auto()
    """One plain run, and a few runs perturbed in the precision of the step."""
    WIDENED = auto()
    """One more run, which shows what rounding within operators adds."""
    IN_FULL = auto()
    """Runs in float64, exact and perturbed."""


class Expectations:
    """The results of one device for each scenario of one program.

    Attributes:
        alone: whether the step can run alone in its world; True until it fails there.
    """

    def __init__(self, ranks: RanksFixture, program: Program) -> None:
        self._ranks, self._program = ranks, program
        self.alone = True
        self._expected: dict[tuple[object, ...], Expected | RankFailure] = {}
        self._elements: int | None = None
        """Elements of the results, if ranks share the runs of this step; 0 if one rank does all runs; None before the
        first."""

    def of(self, scenario: Scenario, deep: bool = False, effort: Effort = Effort.IN_FULL) -> Expected:
        """Return the results of one device; measure them once for all world sizes."""
        of_size = scenario.world_size if wants_world_size(self._program.reference) else 0
        case = key_of(replace(scenario, world_size=of_size))
        known = self._expected.get((case, deep))
        if known is None and effort is not Effort.IN_FULL:
            known = self._provisional((case, "provisionally"), scenario, effort)
        if known is None:  # not measured yet, or the provisional measurement is inconclusive
            known = self._kept((case, deep), scenario, measure, deep)
        assert known is not None
        if isinstance(known, RankFailure):
            raise known
        return known

    def _provisional(
        self, key: tuple[object, ...], scenario: Scenario, effort: Effort
    ) -> Expected | RankFailure | None:
        known = self._expected.get(key) or self._kept(key, scenario, measure_provisionally)
        if effort is Effort.WIDENED and isinstance(known, Expected) and not known.widened:
            again = self._ranks.run(measure_slightly_moved, self._program, scenario, size=1)[0]
            errors = rounding_seen(known.single, again)
            if errors is None:
                return None
            known.tolerance = granted_with(known.tolerance, known.exact, errors)
            known.widened = True
        return known

    def _kept(
        self, key: tuple[object, ...], scenario: Scenario, measuring: Callable[..., Expected | None], *how: bool
    ) -> Expected | RankFailure | None:
        try:
            found: Expected | RankFailure | None = self._measured(scenario, measuring, *how)
        except RankFailure as refused:
            raise_unusable(self._program.gate, refused)
            found = refused
        if found is not None:
            self._expected[key] = found
        while len(self._expected) > 1 and (
            len(self._expected) > _KEPT or sum(map(_elements_of, self._expected.values())) > _KEPT_ELEMENTS
        ):
            del self._expected[next(iter(self._expected))]
        return found

    def _measured(self, scenario: Scenario, measuring: Callable[..., Expected | None], *how: bool) -> Expected | None:
        if measuring is measure_provisionally and (together := self._measured_together(scenario)) is not None:
            return together
        try:
            found: Expected | None = self._ranks.run(measuring, self._program, scenario, *how, self.alone, size=1)[0]
        except (RankDied, RankHang):
            if self._program.reference is None or not self.alone:
                raise
            # Parallel code may hang or die at world size 1; with a reference it need not run there.
            self.alone = False
            return self._measured(scenario, measuring, *how)
        if measuring is measure_provisionally and found is not None and self._elements is None:
            elements = sum(value.numel() for value in found.single.values.values())
            large = elements >= LARGE and not found.single.nonlinear and self._ranks._at_once > 1
            self._elements = elements if large else 0
        return found

    def _measured_together(self, scenario: Scenario) -> Expected | None:
        """Return `measure_provisionally` from runs shared by ranks; None if one rank has to do all runs."""
        elements = self._elements
        if not elements or (self._program.reference is not None and scenario.change):
            return None
        count = min(len(RUNS), self._ranks._at_once)
        shares = [RUNS[first::count] for first in range(count)]
        arguments = [(self._program, scenario, runs, elements) for runs in shares]
        try:
            done = self._ranks._run_apart(measure_in_parts, arguments)
        except RankDied:  # memory may suffice for one rank and not for several
            self._elements = 0
            return None
        parts = {
            run: part
            for runs, of_rank in zip(shares, done, strict=True)
            for run, part in zip(runs, of_rank, strict=True)
        }
        found = of_parts(self._program, [parts[run] for run in RUNS], elements)
        if found is None:
            self._elements = 0
        return found


def key_of(scenario: Scenario) -> tuple[object, ...]:
    """Return a key that differs between scenarios; drawn batches enter with the digests of their tensors."""
    return scenario, tuple(digest_of(leaf) for leaf in tensors_of(scenario.batches))


def _elements_of(known: Expected | RankFailure) -> int:
    if isinstance(known, RankFailure):
        return 0
    return 3 * sum(value.numel() for value in known.single.values.values())
