"""The records of the collectives that ranks have entered, and what the records of all ranks say together: a
collective that one rank entered and another did not, and ranks that wait for each other.

The rank maps the file into its memory. So writing costs no system call, and the record is readable while the rank
hangs, is halted or is dead.
"""

from __future__ import annotations

import difflib
import os
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mgpu_check.processes.channel import Group
from mgpu_check.processes.rank_lists import grouped, named

KEPT = 32  # number of collectives in a record, which holds the last ones
SLOT = 512  # Bytes for each collective. A longer entry, which only several long texts together make, is cut.
HEADER = struct.Struct("=Q")  # the number of collectives that were entered in this call

SIZE = HEADER.size + KEPT * SLOT

State = Literal["inside", "done", "pending", "waiting", "failed"]

_STATES: dict[str, State] = {"I": "inside", "D": "done", "P": "pending", "W": "waiting", "F": "failed"}
_SEPARATOR = "\x1f"
_LONGEST_FILE = 200  # characters: the end of a path identifies the file
_LONGEST = 80  # characters of any other text


@dataclass(frozen=True)
class Entered:
    """One collective, as one rank entered it."""

    name: str  # of the function of ``torch.distributed``
    number: int  # 1 for the first collective of this group in this call, and so on; 0 for sends and receives
    group_name: str  # name of the group, empty for the default group
    group: str  # ranks of the group, such as "0,2"; empty for all ranks
    operand: str  # dtype and shape of its tensor, such as "float32[4, 2]", with the number of tensors if it is a list
    options: str  # other options that must be equal on all ranks: "sum", "src=0"; for a send or receive the peer
    compared: str  # a checksum of the dtypes and sizes that must be equal on all ranks; empty if they may differ
    # file, line: where the code under test called it
    file: str
    line: int
    # "inside" the call; "pending" once an asynchronous call has returned, then "waiting" for it; "done"; "failed"
    state: State

    def __str__(self) -> str:
        number = f" #{self.number}" if self.number else ""
        members = f" of ranks {self.group}" if self.group else ""
        return f"{self.name}{number}{members} ({self.site})"

    @property
    def site(self) -> str:
        """The line that called it: "src/train.py:40"."""
        return f"{relative(self.file)}:{self.line}"

    @property
    def details(self) -> str:
        return ", ".join(detail for detail in (self.operand, self.options) if detail)

    @property
    def cut(self) -> bool:
        """True if `group` was cut for want of space."""
        return len(self.group) >= _LONGEST

    @property
    def described(self) -> str:
        """Its name, place and details: "all_reduce #1 (train.py:40), float32[4], sum"."""
        return f"{self}, {self.details}" if self.details else str(self)

    @property
    def unfinished(self) -> bool:
        return self.state in ("inside", "waiting")


@dataclass(frozen=True)
class Record:
    entries: tuple[Entered, ...]
    total: int

    @property
    def last(self) -> Entered | None:
        """The collective that the rank is in, or else the last that it entered; None if it has entered none."""
        unfinished = [entry for entry in self.entries if entry.unfinished]
        return next(reversed(unfinished or self.entries), None)

    @property
    def current(self) -> Entered | None:
        """The collective that the rank is in or waits for; None if it is in none."""
        return self.last if self.last is not None and self.last.unfinished else None


def fewest(entered: Mapping[int, int | tuple[int, ...]]) -> list[int]:
    """Return the ranks that have entered the fewest collectives, because the others wait for them."""
    return [rank for rank, count in entered.items() if count == min(entered.values())]


def relative(file: str) -> str:
    """Return `file` relative to the working directory if it is below it, otherwise unchanged."""
    return file.removeprefix(os.getcwd() + os.sep)


def pack_entry(
    state: str,
    number: int,
    line: int,
    name: str,
    group_name: str,
    group: str,
    operand: str,
    options: str,
    compared: str,
    file: str,
) -> bytes:
    """Return the bytes of an entry for its slot. The first byte is the state, which may be overwritten alone."""
    texts = [text[:_LONGEST] for text in (name, str(number), group_name, group, operand, options)]
    text = _SEPARATOR.join((*texts, compared, str(line), file[-_LONGEST_FILE:]))
    return (state.encode() + text.encode(errors="replace"))[: SLOT - 1] + b"\0"


