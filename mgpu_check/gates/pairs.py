"""Compare the results of a configuration on its ranks with those of another one, without one device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from mgpu_check.diagnosis.observed import Expected, ObservedRun, RankTrace, Relations
from mgpu_check.diagnosis.results import Result
from mgpu_check.errors import RankFailure, RankHang
from mgpu_check.gates.expectations import Effort, key_of
from mgpu_check.gates.meshes import Place
from mgpu_check.gates.perturbing import ROUNDOFF
from mgpu_check.gates.relations import relations_of
from mgpu_check.gates.rounding import rounding_seen
from mgpu_check.gates.running import run_traced
from mgpu_check.gates.runs import alike, wide
from mgpu_check.gates.scenario import Scenario
from mgpu_check.gates.states import explained_by_rounding
from mgpu_check.gates.switches import Switch
from mgpu_check.gates.trial import Trials
from mgpu_check.gates.varying import Variation, run_varied
from mgpu_check.numerics.bounds import unit_roundoff
from mgpu_check.numerics.steps import PAIRS, assess, deviations, granted_at_least, granted_with, with_roundings

Allowance = Literal["bits", "rounding", "bfloat16"]
"""How far two configurations may differ: not at all, by rounding, or also by rounding to bfloat16."""

_KEPT = 64
"""Most runs that are kept for further comparisons."""
_PAIR = 2
"""Most ranks whose sum is the same in any order."""

_Values = Mapping[Result, torch.Tensor]


class OnRanks:
    """The results of one configuration on its ranks, and how far rounding may move them.

    Attributes:
        place: the ranks, and their mesh.
    """

    def __init__(self, trials: Trials, place: Place) -> None:
        self.trials, self.place = trials, place
        self._runs: dict[tuple[object, ...], list[ObservedRun]] = {}
        self._measured: dict[tuple[object, ...], Expected] = {}

    def case(self, scenario: Scenario) -> Scenario:
        return replace(scenario, world_size=self.place[0], mesh=self.place[1])

    def run(self, scenario: Scenario, how: Variation | None = None, number: int = 0) -> list[ObservedRun]:
        case = self.case(scenario)
        key = (key_of(case), how, number)
        if key not in self._runs:
            if how is None:
                found = self.trials.on_ranks(case, whole=True)
            else:
                seen = self.trials.ranks.run(run_varied, self.trials.program, case, how, size=case.world_size)
                found = self.trials.assembled(case, seen)[:1]  # only the results of rank 0 are measured
            self._runs[key] = found
            if len(self._runs) > _KEPT:
                del self._runs[next(iter(self._runs))]
        return self._runs[key]

    def repeats(self, scenario: Scenario) -> bool:
        """Return whether a second run gives the same bits, and would in any order of the ranks' sums."""
        axes = [size for _, size in self.place[1]] or [self.place[0]]
        if max(axes) > _PAIR:
            return False
        first, again = (self.run(scenario, number=number) for number in range(2))
        return _same_bits(first, again)

    def expected(self, scenario: Scenario, deep: bool, effort: Effort, roundoff: float = 0.0) -> Expected:
        """Return the results as those that another configuration must give.

        Args:
            deep: also measure the results of each optimizer step.
            roundoff: unit roundoff of a narrow dtype that the other one may round to.
        """
        key = (key_of(self.case(scenario)), deep, effort, roundoff)
        if key not in self._measured:
            self._measured[key] = self._measure(scenario, deep, effort, roundoff)
            if len(self._measured) > _KEPT:
                del self._measured[next(iter(self._measured))]
        return self._measured[key]

    def _measure(self, scenario: Scenario, deep: bool, effort: Effort, roundoff: float) -> Expected:
        seen = self.run(scenario)
        expected = Expected(seen[0], None, provisional=effort is not Effort.IN_FULL)
        single = _finite(seen[0].values)
        # Rounding in float32 rarely decides the sign of a gradient, so the first measurement does without.
        nudged = (bool(roundoff) or effort is not Effort.PROVISIONAL) and any(one.nonlinear for one in seen)
        spread = deviations(sum(value.numel() for value in single.values()))
        try:
            pairs = 1 if effort is not Effort.IN_FULL else PAIRS
            moved = self._perturbed(scenario, spread, pairs, nudged, roundoff)
            granted = granted_at_least(single, [_finite(one.values) for one in moved], ROUNDOFF, spread)
            exact: _Values = single
            if effort is not Effort.PROVISIONAL:
                again = self.run(scenario, Variation(1.0, -1, batch_only=True))[0]
                errors = rounding_seen(seen[0], again) or {}
                granted = granted_with(granted, single, errors)
            if effort is Effort.IN_FULL:
                exact = self._exact(scenario, expected)
                measured = assess(exact, [single], [_finite(one.values) for one in moved], ROUNDOFF, spread)
                granted = {name: torch.maximum(value, granted[name]) for name, value in measured.tolerance.items()}
        except (RankFailure, RankHang) as error:
            exact = single
            granted = {name: torch.full_like(one, explained_by_rounding(one, 0.0)) for name, one in single.items()}
            said = (str(error).splitlines() or [type(error).__name__])[0]
            remark = f"tolerances are estimates, because a perturbed run failed: {said}"
            expected.remarks.append(remark)
            self.trials.ranks._remark(f"{self.trials.program.gate}: {self.trials.name}: {remark}")
        expected.exact = {
            name: torch.where(value.isfinite(), exact[name], value) for name, value in wide(seen[0].values).items()
        }
        expected.tolerance = {
            name: with_roundings(value, exact[name], roundoff) if roundoff else value for name, value in granted.items()
        }
        if deep:
            self._take_steps(scenario, expected, spread, roundoff)
        return expected

    def _perturbed(
        self, scenario: Scenario, spread: float, pairs: int, nudged: bool, roundoff: float
    ) -> list[ObservedRun]:
        """Return the results of perturbed runs that are comparable with the run without perturbation."""
        how = [Variation(sign * spread, pair) for pair in range(pairs) for sign in (1, -1)]
        if nudged:
            how += [Variation(spread, pair, nudged=True, roundoff=roundoff) for pair in range(pairs)]
        plain = self.run(scenario)[0]
        return [one for one in (self.run(scenario, each)[0] for each in how) if alike(plain, one)]

    def _exact(self, scenario: Scenario, expected: Expected) -> _Values:
        """Return the results in float64, or those of the step's own precision if it does not run in float64."""
        plain = self.run(scenario)[0]
        try:
            exact = self.run(scenario, Variation(double=True))[0]
        except (RankFailure, RankHang):
            exact = plain
        if exact is plain or not alike(plain, exact):
            expected.remarks.append("the step does not run in float64, so tolerances are those of its own precision")
            exact = plain
        return {name: value.double() for name, value in _finite(exact.values).items()}

    def traces(self, scenario: Scenario) -> list[RankTrace]:
        case = self.case(scenario)
        seen = self.trials.ranks.run(run_traced, self.trials.program, case, size=case.world_size)
        return [trace for _, trace in seen]

    def _take_steps(self, scenario: Scenario, expected: Expected, spread: float, roundoff: float) -> None:
        expected.drawn = self.traces(scenario)[0].drawn
        plain, *moved = (self.run(scenario, Variation(by, deep=True))[0].snapshots for by in (0.0, spread, -spread))
        for step, stage in enumerate(plain):
            others = [_finite(one[step]) for one in moved if step < len(one)]
            single = {
                name: value
                for name, value in _finite(stage).items()
                if all(name in other and other[name].shape == value.shape for other in others)
            }
            granted = granted_at_least(single, others, ROUNDOFF, 2 * spread)
            expected.snapshots.append({name: value.double() for name, value in single.items()})
            expected.allowances.append(
                {name: with_roundings(one.double(), single[name].double(), roundoff) for name, one in granted.items()}
            )


