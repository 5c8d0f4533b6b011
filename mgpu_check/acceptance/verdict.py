"""From what was seen to the parts that explain it: the smallest set of parts, with its evidence.

A part *explains* a failed observation if it takes part in what was looked at, and the data do not point elsewhere. Of the sets of
parts that explain most, the cheapest is chosen. Each part costs 1, the host more, because it explains everything; what a part would
spoil, but was seen to be right, counts a little against it. So one failed pair of eight GPUs is a link, and all pairs out of one GPU
are that GPU. Where several would explain the same at the same price, none is named, and the failure stands unexplained.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mgpu_check.acceptance.checklist import CHECKLIST
from mgpu_check.devices.observations import Observation, Part, Subject

__all__ = ["Explanation", "Suspect", "explain"]

_COST = {"gpu": 1.0, "link": 0.9, "host-link": 0.9, "host": 4.0}
_BOTH_WAYS = 1.0
_AGAINST_DATA = 1.1  # of a link, where the data point at one of its GPUs and no copy over it has failed
_SPOILED = 0.3  # at most, for a part of which all else was seen to be right
_UNEXPLAINED = 10.0
_MOST_SETS = 20_000

Key = tuple[str, Subject, tuple[int, ...]]
"""What tells observations apart for their explanation: check, subject, suspects."""


@dataclass(frozen=True, order=True)
class Suspect:
    """Parts that stand and fall together: one, or both directions of a link."""

    parts: tuple[Part, ...]
    cost: float

    def explains(self, key: Key, hosts: Sequence[int]) -> bool:
        return any(_explains(part, *key, hosts) for part in self.parts)


@dataclass(frozen=True)
class Explanation:
    """The end of the search.

    Attributes:
        parts: each with the numbers of the failed observations that it explains.
        unexplained: numbers of the others.
    """

    parts: Mapping[Part, tuple[int, ...]]
    unexplained: tuple[int, ...]


def explain(
    observations: Sequence[Observation], hosts: Sequence[int], follows_rank: Collection[int] = ()
) -> Explanation:
    """Return the smallest set of parts that explains the failed ones of `observations`.

    Args:
        hosts: the host of each GPU, by its number.
        follows_rank: numbers of observations of which a second look has shown that the fault stays with the rank, whatever
            device it has: only the host, that is its software, explains them.
    """
    failed = [number for number, entry in enumerate(observations) if entry.outcome == "failed"]
    keys: dict[Key, list[int]] = {}
    for number in failed:
        if number not in follows_rank:
            keys.setdefault(_key(observations[number]), []).append(number)
    passed = [_key(entry) for entry in observations if entry.outcome == "passed"]
    search = _Search(list(keys), passed, hosts)
    chosen = search.sure(search.best())
    parts: dict[Part, list[int]] = {part: [] for suspect in chosen for part in suspect.parts}
    unexplained = []
    for key, numbers in keys.items():
        explaining = [part for part in parts if _explains(part, *key, hosts)]
        for part in explaining:
            parts[part] += numbers
        if not explaining:
            unexplained += numbers
    for number in follows_rank:
        for part in _hosts_of(observations[number].subject, hosts):
            parts.setdefault(part, []).append(number)
    return Explanation({part: tuple(sorted(numbers)) for part, numbers in parts.items() if numbers}, tuple(unexplained))


def _key(entry: Observation) -> Key:
    return entry.check, entry.subject, tuple(sorted(entry.suspects))


def _hosts_of(subject: Subject, hosts: Sequence[int]) -> set[Part]:
    numbers = subject.members if subject.kind == "host" else {hosts[member] for member in subject.members}
    return {Part("host", (number,)) for number in numbers}


def _explains(part: Part, check: str, subject: Subject, suspects: tuple[int, ...], hosts: Sequence[int]) -> bool:
    members = subject.members
    if part.kind == "host":
        return part in _hosts_of(subject, hosts)
    if subject.kind == "host":
        return False
    if part.kind == "gpu":
        return part.members[0] in (suspects or members)
    if part.kind == "host-link":
        if subject.kind in ("upload", "download"):
            return members == part.members
        return CHECKLIST[check].over_the_host and subject.kind in ("gpu", "group") and part.members[0] in members
    if subject.kind == "copy":
        return members == part.members
    both = set(part.members) <= set(members)
    return subject.kind == "group" and both and (not suspects or bool(set(suspects) & set(part.members)))


class _Search:
    def __init__(self, failed: Sequence[Key], passed: Iterable[Key], hosts: Sequence[int]) -> None:
        self.failed = failed
        self.hosts = hosts
        # Only what never failed speaks for a part: a fault may show now and then.
        self.passed = set(passed) - set(failed)

    def best(self) -> tuple[Suspect, ...]:
        if not self.failed:
            return ()
        candidates = self.candidates
        best: tuple[Suspect, ...] = ()
        least = self._price(())
        for count in range(1, len(candidates) + 1):
            if count > 1 and _sets(len(candidates), count) > _MOST_SETS:
                return self._improved(best, least)
            price, found = min((self._price(some), some) for some in itertools.combinations(candidates, count))
            if price < least:
                best, least = found, price
            elif not self._left(best) or count > len(self.failed):
                return best
        return best

    def sure(self, chosen: tuple[Suspect, ...]) -> tuple[Suspect, ...]:
        """Leave out who is no more suspect than another that was not chosen: to name one of several alike would be a guess."""
        price = self._price(chosen)
        others = [one for one in self.candidates if one not in chosen]
        return tuple(
            one
            for one in chosen
            if not any(self._price((*(two for two in chosen if two != one), other)) <= price for other in others)
        )

    def _improved(self, best: tuple[Suspect, ...], least: float) -> tuple[Suspect, ...]:
        """Add one by one what helps most, where there are too many sets to try them all; take out what helps no more."""
        while True:
            more = [(*best, one) for one in self.candidates if one not in best]
            fewer = [tuple(other for other in best if other != one) for one in best]
            price, found = min(((self._price(some), some) for some in [*more, *fewer]), default=(least, best))
            if price >= least:
                return best
            best, least = found, price

    @cached_property
    def candidates(self) -> list[Suspect]:
        parts: set[Part] = set()
        copies: set[tuple[int, ...]] = set()
        groups: dict[tuple[int, ...], float] = {}
        for _, subject, suspects in self.failed:
            parts |= _hosts_of(subject, self.hosts)
            if subject.kind == "host":
                continue
            parts |= {Part("gpu", (member,)) for member in suspects or subject.members}
            if subject.kind in ("upload", "download"):
                parts.add(Part("host-link", subject.members))
            elif subject.kind == "copy":
                parts.add(Part("link", subject.members))
                copies.add(subject.members)
            elif subject.kind == "group" and len(subject.members) == 2:
                pair = tuple(sorted(subject.members))
                groups[pair] = min(groups.get(pair, _AGAINST_DATA), _AGAINST_DATA if suspects else _COST["link"])
        alone = [Suspect((part,), _COST[part.kind]) for part in parts]
        # A group does not tell which direction is wrong.
        both = {pair: cost for pair, cost in groups.items() if not copies & {pair, pair[::-1]}}
        both |= {pair: _BOTH_WAYS for pair in copies if pair < pair[::-1] and pair[::-1] in copies}
        return sorted(
            [*alone, *(Suspect((Part("link", pair), Part("link", pair[::-1])), cost) for pair, cost in both.items())]
        )

    @cached_property
    def _explained(self) -> dict[Suspect, frozenset[int]]:
        return {
            suspect: frozenset(number for number, key in enumerate(self.failed) if suspect.explains(key, self.hosts))
            for suspect in self.candidates
        }

    @cached_property
    def _spoiled(self) -> dict[Suspect, float]:
        """How much of what a suspect would spoil was seen to be right."""
        share = {}
        for suspect in self.candidates:
            right = sum(suspect.explains(key, self.hosts) for key in self.passed)
            share[suspect] = right / max(1, right + len(self._explained[suspect]))
        return share

    def _left(self, some: tuple[Suspect, ...]) -> int:
        return len(self.failed) - len(frozenset().union(*(self._explained[one] for one in some)))

    def _price(self, some: tuple[Suspect, ...]) -> float:
        cost = sum(one.cost + _SPOILED * self._spoiled[one] for one in some)
        return round(cost + _UNEXPLAINED * self._left(some), 9)


def _sets(of: int, count: int) -> int:
    number = 1
    for k in range(count):
        number = number * (of - k) // (k + 1)
    return number