def parse(data: bytes) -> Record:
    """Parse a record, without entries that the rank was writing at the time."""
    if len(data) < HEADER.size:
        return Record((), 0)
    (total,) = HEADER.unpack_from(data)
    entries = []
    for count in range(max(0, total - KEPT), total):
        start = HEADER.size + count % KEPT * SLOT
        if (entry := _parse_entry(data[start : start + SLOT])) is not None:
            entries.append(entry)
    return Record(tuple(entries), total)


def _parse_entry(slot: bytes) -> Entered | None:
    text = slot.partition(b"\0")[0].decode(errors="replace")
    fields = text[1:].split(_SEPARATOR)
    try:
        name, number, group_name, group, operand, options, compared, line, file = fields
        return Entered(
            name, int(number), group_name, group, operand, options, compared, file, int(line), _STATES[text[0]]
        )
    except (ValueError, IndexError, KeyError):
        return None


def parting(records: Mapping[int, Record]) -> dict[int, Entered] | None:
    """Return the first collectives of a group that differ between ranks, rank -> collective; None if none differ.

    Sends and receives do not count. Ranks that have not reached the collective yet are left out.
    """
    by_group: dict[str, dict[int, dict[int, Entered]]] = {}
    for rank, record in records.items():
        for entry in record.entries:
            if entry.number:
                by_group.setdefault(entry.group_name, {}).setdefault(entry.number, {})[rank] = entry
    for numbers in by_group.values():
        for number in sorted(numbers):
            if len({(entry.name, entry.compared, entry.options) for entry in numbers[number].values()}) > 1:
                return numbers[number]
    return None


Counts = Mapping[Group, int]  # group -> number of collectives that one rank has entered there


@dataclass(frozen=True)
class Uneven:
    """A group whose ranks have entered different numbers of collectives."""

    group: Group
    described: str  # the description that its maker gave, or empty
    counts: Mapping[int, int]  # rank -> number of collectives that it has entered
    # rank -> its first collective that other ranks lack; empty if the records no longer contain it
    unmatched: Mapping[int, Entered]

    @property
    def missing(self) -> list[int]:
        return fewest(self.counts)

    def told(self, when: str, noun: str = "") -> str:
        """Describe the difference in a line: the counts of the ranks, and the unmatched collective.

        `when`: a clause that ends the first count, such as "by the end of step 1". `noun`: the counted noun; default
        "collectives".
        """
        group_text = "the default group"
        if self.group.name:
            group_text = f"group {self.described or self.group.name} of {named(self.group.ranks)}"
        by_count = sorted(grouped((count, rank) for rank, count in self.counts.items()))
        (fewest, behind), *others = by_count
        noun = noun or ("collective" if fewest == 1 else "collectives")
        statement = f"{named(behind)} made {fewest} {noun} in {group_text} {when}"
        statement += "".join(f", {named(ranks)} made {count}" for count, ranks in others)
        entered = next(iter(self.unmatched.values()), None)
        if entered is None:
            return statement
        details = f", {entered.details}" if entered.details else ""
        by = "" if len(by_count) == 2 else f" of {named(self.unmatched)}"
        return f"{statement}: {entered}{details},{by} is not matched on {named(self.missing)}"


def uneven(counts: Mapping[int, Counts], records: Mapping[int, Record], described: Mapping[str, str]) -> Uneven | None:
    """Return the first group whose members have entered different numbers of collectives, or None.

    `counts`: of every rank. `records`: rank -> the last collectives that it has entered. `described`: name of a group
    -> the description that its maker gave.
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

    `counts`: of the ranks that have finished the step. `late`: the ranks that have not. `records`: rank -> the last
    collectives that it has entered.
    """
    latest: dict[str, dict[int, Entered]] = {}
    for rank in late:
        for entered in records[rank].entries:
            if entered.number:  # sends and receives have number 0, and their peer may still follow
                latest.setdefault(entered.group_name, {})[rank] = entered
    for name, entries in latest.items():
        group = Group(name, members(next(iter(entries.values())), size))
        of_group = {
            rank: next((count for candidate, count in counts[rank].items() if candidate.name == name), 0)
            for rank in group.ranks
            if rank in counts
        }
        if of_group and min(of_group.values()) < max(entered.number for entered in entries.values()):
            of_group |= {rank: entered.number for rank, entered in entries.items()}
            return _uneven(group, dict(sorted(of_group.items())), records, described)
    return None


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
    leaders = [rank for rank, count in counts.items() if count == most]
    less = next(rank for rank, count in counts.items() if count == fewest)
    number = _first_unmatched(entries.get(leaders[0], {}), entries.get(less, {}), fewest)
    unmatched = {rank: entries[rank][number] for rank in leaders if number in entries.get(rank, {})}
    return Uneven(group, described.get(group.name, ""), counts, unmatched)


