"""From how a call ended on each rank to one error that tells the whole story."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from mgpu_check.errors import AgentLost, RankDied, RankFailure, RankHang
from mgpu_check.processes import pickling
from mgpu_check.processes.protocol import Failure
from mgpu_check.processes.rank_lists import grouped, intervals, named
from mgpu_check.processes.record import Entered, Record, fewest, parting
from mgpu_check.processes.stacks import HALTED, place_of

__all__ = [
    "NODE",
    "Died",
    "Finished",
    "Interrupted",
    "Raised",
    "Who",
    "alike",
    "disagreement",
    "error_of",
    "last_collectives",
    "raised_at",
]

_MOST_HEADLINES = 3
_ADDRESS = re.compile(r"\[[0-9a-fA-F.:]+\]:\d+")
"""Of a peer, in errors of gloo: it differs from rank to rank, and says nothing to anybody."""

NODE = -1
"""Index of the node process, where a rank's would stand."""


@dataclass(frozen=True)
class Finished:
    """The rank returned."""


@dataclass(frozen=True)
class Raised:
    """The rank raised, and lives."""

    failure: Failure


@dataclass(frozen=True)
class Died:
    """The rank's process ended before it answered.

    Attributes:
        cause: signal or exit code, in words.
        last_words: the stacks that it left.
        lost: with the agent that held it.
    """

    cause: str
    last_words: str
    lost: bool = False


@dataclass(frozen=True)
class Interrupted:
    """The rank had not answered when the parent stopped waiting, and was killed.

    Attributes:
        settling: it had returned, and waited for what it had queued on its devices.
    """

    seconds: float
    stacks: str
    settling: bool = False


Ending = Finished | Raised | Died | Interrupted


@dataclass(frozen=True)
class Who:
    """How the processes of a world are called.

    Attributes:
        size: of the world, 0 for a node process.
        hosts: rank -> name of its host, where there are several.
    """

    size: int
    hosts: Mapping[int, str] = field(default_factory=dict)

    def __call__(self, ranks: Iterable[int]) -> str:
        """ "rank 2", "ranks 0-2, 5", "the node process"."""
        indices = list(ranks)
        return "the node process" if indices == [NODE] else named(indices)

    def full(self, ranks: Iterable[int]) -> str:
        """ "rank 2 of 4", with the hosts where there are several: "ranks 1, 5 of 8 (1 on alpha, 5 on beta)"."""
        indices = sorted(ranks)
        text = f"{self(indices)} of {self.size}" if self.size else self(indices)
        if not self.hosts:
            return text
        on = grouped((self.hosts[rank], rank) for rank in indices)
        if len(on) == 1:
            return f"{text} on {on[0][0]}"
        return f"{text} ({', '.join(f'{intervals(some)} on {host}' for host, some in on)})"


