"""Try changes to single calls on a step that is wrong: the one that makes it right is the control of a diagnosis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mgpu_check.errors import CheckFailure, RankHang
from mgpu_check.gates.interventions import run_changed, run_noting_ranges
from mgpu_check.gates.scenario import Scenario
from mgpu_check.gates.trial import Trials
from mgpu_check.mistakes.observed import Change, Event, Trace
from mgpu_check.torch_hooks.table import COLLECTIVES

__all__ = ["changes_tried"]

_Group = tuple[int, tuple[tuple[int, ...], ...]]
"""Index among the groups of a rank, and the ranks of each group with this index."""

_MOST_LINES = 12
_MOST_RUNS = 30
_SECONDS = (5.0, 20.0)
"""The least and the most that a changed step is waited for; it may hang."""
_TIMES = 20.0
"""As long as the latest run of the step as it is: on a busy machine a right change must not be taken for a hang."""


def changes_tried(trials: Trials, scenario: Scenario, traces: Sequence[Trace]) -> list[Change]:
    """Return the changes that were tried, each alone; the last one if the step is right with it, here and with another seed."""
    if trials.program.single_process or scenario.world_size < 2:
        return []
    found: list[Change] = []
    for number, change in enumerate(_changes(trials, scenario, traces)):
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
        relations = trials.compared(trials.expected(scenario), trials.assembled(scenario, seen))
    except (CheckFailure, RankHang, ValueError):
        return False
    return relations.holds and not relations.unjudged


def _changes(trials: Trials, scenario: Scenario, traces: Sequence[Trace]) -> Iterator[Change]:
    """Yield changes, the likeliest first: other groups, positions, factors, groups of one rank, operations, calls left out.

    Where all ranks give the same number, a group of one, or the operation MAX, does what dividing does: that goes first.
    """
    lines = _lines(traces)
    groups = _groups(traces, scenario.world_size)
    yield from _in_groups(lines, [group for group in groups if len(group[1][0]) > 1])
    yield from _shifts(trials, scenario)
    for (name, line), events in lines:
        size = max((len(event.details.get("group", ())) for event in events), default=0)
        if _kind(name) in ("reduction", "parts") and size > 1:
            yield Change("divide", name, line, size=size)
            yield Change("multiply", name, line, size=size)
    yield from _in_groups(lines, [group for group in groups if len(group[1][0]) == 1])
    for (name, line), events in lines:
        size = max((len(event.details.get("group", ())) for event in events), default=0)
        if _kind(name) != "reduction":
            continue
        op = events[0].details.get("op", "sum")
        yield from (Change("op", name, line, other, size=size) for other in ("max", "sum") if other not in op)
        yield Change("skip", name, line, size=size)
        calls, rest = divmod(len(events), len(traces) * max(1, scenario.steps))
        if scenario.steps > 1 and not rest and "sum" in op:
            yield Change("new", name, line, calls, size=size)


def _in_groups(lines: Sequence[tuple[tuple[str, str], list[Event]]], groups: Sequence[_Group]) -> Iterator[Change]:
    for (name, line), events in lines:
        was = tuple(dict.fromkeys(event.details.get("group", ()) for event in events))
        for index, now in groups:
            if set(now) != set(was):
                yield Change("group", name, line, index, was, now, len(now[0]))


def _kind(name: str) -> str:
    return COLLECTIVES[name].kind if name in COLLECTIVES else ""


def _lines(traces: Sequence[Trace]) -> list[tuple[tuple[str, str], list[Event]]]:
    """Return the lines that call collectives, equally often on each rank: a change there leaves no rank waiting."""
    counts = [Counter((event.name, event.site) for event in trace.of("collective") if event.site) for trace in traces]
    if not counts:
        return []
    common = [line for line, count in counts[0].items() if all(other.get(line) == count for other in counts)]
    return [
        (line, [event for trace in traces for event in trace.of("collective") if (event.name, event.site) == line])
        for line in common[:_MOST_LINES]
    ]


def _groups(traces: Sequence[Trace], size: int) -> list[_Group]:
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


def _shifts(trials: Trials, scenario: Scenario) -> Iterator[Change]:
    """Yield a shift of each range that is shorter on ranks than on one device."""
    try:
        ranks = trials.ranks.run(
            run_noting_ranges, trials.program, scenario, size=scenario.world_size, timeout=_patience(trials)
        )
        (alone,) = trials.ranks.run(run_noting_ranges, trials.program, scenario, size=1)
    except (CheckFailure, RankHang):
        return
    for line, length in alone.items():
        parts = {one.get(line, 0) for one in ranks}
        (part,) = parts if len(parts) == 1 else (0,)
        if part and length > part and length % part == 0 and scenario.world_size % (length // part) == 0:
            for order in ("inner", "outer"):
                yield Change("shift", "arange", line, (length // part, order), size=length // part)
