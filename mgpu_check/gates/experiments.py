"""Repeat a wrong step with one call changed: a change that makes the step right confirms a diagnosis."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mgpu_check.diagnosis.observed import FINITE, REPEATS, CallEvent, Change, Expected, RankTrace, Relations
from mgpu_check.diagnosis.results import Result
from mgpu_check.errors import CheckFailure, RankHang
from mgpu_check.gates.interventions import part_of, run_changed, run_noting_ranges, run_noting_terms
from mgpu_check.gates.relations import RANDOM
from mgpu_check.gates.scenario import Scenario
from mgpu_check.gates.trial import Trials
from mgpu_check.torch_hooks.table import COLLECTIVES

_Group = tuple[int, tuple[tuple[int, ...], ...]]
"""Index among the groups of a rank, and the ranks of each group with this index."""

_MOST_LINES = 12
_MOST_RUNS = 40
_MOST_TERMS = 4
_EXTREMES = ("max", "min")
_SECONDS = (5.0, 20.0)
"""Shortest and longest timeout of a changed step, in seconds: the change may make it hang."""
_TIMES = 20.0
"""Timeout as a multiple of the latest unchanged run, so that a right change is not taken for a hang on a busy
machine."""


def changes_tried(
    trials: Trials, scenario: Scenario, traces: Sequence[RankTrace], relations: Relations
) -> list[Change]:
    """Return the changes that were tried, one at a time, until the step was right with one of them.

    Only the last change can hold. It holds if the step is right with it, with this seed and with another one.
    """
    if trials.program.single_process or scenario.world_size < 2:
        return []
    found: list[Change] = []
    for number, change in enumerate(_changes(trials, scenario, traces, relations)):
        if number >= _MOST_RUNS:
            break
        holds = _holds(trials, scenario, change) and _holds(trials, _other_seed(scenario), change)
        found.append(replace(change, holds=holds))
        if holds:
            break
    return found


def _other_seed(scenario: Scenario) -> Scenario:
    return scenario if scenario.batches else replace(scenario, seed=scenario.seed + 1)


def _patience(trials: Trials) -> float:
    least, most = _SECONDS
    return min(most, max(least, _TIMES * trials.latest))


def _holds(trials: Trials, scenario: Scenario, change: Change) -> bool:
    try:
        seen = trials.ranks.run(
            run_changed, trials.program, scenario, change, size=scenario.world_size, timeout=_patience(trials)
        )
        expected = trials.expected(scenario)
        relations = trials.compared(expected, trials.assembled(scenario, seen))
    except (CheckFailure, RankHang, ValueError):
        return False
    if relations.unjudged:
        return False
    return relations.holds if change.kind != "term" else not _wrong_but_for_losses(relations, expected)


def _wrong_but_for_losses(relations: Relations, expected: Expected) -> list[Result]:
    """Return the results with a failed relation, except returned scalars, which no change of a gradient affects."""
    values = expected.single.values
    shown = {
        name for name in relations.held if name.kind == "returned" and (name not in values or values[name].numel() == 1)
    }
    return [name for name, held in relations.held.items() if name not in shown and False in held.values()]


def _changes(trials: Trials, scenario: Scenario, traces: Sequence[RankTrace], relations: Relations) -> Iterator[Change]:
    """Yield the changes to try, the likeliest first.

    They are: waits, other groups, combined gradients, positions, orders, factors, terms of the loss, groups of one
    rank, other operations, calls left out.

    If all ranks give the same number, a group of one rank or the operation MAX has the effect of a division, so factors
    come first. A factor of a collective also corrects returned values, so it comes before a factor of a term.
    """
    lines = _lines(traces)
    yield from _waits(lines, relations)
    groups = _groups(traces, scenario.world_size)
    several = [group for group in groups if len(group[1][0]) > 1]
    yield from _in_groups(lines, several)
    yield from _combined(several, traces, relations, max(1, scenario.steps))
    yield from _shifts(trials, scenario)
    yield from _orders(lines)
    for (name, line), events in lines:
        op, size = _op(events), _size(events)
        if "avg" in op:
            yield Change("op", name, line, "sum", size=size)
        if _reduces(name) and size > 1 and op not in _EXTREMES:
            yield Change("divide", name, line, size=size)
            yield Change("multiply", name, line, size=size)
    if _wrong_but_for_losses(relations, trials.expected(scenario)):
        yield from _terms(trials, scenario, traces)
    yield from _in_groups(lines, [group for group in groups if len(group[1][0]) == 1])
    for (name, line), events in lines:
        op, size = _op(events), _size(events)
        if _kind(name) != "reduction":
            continue
        yield from (Change("op", name, line, other, size=size) for other in ("max", "sum") if other != op)
        yield Change("skip", name, line, size=size)
        calls, rest = divmod(len(events), len(traces) * max(1, scenario.steps))
        if scenario.steps > 1 and not rest and op == "sum":
            yield Change("new", name, line, calls, size=size)


def _waits(lines: Sequence[tuple[tuple[str, str], list[CallEvent]]], relations: Relations) -> Iterator[Change]:
    """Yield waits right after asynchronous collectives: of the lines without a wait, of each line, of all lines.

    A line with a wait matters only if a result is not finite, or changes. A send may not end before its receive, so
    messages are left alone.
    """
    started = [
        (line, all(event.details.get("waited") for event in events))
        for line, events in lines
        if _kind(line[0]) != "message" and any(event.details.get("asynchronous") for event in events)
    ]
    unsteady = any(False in (held.get(FINITE), held.get(REPEATS)) for n, held in relations.held.items() if n != RANDOM)
    each = [*((line,) for line, _ in started), tuple(line for line, _ in started)] if unsteady else []
    for chosen in dict.fromkeys((tuple(line for line, waited in started if not waited), *each)):
        if chosen:
            yield Change("wait", *chosen[0], chosen)


def _op(events: Sequence[CallEvent]) -> str:
    return str(events[0].details.get("op", "sum")).lower()


def _size(events: Sequence[CallEvent]) -> int:
    return max((len(event.details.get("group", ())) for event in events), default=0)


def _reduces(name: str) -> bool:
    """Return whether a collective sums or averages: only those can give a multiple of the right values."""
    return name in COLLECTIVES and COLLECTIVES[name].reduces


def _in_groups(lines: Sequence[tuple[tuple[str, str], list[CallEvent]]], groups: Sequence[_Group]) -> Iterator[Change]:
    for (name, line), events in lines:
        was = tuple(dict.fromkeys(event.details.get("group", ()) for event in events))
        for index, now in groups:
            if set(now) != set(was):
                yield Change("group", name, line, index, was, now, len(now[0]))


def _combined(
    groups: Sequence[_Group], traces: Sequence[RankTrace], relations: Relations, steps: int
) -> Iterator[Change]:
    """Yield gradients that differ between ranks, combined over each group after backward.

    All ranks must call backward equally often, so that no rank waits for the others.
    """
    names = tuple(name.of for name in relations.split if name.kind == "grads") or _stepped_alone(traces)
    passes = [trace.of("backward") for trace in traces]
    if not names or not passes or not passes[0] or len({len(events) for events in passes}) > 1:
        return
    for how in ("mean", "sum") if len(passes[0]) == steps else ("mean",):
        for index, now in groups:
            yield Change("combine", "backward", passes[0][-1].site, (index, names, how), now=now, size=len(now[0]))


def _stepped_alone(traces: Sequence[RankTrace]) -> tuple[str, ...]:
    """Return the parameters that the first optimizer step of each rank takes with gradients of its own.

    These gradients differ between ranks, and no collective runs between the last backward pass and the step.
    """
    left: list[Mapping[str, Mapping[str, float]]] = []
    for trace in traces:
        before = list(itertools.takewhile(lambda event: event.kind != "step", trace.events))
        events = [event for event in before if event.kind in ("backward", "collective")]
        if len(before) == len(trace.events) or not events or events[-1].kind == "collective":
            return ()
        left.append(events[-1].details.get("left", {}))
    everywhere = [name for name in left[0] if all(name in one for one in left)] if left else []
    return tuple(name for name in everywhere if any(one[name] != left[0][name] for one in left))


def _kind(name: str) -> str:
    return COLLECTIVES[name].kind if name in COLLECTIVES else ""


def _lines(traces: Sequence[RankTrace]) -> list[tuple[tuple[str, str], list[CallEvent]]]:
    """Return the lines that call collectives, equally often on each rank: a change there leaves no rank waiting."""
    counts = [Counter((event.name, event.site) for event in trace.of("collective") if event.site) for trace in traces]
    if not counts:
        return []
    common = [line for line, count in counts[0].items() if all(other.get(line) == count for other in counts)]
    return [
        (line, [event for trace in traces for event in trace.of("collective") if (event.name, event.site) == line])
        for line in common[:_MOST_LINES]
    ]


def _groups(traces: Sequence[RankTrace], size: int) -> list[_Group]:
    """Return the groups that exist: the index among the groups of a rank, and the ranks of each group with this index.

    Index 0 is the world. An index counts if every rank has a group with it.
    """
    found: list[_Group] = [(0, (tuple(range(size)),))]
    several = [trace.groups for trace in traces]
    for index in range(1, min(map(len, several), default=0)):
        now = tuple(dict.fromkeys(groups[index] for groups in several))
        if sum(map(len, now)) == size:
            found.append((index, now))
    return found


def _orders(lines: Sequence[tuple[tuple[str, str], list[CallEvent]]]) -> Iterator[Change]:
    """Yield other orders of gathered rows: by pieces of each rank's rows instead of by rank."""
    for (name, line), events in lines:
        shapes = {tensor["shape"] for event in events for tensor in event.details.get("tensors", ())[-1:]}
        size = _size(events)
        if "gather" not in name or "scatter" in name or size < 2 or len(shapes) != 1:
            continue
        rows = next(iter(shapes))[:1]
        for pieces in sorted({2, 3, *rows} - {0, 1}) if rows else ():
            if rows[0] % pieces == 0:
                yield Change("reorder", name, line, pieces, size=size)