def error_of(
    endings: Mapping[int, Ending], who: Who, doing: str, timeout: float | None, records: Mapping[int, Record]
) -> BaseException:
    """The error to raise in the parent, when not all of `endings` are `Finished`.

    Args:
        endings: rank -> how the call ended there, in the order in which the answers came.
        doing: what the ranks were at, such as "test_step".
        timeout: the deadline in seconds, if it passed.
        records: rank -> the collectives that it has entered.
    """
    died = {rank: end for rank, end in endings.items() if isinstance(end, Died)}
    raised = {rank: end for rank, end in endings.items() if isinstance(end, Raised)}
    interrupted = {rank: end for rank, end in endings.items() if isinstance(end, Interrupted)}
    if raised or died:
        timeout = None  # the others were waited for until the deadline, but that is not the story
    finished = [rank for rank, end in endings.items() if isinstance(end, Finished)]

    headlines: list[str] = []
    blocks: list[str] = []
    for cause, ranks in grouped((end.cause, rank) for rank, end in died.items()):
        headlines.append(f"{who.full(ranks)} died: {cause}")
        words = next((died[rank].last_words for rank in ranks if died[rank].last_words), "")
        if words:
            blocks.append(_block(f"{who(ranks)}: stacks at the end", words))
    # Once a rank is dead, its peers' errors are mostly echoes of that: they come second.
    for ranks in alike(endings):
        said = grouped((_ADDRESS.sub("", raised[rank].failure.headline), rank) for rank in ranks)
        for _, some in said[:_MOST_HEADLINES]:
            headlines.append(f"{who.full(some)} raised {raised[some[0]].failure.headline}")
        others = [rank for _, some in said[_MOST_HEADLINES:] for rank in some]
        if others:
            headlines.append(f"{who.full(others)} raised the same with other values")
        blocks.append(_block(who(ranks), raised[ranks[0]].failure.text))
    if interrupted and timeout is not None:
        headlines[:0] = _hang_headlines(interrupted, who, doing, timeout, records)
    elif interrupted:
        seconds = max(end.seconds for end in interrupted.values())
        headlines.append(f"{who(interrupted)} still ran {seconds:.2g} s later, and {_were(interrupted)} stopped")
        if halted := [rank for rank, end in interrupted.items() if end.stacks == HALTED]:
            headlines.append(f"{who(halted)} {_were(halted)} {HALTED}")
    for stacks, ranks in grouped((end.stacks, rank) for rank, end in interrupted.items() if end.stacks != HALTED):
        text = stacks or "no stacks: the process did not answer, as in uninterruptible sleep"
        blocks.append(_block(f"{who(ranks)}: stacks of all threads, when stopped", text))
    if finished:
        headlines.append(f"{who(finished)} finished")
    parted = parting(records) or {}
    if any(records[rank].current != entered for rank, entered in parted.items()) or not interrupted:
        headlines += [different] if (different := different_collectives(records, who)) else []
    told = interrupted if timeout is not None else {}
    headlines += last_collectives({rank: record for rank, record in records.items() if rank not in told}, who)

    message = "\n".join([*headlines, *(f"\n{block}" for block in blocks)])
    if interrupted and timeout is not None:
        return RankHang(message, ranks=sorted({*interrupted, *raised, *died}))
    if died:
        kind = AgentLost if any(end.lost for end in died.values()) else RankDied
        return kind(message, ranks=sorted(died))
    error = RankFailure(message, ranks=sorted(raised))
    first = next(iter(raised.values()), None)
    if first is not None:
        return raised_at(error, first.failure.filename, first.failure.lineno, _exception(first.failure))
    return error


def disagreement(who: Who, records: Mapping[int, Record]) -> RankFailure:
    """The error where all ranks have returned, but have not entered the same collectives."""
    text = different_collectives(records, who)
    first = text or "ranks have entered different collectives, or with different tensors"
    lines = [first, *([] if text else last_collectives(records, who))]
    parted = parting(records) or {}
    odd = _odd(parted)
    error = RankFailure(
        "\n".join([*lines, "all ranks returned: what they computed in them is undefined"]),
        ranks=sorted(odd or records),
    )
    if not odd:
        return error
    return raised_at(error, parted[odd[0]].file, parted[odd[0]].line, None)


def different_collectives(records: Mapping[int, Record], who: Who) -> str:
    """ "rank 2 of 4 entered broadcast #7 (train.py:40), where ranks 0-1, 3 entered …"; nothing where none differ."""
    parted = parting(records)
    if parted is None:
        return ""
    said = (((_described(entry), entry.compared), rank) for rank, entry in parted.items())
    groups = sorted(grouped(said), key=lambda g: len(g[1]))
    ((first, _), odd), *others = groups
    rest = " and ".join(
        f"{who(ranks)} entered {text}{', of other dtypes or sizes further on' if text == first else ''}"
        for (text, _), ranks in others
    )
    return f"{who.full(odd)} entered {first}, where {rest}"


