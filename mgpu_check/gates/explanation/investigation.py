"""Diagnose a failure: run it again, match the evidence with known mistakes, and gather the facts.

The steps: find the axes of the mesh that the failure needs; run the case a few more times and record everything;
repeat it with one call changed, since a change that makes the step right confirms a diagnosis.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from mgpu_check.diagnosis import observations
from mgpu_check.diagnosis.divergence import first_parting, first_wrong_module
from mgpu_check.diagnosis.evidence import UnfinishedCall
from mgpu_check.diagnosis.observations import CallEvent, Change, Expected, ObservedRun, RankTrace, Relations, Result
from mgpu_check.diagnosis.report import Attempts
from mgpu_check.diagnosis.rules.order import findings_of, findings_of_calls
from mgpu_check.diagnosis.tensors import Tensors
from mgpu_check.engine.failures import account_of
from mgpu_check.errors import CheckFailure, RankFailure, RankHang
from mgpu_check.gates.comparison.relations import RANDOM, allowed_for, close, ranks_changed, repeats
from mgpu_check.gates.explanation.evidence import calls_of, evidence_of, unlike
from mgpu_check.gates.explanation.failure_report import Axes, Failure, FirstWrong, Mismatch, NoReturn, late_hang
from mgpu_check.gates.gate_arguments import wants_world_size
from mgpu_check.gates.run import interventions
from mgpu_check.gates.run.hypotheses import left_on_cpu, run_block_orders, run_hypotheses
from mgpu_check.gates.run.step_runs import run_redrawn, run_traced
from mgpu_check.gates.search.scenarios import Mesh, Scenario, size_of
from mgpu_check.gates.search.trials import Effort, Trial, Trials
from mgpu_check.numerics.differences import diagnose, difference
from mgpu_check.processes.rank_lists import grouped
from mgpu_check.torch_hooks.collective_table import COLLECTIVES


def shrunk_to_axes(trials: Trials, failed: Trial) -> tuple[Trial, Axes | None]:
    """Return the failure on the fewest axes that show it, and those axes.

    An axis is named only if the same case fails with it and passes without it. The axes are None if at most one axis is
    larger than 1, or if the runs on single axes do not determine them.
    """
    mesh = failed.scenario.mesh
    wide = tuple(axis for axis, size in mesh if size > 1)
    if len(wide) < 2:
        return failed, None
    alone = {axis: _tried(trials, failed, tuple((a, s if a == axis else 1) for a, s in mesh)) for axis in wide}
    guilty = {axis: outcome for axis, outcome in alone.items() if isinstance(outcome, Trial)}
    passing = tuple(axis for axis, outcome in alone.items() if outcome is True)
    if not guilty:
        return failed, Axes(wide, "all") if len(passing) == len(wide) else None
    others = tuple(axis for axis in wide if axis not in guilty) if len(guilty) == 1 else ()
    return next(iter(guilty.values())), Axes(tuple(guilty), "any", passing, others)


def _tried(trials: Trials, failed: Trial, mesh: Mesh) -> Trial | bool | None:
    """Return the failure on another mesh; True if it passes there; None if the outcome is not known."""
    scenario = replace(failed.scenario, mesh=mesh, world_size=size_of(mesh))
    try:
        outcome = trials.run(scenario)
    except (CheckFailure, RankHang, ValueError):
        return None
    if outcome is not None:
        return outcome if outcome.error is None or failed.error is not None else None
    return True if trials.completed[scenario.place] else None


_Group = tuple[int, tuple[tuple[int, ...], ...]]  # index among a rank's groups, and the ranks of each with that index
_Line = tuple[tuple[str, str], list[CallEvent]]  # name and line of a collective, and its calls on all ranks

_MOST_LINES = 12
_NEAR = 1e-4  # tolerance, as a fraction of the norm, between sums of one value that were added up in other orders
_MOST_RUNS = 40
_MOST_TERMS = 4
_EXTREMES = ("max", "min")
_SECONDS = (5.0, 20.0)  # shortest and longest timeout of a changed step, in seconds: the change may make it hang
_TIMES = 20.0  # timeout in latest unchanged runs: on a busy machine a right change must not be taken for a hang


def changes_tried(
    trials: Trials, scenario: Scenario, traces: Sequence[RankTrace], relations: Relations
) -> list[Change]:
    """Return the changes that were tried, one at a time, until the step was right with one of them.

    Only the last change can hold. It holds if the step is right with it, with this seed and with another one.
    """
    if trials.program.single_process or scenario.world_size < 2:
        return []
    changes: list[Change] = []
    reseeded = scenario if scenario.batches else replace(scenario, seed=scenario.seed + 1)
    for change in itertools.islice(_changes(trials, scenario, traces, relations), _MOST_RUNS):
        holds = _holds(trials, scenario, change) and _holds(trials, reseeded, change)
        changes.append(replace(change, holds=holds))
        if holds:
            break
    return changes


def _patiently(trials: Trials, by: Callable[..., Any], scenario: Scenario, *how: Change) -> list[Any]:
    least, most = _SECONDS
    timeout = min(most, max(least, _TIMES * trials.latest))
    return trials.ranks.run(by, trials.program, scenario, *how, size=scenario.world_size, timeout=timeout)


def _holds(trials: Trials, scenario: Scenario, change: Change) -> bool:
    try:
        runs = _patiently(trials, interventions.run_changed, scenario, change)
        expected = trials.expected(scenario)
        relations = trials.compared(expected, trials.assembled(scenario, runs))
    except (CheckFailure, RankHang, ValueError):
        return False
    if relations.unjudged:
        return False
    return relations.holds if change.kind != "term" else not _wrong_but_for_losses(relations, expected)


def _wrong_but_for_losses(relations: Relations, expected: Expected) -> list[Result]:
    """Return the results with a failed relation, except returned scalars, which no change of a gradient affects."""
    values = expected.single.values
    returned = {name for name in relations.held if name.kind == "returned"}
    shown = {name for name in returned if name not in values or values[name].numel() == 1}
    return [name for name, verdicts in relations.held.items() if name not in shown and False in verdicts.values()]


def _changes(trials: Trials, scenario: Scenario, traces: Sequence[RankTrace], relations: Relations) -> Iterator[Change]:
    """Yield the changes to try, the likeliest first.

    If all ranks give the same number, a group of one rank or the operation MAX has the effect of a division, so factors
    come first. A factor of a collective also corrects returned values, so it comes before a factor of a term.
    """
    lines = _lines(traces)
    yield from _waits(lines, relations)
    yield from _mistimed(trials, scenario, traces)
    yield from _reduced_again(lines, traces[0]) if traces else ()
    groups = _groups(traces, scenario.world_size)
    several = [group for group in groups if len(group[1][0]) > 1]
    yield from _in_groups(lines, several)
    yield from _combined(several, traces, relations, max(1, scenario.steps))
    yield from _shifts(trials, scenario)
    yield from _orders(lines)
    for (name, line), events in lines:
        op, size = _op_and_size(events)
        if "avg" in op:
            yield Change("op", name, line, "sum", size=size)
        # Only a collective that sums or averages can give a multiple of the right values.
        if name in COLLECTIVES and COLLECTIVES[name].reduces and size > 1 and op not in _EXTREMES:
            yield Change("divide", name, line, size=size)
            yield Change("multiply", name, line, size=size)
    if _wrong_but_for_losses(relations, trials.expected(scenario)):
        yield from _terms(trials, scenario, traces)
    yield from _in_groups(lines, [group for group in groups if len(group[1][0]) == 1])
    for (name, line), events in lines:
        op, size = _op_and_size(events)
        if _kind(name) != "reduction":
            continue
        others = (operation for operation in ("max", "sum", "norm") if operation != op)
        yield from (Change("op", name, line, operation, size=size) for operation in others)
        groups_here = tuple(dict.fromkeys(event.details.get("group", ()) for event in events))
        if op == "sum" and any(tensor["shape"] for tensor in events[0].tensors):
            yield from (Change("once", name, line, addend, now=groups_here, size=size) for addend in (0, 1))
        yield Change("skip", name, line, size=size)
        calls, rest = divmod(len(events), len(traces) * max(1, scenario.steps))
        if scenario.steps > 1 and not rest and op == "sum":
            yield Change("new", name, line, calls, size=size)


def _mistimed(trials: Trials, scenario: Scenario, traces: Sequence[RankTrace]) -> Iterator[Change]:
    """Yield changes of what happens at the wrong time: draws, recomputation, synchronization, repeated writes."""
    steps, first = max(1, scenario.steps), traces[0] if traces else RankTrace()
    for event in first.of("recompute")[:1]:
        yield Change("keep", event.name, event.site)
    passes = len(first.of("backward"))
    for event in [*first.of("no_sync"), *first.of("wrap")][:1] if passes > steps else ():
        yield Change("synchronize", event.name, event.site)
    if passes > steps:
        yield Change("weigh", "backward", first.of("backward")[0].site)
    numbers = {trace.numbers for trace in traces}
    if first.drawn and len({trace.drawn for trace in traces}) == 1 and (len(numbers) > 1 or None in first.numbers):
        seeded = next(iter(first.of("generator", "seed")), None)
        yield Change("draw", "draws", "" if seeded is None else seeded.site)
    try:
        ranks = _patiently(trials, interventions.run_noting_repetitions, scenario)
    except _ENDS:
        return
    updates = max(steps, next((len(trace.of("step")) for trace in traces), 0))
    repeated = [own for own in ranks[0] if own[2][0] > updates and not own[2][0] % updates]
    for name, line, (count, *defined) in [own for own in repeated if all(own in others for others in ranks)][
        :_MOST_LINES
    ]:
        times = count // updates
        yield Change("last", name, line, (times, *defined) if defined else times)


def _reduced_again(lines: Sequence[_Line], trace: RankTrace) -> Iterator[Change]:
    """Leave out each reduction of what an earlier line has reduced: a multiple of its result, or of all its results."""
    calls = trace.of("collective")
    for (name, line), events in lines:
        index = next(number for number, event in enumerate(calls) if (event.name, event.site) == (name, line))
        operand: Mapping[str, float] = next((tensor.get("before", {}) for tensor in calls[index].tensors), {})
        if _kind(name) != "reduction" or not operand.get("norm"):
            continue
        results: dict[str, list[Mapping[str, float]]] = {}
        for event in calls[:index]:
            if event.name in COLLECTIVES and COLLECTIVES[event.name].reduces and event.details.get("after"):
                results.setdefault(event.where, []).append(event.details["after"][0])
        for where, several in results.items():
            sums = [(own["sum"], own["norm"]) for own in several]
            sums += [(sum(own["sum"] for own in several), math.hypot(*(own["norm"] for own in several)))]
            if any(abs(operand["sum"] / operand["norm"] - total / norm) <= _NEAR for total, norm in sums if norm):
                yield Change("skip", name, line, where, size=_op_and_size(events)[1])
                break


def _op_and_size(events: Sequence[CallEvent]) -> tuple[str, int]:
    size = max((len(event.details.get("group", ())) for event in events), default=0)
    return str(events[0].details.get("op", "sum")).lower(), size


def _waits(lines: Sequence[_Line], relations: Relations) -> Iterator[Change]:
    """Yield waits right after asynchronous collectives: of the lines without a wait, of each line, of all lines."""
    # A line with a wait matters only if a result is not finite, or changes. A send may not end before its receive, so
    # messages are left alone.
    started = [
        (line, all(event.details.get("waited") for event in events))
        for line, events in lines
        if _kind(line[0]) != "message" and any(event.details.get("asynchronous") for event in events)
    ]
    several = (verdicts for name, verdicts in relations.held.items() if name != RANDOM)
    unsteady = any(
        False in (verdicts.get(observations.FINITE), verdicts.get(observations.REPEATS)) for verdicts in several
    )
    each = [*((line,) for line, _ in started), tuple(line for line, _ in started)] if unsteady else []
    for chosen in dict.fromkeys((tuple(line for line, waited in started if not waited), *each)):
        if chosen:
            yield Change("wait", *chosen[0], chosen)


def _in_groups(lines: Sequence[_Line], groups: Sequence[_Group]) -> Iterator[Change]:
    for (name, line), events in lines:
        was = tuple(dict.fromkeys(event.details.get("group", ()) for event in events))
        for index, now in groups:
            if set(now) != set(was):
                yield Change("group", name, line, index, was, now, len(now[0]))


def _combined(
    groups: Sequence[_Group], traces: Sequence[RankTrace], relations: Relations, steps: int
) -> Iterator[Change]:
    """Yield gradients combined over each group after backward, if all ranks call backward equally often."""
    parameter_names = tuple(name.of for name in relations.split if name.kind == "grads") or _stepped_alone(traces)
    passes = [trace.of("backward") for trace in traces]
    if not parameter_names or not passes or not passes[0] or len({len(events) for events in passes}) > 1:
        return
    for how in ("mean", "sum") if len(passes[0]) == steps else ("mean",):
        for index, now in groups:
            value = index, parameter_names, how
            yield Change("combine", "backward", passes[0][-1].site, value, now=now, size=len(now[0]))


def _stepped_alone(traces: Sequence[RankTrace]) -> tuple[str, ...]:
    """Return the parameters whose gradients differ between ranks, if no collective precedes the first step."""
    gradients_by_rank: list[Mapping[str, Mapping[str, float]]] = []
    for trace in traces:
        before = list(itertools.takewhile(lambda event: event.kind != "step", trace.events))
        events = [event for event in before if event.kind in ("backward", "collective")]
        if len(before) == len(trace.events) or not events or events[-1].kind == "collective":
            return ()
        gradients_by_rank.append(events[-1].details.get("left", {}))
    return tuple(unlike(gradients_by_rank))


def _kind(name: str) -> str:
    return COLLECTIVES[name].kind if name in COLLECTIVES else ""


def _lines(traces: Sequence[RankTrace]) -> list[_Line]:
    """Return the lines that call collectives, equally often on each rank: a change there leaves no rank waiting."""
    counts = [Counter((event.name, event.site) for event in trace.of("collective") if event.site) for trace in traces]
    common = [line for line in counts[0] if len({count[line] for count in counts}) == 1] if counts else []
    return [
        (line, [event for trace in traces for event in trace.of("collective") if (event.name, event.site) == line])
        for line in common[:_MOST_LINES]
    ]


def _groups(traces: Sequence[RankTrace], size: int) -> list[_Group]:
    shared_groups: list[_Group] = [(0, (tuple(range(size)),))]  # index 0 is the world
    several = [trace.groups for trace in traces]
    for index in range(1, min(map(len, several), default=0)):
        now = tuple(dict.fromkeys(groups[index] for groups in several))
        if sum(map(len, now)) == size:  # every rank has a group with this index
            shared_groups.append((index, now))
    return shared_groups


def _orders(lines: Sequence[_Line]) -> Iterator[Change]:
    """Yield other orders of gathered rows: by pieces of each rank's rows instead of by rank."""
    for (name, line), events in lines:
        shapes = {tensor["shape"] for event in events for tensor in event.details.get("tensors", ())[-1:]}
        _, size = _op_and_size(events)
        if "gather" not in name or "scatter" in name or size < 2 or len(shapes) != 1:
            continue
        rows = next(iter(shapes))[:1]
        for pieces in sorted({2, 3, *rows} - {0, 1}) if rows else ():
            if rows[0] % pieces == 0:
                yield Change("reorder", name, line, pieces, size=size)


