"""Combine how a call ended on each rank into one error, and separate ranks that hang in a collective, send or receive
from ranks that hang elsewhere.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from mgpu_check.errors import AgentLost, RankDied, RankFailure, RankHang
from mgpu_check.processes import pickling
from mgpu_check.processes.channel import RaisedInRank
from mgpu_check.processes.collective_records import Entered, Record, fewest, parting
from mgpu_check.processes.rank_lists import grouped, intervals, named
from mgpu_check.processes.tracebacks import HALTED, is_returning, location_of


@dataclass(frozen=True)
class RankPlaces:
    """The places of ranks that did not finish, in words such as "in all_reduce #1 (train.py:40), float32[4], sum"."""

    waiting: dict[int, str] = field(default_factory=dict)  # rank -> the collective, send or receive that it is in
    elsewhere: dict[int, str] = field(default_factory=dict)  # rank -> its location, for every other rank

    def grouped(self) -> list[tuple[str, list[int]]]:
        """Return each place with its ranks, starting with the ranks that the others may wait for."""
        return grouped((text, rank) for places in (self.elsewhere, self.waiting) for rank, text in places.items())

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
                activity = end.stacks if end.stacks == HALTED else f"in {location or 'an unknown place'}"
                if is_returning(end.stacks):
                    activity = "sending its result, which takes long if it is large: return less, or allow more time"
                if end.settling:
                    activity = "done, except for work that is queued on its devices"
                places.elsewhere[rank] = activity + after
        return places


_MOST_HEADLINES = 3  # messages of the same error in a report: more rarely help
_ADDRESS = re.compile(r"\[[0-9a-fA-F.:]+\]:\d+")  # of a peer, in errors of gloo: it differs between ranks
NODE = -1  # index of the node process, in place of a rank


@dataclass(frozen=True)
class Finished:
    """The rank returned, or it finished `stage` of the call, such as "step 1", and waited for the other ranks."""

    stage: str = ""


@dataclass(frozen=True)
class Raised:
    """The rank raised an exception and is still alive."""

    failure: RaisedInRank


_RULES = {
    "skip": "a test is skipped on all ranks or on none",
    "xfail": "a test is xfailed on all ranks or on none",
    "reject": "an example is rejected, as by assume, on all ranks or on none",
}


@dataclass(frozen=True)
class Died:
    """The rank's process ended before it answered."""

    cause: str  # signal or exit code, in words
    last_words: str  # the stacks that it wrote when a fatal signal ended it
    lost: bool = False  # whether the agent that held it was lost
    exit_code: int | None = None  # of the process, negative for a signal; None if it has not ended by itself


@dataclass(frozen=True)
class Interrupted:
    """The rank had not answered when the parent stopped waiting, and was killed."""

    seconds: float  # time since the call started
    stacks: str  # of all threads, `HALTED` if the process was stopped, empty if it did not write them
    settling: bool = False  # whether it had returned, and waited for the operations queued on its devices


Ending = Finished | Raised | Died | Interrupted


@dataclass(frozen=True)
class Who:
    """The names of a world's processes in reports."""

    size: int  # of the world; 0 for a node process
    hosts: Mapping[int, str] = field(default_factory=dict)  # rank -> name of its host; empty on a single host

    def __call__(self, ranks: Iterable[int]) -> str:
        """Name processes: "rank 2", "ranks 0-2, 5", "the node process"."""
        indices = list(ranks)
        return "the node process" if indices == [NODE] else named(indices)

    def full(self, ranks: Iterable[int]) -> str:
        """Name ranks in full: "rank 2 of 4", or "ranks 1, 5 of 8 (1 on alpha, 5 on beta)" on several hosts."""
        indices = sorted(ranks)
        text = f"{self(indices)} of {self.size}" if self.size else self(indices)
        if not self.hosts:
            return text
        on = grouped((self.hosts[rank], rank) for rank in indices)
        if len(on) == 1:
            return f"{text} on {on[0][0]}"
        return f"{text} ({', '.join(f'{intervals(local_ranks)} on {host}' for host, local_ranks in on)})"


