"""From how a call ended on each rank to one error that tells the whole story."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mgpu_check.errors import RankDied, RankFailure, RankHang
from mgpu_check.ranks import transport
from mgpu_check.ranks.process import describe_exit
from mgpu_check.ranks.protocol import Failure
from mgpu_check.ranks.stacks import place_of

__all__ = ["NODE", "Died", "Finished", "Interrupted", "Raised", "Who", "alike", "error_of"]

Key = TypeVar("Key")

_MOST_HEADLINES = 3

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
    """The rank's process ended before it answered."""

    exit_code: int | None
    last_words: str


@dataclass(frozen=True)
class Interrupted:
    """The rank had not answered when the parent stopped waiting, and was killed."""

    seconds: float
    stacks: str


Ending = Finished | Raised | Died | Interrupted


@dataclass(frozen=True)
class Who:
    """How the processes of a world are called."""

    size: int

    def __call__(self, ranks: Iterable[int]) -> str:
        """ "rank 2", "ranks 0-2, 5", "the node process"."""
        indices = sorted(ranks)
        if indices == [NODE]:
            return "the node process"
        return f"{'rank' if len(indices) == 1 else 'ranks'} {_intervals(indices)}"

    @property
    def of(self) -> str:
        return "" if self.size == 0 else f" of {self.size}"


def _intervals(indices: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def error_of(endings: Mapping[int, Ending], who: Who, doing: str, timeout: float | None) -> BaseException:
    """The error to raise in the parent, when not all of `endings` are `Finished`.

    Args:
        endings: rank -> how the call ended there, in the order in which the answers came.
        doing: what the ranks were at, such as "test_step".
        timeout: the deadline in seconds, if it passed.
    """
    died = {rank: end for rank, end in endings.items() if isinstance(end, Died)}
    raised = {rank: end for rank, end in endings.items() if isinstance(end, Raised)}
    interrupted = {rank: end for rank, end in endings.items() if isinstance(end, Interrupted)}
    if raised or died:
        timeout = None  # the others were waited for until the deadline, but that is not the story
    finished = [rank for rank, end in endings.items() if isinstance(end, Finished)]

    headlines: list[str] = []
    blocks: list[str] = []
    for code, ranks in _grouped((end.exit_code, rank) for rank, end in died.items()):
        headlines.append(f"{who(ranks)}{who.of} died: {describe_exit(code)}")
        words = next((died[rank].last_words for rank in ranks if died[rank].last_words), "")
        if words:
            blocks.append(_block(f"{who(ranks)}: stacks at the end", words))
    # Once a rank is dead, its peers' errors are mostly echoes of that: they come second.
    for ranks in alike(endings):
        said = _grouped((raised[rank].failure.headline, rank) for rank in ranks)
        headlines += [f"{who(some)}{who.of} raised {headline}" for headline, some in said[:_MOST_HEADLINES]]
        others = [rank for _, some in said[_MOST_HEADLINES:] for rank in some]
        if others:
            headlines.append(f"{who(others)}{who.of} raised the same with other values")
        blocks.append(_block(who(ranks), raised[ranks[0]].failure.text))
    if interrupted and timeout is not None:
        headlines[:0] = _hang_headlines(interrupted, who, doing, timeout)
    elif interrupted:
        seconds = max(end.seconds for end in interrupted.values())
        headlines.append(f"{who(interrupted)} still ran {seconds:.2g} s later, and {_were(interrupted)} stopped")
    for stacks, ranks in _grouped((end.stacks, rank) for rank, end in interrupted.items()):
        text = stacks or "no stacks: the process did not answer, because it is stopped or in uninterruptible sleep"
        blocks.append(_block(f"{who(ranks)}: stacks of all threads, when stopped", text))
    if finished:
        headlines.append(f"{who(finished)} finished")

    message = "\n".join([*headlines, *(f"\n{block}" for block in blocks)])
    if interrupted and timeout is not None:
        return RankHang(message, ranks=sorted({*interrupted, *raised, *died}))
    if died:
        return RankDied(message, ranks=sorted(died))
    error = RankFailure(message, ranks=sorted(raised))
    first = next(iter(raised.values()), None)
    if first is not None:
        return _raised_at(error, first.failure.filename, first.failure.lineno, _exception(first.failure))
    return error


def _exception(failure: Failure) -> BaseException | None:
    if failure.pickled is None:
        return None
    try:
        error = transport.loads(failure.pickled)
    except Exception:  # its class refers to what only the rank has
        return None
    return error if isinstance(error, BaseException) else None


def _hang_headlines(interrupted: Mapping[int, Interrupted], who: Who, doing: str, timeout: float) -> list[str]:
    """Who did not finish; first those that the others wait for in a collective, where there are such."""
    places = {rank: place_of(end.stacks) for rank, end in interrupted.items()}
    waiting = [rank for rank, place in places.items() if place is not None and place.collective]
    elsewhere = [rank for rank in places if rank not in waiting]
    lines = [f"{who(elsewhere or waiting)}{who.of} did not finish {doing} within {timeout:g} s"]
    for verb, ranks in (("stopped in", elsewhere), ("waited in", waiting)):
        for place, group in _grouped((str(places[rank] or "an unknown place"), rank) for rank in ranks):
            lines.append(f"{who(group)} {verb} {place}")
    return lines


def _were(ranks: Mapping[int, object]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _grouped(pairs: Iterable[tuple[Key, int]]) -> list[tuple[Key, list[int]]]:
    groups: dict[Key, list[int]] = {}
    for key, rank in pairs:
        groups.setdefault(key, []).append(rank)
    return list(groups.items())


def alike(endings: Mapping[int, Ending]) -> list[list[int]]:
    """The ranks that raised, those together that raised the same at the same place, if with other values."""
    failures = ((end.failure, rank) for rank, end in endings.items() if isinstance(end, Raised))
    kinds = (((f.headline.partition(":")[0], f.filename, f.lineno), rank) for f, rank in failures)
    return [sorted(ranks) for _, ranks in _grouped(kinds)]


def _block(title: str, text: str) -> str:
    return f"{f' {title} ':-^100}\n{text}"


def _raised_at(error: RankFailure, filename: str, lineno: int, cause: BaseException | None) -> RankFailure:
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
