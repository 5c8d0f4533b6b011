"""Find a collective that one rank entered and another did not, from the counts and records of the ranks."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mgpu_check.processes.protocol import Group
from mgpu_check.processes.rank_lists import grouped, named
from mgpu_check.processes.record import Entered, Record

Counts = Mapping[Group, int]
"""Group -> number of collectives that one rank has entered there."""


@dataclass(frozen=True)
class Uneven:
    """A group whose ranks have entered different numbers of collectives.

    Attributes:
        described: the description that its maker gave, or empty.
        counts: rank -> number of collectives that it has entered.
        unmatched: rank -> its first collective that other ranks lack; empty if the records no longer contain it.
    """

    group: Group
    described: str
    counts: Mapping[int, int]
    unmatched: Mapping[int, Entered]

    @property
    def missing(self) -> list[int]:
        return [rank for rank, count in self.counts.items() if count == min(self.counts.values())]

    def told(self, when: str, what: str = "") -> str:
        """Describe the difference in a line: the counts of the ranks, and the unmatched collective.

        Args:
            when: a clause that ends the first count, such as "by the end of step 1".
            what: the counted noun; default "collectives".
        """
        where = "the default group"
        if self.group.name:
            where = f"group {self.described or self.group.name} of {named(self.group.ranks)}"
        by_count = sorted(grouped((count, rank) for rank, count in self.counts.items()))
        (fewest, behind), *others = by_count
        what = what or ("collective" if fewest == 1 else "collectives")
        made = f"{named(behind)} made {fewest} {what} in {where} {when}"
        made += "".join(f", {named(ranks)} made {count}" for count, ranks in others)
        entered = next(iter(self.unmatched.values()), None)
        if entered is None:
            return made
        details = f", {entered.details}" if entered.details else ""
        by = "" if len(by_count) == 2 else f" of {named(self.unmatched)}"
        return f"{made}: {entered}{details},{by} is not matched on {named(self.missing)}"


def uneven(counts: Mapping[int, Counts], records: Mapping[int, Record], described: Mapping[str, str]) -> Uneven | None:
    """Return the first group whose members have entered different numbers of collectives, or None.

    Args:
        counts: of every rank.
        records: rank -> the last collectives that it has entered.
        described: name of a group -> the description that its maker gave.
    """
    for group in sorted({group for of_rank in counts.values() for group in of_rank}):
        of_group = {rank: counts[rank].get(group, 0) for rank in group.ranks if rank in counts}
        if len(set(of_group.values())) > 1:
            return _uneven(group, of_group, records, described)
    return None


def ahead(
    counts: Mapping[int, Counts],
    late: Collection[int],
    records: Mapping[int, Record],
    size: int,
    described: Mapping[str, str],
) -> Uneven | None:
    """Return the group of a collective that late ranks have entered and finished ranks have skipped, or None.

    Args:
        counts: of the ranks that have finished the step.
        late: the ranks that have not.
        records: rank -> the last collectives that it has entered.
    """
    latest: dict[str, dict[int, Entered]] = {}
    for rank in late:
        for entered in records[rank].entries:
            if entered.number:  # sends and receives have number 0, and their peer may still follow
                latest.setdefault(entered.group_name, {})[rank] = entered
    for name, entries in latest.items():
        group = Group(name, members(next(iter(entries.values())), size))
        of_group = {rank: _count(counts[rank], group) for rank in group.ranks if rank in counts}
        if of_group and min(of_group.values()) < max(entered.number for entered in entries.values()):
            of_group |= {rank: entered.number for rank, entered in entries.items()}
            return _uneven(group, dict(sorted(of_group.items())), records, described)
    return None


def _count(counts: Counts, group: Group) -> int:
    return next((count for other, count in counts.items() if other.name == group.name), 0)


def members(entered: Entered, size: int) -> tuple[int, ...]:
    """Return the ranks of a collective's group; only the first ones if its entry was cut."""
    if not entered.group:
        return tuple(range(size))
    *sure, last = entered.group.split(",")
    return tuple(map(int, sure if entered.cut else [*sure, last]))


def _uneven(
    group: Group, counts: Mapping[int, int], records: Mapping[int, Record], described: Mapping[str, str]
) -> Uneven:
    entries = {
        rank: {entry.number: entry for entry in records[rank].entries if entry.group_name == group.name}
        for rank in counts
        if rank in records
    }
    most, fewest = max(counts.values()), min(counts.values())
    more = [rank for rank, count in counts.items() if count == most]
    less = next(rank for rank, count in counts.items() if count == fewest)
    number = _first_unmatched(entries.get(more[0], {}), entries.get(less, {}), fewest)
    unmatched = {rank: entries[rank][number] for rank in more if number in entries.get(rank, {})}
    return Uneven(group, described.get(group.name, ""), counts, unmatched)


def _first_unmatched(more: Mapping[int, Entered], less: Mapping[int, Entered], fewest: int) -> int:
    """Return the number of the first collective in `more` that `less`, with `fewest` collectives, lacks."""
    begin = max(min(more, default=0), min(less, default=1))
    longer = [number for number in sorted(more) if number >= begin]
    shorter = [number for number in sorted(less) if number >= begin]
    matcher = difflib.SequenceMatcher(
        None, _looks([more[number] for number in longer]), _looks([less[number] for number in shorter]), autojunk=False
    )
    surplus = [longer[i] for kind, i, _, _, _ in matcher.get_opcodes() if kind == "delete"]
    # If ranks take different branches, the collectives of both branches pair up, and only the surplus is unmatched.
    surplus += [
        longer[i + k - j] for kind, i, i2, j, k in matcher.get_opcodes() if kind == "replace" and i2 - i > k - j
    ]
    return min(surplus, default=fewest + 1)


def _looks(entries: Collection[Entered]) -> Sequence[tuple[object, ...]]:
    return [(entry.name, entry.compared, entry.options, entry.file, entry.line) for entry in entries]