@dataclass(frozen=True)
class Account:
    """How a call ended on each rank: data for diagnosis, and the text that users read."""

    endings: Mapping[int, Ending]  # rank -> how the call ended there, in the order of arrival
    who: Who
    doing: str = ""  # the function or step that the ranks ran, such as "test_step"
    deadline: float | None = None  # in seconds; None unless it passed
    records: Mapping[int, Record] = field(default_factory=dict)  # rank -> the collectives that it has entered
    instead: tuple[str, ...] = ()  # lines that replace the endings in the report if all ranks returned
    unmatched: str | None = None  # how ranks differed in a part of the call that all have finished, in words
    # ranks waited in vain, for each other or for finished ranks; `deadline` is then the time that they were given
    crossed: bool = False

    @property
    def died(self) -> dict[int, Died]:
        return {rank: end for rank, end in self.endings.items() if isinstance(end, Died)}

    @property
    def raised(self) -> dict[int, Raised]:
        return {rank: end for rank, end in self.endings.items() if isinstance(end, Raised)}

    @property
    def interrupted(self) -> dict[int, Interrupted]:
        return {rank: end for rank, end in self.endings.items() if isinstance(end, Interrupted)}

    @property
    def finished(self) -> list[int]:
        return [rank for rank, end in self.endings.items() if isinstance(end, Finished)]

    @property
    def hung(self) -> float | None:
        """The deadline if ranks hang; None if a rank raised or died, because the others then waited for that rank."""
        return self.deadline if self.interrupted and not (self.raised or self.died) else None

    @property
    def parted(self) -> dict[int, Entered]:
        """Rank -> the first collective that differs between ranks; empty if none does.
        Also empty if ranks still wait in these collectives, because the report of the hang names them."""
        parted = parting(self.records) or {}
        waiting = all(self.records[rank].current == entered for rank, entered in parted.items())
        return {} if waiting and self.interrupted else parted

    @property
    def last(self) -> dict[int, Entered]:
        """Rank -> the collective that it is in or entered last, as far as collectives were recorded."""
        lasts = {rank: record.last for rank, record in self.records.items() if not self._in_another(rank)}
        return {rank: entered for rank, entered in lasts.items() if entered is not None and entered.number}

    @property
    def places(self) -> RankPlaces:
        """The places of ranks that hang; empty unless `hung`."""
        return RankPlaces() if self.hung is None else RankPlaces.of(self.interrupted, self.records)

    def _in_another(self, rank: int) -> bool:
        end, record = self.endings.get(rank), self.records[rank]
        if self.hung is None or not isinstance(end, Interrupted) or record.current is not None:
            return False
        location = location_of(end.stacks)
        return location is not None and bool(location.collective)

    def told_of_raised(self) -> list[tuple[list[int], str]]:
        """Group the ranks that raised the same error, and return each group with its line of the report."""
        lines: list[tuple[list[int], str]] = []
        for ranks in alike(self.endings):
            headlines = grouped((_ADDRESS.sub("", self.raised[rank].failure.headline), rank) for rank in ranks)
            for _, group in headlines[:_MOST_HEADLINES]:
                lines.append((group, f"{self.who.full(group)} raised {self.raised[group[0]].failure.headline}"))
            if others := [rank for _, group in headlines[_MOST_HEADLINES:] for rank in group]:
                lines.append((others, f"{self.who.full(others)} raised the same error with other values"))
        return lines

    def headlines(self, doing: str | None = None) -> list[str]:
        """Describe what happened, one line per fact."""
        if self.instead:
            return list(self.instead)
        who, interrupted = self.who, self.interrupted
        headlines = [
            f"{who.full(ranks)} died: {cause}"
            for cause, ranks in grouped((end.cause, rank) for rank, end in self.died.items())
        ]
        # The death of a rank causes most of its peers' errors, so those come second.
        headlines += [line for _, line in self.told_of_raised()]
        kinds = {end.failure.kind for end in self.raised.values()}
        headlines += [f"{rule}: decide it by values that all ranks have" for k, rule in _RULES.items() if k in kinds]
        if self.hung is not None:
            headlines[:0] = _hang_headlines(interrupted, who, doing or self.doing, self.hung, self.records)
            if self.crossed:
                for_whom = "each other or for finished ranks" if self.finished else "each other in different calls"
                headlines.append(f"the ranks wait for {for_whom}, so more time would not help")
        elif interrupted:
            seconds = max(end.seconds for end in interrupted.values())
            headlines.append(f"{who(interrupted)} still ran {seconds:.2g} s later, and {_were(interrupted)} stopped")
            if halted := [rank for rank, end in interrupted.items() if end.stacks == HALTED]:
                headlines.append(f"{who(halted)} {_were(halted)} {HALTED}")
        done = ((f"finished {end.stage}".strip(), r) for r, end in self.endings.items() if isinstance(end, Finished))
        headlines += [f"{who(ranks)} {text}" for text, ranks in grouped(done)]
        if (different := different_collectives(self.parted, who)) is not None:
            headlines.append(different)
        reported = interrupted if self.hung is not None else {}
        rest = {rank: record for rank, record in self.records.items() if rank not in reported}
        return headlines + last_collectives(rest, who)

    def blocks(self) -> list[str]:
        """Return stacks and tracebacks, each below a title line."""
        blocks: list[str] = []
        for _, ranks in grouped((end.cause, rank) for rank, end in self.died.items()):
            words = next((self.died[rank].last_words for rank in ranks if self.died[rank].last_words), "")
            if words:
                blocks.append(_block(f"{self.who(ranks)}: stacks at the end", words))
        for ranks in alike(self.endings):
            blocks.append(_block(self.who(ranks), self.raised[ranks[0]].failure.text))
        stacks_of = ((end.stacks, rank) for rank, end in self.interrupted.items() if end.stacks != HALTED)
        for stacks, ranks in grouped(stacks_of):
            text = stacks or "no stacks: the process did not answer, as in uninterruptible sleep"
            blocks.append(_block(f"{self.who(ranks)}: stacks of all threads, when stopped", text))
        return blocks

    def __str__(self) -> str:
        return "\n".join([*self.headlines(), *(f"\n{block}" for block in self.blocks())])

    def error(self) -> BaseException:
        if self.hung is not None:
            hang = RankHang(str(self), ranks=sorted(self.interrupted))
            hang.account = self
            return hang
        if self.died:
            error_class = AgentLost if any(end.lost for end in self.died.values()) else RankDied
            death = error_class(str(self), ranks=sorted(self.died))
            death.account = self
            return death
        error = RankFailure(str(self), ranks=sorted(self.raised))
        error.account = self
        earliest = next(iter(self.raised.values()), None)
        if earliest is not None:
            return raised_at(error, earliest.failure.filename, earliest.failure.lineno, _exception(earliest.failure))
        return error


