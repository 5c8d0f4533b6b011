"""The record of the collectives that a rank has entered: its format in a file, and its parser for the pytest process.

The rank maps the file into its memory. So writing costs no system call, and the record is readable while the rank
hangs, is halted or is dead.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

KEPT = 32
"""Number of collectives in a record, which holds the last ones."""

SLOT = 512
"""Bytes for each collective. A longer entry, which only several long texts together make, is cut."""

HEADER = struct.Struct("=Q")
"""The number of collectives that were entered in this call."""

SIZE = HEADER.size + KEPT * SLOT

State = Literal["inside", "done", "pending", "waiting", "failed"]

_STATES: dict[str, State] = {"I": "inside", "D": "done", "P": "pending", "W": "waiting", "F": "failed"}
_SEPARATOR = "\x1f"
_LONGEST_FILE = 200  # characters: the end of a path identifies the file
_LONGEST = 80  # characters of any other text


@dataclass(frozen=True)
class Entered:
    """One collective, as one rank entered it.

    Attributes:
        name: of the function of ``torch.distributed``.
        number: 1 for the first collective of this group in this call, and so on; 0 for sends and receives.
        group_name: name of the group, empty for the default group.
        group: ranks of the group, such as "0,2"; empty for all ranks.
        operand: dtype and shape of its tensor, such as "float32[4, 2]", with the number of tensors if it is a list.
        options: other options that must be equal on all ranks: "sum", "src=0"; for a send or receive the peer.
        compared: a checksum of the dtypes and sizes that must be equal on all ranks; empty if they may differ.
        file, line: where the code under test called it.
        state: "inside" the call; "pending" once an asynchronous call has returned, then "waiting" for it; "done";
            "failed".
    """

    name: str
    number: int
    group_name: str
    group: str
    operand: str
    options: str
    compared: str
    file: str
    line: int
    state: State

    def __str__(self) -> str:
        number = f" #{self.number}" if self.number else ""
        of = f" of ranks {self.group}" if self.group else ""
        return f"{self.name}{number}{of} ({self.site})"

    @property
    def site(self) -> str:
        """The line that called it: "src/train.py:40"."""
        return f"{relative(self.file)}:{self.line}"

    @property
    def details(self) -> str:
        return ", ".join(part for part in (self.operand, self.options) if part)

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
    texts = (
        name[:_LONGEST],
        str(number),
        group_name[:_LONGEST],
        group[:_LONGEST],
        operand[:_LONGEST],
        options[:_LONGEST],
    )
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
    parts = text[1:].split(_SEPARATOR)
    try:
        name, number, group_name, group, operand, options, compared, line, file = parts
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
            if len({_signature(entry) for entry in numbers[number].values()}) > 1:
                return numbers[number]
    return None


def _signature(entry: Entered) -> Sequence[str]:
    return (entry.name, entry.compared, entry.options)
