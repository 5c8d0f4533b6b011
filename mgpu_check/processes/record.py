"""The record of the collectives that a rank has entered: how it lies in a file, and how the pytest process reads it.

The rank writes it through memory that it shares with the file, so it can be read while the rank hangs, stands still or
is dead, and costs no system call.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["HEADER", "KEPT", "SIZE", "SLOT", "Entered", "Record", "pack_entry", "parse"]

KEPT = 32
"""Collectives that a record holds: the last ones."""

SLOT = 512
"""Bytes for each."""

HEADER = struct.Struct("=Q")
"""How many collectives were entered in this call."""

SIZE = HEADER.size + KEPT * SLOT

State = Literal["inside", "done", "pending", "waiting", "failed"]

_STATES: dict[str, State] = {"I": "inside", "D": "done", "P": "pending", "W": "waiting", "F": "failed"}
_SEPARATOR = "\x1f"
_LONGEST_FILE = 200
_LONGEST = 80


@dataclass(frozen=True)
class Entered:
    """One collective, as one rank entered it.

    Attributes:
        name: of the function of ``torch.distributed``.
        number: how many collectives of this group the rank has entered in this call, this one included; 0 for sends
            and receives, which only two ranks enter.
        group_name: what the group is called, empty for the default one.
        group: ranks of the group where they are not all, such as "0,2".
        operand: dtype and shape of its tensor, such as "float32[4, 2]", with the number of tensors where it is a list.
        options: what must be equal on all ranks besides: "sum", "src=0"; for a send or receive the peer.
        compared: a checksum of the dtypes and sizes that must be equal on all ranks; empty where they need not be.
        file, line: where the code under test called it.
        state: "inside" the call, "waiting" for an asynchronous one, which is "pending" before; "done"; "failed".
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
        return f"{self.name}{number}{of} ({relative(self.file)}:{self.line})"

    @property
    def details(self) -> str:
        """Its operands and options: "float32[4], sum"."""
        return ", ".join(part for part in (self.operand, self.options) if part)

    @property
    def cut(self) -> bool:
        """True if there was no room for all ranks of its group."""
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
    """The last collectives that one rank has entered in a call, the oldest first, of `total`."""

    entries: tuple[Entered, ...]
    total: int

    @property
    def last(self) -> Entered | None:
        """The collective that the rank is in; else the last that it has entered."""
        unfinished = [entry for entry in self.entries if entry.unfinished]
        return next(reversed(unfinished or self.entries), None)

    @property
    def current(self) -> Entered | None:
        """The collective that the rank is in, or waits for."""
        return self.last if self.last is not None and self.last.unfinished else None


def fewest(entered: Mapping[int, int | tuple[int, ...]]) -> list[int]:
    """Return those of waiting ranks that have entered fewest collectives: the others wait for them."""
    return [rank for rank, count in entered.items() if count == min(entered.values())]


def relative(file: str) -> str:
    """Return `file` as seen from the working directory, if it lies below it."""
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
    """Pack an entry as it lies in its slot; its first byte is the state, which may be written alone."""
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
    """Read a record; what is torn, because the rank goes on writing, is left out."""
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
    """Find where ranks entered different collectives of a group: rank -> what it entered, of the first that differ.

    Sends and receives are left aside, as are collectives that only some have reached yet.
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