def account_of(error: BaseException) -> Account | None:
    """Return the account attached to an error; None if a call on ranks did not raise it."""
    account = getattr(error, "account", None)
    return account if isinstance(account, Account) else None


def disagreement(who: Who, records: Mapping[int, Record]) -> RankFailure:
    """Return the error for ranks that have all returned but entered different collectives."""
    parted = parting(records) or {}
    text = different_collectives(parted, who)
    headline = text or "ranks entered different collectives, or the same ones with different tensors"
    lines = [headline, *([] if text else last_collectives(records, who))]
    odd = _odd(parted)
    lines.append("all ranks returned: the results of these collectives are undefined")
    error = all_returned(lines, who, records, odd or records)
    return raised_at(error, parted[odd[0]].file, parted[odd[0]].line, None) if odd else error


def all_returned(
    lines: Iterable[str], who: Who, records: Mapping[int, Record], ranks: Iterable[int], unmatched: str | None = None
) -> RankFailure:
    endings = dict.fromkeys(records, Finished())
    account = Account(endings, who, records=records, instead=tuple(lines), unmatched=unmatched)
    error = RankFailure(str(account), ranks=sorted(ranks))
    error.account = account
    return error


def different_collectives(parted: Mapping[int, Entered], who: Who) -> str | None:
    """Describe a difference, None for none: "rank 2 of 4 entered broadcast #7 (train.py:40), where ranks 0-1, 3 …"."""
    if not parted:
        return None
    entries = (((entry.described, entry.compared), rank) for rank, entry in parted.items())
    ((odd_collective, _), odd), *others = sorted(grouped(entries), key=lambda g: len(g[1]))
    rest = " and ".join(
        f"{who(ranks)} entered {text}{', of other dtypes or sizes further on' if text == odd_collective else ''}"
        for (text, _), ranks in others
    )
    return f"{who.full(odd)} entered {odd_collective}, where {rest}"


