"""In the pytest process: scenarios run on ranks, and compared with one device."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mgpu_check.errors import RankDied, RankFailure, RankHang
from mgpu_check.gate.measuring import Expected, largest_factor, measure
from mgpu_check.gate.observing import Observation, Program, Unusable
from mgpu_check.gate.relations import Verdict, judge, repeats
from mgpu_check.gate.running import run_step
from mgpu_check.gate.scenario import Scenario
from mgpu_check.gate.worlds import World

__all__ = ["Trial", "Trials"]

_KEPT = 64


@dataclass
class Trial:
    """A scenario that has failed.

    Attributes:
        expected: what one device gives.
        verdict: what does not hold; None where ranks did not return.
        seen: what each rank has left.
        error: what ranks have raised.
    """

    scenario: Scenario
    expected: Expected
    verdict: Verdict | None
    seen: Sequence[Observation] = ()
    error: RankFailure | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are wrong; all where all are."""
        if self.error is not None:
            return self.error.ranks
        assert self.verdict is not None
        wrong = {rank for ranks in self.verdict.wrong.values() for rank in ranks}
        return tuple(sorted(wrong or range(self.scenario.world_size)))


class Trials:
    """What is tried of one program, each scenario once.

    Args:
        kinds: what is compared.
        tolerance: what the user grants; None for what is measured.
        name: of the step.

    Attributes:
        completed: scenarios that were compared.
        current: that which is tried, or was tried last.
        trains: the step has changed the model, so that a second one is another.
    """

    def __init__(
        self,
        ranks: World,
        program: Program,
        kinds: Collection[str],
        tolerance: float | Mapping[str, float] | None,
        name: str,
    ) -> None:
        self.ranks, self.program, self.kinds, self.tolerance, self.name = ranks, program, kinds, tolerance, name
        self.completed = 0
        self.trains = isinstance(program.step, type)
        self.current = Scenario(1, 0)
        self._expected: dict[tuple[object, ...], Expected | RankFailure] = {}
        self._outcomes: dict[Scenario, Trial | None] = {}
        self._repeated: set[int] = set()
        self._alone = True
        self._factor: float | None = None
        self._refusals: list[RankFailure] = []
        self._vague: list[str] = []

    def knows(self, scenario: Scenario) -> bool:
        return not scenario.batches and scenario in self._outcomes

    def run(self, scenario: Scenario) -> Trial | None:
        """Try a scenario; None where all relations hold, or one device cannot do it either."""
        self.current = scenario = self._placed(scenario)
        if self.knows(scenario):
            return self._outcomes[scenario]
        trial = self._run(scenario)
        if not scenario.batches:
            self._outcomes[scenario] = trial
        return trial

    def _run(self, scenario: Scenario) -> Trial | None:
        try:
            expected = self.expected(scenario)
        except RankFailure as refused:
            self._refusals.append(refused)
            return None
        if scenario.change and not self._counts(scenario, expected):
            return None
        if vague := self._not_a_number(expected):
            self._vague.append(f"{vague} is not a number on one device, for {scenario.samples} samples")
            return None
        self.trains |= "params" in (expected.own or expected.single).touched
        try:
            seen = self.on_ranks(scenario)
        except RankFailure as error:
            return Trial(scenario, expected, None, error=error)
        self._check_batches(expected, seen)
        verdict = judge(expected, seen, self.kinds, self.tolerance)
        if not verdict.holds and not all(one.values for one in seen):
            # Checksums tell that ranks differ, values by how much.
            seen = self.on_ranks(scenario, whole=True)
            verdict = judge(expected, seen, self.kinds, self.tolerance)
        if not verdict.relations:
            raise ValueError(
                f"assert_step_scales: {self.name} leaves nothing of {', '.join(sorted(self.kinds))} to be compared; return "
                "named tensors or numbers from it, or observe something else"
            )
        if verdict.holds and scenario.world_size not in self._repeated:
            self._repeated.add(scenario.world_size)
            repeats(verdict, expected, seen, self.on_ranks(scenario), self.tolerance)
        self.completed += 1
        return None if verdict.holds else Trial(scenario, expected, verdict, seen)

    def _not_a_number(self, expected: Expected) -> str | None:
        """The first result of one device that is NaN, with which everything and nothing agrees."""
        single = expected.single
        for name, value in single.values.items():
            if single.kinds[name] in self.kinds and value.is_floating_point() and bool(value.isnan().any()):
                return name
        return None

    def _counts(self, scenario: Scenario, expected: Expected) -> bool:
        """Whether a changed batch is one that the step is meant for: one device can do it, and does what is expected."""
        if scenario.change == "scaled" and not expected.finite:
            return False
        return expected.own is None or judge(expected, [expected.own], self.kinds, self.tolerance).holds

    def on_ranks(self, scenario: Scenario, whole: bool = False) -> list[Observation]:
        """Run the step at the scenario's world size."""
        size = 1 if self.program.single_process else scenario.world_size
        seen: list[Observation] = self.ranks.run(run_step, self.program, scenario, whole, size=size)
        return seen

    def expected(self, scenario: Scenario, deep: bool = False) -> Expected:
        """What one device gives; measured once for all world sizes.

        Raises:
            RankFailure: the reference, or the step, fails on one device.
            ValueError: what `build` gives is no model.
        """
        of_size = scenario.world_size if _wants_world_size(self.program.reference) else 0
        key = (of_size, scenario.samples, scenario.steps, scenario.change, scenario.factor, scenario.seed, deep)
        if scenario.batches or key not in self._expected:
            try:
                found: Expected | RankFailure = self._measured(scenario, deep)
            except RankFailure as refused:
                if isinstance(refused.__cause__, Unusable):
                    raise ValueError(str(refused.__cause__)) from None
                found = refused
            if len(self._expected) >= _KEPT:
                del self._expected[next(iter(self._expected))]
            self._expected[key] = found
        known = self._expected[key]
        if isinstance(known, RankFailure):
            raise known
        return known

    def _measured(self, scenario: Scenario, deep: bool) -> Expected:
        try:
            found: Expected = self.ranks.run(measure, self.program, scenario, deep, self._alone, size=1)[0]
        except (RankDied, RankHang):
            if self.program.reference is None or not self._alone:
                raise
            # Code for several ranks need not bear to be alone: where there is a reference, it need not be.
            self._alone = False
            return self._measured(scenario, deep)
        return found

    def finish(self) -> None:
        """See that something was compared.

        Raises:
            ValueError: nothing could be.
        """
        if self.completed:
            return
        if self._refusals:
            raise ValueError(
                f"assert_step_scales: {self.name} fails on one device for every batch that was tried, so there is nothing "
                f"to compare with: {str(self._refusals[0]).splitlines()[0]}"
            ) from self._refusals[0]
        if self._vague:
            raise ValueError(
                f"assert_step_scales: {self.name}: {self._vague[0]}, and so for every batch that was tried; leave it out with "
                "observe=, or give a reference"
            )
        raise ValueError(
            "assert_step_scales: no case could be drawn; sizes and world_sizes together leave nothing to try"
        )

    def _placed(self, scenario: Scenario) -> Scenario:
        """With the factor for scaling that suits the step."""
        if scenario.change != "scaled" or scenario.batches:
            return scenario
        if self._factor is None:
            plain = replace(scenario, change="", steps=1)
            try:
                factor = self.ranks.run(largest_factor, self.program, plain, size=1)[0]
            except RankFailure:
                factor = None
            self._factor = factor or scenario.factor
        return replace(scenario, factor=self._factor)

    def _check_batches(self, expected: Expected, seen: Sequence[Observation]) -> None:
        if {one.batch for one in seen} != {expected.single.batch}:
            raise ValueError(
                "assert_step_scales: batch(n) gives other batches when it is called again under the same seed; draw "
                "from torch's, Python's or NumPy's global generators, or from one of your own with a fixed seed"
            )


def _wants_world_size(reference: object) -> bool:
    return callable(reference) and "world_size" in inspect.signature(reference).parameters
