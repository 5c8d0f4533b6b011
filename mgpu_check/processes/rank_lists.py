"""Say once what holds for several ranks: group equal statements, and write rank numbers in short."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

__all__ = ["by_ranks", "few", "grouped", "intervals", "named"]

Key = TypeVar("Key")
Member = TypeVar("Member")


def grouped(pairs: Iterable[tuple[Key, Member]]) -> list[tuple[Key, list[Member]]]:
    """Group equal things that ranks report: each thing with its ranks, both in the order in which they come."""
    groups: dict[Key, list[Member]] = {}
    for key, member in pairs:
        groups.setdefault(key, []).append(member)
    return list(groups.items())


def intervals(numbers: Sequence[int]) -> str:
    """Write ascending numbers in short: "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def named(ranks: Collection[int]) -> str:
    """Name ranks: "rank 2", "ranks 0-2, 5"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {intervals(sorted(ranks))}"


def few(names: Sequence[object], shown: int = 2) -> str:
    """Name the first of many, and count the rest: "a, b and 3 more"."""
    return ", ".join(map(str, names[:shown])) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def by_ranks(ranks_of: Mapping[Key, Sequence[int]], shown: int = 2) -> str:
    """Name things by the ranks that they are on: "a, b on ranks 1-2; c on rank 3"; of each group the first few."""
    groups: dict[tuple[int, ...], list[Key]] = {}
    for name, ranks in ranks_of.items():
        groups.setdefault(tuple(ranks), []).append(name)
    return "; ".join(f"{few(names, shown)} on {named(ranks)}" for ranks, names in groups.items())