def _odd(parted: Mapping[int, Entered]) -> list[int]:
    entries = (((entry.described, entry.compared), rank) for rank, entry in parted.items())
    groups = sorted((ranks for _, ranks in grouped(entries)), key=len)
    return groups[0] if len(groups) > 1 and len(groups[0]) < len(groups[-1]) else []


def last_collectives(records: Mapping[int, Record], who: Who) -> list[str]:
    if not any(record.last for record in records.values()):
        return []
    ends = {"inside": " (still in it)", "waiting": " (still waiting for it)", "failed": " (failed)"}
    texts = (
        ("none" if (last := record.last) is None else last.described + ends.get(last.state, ""), rank)
        for rank, record in records.items()
    )
    return [f"last collective of {who(ranks)}: {text}" for text, ranks in grouped(texts)]


def _exception(failure: RaisedInRank) -> BaseException | None:
    if failure.pickled is None:
        return None
    try:
        error = pickling.loads(failure.pickled)
    except BaseException:  # its class may exist in the rank only, and its code may raise anything
        return None
    return error if isinstance(error, BaseException) else None


def _hang_headlines(
    interrupted: Mapping[int, Interrupted], who: Who, doing: str, timeout: float, records: Mapping[int, Record]
) -> list[str]:
    """Describe which ranks did not finish and where each was, the ranks that the others wait for first."""
    places = RankPlaces.of(interrupted, records)
    behind = [*(places.elsewhere or places.waiting)]
    if places.elsewhere and not places.waiting:
        # A collective on devices returns at once and finishes later, so the ranks that entered the fewest are behind.
        behind = fewest({rank: records[rank].total if rank in records else 0 for rank in behind})
    culprits = _odd(parting(records) or {}) or behind
    lines = [f"{who.full(culprits)} did not finish {doing} within {timeout:g} s"]
    for text, ranks in places.grouped():
        lines.append(f"{who(ranks)} {'is' if len(ranks) == 1 else 'are'} {text}")
    return lines


def _were(ranks: Collection[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def alike(endings: Mapping[int, Ending]) -> list[list[int]]:
    failures = ((end.failure, rank) for rank, end in endings.items() if isinstance(end, Raised))
    kinds = (((f.type, f.filename, f.lineno), rank) for f, rank in failures)
    return [sorted(ranks) for _, ranks in grouped(kinds)]


def _block(title: str, text: str) -> str:
    return f"{f' {title} ':-^100}\n{text}"


def raised_at(error: RankFailure, filename: str, lineno: int, cause: BaseException | None) -> RankFailure:
    """Return `error` with a traceback that ends where the rank raised.
    Hypothesis distinguishes failures by type and place (hypothesis/internal/escalation.py, InterestingOrigin, 6.170).
    If all were raised here, it would confuse two bugs, and might shrink the wrong one."""
    error.__cause__ = cause
    try:
        exec(_raise_on_line(filename, lineno), {"error": error})
    except RankFailure as raised:
        return raised
    raise AssertionError("unreachable")


@functools.lru_cache(maxsize=64)
def _raise_on_line(filename: str, lineno: int) -> types.CodeType:
    return compile("\n" * (lineno - 1) + "raise error", filename or "<rank>", "exec")
