"""Run several configurations of a step on the same cases, and find out which agree."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mgpu_check.diagnosis.observed import Expected, ObservedRun
from mgpu_check.errors import NotCompared, RankFailure
from mgpu_check.gates.expectations import key_of
from mgpu_check.gates.meshes import Place
from mgpu_check.gates.pairs import Allowance, OnRanks, PairTrials
from mgpu_check.gates.program import Program, raise_unusable
from mgpu_check.gates.scenario import Scenario
from mgpu_check.gates.switches import AXES, Switch
from mgpu_check.gates.trial import Trial, Trials
from mgpu_check.gates.worlds import RanksFixture
from mgpu_check.processes.rank_lists import few

_ALLOWANCES: Mapping[str, Allowance] = {"checkpointed": "bits", "bfloat16": "bfloat16"}

Tolerance = float | Mapping[str, float] | None


@dataclass
class Disagreement:
    """A case that shows a disagreement of configurations.

    Attributes:
        verdict: which of them disagree, in words.
        failures: the failed comparisons, each with its trials, the most telling first. Without a control there is one
            in each direction.
        groups: the configurations that agree with each other; empty if they were compared with one device.
        control: whether something shows which configuration is wrong.
    """

    verdict: str
    failures: Sequence[tuple[Trials, Trial]]
    groups: Sequence[Sequence[str]] = ()
    control: bool = True


@dataclass
class Agreement(abc.ABC):
    """Configurations of one step that run the same cases.

    Attributes:
        programs: the configurations by name.
        current: the trials that are under way, or were the latest.
    """

    ranks: RanksFixture
    programs: Mapping[str, Program]
    places: Mapping[str, Place]
    kinds: Collection[str]
    tolerance: Tolerance
    trials: dict[str, Trials] = field(init=False)
    current: Trials = field(init=False)

    def __post_init__(self) -> None:
        self.trials = {
            name: Trials(self.ranks, program, self.kinds, self.tolerance, name)
            for name, program in self.programs.items()
        }
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

    def _failed(self, trials: Trials, name: str, scenario: Scenario, error: RankFailure) -> Disagreement:
        """Return the disagreement for a configuration that fails on its ranks, without any comparison."""
        raise_unusable(trials.program.gate, error)
        trial = Trial(self._placed(name, scenario), Expected(ObservedRun(), None), None, error=error)
        return Disagreement(f"{name} fails on its own", [(trials, trial)])

    def _tried(self, trials: Trials, name: str, scenario: Scenario) -> Trial | None:
        self.current = trials
        return trials.run(self._placed(name, scenario))


class OnOneDevice(Agreement):
    """Configurations that also run on one device, which shows the wrong ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._of_one: WithoutOneDevice | None = None

    def _run(self, scenario: Scenario) -> Disagreement | None:
        failed = {}
        for name, trials in self.trials.items():
            if (trial := self._tried(trials, name, scenario)) is not None:
                failed[name] = trial
        if not failed:
            return self._alone(scenario)
        right = [name for name in self.trials if name not in failed]
        verdict = f"{_all_of(failed)} from one device"
        if right:
            verdict += f"; {few(right)} {'agrees' if len(right) == 1 else 'agree'} with it"
        failures = [(self.trials[name], trial) for name, trial in failed.items()]
        return Disagreement(verdict, failures)

    def _alone(self, scenario: Scenario) -> Disagreement | None:
        """Compare the configurations with each other on one device, if each of them is its own reference."""
        if len(self.programs) < 2 or any(program.reference is not None for program in self.programs.values()):
            return None
        if self._of_one is None:
            places = {name: (1, tuple((axis, 1) for axis, _ in mesh)) for name, (_, mesh) in self.places.items()}
            self._of_one = WithoutOneDevice(self.ranks, self.programs, places, self.kinds, self.tolerance)
        found = self._of_one.run(scenario)
        if found is None or any(trial.error is not None for _, trial in found.failures):
            return None  # the trials leave out a case that fails on one device
        return replace(found, verdict=f"{found.verdict}, on one device already")