def _terms(trials: Trials, scenario: Scenario, traces: Sequence[RankTrace]) -> Iterator[Change]:
    try:
        ranks = _patiently(trials, interventions.run_noting_terms, scenario)
    except _ENDS:
        return
    terms = {(term.backward, term.paths): term for terms_of_rank in ranks for term in terms_of_rank}
    losses = {backward for backward, _ in terms}
    sizes = {scenario.world_size, *(len(group) for trace in traces for group in trace.groups)} - {1}
    for term in [term for term in terms.values() if term.paths[0] or len(losses) > 1][:_MOST_TERMS]:
        for size in sorted(sizes, reverse=True):
            for times in (1 / size, float(size)):
                yield Change("term", "backward", term.backward, (term, times), size=size)


def _shifts(trials: Trials, scenario: Scenario) -> Iterator[Change]:
    """Yield a shift of each range that is shorter on ranks than on one device, and that starts again on each rank."""
    if not trials.one_device:
        return
    try:
        ranks = _patiently(trials, interventions.run_noting_ranges, scenario)
        (alone,) = trials.ranks.run(interventions.run_noting_ranges, trials.program, scenario, size=1)
    except _ENDS:
        return
    for line, full_range in alone.items():
        local_ranges = [ranges_of_rank[line] for ranges_of_rank in ranks if line in ranges_of_rank]
        lengths = {local_range.length for local_range in local_ranges}
        (length,) = lengths if len(lengths) == 1 and len(local_ranges) == len(ranks) else (0,)
        count = full_range.length // length if length else 0
        if count < 2 or full_range.length % length or scenario.world_size % count:
            continue
        for order in ("inner", "outer"):
            shift = Change("shift", full_range.name, line, (count, order), size=count)
            offsets = [length * interventions.part_of(shift, rank, len(ranks)) for rank in range(len(ranks))]
            if [local_range.start - local_ranges[0].start for local_range in local_ranges] != offsets:
                yield shift