def _odd(parted: Mapping[int, Entered]) -> list[int]:
    """The ranks that differ from the most of them; none where there is no such majority."""
    said = (((_described(entry), entry.compared), rank) for rank, entry in parted.items())
    groups = sorted((ranks for _, ranks in grouped(said)), key=len)
    return groups[0] if len(groups) > 1 and len(groups[0]) < len(groups[-1]) else []


def _described(entry: Entered) -> str:
    return f"{entry}, {entry.details}" if entry.details else str(entry)


def last_collectives(records: Mapping[int, Record], who: Who) -> list[str]:
    if not any(record.last for record in records.values()):
        return []
    ends = {"inside": " (still in it)", "waiting": " (still waiting for it)", "failed": " (failed)"}
    texts = (
        ("none" if (last := record.last) is None else _described(last) + ends.get(last.state, ""), rank)
        for rank, record in records.items()
    )
    return [f"last collective of {who(ranks)}: {text}" for text, ranks in grouped(texts)]


def _exception(failure: Failure) -> BaseException | None:
    if failure.pickled is None:
        return None
    try:
        error = pickling.loads(failure.pickled)
    except BaseException:  # its class refers to what only the rank has; and whatever it raises is not ours
        return None
    return error if isinstance(error, BaseException) else None


def _hang_headlines(
    interrupted: Mapping[int, Interrupted], who: Who, doing: str, timeout: float, records: Mapping[int, Record]
) -> list[str]:
    """Who did not finish, and where each was; first those that the others wait for in a collective."""
    nowhere = Record((), 0)
    waiting: list[tuple[str, int]] = []
    elsewhere: list[tuple[str, int]] = []
    for rank, end in interrupted.items():
        record, place = records.get(rank, nowhere), place_of(end.stacks)
        if record.current is not None:
            waiting.append((f"in {_described(record.current)}", rank))
        elif place is not None and place.collective:  # one that is not recorded
            waiting.append((f"in {place}", rank))
        else:
            after = f", after {record.last}" if record.last else ""
            where = end.stacks if end.stacks == HALTED else f"in {place or 'an unknown place'}"
            if end.settling:
                where = "done, but for what it has queued on its devices"
            elsewhere.append((where + after, rank))
    behind = [rank for _, rank in elsewhere or waiting]
    if elsewhere and not waiting:
        # A collective on devices is entered and left at once, and waited for later: who has entered fewest is waited for.
        behind = fewest({rank: records.get(rank, nowhere).total for rank in behind})
    culprits = _odd(parting(records) or {}) or behind
    lines = [f"{who.full(culprits)} did not finish {doing} within {timeout:g} s"]
    for text, ranks in (*grouped(elsewhere), *grouped(waiting)):
        lines.append(f"{who(ranks)} {'is' if len(ranks) == 1 else 'are'} {text}")
    return lines


def _were(ranks: Collection[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def alike(endings: Mapping[int, Ending]) -> list[list[int]]:
    """The ranks that raised, those together that raised the same at the same place, if with other values."""
    failures = ((end.failure, rank) for rank, end in endings.items() if isinstance(end, Raised))
    kinds = (((f.headline.partition(":")[0], f.filename, f.lineno), rank) for f, rank in failures)
    return [sorted(ranks) for _, ranks in grouped(kinds)]


def _block(title: str, text: str) -> str:
    return f"{f' {title} ':-^100}\n{text}"


def raised_at(error: RankFailure, filename: str, lineno: int, cause: BaseException | None) -> RankFailure:
    """`error`, with a traceback that ends where the rank raised.

    Hypothesis tells failures apart by type and place. Were all raised here, it would take two bugs for one, and end
    up shrinking the other.
    """
    error.__cause__ = cause
    try:
        exec(_raise_on_line(filename, lineno), {"error": error})
    except RankFailure as raised:
        return raised
    raise AssertionError("unreachable")


@functools.lru_cache(maxsize=64)
def _raise_on_line(filename: str, lineno: int) -> types.CodeType:
    return compile("\n" * (lineno - 1) + "raise error", filename or "<rank>", "exec")
