"""Find out what a resumed run did not restore, from the entries that differ. Imports no torch and starts no ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from mgpu_check.diagnosis.attempts import Attempts
from mgpu_check.diagnosis.evidence import Restored
from mgpu_check.diagnosis.report import Finding, Observable
from mgpu_check.diagnosis.rules.order import findings_of_checkpoint
from mgpu_check.processes.rank_lists import by_ranks, named

if TYPE_CHECKING:
    from mgpu_check.gates.states import StateEntry, StateRow

_SHOWN = 4
_LOADED = "loaded as saved"


class Entries:
    """The entries of the state, as compared on each rank."""

    def __init__(self, rows: Sequence[Sequence[StateRow]]) -> None:
        self.size = len(rows)
        self.by_name: dict[StateEntry, dict[int, StateRow]] = {}
        for rank, of_rank in enumerate(rows):
            for row in of_rank:
                self.by_name.setdefault(row.entry, {})[rank] = row

    @property
    def irreproducible(self) -> str:
        """A description of the entries that differ between two uninterrupted runs by more than rounding, or ""."""
        differing = {
            name: [rank for rank, row in rows.items() if not row.repeats] for name, rows in self.by_name.items()
        }
        differing = {name: ranks for name, ranks in differing.items() if ranks}
        if not differing:
            return ""
        name, ranks = next(iter(differing.items()))
        return f"{by_ranks(differing, _SHOWN)}: {name}: {self.by_name[name][ranks[0]].detail}"

    @property
    def state_moves(self) -> bool:
        """True if any comparable entry has changed since the earlier state."""
        return any(
            row.moved and row.same is not None
            for name, rows in self.by_name.items()
            for row in rows.values()
            if not name.generator
        )

    @cached_property
    def wrong(self) -> dict[StateEntry, list[int]]:
        return {name: self.ranks_wrong(name) for name in self.by_name if not name.generator and self.ranks_wrong(name)}

    @property
    def wrong_generators(self) -> dict[StateEntry, list[int]]:
        return {name: self.ranks_wrong(name) for name in self.by_name if name.generator and self.ranks_wrong(name)}

    @property
    def wrong_ranks(self) -> list[int]:
        return sorted({rank for ranks in self.wrong.values() for rank in ranks})

    @property
    def first_wrong(self) -> tuple[StateEntry, str, list[int]]:
        name, ranks = next(iter(self.wrong.items()))
        return name, self.by_name[name][ranks[0]].detail, ranks

    def ranks_wrong(self, name: StateEntry) -> list[int]:
        return [rank for rank, row in self.by_name.get(name, {}).items() if row.same is False]

    def ranks_right(self, name: StateEntry) -> list[int]:
        return [rank for rank, row in self.by_name.get(name, {}).items() if row.same]

    def drawn(self, name: StateEntry) -> bool:
        """Return whether the later steps draw from this generator on any rank."""
        return any(row.moved for row in self.by_name[name].values())

    def parted(self, name: StateEntry) -> bool:
        """Return whether ranks differ that should agree."""
        rows = self.by_name[name].values()
        return len({row.expected for row in rows}) == 1 and len({row.got for row in rows}) > 1

    def is_rank_0s(self, name: StateEntry) -> bool:
        """Return whether the wrong ranks have the value that is right for rank 0."""
        rows = self.by_name[name]
        wrong = self.ranks_wrong(name)
        return 0 not in wrong and 0 in rows and all(rows[rank].got == rows[0].expected != "" for rank in wrong)


def explained(
    ends: Entries,
    loaded: Entries | None,
    attempts: Attempts,
    epochs: Sequence[Sequence[Sequence[int]]] = (),
    resharded: Mapping[StateEntry, str] = MappingProxyType({}),
    fresh: Entries | None = None,
) -> tuple[list[Observable], list[Finding], list[str]]:
    """Return the table row of each entry, the likely causes, and the facts that prove no cause.

    Args:
        ends: compares the end of the resumed run with the uninterrupted run.
        loaded: compares the states right after loading with the saved ones; None if loading could not be observed.
        epochs: for each rank, the epochs of samplers in the uninterrupted run, before the interruption, and after it.
        resharded: `Restored.resharded`.
        fresh: compares the states right after loading with those of a run that loads nothing; None if that failed.
    """
    observables = []
    drawn = [name for name in ends.by_name if name.generator and ends.drawn(name)]
    for name in ends.by_name:
        if name.generator and name not in drawn:
            continue
        relations: dict[str, bool | None] = {"continues": _holds(ends, name)}
        if ends.size > 1:
            relations["ranks agree as before"] = not ends.parted(name)
        detail = _detail(ends, name)
        if loaded is not None:
            relations[_LOADED] = _holds(loaded, name)
            detail = detail or _detail(loaded, name, "after loading ")
        observables.append(Observable(str(name), relations, detail))
    # Show entries that were lost in loading first: they are the cause, and a report shows only a few rows.
    observables.sort(key=lambda observable: observable.relations.get(_LOADED) is not False)
    altered = {} if loaded is None else _altered(ends, loaded, fresh, resharded)
    evidence = attempts.of("the evidence", None, _evidence, ends, loaded, drawn, _epochs(epochs), resharded, altered)
    told = f"right after loading, not as saved: {by_ranks(altered, _SHOWN)}"
    return observables, [] if evidence is None else findings_of_checkpoint(evidence, attempts), [told] * bool(altered)


def _altered(
    ends: Entries, loaded: Entries, fresh: Entries | None, resharded: Mapping[StateEntry, str]
) -> dict[StateEntry, list[int]]:
    """Return the entries that loading changed to other values than the saved ones, with those ranks.

    An entry that was not restored is missing, or has its value of a run without a checkpoint.
    """
    found = {}
    for name, ranks in loaded.wrong.items():
        left = [] if fresh is None else fresh.ranks_right(name)
        other = [rank for rank in ranks if rank not in left and loaded.by_name[name][rank].got]
        if other and name not in resharded and _holds(ends, name) is not None and not loaded.is_rank_0s(name):
            found[name] = other
    return found


def _epochs(of_ranks: Sequence[Sequence[Sequence[int]]]) -> str:
    """Describe a sampler whose epoch does not follow from the interrupted run; "" if none does."""
    for rank, (whole, before, after) in enumerate(of_ranks):
        # Training may continue in the interrupted epoch or in the next one, or repeat earlier epochs.
        right = [whole[start:] for start in range(min(len(before), len(whole)) + 1)]
        if after and list(after) not in [list(one) for one in right] and len(after) <= len(whole):
            told = (
                f"DistributedSampler continues with epoch {after[0]} on rank {rank}, and with epoch "
                f"{whole[-len(after)]}"
            )
            return f"{told} in the uninterrupted run"
    return ""


def _evidence(
    ends: Entries,
    loaded: Entries | None,
    drawn: Sequence[StateEntry],
    epochs: str,
    resharded: Mapping[StateEntry, str],
    altered: Mapping[StateEntry, Sequence[int]],
) -> Restored:
    lost_numbers = {name: ranks for name, ranks in (loaded or ends).wrong_generators.items() if name in drawn}
    wrong = {} if loaded is None else loaded.wrong
    lost = {n: r for n, r in wrong.items() if _holds(ends, n) is not None and n not in (*resharded, *altered)}
    if loaded is not None and (lost or lost_numbers or resharded or altered):
        both = {**lost, **lost_numbers}
        partly = {name: ranks for name, ranks in both.items() if len(ranks) < len(loaded.by_name[name])}
        of_rank_0 = {name: ranks for name, ranks in partly.items() if loaded.is_rank_0s(name)}
        return Restored(
            seen=True,
            epochs="" if lost or resharded else epochs,
            on_some={name: ranks for name, ranks in partly.items() if name not in of_rank_0},
            nowhere=[name for name in (*lost, *lost_numbers) if name not in partly],
            of_rank_0=of_rank_0,
            numbers_of_rank_0={name: ranks for name, ranks in of_rank_0.items() if name.generator},
            resharded=resharded,
            altered=altered,
        )
    parted = {name: ranks for name, ranks in ends.wrong.items() if ends.parted(name)}
    return Restored(
        seen=loaded is not None,
        epochs=epochs,
        parted=parted,
        right_on_rank_0={n: r for n, r in ends.wrong.items() if 0 in ends.ranks_right(n) and n not in parted},
        at_the_end=[*ends.wrong, *lost_numbers],
    )


def _holds(entries: Entries, name: StateEntry) -> bool | None:
    found = [row.same for row in entries.by_name.get(name, {}).values()]
    return False if False in found else None if None in found or not found else True


def _detail(entries: Entries, name: StateEntry, when: str = "") -> str:
    wrong = entries.ranks_wrong(name)
    if not wrong:
        return next((row.detail for row in entries.by_name.get(name, {}).values() if row.same is None), "")
    what = "other numbers follow" if name.generator else entries.by_name[name][wrong[0]].detail
    return f"{when}{named(wrong)}: {what}"