_SMALL = 2.0**-10
_FURTHER = 2  # least controls, if the wrong results are few values
_SEEDS = 4  # most seeds that are tried for a case that fails, too
_DECISIVE = ("wait", "keep", "last", "synchronize", "weigh", "group", "shift", "reorder")
"""Changes whose rules come first in the order: if the step is right with one of them, it needs no other control."""
_SCALES = (0.5, 2.0)  # of a batch that the user has given, for a control
_FEW = 16  # fewer wrong values than this may fit an explanation by chance
_REDRAWN = (1, 2, 3)  # draws to discard in further runs: a decision may come out alike with other numbers
_ENOUGH = (Effort.PROVISIONAL, Effort.WIDENED)  # enough for a scaled-down batch: every effort rejects a wrong result
_ENDS = (CheckFailure, RankHang)  # errors that end a run without evidence
_T = TypeVar("_T")


def _tensors(
    case: Scenario, expected: Expected, relations: Relations, runs: Sequence[ObservedRun], **further: Any
) -> Tensors:
    options: dict[str, Any] = {"traces": (), "hypotheses": observations.Hypotheses([], []), **further}
    return Tensors(case.world_size, case.samples, case.steps, expected, relations, runs, **options)


class SecondLook:
    """The further runs of a case that failed.

    `failure_of` makes one for each failed trial, with the world sizes of the gate, calls `taken` once, and drops it.
    `_control` makes one for each control, too. Each run that fails is left out. `repeated` is False if the second run
    was.
    """

    def __init__(self, trials: Trials, failed: Trial, sizes: Sequence[int], attempts: Attempts) -> None:
        assert failed.relations is not None
        self._trials, self._scenario, self._sizes, self._attempts = trials, failed.scenario, sizes, attempts
        label, case = "measuring each optimizer step", failed.scenario
        self._expected = attempts.of(label, failed.expected, trials.expected, case, deep=True)
        self._seen, self._relations = failed.runs, failed.relations
        self._traces: Sequence[RankTrace] = ()
        self.cases: list[tuple[Scenario, Tensors]] = []  # the case and its controls, with their evidence
        self.repeated = True

    def taken(self) -> Tensors:
        """Run the case again in several ways, and return all evidence."""
        attempts, case = self._attempts, self._scenario
        tensors = self.at_the_case()
        attempts.of("the run once more", None, self._repeat)
        tensors.elsewhere = attempts.of("the run at another world size", None, self._at_another_size)
        attempts.of("the run with permuted samples", None, self._in_other_order)
        label = "changes to single calls"
        tensors.tried = attempts.of(label, [], changes_tried, self._trials, case, self._traces, self._relations)
        self.cases = [(case, tensors)]
        if not any(change.holds and change.kind in _DECISIVE for change in tensors.tried):
            self.cases += attempts.of("the cases with other data", [], self._controls)
        several = [evidence for _, evidence in self.cases]
        for evidence in several:
            evidence.further = [other for other in several if other is not evidence and other.hypotheses.divisions]
        tensors.controls = several[1:]
        return tensors

    def at_the_case(self) -> Tensors:
        """Return the evidence of the case itself, without other sizes, orders and seeds."""
        attempts, case = self._attempts, self._scenario
        attempts.of("the traced run", None, self._trace)
        windows = max(1, max((len(trace.of("backward")) for trace in self._traces), default=1) // max(1, case.steps))
        tensors = _tensors(
            case,
            self._expected,
            self._relations,
            self._seen,
            traces=self._traces,
            hypotheses=attempts.of("the parts of the batch", None, self._parts, windows)
            or observations.Hypotheses([], []),
            wrong_alone=attempts.of("the step at world size 1", False, self._is_wrong_alone),
            right_when_small=attempts.of("the run with a small batch", None, self._when_small),
            shardwise=wants_world_size(self._trials.program.reference),
            alone=attempts.of("the record of one device", None, self._unless_it_ends, self._trials.trace_alone, case),
            mesh=case.mesh,
            by_draws=attempts.of("the runs with other random numbers", frozenset(), self._by_draws),
        )
        if not tensors.steps_alike:  # no step of a rank has its counterpart among those of one device
            tensors.expected = replace(tensors.expected, snapshots=[], allowances=[])
        return tensors

    def _trace(self) -> None:
        """Run the case and record its calls. Its results replace the earlier ones only if it fails again."""
        trials, case = self._trials, self._scenario
        pairs = self._unless_it_ends(trials.run_on_ranks, trials.program, case, by=run_traced)
        if pairs is None:
            return
        self._traces = tuple(trace for _, trace in pairs)
        runs = trials.assembled(case, [run for run, _ in pairs])
        relations = trials.compared(self._expected, runs)
        if not relations.holds:
            self._seen, self._relations = runs, relations

    @staticmethod
    def _unless_it_ends(run: Callable[..., _T], *args: Any, **how: Any) -> _T | None:
        try:
            return run(*args, **how)
        except _ENDS:
            return None

    def _is_wrong_alone(self) -> bool:
        own = self._expected.own
        if own is None or wants_world_size(self._trials.program.reference):
            return False
        return not self._trials.compared(self._expected, [own]).holds

    def _parts(self, windows: int) -> observations.Hypotheses | None:
        trials = self._trials
        if not trials.one_device:
            return None  # the step may not run on one device
        how = run_hypotheses, trials.program, self._scenario, windows
        results = self._unless_it_ends(trials.ranks.run, *how, size=1)
        return None if results is None else results[0]

    def _controls(self) -> list[tuple[Scenario, Tensors]]:
        """Return the evidence of cases with other data that fail, too: a mistake must explain each of them."""
        # A metric has few values, so any explanation may fit them by chance, and other seeds may leave the batch as is.
        # Then there are cases with more samples, too; their number leaves the parts as uneven as before.
        case, values = self._scenario, self._expected.single.values
        small = sum(values[name].numel() for name in self._relations.wrong if name in values) < _FEW
        evidence: list[tuple[Scenario, Tensors]] = []
        if case.batches:
            variants = (replace(case, change="scaled", factor=factor) for factor in _SCALES if not case.change)
            return list(itertools.islice(filter(None, map(self._control, variants)), 1))
        for number in range(1, _SEEDS + 1):
            if len(evidence) >= (_FURTHER if small else 1):
                break
            reseeded = replace(case, seed=case.seed + number)
            enlarged = replace(reseeded, samples=case.samples * (number * case.world_size + 1))
            tried = filter(None, map(self._control, (reseeded, enlarged)))
            evidence += itertools.islice(tried, 2 if small else 1)
        return evidence

    def _control(self, scenario: Scenario) -> tuple[Scenario, Tensors] | None:
        """Return the evidence of another case; None if it has the same batch, does not run, or is right."""
        trials = self._trials
        try:
            expected = trials.expected(scenario, deep=True)  # as `SecondLook` measures it
            if expected.single.batch == self._expected.single.batch:
                return None  # the user's code sets its own seeds
            runs = trials.on_ranks(scenario, all_values=True)
        except (*_ENDS, ValueError):  # the user's functions may not take that number of samples
            return None
        relations = trials.compared(expected, runs)
        if relations.holds:
            return None
        look = SecondLook(trials, Trial(scenario, expected, relations, runs), (), self._attempts)
        return scenario, look.at_the_case()

    def _when_small(self) -> bool | None:
        """Return whether the step is right for a scaled-down batch, which reaches no limit on a norm."""
        if self._scenario.change not in ("", "scaled"):
            return None
        small = replace(self._scenario, change="scaled", factor=_SMALL)
        trials = self._trials
        try:
            runs = trials.on_ranks(small, all_values=True)
            return any(trials.compared(trials.expected(small, effort=effort), runs).holds for effort in _ENOUGH)
        except _ENDS:
            return None

    def _repeat(self) -> None:
        repeated_runs = self._unless_it_ends(self._trials.on_ranks, self._scenario, all_values=True)
        self.repeated = repeated_runs is not None
        if repeated_runs is not None:
            repeats(self._relations, self._expected, self._seen, repeated_runs, self._trials.tolerance)

    def _by_draws(self) -> frozenset[Result]:
        trials, case = self._trials, self._scenario
        changed: set[Result] = set()
        if not self._expected.drawn and not any(trace.drawn or trace.of("generator") for trace in self._traces):
            return frozenset()
        for times in _REDRAWN:
            runs = self._unless_it_ends(trials.run_on_ranks, trials.program, case, times, by=run_redrawn)
            if runs is None:
                break
            compared = (self._expected, self._seen, trials.assembled(case, runs))
            changed |= {name for name in self._relations.held if ranks_changed(*compared, name, trials.tolerance)}
        return frozenset(changed)

    def _at_another_size(self) -> Tensors | None:
        """Return the case at the smallest other world size, and note for each result whether it is the same there."""
        case = self._scenario
        other_size = min((size for size in self._sizes if size not in (1, case.world_size)), default=None)
        if other_size is None:
            return None
        resized = replace(case, world_size=other_size)
        other_runs = self._unless_it_ends(self._trials.on_ranks, resized, all_values=True)
        if other_runs is None:
            return None
        low, high = sorted((other_size, case.world_size))
        for name, verdicts in self._relations.held.items():
            if name == RANDOM or name not in self._expected.single.values:
                continue
            allowed = 2 * allowed_for(self._expected, name, self._trials.tolerance)
            got, own = (runs[0].values.get(name) for runs in (other_runs, self._seen))
            verdicts[f"same at {low} and {high}"] = close(got, own, allowed)
        few = 0 < case.samples < other_size and not case.batches  # some ranks have no sample: take a case with more
        evidence = self._control(replace(resized, samples=case.samples * other_size)) if few else None
        return evidence[1] if evidence else _tensors(resized, self._expected, self._relations, other_runs[:1])

    def _in_other_order(self) -> None:
        """Note for each result whether permuted samples change it, if they do not change it on one device."""
        case, trials = self._scenario, self._trials
        if case.batches or case.change or case.samples < 2:
            return
        permuted = replace(case, change="permuted")
        try:
            # Without one device, all ranks run for each measurement.
            effort = Effort.IN_FULL if trials.one_device else Effort.WIDENED
            expected, expected_permuted = trials.expected(case, deep=True), trials.expected(permuted, effort=effort)
            permuted_runs = trials.on_ranks(permuted)
        except _ENDS:
            return
        for name, verdicts in self._relations.held.items():
            if (allowed := self._as_permuted(name, expected, expected_permuted)) is not None:
                got, own = (runs[0].values.get(name) for runs in (permuted_runs, self._seen))
                verdicts["any order"] = close(got, own, 2 * allowed)

    def _as_permuted(self, name: Result, expected: Expected, permuted: Expected) -> torch.Tensor | float | None:
        """Return the tolerance of a result in another order; None if one device is not independent of the order."""
        exact, moved = expected.exact.get(name), permuted.exact.get(name)
        if exact is None or moved is None or exact.shape != moved.shape:
            return None
        tolerance = self._trials.tolerance
        allowed = allowed_for(expected, name, tolerance) + allowed_for(permuted, name, tolerance)
        return allowed if difference(exact, moved, allowed) is None else None


def _try_block_orders(trials: Trials, cases: Sequence[tuple[Scenario, Tensors]]) -> None:
    """Add to the hypotheses of each case the orders of blocks that explain it, up to the first that has none."""
    for scenario, tensors in cases:
        values = {name: tensors.seen[0].values[name] for name in tensors.names if name in tensors.seen[0].values}
        if not values or len(values) < len(tensors.names):
            return
        (orders,) = trials.ranks.run(run_block_orders, trials.program, scenario, values, size=1)
        if not orders:
            return
        tensors.hypotheses.alternatives.extend(orders)


_LIKELY = 2  # most causes that a report names


def failure_of(trials: Trials, failed: Trial, sizes: Sequence[int], axes: Axes | None = None) -> Failure:
    """Diagnose a failed trial; this runs the step a few more times. `axes`: those of the mesh that the failure needs.

    If a part of the diagnosis raises an error, the part is left out and the error is kept in `incomplete`.
    """
    if failed.relations is None:
        assert failed.error is not None
        lost = no_return_of(trials.name, failed.scenario, failed.error, trials.defined)
        run = functools.partial(trials.run_on_ranks, scenario=failed.scenario)
        unmoved = left_on_cpu(trials.program, failed.error, run)
        return replace(lost, against=trials.against, lines=[*filter(None, [unmoved]), *lost.lines])
    started, attempts = time.monotonic(), Attempts()
    look = SecondLook(trials, failed, sizes, attempts)
    first_look = _tensors(failed.scenario, failed.expected, failed.relations, failed.runs)
    tensors = attempts.of("the second look at the case", first_look, look.taken)
    controls = [evidence_of(control, attempts) for control in tensors.controls]
    evidence = evidence_of(tensors, attempts)
    findings = findings_of(evidence, _LIKELY, attempts, controls)
    if not findings and trials.one_device:  # it takes many runs
        attempts.of("other orders of blocks", None, _try_block_orders, trials, look.cases)
        findings = findings_of(evidence, _LIKELY, attempts, controls)
    mistakes = [finding.mistake for finding in findings[:1]]
    return Mismatch(
        name=trials.name,
        case=failed.scenario.described,
        findings=findings,
        size=failed.scenario.world_size,
        single_process=trials.program.single_process,
        relations=tensors.relations,
        expected=tensors.expected,
        axes=axes,
        first_wrong=attempts.of("the first wrong step", None, _first_wrong, tensors),
        parting=attempts.of("the line where ranks part", None, first_parting, tensors, mistakes),
        module=attempts.of("the first wrong module", None, first_wrong_module, tensors),
        factor=attempts.of("the factor", None, tensors.factor),
        factor_of=tensors.names,
        of_update=tensors.has_right_gradients and bool(tensors.wrong("params")),
        patterns=attempts.of("the pattern of wrong values", [], _patterns, tensors),
        casts=attempts.of("the casts to float8", [], _casts, tensors),
        wrong_alone=tensors.wrong_alone,
        repeated=look.repeated,
        effort=f"diagnosis: {_counted(len(controls), 'case')} with other data and "
        f"{_counted(len(tensors.tried), 'run')} with one change, in {time.monotonic() - started:.1f} s",
        incomplete=attempts.remarks,
        defined=trials.defined,
        against=trials.against,
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def hang_of(trials: Trials, hang: RankHang, verdict: str = "") -> RankHang:
    """Return the error of a hang in the current trial, with its diagnosis."""
    lost = no_return_of(trials.name, trials.current, hang, trials.defined)
    return late_hang(replace(lost, verdict=verdict), hang)


def no_return_of(name: str, scenario: Scenario, error: RankFailure | RankHang, defined: str = "") -> NoReturn:
    """Diagnose ranks that did not return because they hung, raised or died."""
    account, attempts = account_of(error), Attempts()
    hung = isinstance(error, RankHang)
    lines = str(error).splitlines() if account is None else account.headlines(name if hung else None)
    unknown = UnfinishedCall(scenario.world_size, scenario.samples, " ".join(lines))
    calls = attempts.of("the evidence of the calls", unknown, calls_of, account, scenario, lines, hung=hung)
    findings = findings_of_calls(calls, _LIKELY if hung else 1, attempts)
    facts = NoReturn(name=name, case=scenario.described, findings=findings, account=account, lines=lines, hung=hung)
    return replace(facts, incomplete=attempts.remarks, defined=defined)


def _first_wrong(tensors: Tensors) -> FirstWrong | None:
    # Gradients first: if each rank updates its own parameters, it gets the others only after the optimizer step.
    for of_gradients in (True, False):
        for step, exact in enumerate(tensors.expected.snapshots):
            allowed = tensors.expected.allowances[step]
            for name, value in exact.items():
                if name not in tensors.relations.wrong or (name.kind == "grads") is not of_gradients:
                    continue
                for rank, run in enumerate(tensors.seen):
                    if step >= run.optimizer_steps:
                        return FirstWrong(step + 1, rank, None)
                    # The step may not be on record.
                    snapshot = run.snapshots[step] if step < len(run.snapshots) else None
                    if snapshot is not None and not close(snapshot.get(name), value, allowed[name]):
                        return FirstWrong(step + 1, rank, name)
    return None


def _casts(tensors: Tensors) -> list[str]:
    """Describe what casts to float8 have lost on each rank, and on one device."""
    runs = [("one device", tensors.alone), *((f"rank {rank}", trace) for rank, trace in enumerate(tensors.traces))]
    by_dtype = grouped(
        (dtype, f"{run}: {lost} of {cast} became 0, {beyond} beyond its largest number")
        for run, trace in runs
        if trace is not None
        for dtype, (cast, lost, beyond) in trace.casts.items()
    )
    return [f"elements cast to {dtype}: {'; '.join(texts)}" for dtype, texts in by_dtype]


def _patterns(tensors: Tensors) -> list[str]:
    patterns: list[str] = []
    for name in tensors.names[:1]:
        for rank in tensors.relations.wrong[name][:1]:
            got, exact = tensors.seen[rank].values.get(name), tensors.expected.exact[name]
            if got is not None and got.shape == exact.shape:
                lines = diagnose(got, exact, tensors.expected.tolerance[name], rank=rank)
                patterns += [f"{name} on rank {rank} {line}" for line in lines]
    return patterns
