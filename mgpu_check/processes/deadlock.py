"""Find ranks that wait for each other, or for ranks that have finished, from the records of all ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from mgpu_check.processes.matching import members
from mgpu_check.processes.record import Entered, Record

_ROOT = re.compile(r"\b(src|dst)=(\d+)")


def deadlocked(records: Mapping[int, Record], finished: Collection[int], size: int) -> set[int]:
    """Return the ranks that can never continue: each waits for an operation that another of them, or a finished rank,
    has not begun.

    An operation counts as missing only if the records prove it. A record has the last operations only, and the root of
    a collective in a subgroup may be an index in the group; both are then unknown.

    Args:
        records: of the ranks that wait, and of the finished ranks.
        finished: ranks that enter no further operation.
        size: number of ranks in the world.
    """
    found = {rank for rank, record in records.items() if rank not in finished and record.current is not None}
    while True:
        kept = {rank for rank in found if any(_lacks(rank, other, records, size) for other in {*found, *finished})}
        if kept == found:
            return found
        found = kept


def _lacks(rank: int, other: int, records: Mapping[int, Record], size: int) -> bool:
    """Return whether a rank waits for an operation that another one has not begun."""
    entered = records[rank].current
    if entered is None or rank == other or other not in records:
        return False
    if not entered.number:
        return _is_unsent(entered, rank, other, records)
    if other not in _needed(entered, rank, size):
        return False
    return _count(records[other], entered.group_name) < entered.number


def _needed(entered: Entered, rank: int, size: int) -> tuple[int, ...]:
    """Return the ranks that a collective cannot end without on one rank."""
    root = _ROOT.search(entered.options)
    if root is None:
        return members(entered, size)
    if entered.group:
        return ()
    if root[1] == "src":
        return (int(root[2]),)
    return members(entered, size) if int(root[2]) == rank else ()


def _count(record: Record, group_name: str) -> float:
    """Return how many collectives of a group a rank has entered; infinity if its record does not show that."""
    numbers = [entry.number for entry in record.entries if entry.number and entry.group_name == group_name]
    return max(numbers, default=0 if _is_whole(record) else float("inf"))


def _is_unsent(entered: Entered, rank: int, other: int, records: Mapping[int, Record]) -> bool:
    """Return whether a rank waits to receive a message that another rank has not begun to send.

    Earlier receives from that rank must have ended: otherwise the messages may arrive in another order, by their tags.
    """
    if entered.group or entered.options != f"src={other}" or not all(_is_whole(records[one]) for one in (rank, other)):
        return False
    received = [one for one in _messages(records[rank], f"src={other}") if one.state == "done"]
    begun = [one for one in _messages(records[rank], f"src={other}") if one.state != "done"]
    return begun[0] is entered and len(received) >= len(_messages(records[other], f"dst={rank}"))


def _messages(record: Record, options: str) -> list[Entered]:
    return [entry for entry in record.entries if not entry.number and not entry.group and entry.options == options]


def _is_whole(record: Record) -> bool:
    return len(record.entries) == record.total