def _first_unmatched(leading: Mapping[int, Entered], less: Mapping[int, Entered], fewest: int) -> int:
    """Return the number of the first collective in `leading` that `less`, with `fewest` collectives, lacks."""
    begin = max(min(leading, default=0), min(less, default=1))
    longer = [number for number in sorted(leading) if number >= begin]
    shorter = [number for number in sorted(less) if number >= begin]
    matcher = difflib.SequenceMatcher(
        None,
        _looks([leading[number] for number in longer]),
        _looks([less[number] for number in shorter]),
        autojunk=False,
    )
    surplus = [longer[i] for tag, i, _, _, _ in matcher.get_opcodes() if tag == "delete"]
    # If ranks take different branches, the collectives of both branches pair up, and only the surplus is unmatched.
    surplus += [longer[i + k - j] for tag, i, i2, j, k in matcher.get_opcodes() if tag == "replace" and i2 - i > k - j]
    return min(surplus, default=fewest + 1)


def _looks(entries: Collection[Entered]) -> Sequence[tuple[object, ...]]:
    return [(entry.name, entry.compared, entry.options, entry.file, entry.line) for entry in entries]


_ROOT = re.compile(r"\b(src|dst)=(\d+)")


def deadlocked(records: Mapping[int, Record], finished: Collection[int], size: int) -> set[int]:
    """Return the ranks that can never continue: each waits for an operation that another of them, or a finished rank,
    has not begun.

    An operation counts as missing only if the records prove it. A record has the last operations only, and the root of
    a collective in a subgroup may be an index in the group; both are then unknown. `records`: of the ranks that wait,
    and of the finished ranks. `finished`: ranks that enter no further operation. `size`: number of ranks in the world.
    """
    stuck = {rank for rank, record in records.items() if rank not in finished and record.current is not None}
    while True:
        kept = {rank for rank in stuck if any(_lacks(rank, peer, records, size) for peer in {*stuck, *finished})}
        if kept == stuck:
            return stuck
        stuck = kept


def _lacks(rank: int, peer: int, records: Mapping[int, Record], size: int) -> bool:
    entered = records[rank].current
    if entered is None or rank == peer or peer not in records:
        return False
    if not entered.number:
        return _is_unsent(entered, rank, peer, records)
    if peer not in _needed(entered, rank, size):
        return False
    return _operations_in(records[peer], entered.group_name) < entered.number


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


def _operations_in(record: Record, group_name: str) -> float:
    """Return how many collectives of a group a rank has entered; infinity if its record does not show that."""
    numbers = [entry.number for entry in record.entries if entry.number and entry.group_name == group_name]
    return max(numbers, default=0 if _is_whole(record) else float("inf"))


def _is_unsent(entered: Entered, rank: int, peer: int, records: Mapping[int, Record]) -> bool:
    """Return whether a rank waits to receive a message that another rank has not begun to send.

    Earlier receives from that rank must have ended: otherwise the messages may arrive in another order, by their tags.
    """
    if (
        entered.group
        or entered.options != f"src={peer}"
        or not all(_is_whole(records[member]) for member in (rank, peer))
    ):
        return False
    received = [message for message in _messages(records[rank], f"src={peer}") if message.state == "done"]
    begun = [message for message in _messages(records[rank], f"src={peer}") if message.state != "done"]
    return begun[0] is entered and len(received) >= len(_messages(records[peer], f"dst={rank}"))


def _messages(record: Record, options: str) -> list[Entered]:
    return [entry for entry in record.entries if not entry.number and not entry.group and entry.options == options]


def _is_whole(record: Record) -> bool:
    return len(record.entries) == record.total
