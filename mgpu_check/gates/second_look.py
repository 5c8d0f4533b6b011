"""Run a failed case a few more times and record everything, as evidence for the rules of mistakes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from mgpu_check.diagnosis.attempts import Attempts
from mgpu_check.diagnosis.observed import Expected, Hypotheses, ObservedRun, RankTrace, Relations
from mgpu_check.diagnosis.results import Result
from mgpu_check.diagnosis.tensors import Tensors
from mgpu_check.errors import CheckFailure, RankHang
from mgpu_check.gates.batch_parts import run_hypotheses
from mgpu_check.gates.expectations import Effort
from mgpu_check.gates.experiments import changes_tried
from mgpu_check.gates.program import wants_world_size
from mgpu_check.gates.relations import RANDOM, allowed_for, close, ranks_changed, repeats
from mgpu_check.gates.running import run_redrawn, run_traced
from mgpu_check.gates.scenario import Scenario
from mgpu_check.gates.trial import Trial, Trials
from mgpu_check.numerics.compare import difference

_SMALL = 2.0**-10
_FURTHER = 2
_LARGE = 1_000_000
_FEW = 16
"""Fewer wrong values than this may fit an explanation by chance."""
_REDRAWN = (1, 2, 3)
"""Draws to discard in further runs: a decision may come out alike with other numbers."""
_ENOUGH = (Effort.PROVISIONAL, Effort.WIDENED)
"""Efforts that show whether a scaled-down batch is right: every effort rejects a wrong result."""
_ENDS = (CheckFailure, RankHang)
"""Errors that end a run without evidence."""


def as_seen(failed: Trial, relations: Relations) -> Tensors:
    """Return the evidence of a failure before further runs."""
    case, nothing = failed.scenario, Hypotheses([], [])
    return Tensors(case.world_size, case.samples, case.steps, failed.expected, relations, failed.seen, (), nothing)


class SecondLook:
    """The further runs of a case that failed.

    Args:
        sizes: world sizes of the gate.

    Attributes:
        repeated: whether a second run completed.
    """

    def __init__(self, trials: Trials, failed: Trial, sizes: Sequence[int], attempts: Attempts) -> None:
        assert failed.relations is not None
        self._trials, self._scenario, self._sizes, self._attempts = trials, failed.scenario, sizes, attempts
        self._expected = attempts.of(
            "measuring each optimizer step", failed.expected, trials.expected, failed.scenario, deep=True
        )
        self._seen, self._relations = failed.seen, failed.relations
        self._traces: Sequence[RankTrace] = ()
        self.repeated = True

    def taken(self) -> Tensors:
        """Run the case again in several ways, and return all evidence."""
        attempts, case = self._attempts, self._scenario
        attempts.of("the traced run", None, self._trace)
        attempts.of("the run once more", None, self._repeat)
        elsewhere = attempts.of("the run at another world size", None, self._at_another_size)
        attempts.of("the run with permuted samples", None, self._in_other_order)
        windows = max(1, max((len(trace.of("backward")) for trace in self._traces), default=1) // max(1, case.steps))
        hypotheses = attempts.of("the parts of the batch", None, self._hypotheses, case, windows)
        further = (
            attempts.of("the runs with other seeds", [], self._with_other_seeds, windows)
            if hypotheses is not None and hypotheses.divisions
            else []
        )
        tensors = Tensors(
            case.world_size,
            case.samples,
            case.steps,
            self._expected,
            self._relations,
            self._seen,
            self._traces,
            hypotheses or Hypotheses([], []),
            wrong_alone=attempts.of("the step at world size 1", False, self._is_wrong_alone),
            right_when_small=attempts.of("the run with a small batch", None, self._when_small),
            further=further,
            elsewhere=elsewhere,
            shardwise=wants_world_size(self._trials.program.reference),
            alone=attempts.of("the record of one device", None, self._trace_alone),
            mesh=case.mesh,
            by_draws=attempts.of("the runs with other random numbers", frozenset(), self._by_draws),
            tried=attempts.of(
                "changes to single calls", [], changes_tried, self._trials, case, self._traces, self._relations
            ),
        )
        if not tensors.steps_alike:  # no step of a rank has its counterpart among those of one device
            tensors.expected = replace(tensors.expected, snapshots=[], allowances=[])
        return tensors

    def _trace(self) -> None:
        """Run the case and record its calls. Its results replace the earlier ones only if it fails again."""
        trials, case = self._trials, self._scenario
        try:
            pairs = trials.run_on_ranks(trials.program, case, by=run_traced)
        except _ENDS:
            return
        self._traces = tuple(trace for _, trace in pairs)
        seen = trials.assembled(case, [one for one, _ in pairs])
        relations = trials.compared(self._expected, seen)
        if not relations.holds:
            self._seen, self._relations = seen, relations

    def _trace_alone(self) -> RankTrace | None:
        try:
            return self._trials.trace_alone(self._scenario)
        except _ENDS:
            return None

    def _is_wrong_alone(self) -> bool:
        own = self._expected.own
        if own is None or wants_world_size(self._trials.program.reference):
            return False
        return not self._trials.compared(self._expected, [own]).holds

    def _hypotheses(self, scenario: Scenario, windows: int) -> Hypotheses | None:
        if not self._trials.one_device:
            return None  # the step may not run on one device
        try:
            found: Hypotheses = self._trials.ranks.run(run_hypotheses, self._trials.program, scenario, windows, size=1)[
                0
            ]
        except _ENDS:
            return None
        return found

    def _with_other_seeds(self, windows: int) -> list[Tensors]:
        """Return the evidence of the same case with other seeds; a mistake must explain these results, too.

        A metric has few values, so any explanation may fit them by chance, and other seeds may leave the batch as is.
        Then there are cases with more samples, too; their number leaves the parts as uneven as before.
        """
        case, found = self._scenario, []
        if case.batches:
            return []
        values = self._expected.single.values
        small = sum(values[name].numel() for name in self._relations.wrong if name in values) < _FEW
        for number in range(1, _FURTHER + 1):
            other = replace(case, seed=case.seed + number)
            more = replace(other, samples=case.samples * (number * case.world_size + 1))
            tried = (further for one in (other, more) if (further := self._further(one, windows)) is not None)
            found += list(itertools.islice(tried, 2 if small else 1))
        return found

    def _further(self, other: Scenario, windows: int) -> Tensors | None:
        """Return the evidence of another case; None if it has the same batch, too many values, or does not run."""
        trials = self._trials
        try:
            expected = trials.expected(other)
            if expected.single.batch == self._expected.single.batch:
                return None  # the user's code sets its own seeds
            seen = trials.on_ranks(other, whole=True)
        except (*_ENDS, ValueError):  # the user's functions may not take that number of samples
            return None
        hypotheses = self._hypotheses(other, windows)
        if hypotheses is None or sum(value.numel() for value in seen[0].values.values()) > _LARGE:
            return None
        relations = trials.compared(expected, seen)
        return Tensors(other.world_size, other.samples, other.steps, expected, relations, seen, (), hypotheses)

    def _when_small(self) -> bool | None:
        """Return whether the step is right for a scaled-down batch, which reaches no limit on a norm."""
        if self._scenario.change not in ("", "scaled"):
            return None
        small = replace(self._scenario, change="scaled", factor=_SMALL)
        trials = self._trials
        try:
            seen = trials.on_ranks(small, whole=True)
            return any(trials.compared(trials.expected(small, effort=effort), seen).holds for effort in _ENOUGH)
        except _ENDS:
            return None

    def _repeat(self) -> None:
        """Compare the case with a second run, and add the relation to each result."""
        try:
            again = self._trials.on_ranks(self._scenario, whole=True)
        except _ENDS:
            self.repeated = False
            return
        repeats(self._relations, self._expected, self._seen, again, self._trials.tolerance)

    def _by_draws(self) -> frozenset[Result]:
        """Return the results that other random numbers change."""
        trials, case = self._trials, self._scenario
        found: set[Result] = set()
        if not self._expected.drawn and not any(trace.drawn or trace.of("generator") for trace in self._traces):
            return frozenset()
        for times in _REDRAWN:
            try:
                seen = trials.run_on_ranks(trials.program, case, times, by=run_redrawn)
            except _ENDS:
                break
            again = trials.assembled(case, seen)
            compared = (self._expected, self._seen, again)
            found |= {name for name in self._relations.held if ranks_changed(*compared, name, trials.tolerance)}
        return frozenset(found)

    def _at_another_size(self) -> Tensors | None:
        """Return the case at the smallest other world size, and note for each result whether it is the same there.

        If some ranks have no sample there, the returned case has more samples.
        """
        case = self._scenario
        other = min((size for size in self._sizes if size not in (1, case.world_size)), default=None)
        if other is None:
            return None
        try:
            there: ObservedRun = self._trials.on_ranks(replace(case, world_size=other), whole=True)[0]
        except _ENDS:
            return None
        low, high = sorted((other, case.world_size))
        for name, held in self._relations.held.items():
            if name == RANDOM or name not in self._expected.single.values:
                continue
            allowed = 2 * allowed_for(self._expected, name, self._trials.tolerance)
            held[f"same at {low} and {high}"] = close(there.values.get(name), self._seen[0].values.get(name), allowed)
        more = case.samples * other
        few = 0 < case.samples < other and not case.batches
        found = self._further(replace(case, world_size=other, samples=more), 1) if few else None
        nothing = Hypotheses([], [])
        return found or Tensors(other, case.samples, case.steps, self._expected, self._relations, [there], (), nothing)

    def _in_other_order(self) -> None:
        """Note for each result whether permuted samples change it, if they do not change it on one device."""
        case, trials = self._scenario, self._trials
        if case.batches or case.change or case.samples < 2:
            return
        permuted = replace(case, change="permuted")
        try:
            # Without one device, all ranks run for each measurement.
            effort = Effort.IN_FULL if trials.one_device else Effort.WIDENED
            one, other = trials.expected(case, deep=True), trials.expected(permuted, effort=effort)
            there = trials.on_ranks(permuted)
        except _ENDS:
            return
        for name, held in self._relations.held.items():
            if (allowed := self._as_permuted(name, one, other)) is not None:
                held["any order"] = close(there[0].values.get(name), self._seen[0].values.get(name), 2 * allowed)

    def _as_permuted(self, name: Result, one: Expected, other: Expected) -> torch.Tensor | float | None:
        """Return the tolerance of a result in another order; None if one device is not independent of the order."""
        exact, moved = one.exact.get(name), other.exact.get(name)
        if exact is None or moved is None or exact.shape != moved.shape:
            return None
        tolerance = self._trials.tolerance
        allowed = allowed_for(one, name, tolerance) + allowed_for(other, name, tolerance)
        return allowed if difference(exact, moved, allowed) is None else None
