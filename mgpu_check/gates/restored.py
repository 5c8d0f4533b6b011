"""Conclude from what differs after a resumed run what was not restored. Plain counting: no torch, no ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from mgpu_check.mistakes.report import Finding, Observable
from mgpu_check.processes.rank_lists import few, grouped, named

if TYPE_CHECKING:
    from mgpu_check.gates.states import Entry, Row

__all__ = ["Entries", "explained"]

_SHOWN = 4
_LOADED = "loaded as saved"


class Entries:
    """The entries of the state, as each rank has compared them."""

    def __init__(self, rows: Sequence[Sequence[Row]]) -> None:
        self.size = len(rows)
        self.by_name: dict[Entry, dict[int, Row]] = {}
        for rank, of_rank in enumerate(rows):
            for row in of_rank:
                self.by_name.setdefault(row.entry, {})[rank] = row

    @property
    def irreproducible(self) -> str:
        """The entries in which two uninterrupted runs differ by more than rounding, and how; empty where in none."""
        differing = {
            name: [rank for rank, row in rows.items() if not row.repeats] for name, rows in self.by_name.items()
        }
        differing = {name: ranks for name, ranks in differing.items() if ranks}
        if not differing:
            return ""
        name, ranks = next(iter(differing.items()))
        return f"{_listed(differing)}: {name}: {self.by_name[name][ranks[0]].detail}"

    @property
    def state_moves(self) -> bool:
        """True if any entry that can be compared has changed since the earlier state."""
        return any(
            row.moved and row.same is not None
            for name, rows in self.by_name.items()
            for row in rows.values()
            if not name.generator
        )

    @cached_property
    def wrong(self) -> dict[Entry, list[int]]:
        """Entries that are not what they should be, without generators -> the ranks where."""
        return {name: self.ranks_wrong(name) for name in self.by_name if not name.generator and self.ranks_wrong(name)}

    @property
    def wrong_generators(self) -> dict[Entry, list[int]]:
        """The same of generators."""
        return {name: self.ranks_wrong(name) for name in self.by_name if name.generator and self.ranks_wrong(name)}

    @property
    def wrong_ranks(self) -> list[int]:
        return sorted({rank for ranks in self.wrong.values() for rank in ranks})

    @property
    def first_wrong(self) -> tuple[Entry, str, list[int]]:
        """Name, how it differs, on which ranks."""
        name, ranks = next(iter(self.wrong.items()))
        return name, self.by_name[name][ranks[0]].detail, ranks

    def ranks_wrong(self, name: Entry) -> list[int]:
        return [rank for rank, row in self.by_name.get(name, {}).items() if row.same is False]

    def drawn(self, name: Entry) -> bool:
        """Return whether the later steps draw from this generator, on any rank."""
        return any(row.moved for row in self.by_name[name].values())

    def parted(self, name: Entry) -> bool:
        """Return whether ranks differ, which should agree."""
        rows = self.by_name[name].values()
        return len({row.expected for row in rows}) == 1 and len({row.got for row in rows}) > 1

    def is_rank_0s(self, name: Entry) -> bool:
        """Return whether wrong ranks have what is right for rank 0."""
        rows = self.by_name[name]
        wrong = self.ranks_wrong(name)
        return 0 not in wrong and 0 in rows and all(rows[rank].got == rows[0].expected != "" for rank in wrong)


def explained(ends: Entries, loaded: Entries | None) -> tuple[list[Observable], list[Finding]]:
    """Return what is to be shown of each entry, and the likely causes.

    Args:
        ends: the states at the end of the resumed run, against those of the uninterrupted one.
        loaded: the states right after loading, against those that were saved; None where that could not be seen.
    """
    observables = []
    drawn = [name for name in ends.by_name if name.generator and ends.drawn(name)]
    for name in ends.by_name:
        if name.generator and name not in drawn:
            continue
        relations: dict[str, bool | None] = {"continues": _verdict(ends, name)}
        if ends.size > 1:
            relations["ranks agree as before"] = not ends.parted(name)
        detail = _detail(ends, name)
        if loaded is not None:
            relations[_LOADED] = _verdict(loaded, name)
            detail = detail or _detail(loaded, name, "after loading ")
        observables.append(Observable(str(name), relations, detail))
    # What was lost tells more than what came of it; a report shows a few only.
    observables.sort(key=lambda observable: observable.relations.get(_LOADED) is not False)
    lost_numbers = {name: ranks for name, ranks in (loaded or ends).wrong_generators.items() if name in drawn}
    return observables, _findings(ends, loaded, lost_numbers)


def _findings(ends: Entries, loaded: Entries | None, lost_numbers: dict[Entry, list[int]]) -> list[Finding]:
    unsaid = "what train does not return (the optimizer, the schedule, the position in the data), if later steps depend on it"
    findings = []
    lost = {} if loaded is None else {n: r for n, r in loaded.wrong.items() if _verdict(ends, n) is not None}
    if loaded is not None and (lost or lost_numbers):
        partly = {name: ranks for name, ranks in {**lost, **lost_numbers}.items() if len(ranks) < loaded.size}
        of_rank_0 = {name: ranks for name, ranks in partly.items() if loaded.is_rank_0s(name)}
        some = {name: ranks for name, ranks in partly.items() if name not in of_rank_0}
        nowhere = [name for name in (*lost, *lost_numbers) if name not in partly]
        numbers = {name: ranks for name, ranks in of_rank_0.items() if name.generator}
        if some:
            findings.append(Finding("restored-on-one-rank", f"right after loading, not as saved: {_listed(some)}"))
        if nowhere:
            findings.append(
                Finding("state-not-restored", f"right after loading, on no rank as saved: {_names(nowhere)}")
            )
        elif numbers:
            evidence = f"{_listed(numbers)}: what rank 0 had; each rank must save and load its own"
            findings.append(Finding("state-not-restored", evidence))
        elif not some:
            # Buffers that DistributedDataParallel broadcasts when it is made look like this, too, and do no harm.
            evidence = f"{_listed(of_rank_0)}: what rank 0 had, where each rank had saved its own; or {unsaid}"
            findings.append(Finding("state-not-restored", evidence))
        return findings
    parted = {name: ranks for name, ranks in ends.wrong.items() if ends.parted(name)}
    partly = {name: ranks for name, ranks in ends.wrong.items() if 0 not in ranks and name not in parted}
    if parted or partly:
        evidence = f"after an uninterrupted run ranks agree, after the resumed one not: {_listed(parted or partly)}"
        if not parted:
            evidence = f"right on rank 0, and wrong elsewhere: {_listed(partly)}"
        findings.append(Finding("restored-on-one-rank", evidence))
    if loaded is not None:
        evidence = f"all that train returns is loaded as it was saved; left is {unsaid}"
    else:
        evidence = f"at the end differ {_names({**ends.wrong, **lost_numbers})}"
    findings.append(Finding("state-not-restored", evidence))
    return findings


def _verdict(entries: Entries, name: Entry) -> bool | None:
    found = [row.same for row in entries.by_name.get(name, {}).values()]
    return False if False in found else None if None in found or not found else True


def _detail(entries: Entries, name: Entry, when: str = "") -> str:
    wrong = entries.ranks_wrong(name)
    if not wrong:
        return next((row.detail for row in entries.by_name.get(name, {}).values() if row.same is None), "")
    what = "go on otherwise" if name.generator else entries.by_name[name][wrong[0]].detail
    return f"{when}{named(wrong)}: {what}"


def _listed(lost: dict[Entry, list[int]]) -> str:
    groups = grouped((tuple(ranks), number) for number, ranks in enumerate(lost.values()))
    names = list(lost)
    return "; ".join(f"{_names([names[i] for i in members])} on {named(ranks)}" for ranks, members in groups)


def _names(names: Iterable[Entry]) -> str:
    return few(list(names), _SHOWN)