class WithoutOneDevice(Agreement):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.on_ranks = {name: OnRanks(trials, self.places[name]) for name, trials in self.trials.items()}
        self._pairs: dict[tuple[str, str], PairTrials] = {}
        first = next(iter(self.programs))
        self.pair(first, first)

    @property
    def comparisons(self) -> list[Trials]:
        return list(self._pairs.values())

    def pair(self, name: str, base: str) -> PairTrials:
        if (name, base) not in self._pairs:
            self._pairs[name, base] = PairTrials(self.on_ranks[name], self.on_ranks[base])
        return self._pairs[name, base]

    def _run(self, scenario: Scenario) -> Disagreement | None:
        first, *rest = self.programs
        if (failed := self._unusable(first, scenario)) is not None:
            return None if scenario.change else failed
        if (trial := self._compared(first, first, scenario)) is not None:
            return Disagreement(f"{first} does not agree with itself", [(self.pair(first, first), trial)])
        wrong = {name: trial for name in rest if (trial := self._compared(name, first, scenario)) is not None}
        if not wrong:
            return None
        for name, trial in wrong.items():
            relations = trial.relations
            if relations is None or not relations.wrong:  # an error, or a difference between the ranks of one
                said = f"{name} fails on its own" if relations is None else f"{name} does not agree with itself"
                return Disagreement(said, [(self.pair(name, first), trial)])
        groups = self._groups(scenario, first, rest, wrong)
        largest, *others = sorted(groups, key=len, reverse=True)
        odd = [name for group in others for name in group]
        if 2 * len(largest) > len(self.programs):
            base, verdict = largest[0], f"{_all_of(odd)} from the others, {few(largest)}, which agree"
            for name in odd:
                if (trial := self._compared(name, base, scenario)) is not None:
                    return Disagreement(verdict, [(self.pair(name, base), trial)], groups)
        name = next(iter(wrong))
        failures = [(self.pair(name, first), wrong[name])]
        if (back := self._compared(first, name, scenario)) is not None:
            failures.append((self.pair(first, name), back))
        return Disagreement(f"{name} and {first} differ", failures, groups, control=False)

    def _compared(self, name: str, base: str, scenario: Scenario) -> Trial | None:
        return self._tried(self.pair(name, base), name, scenario)

    def _unusable(self, name: str, scenario: Scenario) -> Disagreement | None:
        self.current = self.pair(name, name)
        try:
            self.on_ranks[name].run(replace(scenario, apart=self.trials[name].is_ambiguous))
        except RankFailure as error:
            return self._failed(self.current, name, scenario, error)
        return None

    def _groups(self, scenario: Scenario, first: str, rest: Sequence[str], wrong: Collection[str]) -> list[list[str]]:
        """Return the configurations in groups that agree."""
        groups = [[first, *(name for name in rest if name not in wrong)]]
        for name in wrong:
            for group in groups[1:]:
                if self._compared(name, group[0], scenario) is None:
                    group.append(name)
                    break
            else:
                groups.append([name])
        return groups


class OnSwitch(Agreement):
    def __post_init__(self) -> None:
        super().__post_init__()
        (self.name,) = self.programs
        self._as_is = OnRanks(self.trials[self.name], self.places[self.name])

    @property
    def trains(self) -> bool:
        return True  # so that several steps are tried

    @property
    def effects(self) -> int:
        """How often the switch had an effect."""
        return self._switched.effects

    def switch(self, switch: Switch) -> None:
        self._switch, axis = switch, AXES[switch.axis]
        self._what = self.name if switch.on is None else f"{self.name} {axis.on if switch.on else axis.off}"
        program = replace(self.programs[self.name], switch=switch)
        trials = Trials(self.ranks, program, self.kinds, self.tolerance, self._what)
        pair = OnRanks(trials, self.places[self.name]), self._as_is
        if switch == Switch("bfloat16", on=False):
            pair = pair[1], pair[0]  # a narrow dtype rounds too coarsely to measure a tolerance
        self._switched = PairTrials(*pair, _ALLOWANCES.get(switch.axis, "rounding"))
        self._known.clear()

    def _run(self, scenario: Scenario) -> Disagreement | None:
        if self._switch.on is None:
            self.current = self._switched
            try:
                self._switched.on_ranks(self._placed(self.name, scenario))
            except RankFailure as error:
                return self._failed(self._switched, self.name, scenario, error)
            return None
        trial = self._tried(self._switched, self.name, scenario)
        if trial is None:
            return None
        how = "differs from" if trial.error is None else "fails, unlike"
        return Disagreement(f"{self._what} {how} {self.name} as written", [(self._switched, trial)])

    def finish(self, unjudged: Mapping[str, str]) -> None:
        """Check that the switch had an effect, and that all trained parameters were compared."""
        self._switched.finish([self.places[self.name]], unjudged)
        if self._switch.on and not self.effects:
            axis = self._switch.axis
            raise NotCompared(
                f"{self._switched.program.gate}: the axis {axis!r} has no effect on {self.name}; it needs "
                f"{AXES[axis].needs}. Leave it out of axes"
            )


def _all_of(names: Collection[str]) -> str:
    return f"{few(list(names))} {'differs' if len(names) == 1 else 'differ'}"