class PairTrials(Trials):
    """The trials of one configuration against another one, on the ranks of each.

    Args:
        own: the configuration.
        base: the other configuration.
        allowance: how far the two may differ.

    Attributes:
        effects: how often the switch of the configuration had an effect.
    """

    one_device = False

    def __init__(self, own: OnRanks, base: OnRanks, allowance: Allowance = "rounding") -> None:
        trials = own.trials
        self.own, self.base, self.against = own, base, base.trials.name
        super().__init__(trials.ranks, trials.program, trials.kinds, trials.tolerance, trials.name)
        self._allowance = allowance
        self._expectations.alone = False
        self.effects = 0

    @property
    def of_switch(self) -> bool:
        """True if both are the same configuration, with an option on and off."""
        return self.program.switch is not None or self.base.trials.program.switch is not None

    def on_ranks(self, scenario: Scenario, whole: bool = False, histories: bool = False) -> list[ObservedRun]:
        """Run the step, and count the effects of its switch; do not run it again to compare it with itself."""
        if self.own is self.base and scenario.place in self._repeated:
            return self.base.run(scenario)
        seen = super().on_ranks(scenario, whole, histories)
        switch = self.program.switch
        # Autocast may narrow nothing; then it changes no bit.
        if switch != Switch("bfloat16", on=True) or not _same_bits(seen, self.base.run(scenario)):
            self.effects += max(one.switched for one in seen)
        return seen

    def expected(self, scenario: Scenario, deep: bool = False, effort: Effort = Effort.IN_FULL) -> Expected:
        """Return the results of the other configuration; see `OnRanks.expected`."""
        roundoff = unit_roundoff(torch.bfloat16) if self._allowance == "bfloat16" else 0.0
        expected = self.base.expected(scenario, deep, effort, roundoff)
        self._apart |= self.base.trials.is_ambiguous
        if self._allowance == "bits" and self.base.repeats(scenario):
            exact = {name: value for name, value in expected.single.values.items() if value.is_floating_point()}
            zeros = {name: torch.zeros_like(value) for name, value in exact.items()}
            return replace(expected, exact=exact, tolerance=zeros, provisional=False)
        if effort is Effort.IN_FULL and self.own is not self.base and not self.of_switch:
            return _with_both(expected, self.own.expected(scenario, False, effort))
        return expected

    def compared(self, expected: Expected, seen: Sequence[ObservedRun]) -> Relations:
        """Return the relations, without results that configurations may have or not."""
        single, first = expected.single, seen[0]
        kinds = set(self.kinds)
        left_out: dict[str, str] = {}
        if ("grads" in single.touched) != ("grads" in first.touched):
            kinds.discard("grads")
            left_out["grads"] = "gradients; only one of the configurations leaves them"
        lost = [name for name in single.values if name.kind == "optimizer" and name not in first.values]
        kept = {name: value for name, value in single.values.items() if name not in lost}
        relations = relations_of(replace(expected, single=replace(single, values=kept)), seen, kinds, self.tolerance)
        relations.left_out |= left_out
        relations.skipped |= dict.fromkeys(lost, f"{self.name} has no such state")
        return relations

    def trace_alone(self, scenario: Scenario) -> RankTrace:
        traces = self.base.traces(scenario)
        divided = {name.of.rpartition(".")[0] for name in self.base.run(scenario)[0].own if name.kind == "params"}
        return RankTrace(
            outputs=_rows([trace.outputs for trace in traces], divided),
            gradients=_rows([trace.gradients for trace in traces], divided),
        )


def _rows(of_ranks: Sequence[Mapping[str, torch.Tensor]], divided: Collection[str]) -> dict[str, torch.Tensor]:
    found = {}
    for name in of_ranks[0]:
        parts = [one[name].reshape(-1, one[name].shape[-1]) for one in of_ranks if name in one]
        inside = any(part == name or part.startswith(f"{name}.") for part in divided)
        if not inside and len({part.shape[-1] for part in parts}) == 1:
            found[name] = torch.cat(parts)
    return found


def _same_bits(seen: Sequence[ObservedRun], other: Sequence[ObservedRun]) -> bool:
    return [one.digests for one in seen] == [one.digests for one in other]


def _with_both(expected: Expected, other: Expected) -> Expected:
    """Return the expected results with the tolerances of both configurations."""
    tolerance = {
        name: value + other.tolerance[name]
        if name in other.tolerance and other.tolerance[name].shape == value.shape
        else value
        for name, value in expected.tolerance.items()
    }
    return replace(expected, tolerance=tolerance)


def _finite(values: _Values) -> dict[Result, torch.Tensor]:
    """Return the floating-point values, in float32 at least, with zeros in place of infinities and NaN."""
    return {name: torch.where(value.isfinite(), value, 0.0) for name, value in wide(values).items()}
