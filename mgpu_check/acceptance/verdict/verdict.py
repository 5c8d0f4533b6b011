"""Find the smallest set of parts that explains the failed observations.

A part *explains* a failed observation if it belongs to the subject, and the data do not point elsewhere. The search
takes the sets of parts that explain the most observations, and chooses the cheapest of them. A GPU costs 1, a link
slightly less. The host costs more, because it explains everything. Observations that passed although a part would spoil
them add a little to its price. So the explanation of one failed pair of eight GPUs is a link; the explanation of all
pairs of one GPU is that GPU. If several parts explain the same failures at the same price, none is named, and the
failures remain unexplained.
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
# Cost of a link if the data point at one of its GPUs and no copy over it failed: more than that of the GPU.
_AGAINST_DATA = 1.1
_SPOILED = 0.3  # largest surcharge, for a part whose other observations all passed
_UNEXPLAINED = 10.0
_MOST_SETS = 20_000

Key = tuple[str, Subject, tuple[int, ...]]
"""Check, subject and suspects. Observations with the same key have the same explanation."""


@dataclass(frozen=True, order=True)
class Suspect:
    """Parts that are accused together: a single part, or both directions of a link."""

    parts: tuple[Part, ...]
    cost: float

    def explains(self, key: Key, hosts: Sequence[int]) -> bool:
        return any(_explains(part, *key, hosts) for part in self.parts)


@dataclass(frozen=True)
class Explanation:
    """The result of the search.

    Attributes:
        parts: the parts at fault, each with the indices of the failed observations that it explains.
        unexplained: indices of the other failed observations.
    """

    parts: Mapping[Part, tuple[int, ...]]
    unexplained: tuple[int, ...]


def explain(
    observations: Sequence[Observation], hosts: Sequence[int], follows_rank: Collection[int] = ()
) -> Explanation:
    """Return the smallest set of parts that explains the failed `observations`.

    Args:
        hosts: the host of each GPU, by number of the GPU.
        follows_rank: indices of observations whose fault stays with the rank on every device, as a second look has
            shown. Only the host, with its software, explains them.
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
        # A key that passed counts for a part only if it never failed: a fault may be intermittent.
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
        """Drop suspects that another candidate could replace at no higher price: to name one of them would be a
        guess."""
        price = self._price(chosen)
        others = [one for one in self.candidates if one not in chosen]
        return tuple(
            one
            for one in chosen
            if not any(self._price((*(two for two in chosen if two != one), other)) <= price for other in others)
        )

    def _improved(self, best: tuple[Suspect, ...], least: float) -> tuple[Suspect, ...]:
        """Improve `best` greedily, if there are too many sets to try all: add or remove one suspect at a time."""
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
        # A failed group does not show which direction of the link is wrong.
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
        """For each suspect the share of the observations it would spoil that passed."""
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