def _terms(trials: Trials, scenario: Scenario, traces: Sequence[RankTrace]) -> Iterator[Change]:
    try:
        ranks = trials.ranks.run(
            run_noting_terms, trials.program, scenario, size=scenario.world_size, timeout=_patience(trials)
        )
    except (CheckFailure, RankHang):
        return
    terms = {(term.backward, term.paths): term for one in ranks for term in one}
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
        ranks = trials.ranks.run(
            run_noting_ranges, trials.program, scenario, size=scenario.world_size, timeout=_patience(trials)
        )
        (alone,) = trials.ranks.run(run_noting_ranges, trials.program, scenario, size=1)
    except (CheckFailure, RankHang):
        return
    for line, whole in alone.items():
        found = [one[line] for one in ranks if line in one]
        parts = {one.length for one in found}
        (part,) = parts if len(parts) == 1 and len(found) == len(ranks) else (0,)
        count = whole.length // part if part else 0
        if count < 2 or whole.length % part or scenario.world_size % count:
            continue
        for order in ("inner", "outer"):
            shift = Change("shift", whole.name, line, (count, order), size=count)
            offsets = [part * part_of(shift, rank, len(ranks)) for rank in range(len(ranks))]
            if [one.first - found[0].first for one in found] != offsets:
                yield shift
