"""Format statements about several ranks: group equal ones, and abbreviate rank numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key")
Member = TypeVar("Member")


def grouped(pairs: Iterable[tuple[Key, Member]]) -> list[tuple[Key, list[Member]]]:
    """Return each distinct key with its members, both in the order of `pairs`."""
    groups: dict[Key, list[Member]] = {}
    for key, member in pairs:
        groups.setdefault(key, []).append(member)
    return list(groups.items())


def intervals(numbers: Sequence[int]) -> str:
    """Abbreviate ascending numbers: "0-2, 5"."""
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


def few(labels: Sequence[object], shown: int = 2) -> str:
    """List the first names, and count the rest: "a, b and 3 more"."""
    return ", ".join(map(str, labels[:shown])) + (f" and {len(labels) - shown} more" if len(labels) > shown else "")


def by_ranks(ranks_of: Mapping[Key, Sequence[int]], shown: int = 2) -> str:
    """List names by their ranks, at most `shown` names per group of ranks: "a, b on ranks 1-2; c on rank 3"."""
    groups = grouped((tuple(ranks), name) for name, ranks in ranks_of.items())
    return "; ".join(f"{few(labels, shown)} on {named(ranks)}" for ranks, labels in groups)
