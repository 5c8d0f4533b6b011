"""Separate ranks that hang in a collective, send or receive from ranks that hang elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mgpu_check.processes.rank_lists import grouped
from mgpu_check.processes.record import Record
from mgpu_check.processes.stacks import HALTED, is_returning, location_of

if TYPE_CHECKING:
    from mgpu_check.engine.failures import Interrupted


@dataclass(frozen=True)
class RankPlaces:
    """The places of ranks that did not finish, in words such as "in all_reduce #1 (train.py:40), float32[4], sum".

    Attributes:
        waiting: rank -> the collective, send or receive that it is in.
        elsewhere: rank -> its location, for every other rank.
    """

    waiting: dict[int, str] = field(default_factory=dict)
    elsewhere: dict[int, str] = field(default_factory=dict)

    def grouped(self) -> list[tuple[str, list[int]]]:
        """Return each place with its ranks, starting with the ranks that the others may wait for."""
        return [group for some in (self.elsewhere, self.waiting) for group in grouped((t, r) for r, t in some.items())]

    @classmethod
    def of(cls, interrupted: Mapping[int, Interrupted], records: Mapping[int, Record]) -> RankPlaces:
        places = cls()
        for rank, end in interrupted.items():
            record, location = records.get(rank, Record((), 0)), location_of(end.stacks)
            if record.current is not None:
                places.waiting[rank] = f"in {record.current.described}"
            elif location is not None and location.collective:  # a collective without a record
                places.waiting[rank] = f"in {location}"
            else:
                after = f", after {record.last}" if record.last else ""
                where = end.stacks if end.stacks == HALTED else f"in {location or 'an unknown place'}"
                if is_returning(end.stacks):
                    where = "sending its result, which takes long if it is large: return less, or allow more time"
                if end.settling:
                    where = "done, except for work that is queued on its devices"
                places.elsewhere[rank] = where + after
        return places
