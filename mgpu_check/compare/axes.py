"""Name the axes of the script's meshes along which ranks agree, and the axes along which they differ."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mgpu_check.compare.alignment import Kind, deviation
from mgpu_check.compare.first_difference import FirstDifference
from mgpu_check.compare.trace import Trace
from mgpu_check.processes.rank_lists import named

_NEAR = 1e-2
"""Relative distance at which a factor counts as the size of an axis: summaries and rounding blur the factor by less."""


@dataclass(frozen=True)
class Axis:
    """An axis of a mesh, or a partition of the world into groups of ranks.

    Attributes:
        name: "tp", or "the groups of ranks 0-1 and of ranks 2-3".
        lines: the lines along the axis, each a tuple of ranks that differ only in their index along the axis.
        places: rank -> its index along the axis; empty for groups without a mesh.
    """

    name: str
    lines: tuple[tuple[int, ...], ...]
    places: Mapping[int, int]

    @property
    def size(self) -> int:
        return len(self.lines[0])


def axes_of(ranks: Sequence[Trace]) -> list[Axis]:
    """Return the axes with more than one rank, first the axes of meshes, then those of other groups."""
    found: dict[tuple[tuple[int, ...], ...], Axis] = {}
    for number in range(min((len(trace.of("mesh")) for trace in ranks), default=0)):
        meshes = {trace.rank: trace.of("mesh")[number]["axes"] for trace in ranks}
        names = {tuple(name for name, _, _ in axes) for axes in meshes.values()}
        for axis, name in enumerate(names.pop() if len(names) == 1 else ()):
            lines: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for rank, axes in meshes.items():
                lines[tuple(index for other, (_, index, _) in enumerate(axes) if other != axis)].append(rank)
            places = {rank: axes[axis][1] for rank, axes in meshes.items()}
            _add(found, Axis(name, tuple(tuple(line) for line in lines.values()), places))
    for lines_ in _partitions(ranks):
        groups = " and of ".join(named(line) for line in lines_)
        _add(found, Axis(f"the groups of {groups}", lines_, {}))
    return list(found.values())


def _add(found: dict[tuple[tuple[int, ...], ...], Axis], axis: Axis) -> None:
    if len({len(line) for line in axis.lines}) == 1 and axis.size > 1:
        found.setdefault(tuple(sorted(axis.lines)), axis)


def _partitions(ranks: Sequence[Trace]) -> list[tuple[tuple[int, ...], ...]]:
    """Return each sequence of groups that the script makes one after the other and that contains each rank once."""
    found: list[tuple[tuple[int, ...], ...]] = []
    lines: list[tuple[int, ...]] = []
    for event in ranks[0].of("subgroup"):
        line = tuple(event["ranks"])
        if {rank for other in lines for rank in other} & set(line):
            lines = []
        lines.append(line)
        if sorted(rank for other in lines for rank in other) == [trace.rank for trace in ranks] and len(lines) > 1:
            found.append(tuple(lines))
            lines = []
    return found


def told_axes(difference: FirstDifference) -> str:
    """Describe the axes along which ranks agree or differ about the first wrong tensor; "" if unknown."""
    kind, axes = difference.kind, axes_of(difference.aligned.ranks)
    if kind is None or not axes:
        return ""
    main = difference.main
    name = main.name if main else difference.apart[kind][0]
    clauses = [*_agreement(difference, kind, name, axes), *_place(difference, kind, name, axes)]
    if not clauses and main is not None:
        clauses = _factor(difference, kind, name, axes)
    return "; ".join(clauses)


def _agreement(difference: FirstDifference, kind: Kind, name: str, axes: Sequence[Axis]) -> list[str]:
    agree: list[str] = []
    differ: list[str] = []
    for axis in axes:
        told = _agrees(difference, kind, name, axis)
        if told is not None:
            (agree if told else differ).append(axis.name)
    if not differ:
        return []
    return [f"ranks {f'agree along {_and(agree)}, and ' if agree else ''}differ along {_and(differ)}"]


def _agrees(difference: FirstDifference, kind: Kind, name: str, axis: Axis) -> bool | None:
    """Return whether ranks of a line with the same part of a tensor agree; None if no two ranks share one."""
    aligned = difference.aligned
    _, here = aligned.found(difference.step, kind, name)
    entries = {trace.rank: trace.entry(name) for trace in aligned.ranks}
    parts, shape = aligned.parts.get(name, {}), aligned.parameter(name).shape
    tolerance = difference.rounding.tolerance(difference.step, kind, name)
    agrees: bool | None = None
    for line in axis.lines:
        there = [rank for rank in line if rank in here]
        for one, other in itertools.pairwise(there):
            entry = entries[one]
            if parts.get(one) != parts.get(other) or (entry is not None and axis.name in entry.over):
                continue
            same = here[one] == here[other] or deviation(here[one], here[other], shape).size <= tolerance
            agrees = same and agrees is not False
    return agrees


def _place(difference: FirstDifference, kind: Kind, name: str, axes: Sequence[Axis]) -> list[str]:
    """Name the index along an axis that all wrong ranks have and no correct rank has."""
    wrong = next((set(wrong.ranks) for wrong in difference.wrong[kind] if wrong.name == name), set())
    _, here = difference.aligned.found(difference.step, kind, name)
    if not wrong or wrong == set(here):
        return []
    for axis in axes:
        places = {axis.places.get(rank) for rank in wrong}
        if len(places) == 1 and None not in places and wrong == {r for r in here if axis.places.get(r) in places}:
            return [f"it is wrong where the index along {axis.name} is {places.pop()}"]
    return []


def _factor(difference: FirstDifference, kind: Kind, name: str, axes: Sequence[Axis]) -> list[str]:
    """Name the axis whose size equals the factor of the wrong tensor, unless the world has the same size."""
    ratio = difference.ratio(kind, name)
    if ratio is None or not ratio:
        return []
    larger = max(ratio, 1 / ratio)
    sizes = [axis.name for axis in axes if axis.places and abs(larger - axis.size) <= _NEAR * larger]
    if not sizes or abs(larger - difference.aligned.world) <= _NEAR * larger:
        return []
    return [f"{larger:.3g}, the size of {_or(sizes)}, is the factor{' inverted' * (ratio < 1)}"]


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)


def _or(names: Sequence[str]) -> str:
    return " or ".join(names)
