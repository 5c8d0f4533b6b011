"""Run scenarios on ranks from the pytest process, and compare them with the results of one device.

The results of one device are measured for each scenario, on ranks that are alone in their world, and kept. A case that
passed is tried once more with different hash seeds on the ranks.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch

from mgpu_check.diagnosis.observations import PARITY, Expected, ObservedRun, RankTrace, Relations
from mgpu_check.errors import RankDied, RankFailure, RankHang, ScalingMismatch
from mgpu_check.gates.comparison.coverage import ParameterCoverage, PassLimits
from mgpu_check.gates.comparison.relations import relations_of, repeats
from mgpu_check.gates.gate_arguments import (
    Program,
    RanksFixture,
    definition_of,
    is_class,
    raise_unusable,
    wants_world_size,
)
from mgpu_check.gates.run import measurement
from mgpu_check.gates.run.hypotheses import left_on_cpu
from mgpu_check.gates.run.measurement import Variation
from mgpu_check.gates.run.shards import assembled, users_of, with_groups_of
from mgpu_check.gates.run.step_runs import run_step, run_traced_alone
from mgpu_check.gates.search.hash_seeds import with_seeds_apart
from mgpu_check.gates.search.scenarios import Mesh, Scenario, place_in, where_is
from mgpu_check.numerics.placement import Unplaced
from mgpu_check.numerics.steps import deviations, granted_with
from mgpu_check.processes.machine import available_memory
from mgpu_check.torch_hooks.nested import tensors_of
from mgpu_check.torch_hooks.switches import some_threads
from mgpu_check.torch_hooks.tensors import FLOAT8, digest_of, name_of

Tolerance = float | Mapping[str, float] | None  # of the user, for all tensors or by name; None to measure it

_KEPT = 64  # most scenarios whose expected results are kept for other world sizes
_KEPT_ELEMENTS = 100_000_000  # fewest elements of all kept results together that are too many: a gigabyte or less
_PROBES = 3  # further cases that show which parameters a rank uses that has used none


class Effort(Enum):
    """How thoroughly to measure the error that a right step may have.

    Efforts are tried in this order: each one grants more than the one before, and takes longer.
    """

    PROVISIONAL = auto()  # one plain run, and a few runs perturbed in the precision of the step
    WIDENED = auto()  # one more run, which shows what rounding within operators adds
    IN_FULL = auto()  # runs in float64, exact and perturbed


class Expectations:
    """The results of one device for each scenario of one program.

    Each `Trials` makes one, and asks it for each scenario that it tries. It measures on ranks that are alone in their
    world, and keeps the latest results. `alone` is True until the step fails alone in its world.
    """

    def __init__(self, ranks: RanksFixture, program: Program) -> None:
        self.ranks, self._program = ranks, program
        self.alone = True
        self._expected: dict[tuple[object, ...], Expected | RankFailure] = {}
        # Elements of the results, if ranks share the runs of this step; 0 if one rank does all; None before the first.
        self._elements: int | None = None

    def of(self, scenario: Scenario, deep: bool = False, effort: Effort = Effort.IN_FULL) -> Expected:
        """Return the results of one device; measure them once for all world sizes."""
        of_size = scenario.world_size if wants_world_size(self._program.reference) else 0
        case = key_of(replace(scenario, world_size=of_size))
        expected = self._expected.get((case, deep))
        if expected is None and effort is not Effort.IN_FULL:
            expected = self._provisional((case, "provisionally"), scenario, effort)
        if expected is None:  # not measured yet, or the provisional measurement is inconclusive
            expected = self._kept((case, deep), scenario, measurement.measure, deep)
        assert expected is not None
        if isinstance(expected, RankFailure):
            raise expected
        return expected

    def _provisional(
        self, key: tuple[object, ...], scenario: Scenario, effort: Effort
    ) -> Expected | RankFailure | None:
        expected = self._expected.get(key) or self._kept(key, scenario, measurement.measure_provisionally)
        if effort is Effort.WIDENED and isinstance(expected, Expected) and not expected.widened:
            moved_run = self.ranks.run(measurement.measure_slightly_moved, self._program, scenario, size=1)[0]
            errors = measurement.rounding_seen(expected.single, moved_run)
            if errors is None:
                return None
            expected.tolerance = granted_with(expected.tolerance, expected.exact, errors)
            expected.widened = True
        return expected

    def _kept(
        self, key: tuple[object, ...], scenario: Scenario, measuring: Callable[..., Expected | None], *how: bool
    ) -> Expected | RankFailure | None:
        try:
            outcome: Expected | RankFailure | None = self._measured(scenario, measuring, *how)
        except RankFailure as refused:
            raise_unusable(self._program.gate, refused)
            outcome = refused
        if outcome is not None:
            self._expected[key] = outcome
        # An eighth of the memory, at 8 bytes for an element: the ways of `mgpu-check model` share one device.
        most = max(_KEPT_ELEMENTS, (available_memory() or 0) // 64)
        while len(self._expected) > 1 and (len(self._expected) > _KEPT or self._kept_elements > most):
            del self._expected[next(iter(self._expected))]
        return outcome

    @property
    def _kept_elements(self) -> int:
        kept = (expected for expected in self._expected.values() if isinstance(expected, Expected))
        return 3 * sum(value.numel() for expected in kept for value in expected.single.values.values())

    def _measured(self, scenario: Scenario, measuring: Callable[..., Expected | None], *how: bool) -> Expected | None:
        if (
            measuring is measurement.measure_provisionally
            and (together := self._measured_together(scenario)) is not None
        ):
            return together
        try:
            expected: Expected | None = self.ranks.run(measuring, self._program, scenario, *how, self.alone, size=1)[0]
        except (RankDied, RankHang) as error:
            if self._program.reference is None or not self.alone:
                if isinstance(error, RankHang):
                    error.is_of_reference = True
                raise
            # Parallel code may hang or die at world size 1; with a reference it need not run there.
            self.alone = False
            return self._measured(scenario, measuring, *how)
        if measuring is measurement.measure_provisionally and expected is not None and self._elements is None:
            elements = sum(value.numel() for value in expected.single.values.values())
            large = elements >= measurement.LARGE and not expected.single.nonlinear and self.ranks._at_once > 1
            self._elements = elements if large else 0
        return expected

    def _measured_together(self, scenario: Scenario) -> Expected | None:
        """Return `measure_provisionally` from runs shared by ranks; None if one rank has to do all runs."""
        elements = self._elements
        if not elements or (self._program.reference is not None and scenario.change):
            return None
        count = min(len(measurement.RUNS), self.ranks._at_once)
        shares = [measurement.RUNS[offset::count] for offset in range(count)]
        arguments = [(self._program, scenario, runs, elements) for runs in shares]
        try:
            done = self.ranks._run_apart(measurement.measure_in_parts, arguments)
        except RankDied:  # memory may suffice for one rank and not for several
            self._elements = 0
            return None
        pairs = [pair for runs, own in zip(shares, done, strict=True) for pair in zip(runs, own, strict=True)]
        run_parts = dict(pairs)
        expected = measurement.of_parts(self._program, [run_parts[run] for run in measurement.RUNS], elements)
        if expected is None:
            self._elements = 0
        return expected


def key_of(scenario: Scenario) -> tuple[object, ...]:
    """Return a key that differs between scenarios; drawn batches enter with the digests of their tensors."""
    return scenario, tuple(digest_of(leaf) for leaf in tensors_of(scenario.batches))


def _casts_to_float8(expected: Expected) -> bool:
    return not {name_of(dtype) for dtype in FLOAT8}.isdisjoint(expected.narrow)


_OWN_ROUNDING = 8.0  # most tolerances of the reference that the step's own rounding may explain
_PATIENCE = 2  # provisional measurements are given up when inconclusive ones outnumber conclusive ones by this many


@dataclass
class Trial:
    """A scenario that failed."""

    scenario: Scenario
    expected: Expected  # the results of one device
    relations: Relations | None
    runs: Sequence[ObservedRun] = ()
    error: RankFailure | None = None  # the error that ranks raised, or None

    @property
    def rewritten(self) -> bool:
        """True if an optimizer that is not torch's own has written into gradients, on ranks or on one device."""
        return self.relations is not None and any(run.rewritten for run in (self.expected.single, *self.runs))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks with wrong results; all ranks if no rank is known to be wrong."""
        if self.error is not None:
            return self.error.ranks
        assert self.relations is not None
        wrong_ranks = {rank for ranks in self.relations.wrong.values() for rank in ranks}
        return tuple(sorted(wrong_ranks or range(self.scenario.world_size)))


class Trials:
    """The trials of one program, each scenario once.

    A gate makes one, and may give it expectations of a program with the same reference. Hypothesis, by
    `smallest_failure`, calls `run` for each case that it draws. After a failure, `failure_of` runs the case again
    through it. If all cases pass, the gate calls `finish`.

    Attributes:
        completed: number of scenarios that were compared, by world size and mesh.
        passed: the first scenario on several ranks that passed.
        current: the current scenario, or the latest one.
        trains: whether the step changes the model, so that a second step differs from the first.
        latest: duration of the latest run on ranks, in seconds.
        one_device: whether results are compared with one device.
        is_ambiguous: the values of parameters do not show which slices some rank holds.
        against: what they are compared with.
        remarks: whether to say what a pass does not show.
        defined: the line where the step is defined; "" if it is unknown.
    """

    one_device = True
    against = PARITY
    remarks = True

    def __init__(
        self,
        ranks: RanksFixture,
        program: Program,
        kinds: Collection[str],
        tolerance: Tolerance,
        name: str,
        expectations: Expectations | None = None,
    ) -> None:
        self.ranks, self.program, self.kinds, self.tolerance, self.name = ranks, program, kinds, tolerance, name
        self.defined = definition_of(program.step)
        self.completed: Counter[tuple[int, Mesh]] = Counter()
        self.passed: Scenario | None = None
        self.trains = is_class(program.step)
        self.current = Scenario(1, 0)
        self.latest = 0.0
        self._outcomes: dict[tuple[object, ...], Trial | None] = {}
        self._repeated: set[tuple[int, Mesh]] = set()
        self._expectations = expectations or Expectations(ranks, program)
        self._factor: float | None = None
        self._effects = False
        self._idle_places: set[tuple[int, Mesh]] = set()
        self._refusals: dict[tuple[int, Mesh], str] = {}
        self._cause: tuple[RankFailure, Scenario] | None = None
        self._score = 0
        self._holders: dict[tuple[int, Mesh], dict[str, set[int]]] = {}
        self.is_ambiguous = self._rewritten = False
        self._single: ObservedRun | None = None  # one device, in the latest case
        self.coverage = ParameterCoverage(program, name, self.against)
        self.limits = PassLimits(program)

    def knows(self, scenario: Scenario) -> bool:
        return key_of(scenario) in self._outcomes

    def run(self, scenario: Scenario) -> Trial | None:
        """Try a scenario; return None if all relations hold, or if one device cannot run it either."""
        self.current = scenario = self._placed(scenario)
        key = key_of(scenario)
        if key not in self._outcomes:
            # Comparing large tensors is slow if threads wait for processors that others use.
            with some_threads(torch.get_num_threads()):
                outcome = self._run(scenario)
                if self.is_ambiguous and not scenario.apart:  # the values were ambiguous: several slices matched
                    self.current = scenario = replace(scenario, apart=True)
                    outcome = self._run(scenario)
                if outcome is not None and outcome.rewritten:  # which of two gradients counts is not known
                    self.current = replace(scenario, rewritten=not scenario.rewritten)
                    if self._run(self.current) is None:
                        self._rewritten, outcome = self.current.rewritten, None
            self._outcomes[key] = outcome
        return self._outcomes[key]

    def _run(self, scenario: Scenario) -> Trial | None:
        runs: list[Sequence[ObservedRun]] = []
        for effort in Effort:
            try:
                expected = self._suitable(scenario, effort)
            except RankFailure as refused:
                self._cause = self._cause or (refused, scenario)
                reason = f"fails on {self.against}: {str(refused).splitlines()[0]}"
                self._refusals.setdefault(scenario.place, reason)
                return None
            if expected is None:
                return None
            try:
                relations = self._tried(scenario, expected, runs)
            except RankFailure as error:
                raise_unusable(self.program.gate, error)
                return Trial(scenario, expected, None, error=error)
            if expected.provisional and (relations.holds or effort is Effort.WIDENED):
                self._score += 1 if relations.holds else -1
            if relations.holds or not expected.provisional:
                break  # otherwise measure the tolerance with more effort
        assert expected is not None
        if not relations.holds and (widened := self._with_own_rounding(scenario, expected, runs[0])) is not None:
            expected, relations = widened, self._tried(scenario, widened, runs)
        self.completed[scenario.place] += 1
        if relations.holds and scenario.world_size > 1:
            self.passed = self.passed or scenario
            self.limits.add(expected, runs[0])
        return None if relations.holds else Trial(scenario, expected, relations, runs[0])

    def _with_own_rounding(
        self, scenario: Scenario, expected: Expected, runs: Sequence[ObservedRun]
    ) -> Expected | None:
        """Return the expectation with room for the rounding of the step itself; None if the results are farther away.

        One device may compute in another way, such as without the shift of a softmax, and round less. So the step is
        perturbed on the ranks, too. Its rounding there counts up to `_OWN_ROUNDING` times the
        tolerance: more would hide a rounding to a narrower dtype.
        """
        if self.tolerance is not None or not self.one_device:
            return None
        farthest = {name: _OWN_ROUNDING * value for name, value in expected.tolerance.items()}
        if not self.compared(replace(expected, tolerance=farthest), runs).holds:
            return None
        spread = deviations(sum(value.numel() for value in runs[0].values.values()))
        varied = [Variation(), Variation(spread), Variation(-spread), measurement.MOVED_BATCH]
        try:
            plain, *moved, of_batch = (
                self.assembled(scenario, self.run_on_ranks(self.program, scenario, how, by=measurement.run_varied))[0]
                for how in varied
            )
        except (RankFailure, RankHang):
            return None
        if not all(measurement.alike(plain, run) for run in moved):
            return None
        granted = measurement.granted_on_ranks(plain, moved, spread, of_batch)
        tolerance = {
            name: value if name not in granted else value + torch.minimum(granted[name], farthest[name])
            for name, value in expected.tolerance.items()
        }
        return replace(expected, tolerance=tolerance)

    def _suitable(self, scenario: Scenario, effort: Effort) -> Expected | None:
        """Return the results of one device; None if the step is not meant for this batch."""
        expected = self.expected(scenario, effort=effort if self._score > -_PATIENCE else Effort.IN_FULL)
        if scenario.change == "scaled" and (self.program.quantizers or _casts_to_float8(expected)):
            return None  # where large inputs saturate, coarse rounding decides which units still have a gradient
        if scenario.change and not self._counts(scenario, expected):
            return self._suitable(scenario, Effort.IN_FULL) if expected.provisional else None
        for name, value in expected.single.values.items():
            if name.kind in self.kinds and value.is_floating_point() and bool(value.isnan().any()):
                self._refusals.setdefault(
                    scenario.place,
                    f"leaves what is not a number on {self.against} ({name}, for {scenario.samples} samples); leave it "
                    "out with observe=, or give a reference",
                )
                return None
        self.trains |= "params" in (expected.own or expected.single).touched
        self._single = expected.single
        return expected

    def _tried(self, scenario: Scenario, expected: Expected, runs: list[Sequence[ObservedRun]]) -> Relations:
        """Compare the results of the ranks with one device, and with a second run. Missing runs are added to `runs`."""
        if not runs:
            runs.append(self.on_ranks(scenario))
        self._check(expected, runs[0])
        relations = self.compared(expected, runs[0])
        # A better measurement than a provisional one may still accept the values of rank 0.
        if not (relations.holds or _have_values(runs)) and (relations.split or not expected.provisional):
            # Checksums only show that ranks differ; values show by how much.
            runs[:] = [self.on_ranks(scenario, all_values=True)]
            relations = self.compared(expected, runs[0])
        if relations.holds and relations.drifting:
            # Replicas that were updated alike must not drift, not even by rounding.
            runs[:] = [self.on_ranks(scenario, all_values=True, histories=True)]
            relations = self.compared(expected, runs[0])
        if relations.holds and (scenario.apart or not self.is_ambiguous):  # else it is tried with distinct values
            self.coverage.add(scenario, expected, relations)
        due = relations.holds and (len(runs) > 1 or scenario.place not in self._repeated)
        if due and (self._repeat(scenario, expected, runs, relations) or not expected.provisional):
            self._repeated.add(scenario.place)
        return relations

    def _repeat(
        self, scenario: Scenario, expected: Expected, runs: list[Sequence[ObservedRun]], relations: Relations
    ) -> bool:
        if len(runs) == 1:
            runs.append(self.on_ranks(scenario))  # kept, too: an intermittent difference may not occur again
            pairs = zip(*runs, strict=True)
            alike = all(run.digests == repeated.digests and run.rng == repeated.rng for run, repeated in pairs)
            if not alike and not _have_values(runs):
                runs[:] = [self.on_ranks(scenario, all_values=True) for _ in range(2)]
        repeats(relations, expected, runs[0], runs[1], self.tolerance)
        return relations.holds

    def _check(self, expected: Expected, runs: Sequence[ObservedRun]) -> None:
        """Check that there are results to compare, and that all come from the same batch."""
        gate, first_run, single = self.program.gate, runs[0], expected.single
        if {run.batch for run in runs} != {single.batch}:
            raise ValueError(
                f"{gate}: batch(n) gives other batches when it is called again under the same seed; draw "
                "from torch's, Python's or NumPy's global generators, or from one of your own with a fixed seed"
            )
        self._effects |= bool(first_run.touched | single.touched)
        self.trains |= expected.by_reference and "params" in first_run.touched
        if (expected.by_reference or not self.one_device) and "returned" in self.kinds:
            returned, expected_labels = (
                {name.label for name in (*run.values, *run.others) if name.kind == "returned"}
                for run in (first_run, single)
            )
            if returned != expected_labels:
                counterpart = "the reference" if self.one_device else self.against
                raise ValueError(
                    f"{gate}: {self.name} returns {_listed(returned)}, and {counterpart} {_listed(expected_labels)}; "
                    "return the same names from both, or leave them out with observe="
                )
        if not any(name.kind in self.kinds for name in (*first_run.values, *first_run.others)):
            raise ValueError(
                f"{gate}: {self.name} leaves no results of kind {', '.join(sorted(self.kinds))} to compare; return "
                "named tensors or numbers from it, or choose other kinds with observe="
            )
        observed_names = {str(name) for name in (*first_run.values, *single.values)}
        by_name = self.tolerance if isinstance(self.tolerance, Mapping) else {}
        if unknown := [name for name in by_name if name not in observed_names]:
            raise ValueError(
                f"{gate}: tolerance has {', '.join(map(repr, unknown))}, which is not observed; choose of "
                f"{', '.join(sorted(observed_names))}"
            )

    def _counts(self, scenario: Scenario, expected: Expected) -> bool:
        """Return whether a changed batch suits the step: its results on one device are finite and as expected."""
        if scenario.change == "scaled" and not expected.finite:
            return False
        return expected.own is None or self.compared(expected, [expected.own]).holds

    def compared(self, expected: Expected, runs: Sequence[ObservedRun]) -> Relations:
        return relations_of(expected, runs, self.kinds, self.tolerance)

    def on_ranks(self, scenario: Scenario, all_values: bool = False, histories: bool = False) -> list[ObservedRun]:
        started = time.monotonic()
        runs = self.run_on_ranks(self.program, scenario, all_values, histories)
        self.latest = time.monotonic() - started
        return self.assembled(scenario, runs)

    def run_on_ranks(
        self, program: Program, scenario: Scenario, *how: Any, by: Callable[..., Any] = run_step
    ) -> list[Any]:
        size = 1 if program.single_process else scenario.world_size
        return self.ranks.run(by, program, scenario, *how, size=size)

    def assembled(self, scenario: Scenario, runs: Sequence[ObservedRun]) -> list[ObservedRun]:
        """Return the results of ranks, with divided results assembled from their pieces."""
        if self._single is not None:
            runs = [with_groups_of(self._single, run) for run in runs]
        # A rank that used a parameter in some case of this world size or mesh counts as a holder of it in all of them.
        holders = self._holders.setdefault(scenario.place, {})
        users, idle = self._add_users(runs, holders)
        if idle and len(idle) < len(runs) and scenario.place not in self._idle_places:
            # An expert, for example, may get no sample in this case.
            self._idle_places.add(scenario.place)
            for number in range(1, _PROBES + 1):
                with contextlib.suppress(RankFailure, RankHang, ValueError):
                    other = replace(scenario, seed=scenario.seed + 1000 * number)
                    self._add_users(self.run_on_ranks(self.program, other), holders)
        # A rank that has used no parameter in any case should have used all of them, as its replicas do.
        idle -= set().union(*holders.values())
        now = {name: holders[name] | idle for name in users}
        self.is_ambiguous |= any(reason is Unplaced.AMBIGUOUS for run in runs for reason in run.unplaced.values())
        returned_by = self.program.returned_by
        returns = None if returned_by is None else functools.partial(_returns, returned_by, scenario)
        return assembled(runs, now, returns)

    @staticmethod
    def _add_users(runs: Sequence[ObservedRun], holders: dict[str, set[int]]) -> tuple[dict[str, set[int]], set[int]]:
        """Add the ranks that use each tensor to `holders`; return them, and the ranks that use no parameter."""
        users, idle = users_of(runs)
        for name, ranks in users.items():
            holders[name] = holders.get(name, set()) | ranks
        return users, idle

    def expected(self, scenario: Scenario, deep: bool = False, effort: Effort = Effort.IN_FULL) -> Expected:
        return self._expectations.of(scenario, deep, effort)

    def trace_alone(self, scenario: Scenario) -> RankTrace:
        return self.ranks.run(run_traced_alone, self.program, scenario, size=1)[0]

    def finish(self, places: Sequence[tuple[int, Mesh]], unjudged: Mapping[str, str]) -> None:
        """Check that each world size or mesh was compared, and every trained parameter."""
        gate = self.program.gate
        for world in places:
            if self.completed[world]:
                continue
            location = where_is(*world)
            if world in self._refusals:
                reason = (
                    f"nothing was compared at {location}, because {self.name} {self._refusals[world]}; so it was for "
                    "every batch that was tried"
                )
                if self._cause is None:
                    raise ValueError(f"{gate}: {reason}")
                error, scenario = self._cause
                run = functools.partial(self.ranks.run, run_step, scenario=scenario, size=1)
                unmoved = left_on_cpu(self.program, error, run)
                raise ValueError(f"{gate}: {'; '.join(filter(None, [unmoved, reason]))}\n\n{error}") from None
            raise ValueError(
                f"{gate}: no case could be drawn at {location}; sizes and world_sizes together leave nothing to try"
            )
        if not self._effects:
            raise ValueError(
                f"{gate}: {self.name} leaves no gradient, changes no parameter or buffer, and returns nothing; train "
                "the model that it is given, in place, or return what it computes"
            )
        self.coverage.finish(unjudged)
        if self.one_device and self.remarks:
            for line in self.limits.lines():
                self.ranks._not_seen(self.name, line)

    def _placed(self, scenario: Scenario) -> Scenario:
        """Return the scenario with the largest scaling factor that the step can take, and with what is now known."""
        scenario = replace(scenario, apart=self.is_ambiguous, rewritten=self._rewritten)
        if scenario.change != "scaled" or scenario.batches:
            return scenario
        if self._factor is None:
            plain = replace(scenario, change="", steps=1)
            self._factor = scenario.factor
            # Code for several ranks, such as a pipeline, may fail at world size 1.
            with contextlib.suppress(RankFailure, RankHang):
                if self._expectations.alone:
                    self._factor = (
                        self.ranks.run(measurement.largest_factor, self.program, plain, size=1)[0] or scenario.factor
                    )
        return replace(scenario, factor=self._factor)


def _returns(returned_by: Callable[[Mapping[str, int]], bool] | str, scenario: Scenario, rank: int) -> bool:
    if callable(returned_by):
        coordinates = place_in(scenario.mesh, rank) if scenario.mesh else {"rank": rank, "size": scenario.world_size}
        return bool(returned_by(coordinates))
    axis = dict(scenario.mesh).get("pp", 0)
    return place_in(scenario.mesh, rank)["pp"] == axis - 1 if axis else rank == scenario.world_size - 1


def _have_values(runs: Sequence[Sequence[ObservedRun]]) -> bool:
    return all(run.values for runs_of_ranks in runs for run in runs_of_ranks)


def _listed(labels: Collection[str]) -> str:
    return ", ".join(repr(name) for name in sorted(labels)) or "nothing"


def try_seeds(trials: Trials) -> None:
    """Try the first case that passed on several ranks; see `with_seeds_apart`."""
    program, passed = trials.program, trials.passed
    if passed is None or program.single_process:
        return

    def judge(ranks: RanksFixture) -> None:
        reseeded = Trials(ranks, program, trials.kinds, trials.tolerance, trials.name)
        if (failed := reseeded.run(passed)) is not None:
            raise ScalingMismatch(_described(failed), ranks=failed.ranks) from failed.error

    with_seeds_apart(trials.ranks, program.gate, (program.step, program.build, program.batch), passed.described, judge)


def _described(failed: Trial) -> str:
    if failed.relations is None:
        return str(failed.error)
    relations = failed.relations
    name = next(iter([*relations.wrong, *relations.split] or relations.broken), None)
    details = "" if name is None else relations.details.get(name, "")
    return f"{name or 'a result'} differs{': ' if details else ''}{details}"
