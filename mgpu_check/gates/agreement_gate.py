"""The gate for configurations: implementations of a step agree with each other.

A configuration is compared with one device, or, without one device, with another configuration on its ranks.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

from mgpu_check.diagnosis.observations import KINDS, PARITY, Expected, ObservedRun, RankTrace, Relations, Result
from mgpu_check.diagnosis.report import Finding
from mgpu_check.errors import RankFailure, RankHang, ScalingMismatch
from mgpu_check.gates.comparison.coverage import check_unjudged
from mgpu_check.gates.comparison.relations import relations_of
from mgpu_check.gates.explanation.failure_report import Failure, report_of
from mgpu_check.gates.explanation.investigation import failure_of, hang_of, shrunk_to_axes
from mgpu_check.gates.gate_arguments import Program, RanksFixture, check_arguments, first_line, raise_unusable
from mgpu_check.gates.run.measurement import (
    MOVED_BATCH,
    ROUNDOFF,
    Variation,
    alike,
    finite,
    granted_on_ranks,
    run_varied,
    wide,
)
from mgpu_check.gates.run.states import explained_by_rounding
from mgpu_check.gates.run.step_runs import run_traced
from mgpu_check.gates.search.scenario_search import SEVERAL_STEPS, Family, Sizes, families, smallest_failure
from mgpu_check.gates.search.scenarios import Place, Scenario, check_places
from mgpu_check.gates.search.trials import Effort, Tolerance, Trial, Trials, key_of, try_seeds
from mgpu_check.numerics.placement import Placement
from mgpu_check.numerics.steps import PAIRS, assess, deviations, granted_at_least
from mgpu_check.processes.rank_lists import few

_GATE = "assert_steps_agree"
_EXAMPLES = 12
_MOST_SHRINKS = 16  # fewer than for one step, because each case runs all configurations


@dataclass(frozen=True)
class Configuration:
    """One of the configurations of `assert_steps_agree`: a step, and the ranks that it runs on.

    Attributes:
        step: ``step(model, batch, rank)``, or a class, as in `assert_step_scales`.
        on: the number of ranks, or a mesh: ``{"dp": 2, "tp": 2}``. Default: all ranks, without a mesh.
        placement: the slice of each parameter that a rank holds, as in `assert_step_scales`.
        returned_by: the ranks whose returned values count, as in `assert_step_scales`.
        unjudged: parameters that need not be compared: a mapping from patterns to reasons.
    """

    step: Callable[..., Any]
    on: int | Mapping[str, int] | None = None
    placement: Placement = None
    returned_by: Callable[[Mapping[str, int]], bool] | str | None = None
    unjudged: Mapping[str, str] | None = None


def assert_steps_agree(
    ranks: RanksFixture,
    steps: Mapping[str, Configuration | Callable[..., Any]],
    *,
    build: Callable[[], Any],
    batch: Callable[[int], Any] | st.SearchStrategy[Any],
    reference: Callable[..., Any] | None = None,
    one_device: bool = True,
    sizes: Sizes = None,
    observe: Collection[str] = KINDS,
    tolerance: float | Mapping[str, float] | None = None,
    max_examples: int | None = None,
) -> None:
    """Assert that several configurations of one training step give the same results.

    All configurations build the model from the same seed, and get the same global batches. Slices that their ranks hold
    are joined, and compared by the names of the parameters: gradients, parameters, buffers, the optimizer's state and
    returned values.

    With ``one_device=True`` each configuration is also compared with one device, as `assert_step_scales` does. One
    device is the control: a failure names the configurations that differ from it. Without it, two configurations that
    differ are reported as a pair. Among three or more, those that differ from a majority are named. Then the tolerance
    is measured on the ranks: the step runs again, with random rounding errors in every operator.

    Args:
        ranks: the fixture.
        steps: two or more configurations by name, each a `Configuration`, or a step that runs on all ranks.
        build: ``build() -> nn.Module``, as in `assert_step_scales`; the same for all configurations.
        batch: ``batch(n)``, or a Hypothesis strategy of global batches, as in `assert_step_scales`.
        reference: ``reference(model, batch)`` computes the step on one device. Default: each configuration at world
            size 1; then they must also agree there.
        one_device: whether configurations are compared with one device. Give False if they do not run on one.
        sizes: batch sizes, as in `assert_step_scales`, where the world size is a multiple of those of all
            configurations. Default: "divisible".
        observe: the kinds to compare, as in `assert_step_scales`.
        tolerance: replaces the measured tolerance, as in `assert_step_scales`.
        max_examples: approximate number of cases to try; default 12.

    Raises:
        NotCompared: no error was found, but a trained parameter was not compared.
        ScalingMismatch: configurations differ. The message names them, and the first result that differs.
        RankHang: ranks did not return in time.
        ValueError: an argument is wrong, or the steps cannot be compared, as in `assert_step_scales`.
    """
    configurations = _checked(steps)
    if len(configurations) < 2:
        (only,) = configurations
        raise ValueError(f"{_GATE}: steps has one configuration, {only!r}; give another one")
    if type(one_device) is not bool:
        raise ValueError(f"{_GATE}: one_device={one_device!r}; give True or False")
    if reference is not None and not one_device:
        raise ValueError(f"{_GATE}: reference and one_device=False are both given; a reference runs on one device")
    of_batch, drawn = (None, batch) if isinstance(batch, st.SearchStrategy) else (batch, None)
    programs = {
        name: Program(
            each.step, build, of_batch, reference, gate=_GATE, placement=each.placement, returned_by=each.returned_by
        )
        for name, each in configurations.items()
    }
    for program in programs.values():
        check_arguments(program, observe, tolerance, max_examples)
    places: dict[str, Place] = {}
    for name, configuration in configurations.items():
        on = ranks.size if configuration.on is None else configuration.on
        (places[name],) = check_places(_GATE, f"on of {name!r}", [on], ranks.size)
    reasons = {name: check_unjudged(_GATE, configuration.unjudged) for name, configuration in configurations.items()}
    if drawn is not None and sizes is not None:
        raise ValueError(f"{_GATE}: sizes and a strategy of batches are both given; batches bring their sizes")
    worlds: list[Place] = [(math.lcm(*(size for size, _ in places.values())), ())]
    sizes = "divisible" if sizes is None and drawn is None else sizes
    kinds = frozenset(observe)
    how = OnOneDevice if one_device else WithoutOneDevice
    agreement: Agreement = how(ranks, programs, places, kinds, tolerance)
    _search(agreement, families(worlds, sizes, drawn, max_examples or _EXAMPLES))
    for trials in agreement.comparisons:
        trials.finish([places[trials.name]], reasons[trials.name])
        if one_device:
            try_seeds(trials)


def _checked(steps: Mapping[str, Configuration | Callable[..., Any]]) -> dict[str, Configuration]:
    wanted = 'give a mapping from names to configurations, such as {"tp": Configuration(step, {"tp": 2}), "ddp": step}'
    if not isinstance(steps, Mapping) or not steps:
        raise ValueError(f"{_GATE}: steps={steps!r:.80}; {wanted}")
    configurations = {}
    for name, step in steps.items():
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{_GATE}: steps has the name {name!r}; {wanted}")
        configurations[name] = step if isinstance(step, Configuration) else Configuration(step)
    return configurations


def _search(agreement: Agreement, families: Iterable[Family]) -> None:
    for family in families:
        if family.name == SEVERAL_STEPS and not agreement.trains:
            continue
        try:
            disagreement = smallest_failure(agreement, family.scenarios, family.examples, _MOST_SHRINKS)
        except RankHang as hang:
            raise hang_of(agreement.current, hang, f"{agreement.current.name} does not return") from None
        if disagreement is not None:
            raise _error_of(disagreement) from disagreement.failures[0][1].error


def _error_of(disagreement: Disagreement) -> ScalingMismatch:
    trials, failed = disagreement.failures[0]
    failed, needed = shrunk_to_axes(trials, failed) if trials.one_device else (failed, None)
    failure = failure_of(trials, failed, [], needed)
    findings = _findings(disagreement, trials, failure)
    if not disagreement.control:
        # Without a control, a mistake may be one of either configuration.
        for other_trials, of_other in disagreement.failures[1:]:
            other_findings = _findings(disagreement, other_trials, failure_of(other_trials, of_other, []))
            mistakes = {finding.mistake for finding in findings}
            findings += [finding for finding in other_findings if finding.mistake not in mistakes]
    failure = replace(failure, findings=findings, verdict=disagreement.verdict)
    report = report_of(failure)
    remarks = list(report.remarks)
    if not disagreement.control:
        remarks.append(f"nothing shows which of them is wrong: expected values are those of {trials.against}")
    if 1 < len(disagreement.groups) < sum(map(len, disagreement.groups)):
        remarks.append("these agree with each other: " + "; ".join(", ".join(group) for group in disagreement.groups))
    return ScalingMismatch(
        str(replace(report, remarks=remarks)),
        ranks=failed.ranks if disagreement.control else (),
        mistakes=report.mistakes,
        site=report.site,
    )


def _findings(disagreement: Disagreement, trials: Trials, failure: Failure) -> list[Finding]:
    """Return the findings in words for what the configuration was compared with; one if it may be right."""
    if trials.one_device:
        return list(failure.findings)
    findings = [
        replace(finding, evidence=finding.evidence.replace(PARITY, trials.against)) for finding in failure.findings
    ]
    if disagreement.control:
        return findings
    condition = f"if {trials.against} is right and {trials.name} is wrong"
    return [replace(finding, evidence=f"{condition}: {finding.evidence}") for finding in findings[:1]]


_KEPT = 64  # most runs that are kept for further comparisons

_Values = Mapping[Result, torch.Tensor]
_T = TypeVar("_T")


def _kept(kept: dict[tuple[object, ...], _T], key: tuple[object, ...], make: Callable[[], _T]) -> _T:
    if key not in kept:
        kept[key] = make()
        if len(kept) > _KEPT:
            del kept[next(iter(kept))]
    return kept[key]


class OnRanks:
    """The results of one configuration on its ranks, and how far rounding may move them.

    An `Agreement` makes one for each configuration, and gives it to `PairTrials`, which ask it for the results of a
    scenario. It keeps the latest `_KEPT` of them.
    """

    def __init__(self, trials: Trials, world: Place) -> None:
        self.trials, self.world = trials, world
        self._runs: dict[tuple[object, ...], list[ObservedRun]] = {}
        self._measured: dict[tuple[object, ...], Expected] = {}

    def case(self, scenario: Scenario) -> Scenario:
        return replace(scenario, world_size=self.world[0], mesh=self.world[1])

    def run(self, scenario: Scenario, how: Variation | None = None) -> list[ObservedRun]:
        case = self.case(scenario)

        def run() -> list[ObservedRun]:
            if how is None:
                return self.trials.on_ranks(case, all_values=True)
            varied_runs = self.trials.ranks.run(run_varied, self.trials.program, case, how, size=case.world_size)
            return self.trials.assembled(case, varied_runs)[:1]  # only the results of rank 0 are measured

        return _kept(self._runs, (key_of(case), how), run)

    def expected(self, scenario: Scenario, deep: bool, effort: Effort) -> Expected:
        """Return the results that another configuration must give."""
        key = (key_of(self.case(scenario)), deep, effort)
        return _kept(self._measured, key, lambda: self._measure(scenario, deep, effort))

    def _measure(self, scenario: Scenario, deep: bool, effort: Effort) -> Expected:
        runs = self.run(scenario)
        expected = Expected(runs[0], None, provisional=effort is not Effort.IN_FULL)
        single = finite(runs[0].values)
        # Rounding in float32 rarely decides the sign of a gradient, so the first measurement does without.
        nudged = effort is not Effort.PROVISIONAL and any(run.nonlinear for run in runs)
        spread = deviations(sum(value.numel() for value in single.values()))
        try:
            moved = self._perturbed(scenario, spread, PAIRS if effort is Effort.IN_FULL else 1, nudged)
            of_batch = None if effort is Effort.PROVISIONAL else self.run(scenario, MOVED_BATCH)[0]
            granted = granted_on_ranks(runs[0], moved, spread, of_batch)
            exact: _Values = single
            if effort is Effort.IN_FULL:
                exact = self._exact(scenario, expected)
                measured = assess(exact, [single], [finite(run.values) for run in moved], ROUNDOFF, spread)
                granted = {name: torch.maximum(value, granted[name]) for name, value in measured.tolerance.items()}
        except (RankFailure, RankHang) as error:
            exact = single
            granted = {name: torch.full_like(value, explained_by_rounding(value)) for name, value in single.items()}
            remark = f"tolerances are estimates, because a perturbed run failed: {first_line(error)}"
            expected.remarks.append(remark)
            self.trials.ranks._remark(f"{self.trials.program.gate}: {self.trials.name}: {remark}")
        values = wide(runs[0].values).items()
        expected.exact = {name: torch.where(value.isfinite(), exact[name], value) for name, value in values}
        expected.tolerance = granted
        if deep:
            self._take_steps(scenario, expected, spread)
        return expected

    def _perturbed(self, scenario: Scenario, spread: float, pairs: int, nudged: bool) -> list[ObservedRun]:
        how = [Variation(sign * spread, pair) for pair in range(pairs) for sign in (1, -1)]
        if nudged:
            how += [Variation(spread, pair, nudged=True) for pair in range(pairs)]
        plain = self.run(scenario)[0]
        return [run for run in (self.run(scenario, each)[0] for each in how) if alike(plain, run)]

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
        return {name: value.double() for name, value in finite(exact.values).items()}

    def traces(self, scenario: Scenario) -> list[RankTrace]:
        case = self.case(scenario)
        pairs = self.trials.ranks.run(run_traced, self.trials.program, case, size=case.world_size)
        return [trace for _, trace in pairs]

    def _take_steps(self, scenario: Scenario, expected: Expected, spread: float) -> None:
        expected.drawn = self.traces(scenario)[0].drawn
        plain, *moved = (self.run(scenario, Variation(by, deep=True))[0].snapshots for by in (0.0, spread, -spread))
        for step, stage in enumerate(plain):
            others = [finite(snapshots[step]) for snapshots in moved if step < len(snapshots)]
            single = {
                name: value
                for name, value in finite(stage).items()
                if all(name in perturbed and perturbed[name].shape == value.shape for perturbed in others)
            }
            granted = granted_at_least(single, others, ROUNDOFF, 2 * spread)
            expected.snapshots.append({name: value.double() for name, value in single.items()})
            expected.allowances.append({name: value.double() for name, value in granted.items()})


class PairTrials(Trials):
    """The trials of one configuration against another one, on the ranks of each.

    `WithoutOneDevice` makes one for each pair that it compares.
    """

    one_device = False

    def __init__(self, own: OnRanks, base: OnRanks) -> None:
        trials = own.trials
        self.own, self.base, self.against = own, base, base.trials.name
        super().__init__(trials.ranks, trials.program, trials.kinds, trials.tolerance, trials.name)
        self._expectations.alone = False

    def on_ranks(self, scenario: Scenario, all_values: bool = False, histories: bool = False) -> list[ObservedRun]:
        """Run the step; do not run it again to compare it with itself."""
        if self.own is self.base and scenario.place in self._repeated:
            return self.base.run(scenario)
        return super().on_ranks(scenario, all_values, histories)

    def expected(self, scenario: Scenario, deep: bool = False, effort: Effort = Effort.IN_FULL) -> Expected:
        """Return the results of the other configuration; see `OnRanks.expected`."""
        expected = self.base.expected(scenario, deep, effort)
        self.is_ambiguous |= self.base.trials.is_ambiguous
        if effort is Effort.IN_FULL and self.own is not self.base:
            return _with_both(expected, self.own.expected(scenario, False, effort))
        return expected

    def compared(self, expected: Expected, runs: Sequence[ObservedRun]) -> Relations:
        """Return the relations, without results that configurations may have or not."""
        single, first_run = expected.single, runs[0]
        kinds = set(self.kinds)
        left_out: dict[str, str] = {}
        if ("grads" in single.touched) != ("grads" in first_run.touched):
            kinds.discard("grads")
            left_out["grads"] = "gradients; only one of the configurations leaves them"
        lost = [name for name in single.values if name.kind == "optimizer" and name not in first_run.values]
        kept = {name: value for name, value in single.values.items() if name not in lost}
        relations = relations_of(replace(expected, single=replace(single, values=kept)), runs, kinds, self.tolerance)
        relations.left_out |= left_out
        relations.skipped |= dict.fromkeys(lost, f"{self.name} has no such state")
        return relations

    def trace_alone(self, scenario: Scenario) -> RankTrace:
        traces = self.base.traces(scenario)
        divided = {name.of.rpartition(".")[0] for name in self.base.run(scenario)[0].own if name.kind == "params"}
        outputs, gradients = [trace.outputs for trace in traces], [trace.gradients for trace in traces]
        return RankTrace(outputs=_rows(outputs, divided), gradients=_rows(gradients, divided))


def _rows(of_ranks: Sequence[Mapping[str, torch.Tensor]], divided: Collection[str]) -> dict[str, torch.Tensor]:
    rows = {}
    for name in of_ranks[0]:
        rows_of_ranks = [outputs[name].reshape(-1, outputs[name].shape[-1]) for outputs in of_ranks if name in outputs]
        inside = any(module_name == name or module_name.startswith(f"{name}.") for module_name in divided)
        if not inside and len({rows_of_rank.shape[-1] for rows_of_rank in rows_of_ranks}) == 1:
            rows[name] = torch.cat(rows_of_ranks)
    return rows


def _with_both(expected: Expected, own: Expected) -> Expected:
    tolerance = dict(expected.tolerance)
    for name, value in own.tolerance.items():
        if name in tolerance and tolerance[name].shape == value.shape:
            tolerance[name] = tolerance[name] + value
    return replace(expected, tolerance=tolerance)


@dataclass
class Disagreement:
    """A case that shows a disagreement of configurations."""

    verdict: str  # which of them disagree, in words
    failures: Sequence[tuple[Trials, Trial]]  # the most telling first; without a control, one in each direction
    groups: Sequence[Sequence[str]] = ()  # those that agree with each other; empty if compared with one device
    control: bool = True  # whether something shows which configuration is wrong


@dataclass
class Agreement(abc.ABC):
    """Configurations of one step that run the same cases.

    `assert_steps_agree` makes one. Hypothesis, by `smallest_failure`,
    calls `run` for each case; then the gate finishes the trials of `comparisons`.
    """

    ranks: RanksFixture
    programs: Mapping[str, Program]  # the configurations by name
    places: Mapping[str, Place]
    kinds: Collection[str]
    tolerance: Tolerance
    trials: dict[str, Trials] = field(init=False)
    current: Trials = field(init=False)  # the trials that are under way, or were the latest

    def __post_init__(self) -> None:
        how = self.kinds, self.tolerance
        self.trials = {name: Trials(self.ranks, program, *how, name) for name, program in self.programs.items()}
        self.current = next(iter(self.trials.values()))
        self._known: dict[tuple[object, ...], Disagreement | None] = {}

    @property
    def trains(self) -> bool:
        """True if the step changes the model, so that a second step differs from the first."""
        return any(trials.trains for trials in self.comparisons)

    @property
    def comparisons(self) -> list[Trials]:
        return list(self.trials.values())

    def knows(self, scenario: Scenario) -> bool:
        return key_of(scenario) in self._known

    def run(self, scenario: Scenario) -> Disagreement | None:
        """Try a scenario on the ranks of each configuration; None if all agree, or if it does not suit them."""
        key = key_of(scenario)
        if key not in self._known:
            self._known[key] = self._run(scenario)
        return self._known[key]

    @abc.abstractmethod
    def _run(self, scenario: Scenario) -> Disagreement | None:
        """Try a scenario that was not tried before."""

    def _placed(self, name: str, scenario: Scenario) -> Scenario:
        world_size, mesh = self.places[name]
        return replace(scenario, world_size=world_size, mesh=mesh)

    def _failed(
        self, trials: Trials, name: str, scenario: Scenario, run: Callable[[Scenario], object]
    ) -> Disagreement | None:
        """Run a configuration on its ranks without any comparison; None if it does not fail."""
        self.current = trials
        try:
            run(scenario)
        except RankFailure as error:
            raise_unusable(trials.program.gate, error)
            trial = Trial(self._placed(name, scenario), Expected(ObservedRun(), None), None, error=error)
            return Disagreement(f"{name} fails on its own", [(trials, trial)])
        return None

    def _tried(self, trials: Trials, name: str, scenario: Scenario) -> Trial | None:
        self.current = trials
        return trials.run(self._placed(name, scenario))


class OnOneDevice(Agreement):
    """Configurations that also run on one device, which shows the wrong ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._of_one: WithoutOneDevice | None = None

    def _run(self, scenario: Scenario) -> Disagreement | None:
        tried = {name: self._tried(trials, name, scenario) for name, trials in self.trials.items()}
        failed = {name: trial for name, trial in tried.items() if trial is not None}
        if not failed:
            return self._alone(scenario)
        agreeing = [name for name in self.trials if name not in failed]
        verdict = f"{_all_of(failed)} from one device"
        if agreeing:
            verdict += f"; {few(agreeing)} {'agrees' if len(agreeing) == 1 else 'agree'} with it"
        return Disagreement(verdict, [(self.trials[name], trial) for name, trial in failed.items()])

    def _alone(self, scenario: Scenario) -> Disagreement | None:
        """Compare the configurations with each other on one device, if each of them is its own reference."""
        if len(self.programs) < 2 or any(program.reference is not None for program in self.programs.values()):
            return None
        if self._of_one is None:
            places = {name: (1, tuple((axis, 1) for axis, _ in mesh)) for name, (_, mesh) in self.places.items()}
            self._of_one = WithoutOneDevice(self.ranks, self.programs, places, self.kinds, self.tolerance)
        disagreement = self._of_one.run(scenario)
        if disagreement is None or any(trial.error is not None for _, trial in disagreement.failures):
            return None  # the trials leave out a case that fails on one device
        return replace(disagreement, verdict=f"{disagreement.verdict}, on one device already")


class WithoutOneDevice(Agreement):
    """Configurations that are compared in pairs: each with the first, and in groups if some differ from it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.on_ranks = {name: OnRanks(trials, self.places[name]) for name, trials in self.trials.items()}
        self._pairs: dict[tuple[str, str], PairTrials] = {}
        baseline = next(iter(self.programs))
        self.pair(baseline, baseline)

    @property
    def comparisons(self) -> list[Trials]:
        return list(self._pairs.values())

    def pair(self, name: str, base: str) -> PairTrials:
        if (name, base) not in self._pairs:
            self._pairs[name, base] = PairTrials(self.on_ranks[name], self.on_ranks[base])
        return self._pairs[name, base]

    def _run(self, scenario: Scenario) -> Disagreement | None:
        baseline, *rest = self.programs
        case = replace(scenario, apart=self.trials[baseline].is_ambiguous)
        run = self.on_ranks[baseline].run
        if (failed := self._failed(self.pair(baseline, baseline), baseline, case, run)) is not None:
            return None if scenario.change else failed
        if (trial := self._compared(baseline, baseline, scenario)) is not None:
            return Disagreement(f"{baseline} does not agree with itself", [(self.pair(baseline, baseline), trial)])
        disagreeing = {name: trial for name in rest if (trial := self._compared(name, baseline, scenario)) is not None}
        if not disagreeing:
            return None
        for name, trial in disagreeing.items():
            relations = trial.relations
            if relations is None or not relations.wrong:  # an error, or a difference between the ranks of one
                summary = f"{name} fails on its own" if relations is None else f"{name} does not agree with itself"
                return Disagreement(summary, [(self.pair(name, baseline), trial)])
        groups = self._groups(scenario, baseline, rest, disagreeing)
        largest, *others = sorted(groups, key=len, reverse=True)
        odd = [name for group in others for name in group]
        if 2 * len(largest) > len(self.programs):
            base, verdict = largest[0], f"{_all_of(odd)} from the others, {few(largest)}, which agree"
            for name in odd:
                if (trial := self._compared(name, base, scenario)) is not None:
                    return Disagreement(verdict, [(self.pair(name, base), trial)], groups)
        name = next(iter(disagreeing))
        failures = [(self.pair(name, baseline), disagreeing[name])]
        if (back := self._compared(baseline, name, scenario)) is not None:
            failures.append((self.pair(baseline, name), back))
        return Disagreement(f"{name} and {baseline} differ", failures, groups, control=False)

    def _compared(self, name: str, base: str, scenario: Scenario) -> Trial | None:
        return self._tried(self.pair(name, base), name, scenario)

    def _groups(
        self, scenario: Scenario, baseline: str, rest: Sequence[str], disagreeing: Collection[str]
    ) -> list[list[str]]:
        groups = [[baseline, *(name for name in rest if name not in disagreeing)]]
        for name in disagreeing:
            for group in groups[1:]:
                if self._compared(name, group[0], scenario) is None:
                    group.append(name)
                    break
            else:
                groups.append([name])
        return groups


def _all_of(configurations: Collection[str]) -> str:
    return f"{few(list(configurations))} {'differs' if len(configurations) == 1 else 'differ'}"
