"""Find the smallest set of parts that explains the failed observations.

A part *explains* a failed observation if it belongs to the subject, and the data do not point elsewhere. Of the sets of
parts that explain all observations the cheapest are the smallest. A GPU costs 1, a link slightly less. The host costs
more, because it explains everything. Observations that passed although a part would spoil them add a little to its
price. So the explanation of one failed pair of eight GPUs is a link; the explanation of all pairs of one GPU is that
GPU.

A link that only collectives accuse needs a control: each of its GPUs is right with a third one. Without it, as on a
node of two GPUs, the link is as dear as one of its GPUs, so that none of the three is named.

If all GPUs of a host fail one check, none is right beside them, and one cause is likelier than several. So the host is
cheaper than three of them, and as dear as two.

A part is named only if every smallest set contains it. If several sets explain the rest, they are *rivals*: none is
named, and what they explain remains unexplained.

An observation of the driver about one GPU (`Check.of_driver`) accuses that GPU, and explains no other failure: a
pending repair of a GPU is not the cause of a failed copy. Facts of the host (`Check.of_facts`) accuse the host in the
same way: slots that are set to Gen3 are not the cause of a wrong word in the memory of one GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mgpu_check.acceptance.checklist import CHECKLIST
from mgpu_check.acceptance.verdict.search import smallest_sets
from mgpu_check.devices.observations import EXCHANGED, Observation, Part, PartKind, Subject

_COST = {"gpu": 1.0, "link": 0.9, "host-link": 0.9, "host": 4.0}
_BOTH_WAYS = 1.0
# Cost of a link if the data point at one of its GPUs and no copy over it failed: more than that of the GPU.
_AGAINST_DATA = 1.1
_SPOILED = 0.3  # largest surcharge, for a part whose other observations all passed
_ONE_CAUSE = 0.9  # of the price of three GPUs or more
_ALIKE = 0.05
"""Prices up to this difference count as equal: GPUs take part in slightly different numbers of observations."""

Key = tuple[str, Subject, tuple[int, ...], bool]
"""Check, subject, suspects, and whether its GPUs exchanged data. Observations with the same key have the same
explanation."""


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
        shared: indices of observations that several of `parts` explain: one of them is enough.
        rivals: sets of parts that explain what is unexplained equally well, if there are several; else empty.
    """

    parts: Mapping[Part, tuple[int, ...]]
    unexplained: tuple[int, ...]
    shared: tuple[int, ...] = ()
    rivals: tuple[tuple[Part, ...], ...] = ()

    def others(self, part: Part) -> dict[int, list[Part]]:
        """Return, for each shared observation of a part, the other parts that explain it."""
        mine = [number for number in self.parts[part] if number in self.shared]
        same = {part, Part(part.kind, part.members[::-1])}
        return {number: [one for one in self.parts if one not in same and number in self.parts[one]] for number in mine}


def explain(
    observations: Sequence[Observation],
    hosts: Sequence[int],
    follows_rank: Collection[int] = (),
    needs_history: Collection[int] = (),
) -> Explanation:
    """Return the parts that every smallest explanation of the failed `observations` contains.

    Args:
        follows_rank: indices of observations whose fault stays with the rank on every device, as a second look has
            shown. Only the host, with its software, explains them.
        needs_history: indices of observations that a control in fresh processes does not repeat. No part explains them.
    """
    parts: dict[Part, list[int]] = {}
    keys: dict[Key, list[int]] = {}
    for number, entry in enumerate(observations):
        if entry.outcome != "failed" or number in needs_history:
            continue
        if number in follows_rank:
            for part in _hosts_of(entry.subject, hosts):
                parts.setdefault(part, []).append(number)
        elif _of_driver(entry):
            kind: PartKind = "host" if entry.subject.kind == "host" else "gpu"
            parts.setdefault(Part(kind, entry.subject.members), []).append(number)
        else:
            keys.setdefault(_key(entry), []).append(number)
    passed = [_key(entry) for entry in observations if entry.outcome == "passed" and not _of_driver(entry)]
    sets = _Candidates(list(keys), passed, hosts).sets()
    named = frozenset.intersection(*sets) if sets else frozenset()
    unexplained = [number for number in needs_history if observations[number].outcome == "failed"]
    shared: list[int] = []
    for key, numbers in keys.items():
        explaining = [suspect for suspect in sorted(named) if suspect.explains(key, hosts)]
        for part in (part for suspect in explaining for part in suspect.parts if _explains(part, *key, hosts)):
            parts.setdefault(part, []).extend(numbers)
        unexplained += numbers if not explaining else ()
        shared += numbers if len(explaining) > 1 else ()
    return Explanation(
        {part: tuple(sorted(numbers)) for part, numbers in parts.items()},
        tuple(sorted(unexplained)),
        tuple(sorted(shared)),
        tuple(tuple(sorted({part for one in some - named for part in one.parts})) for some in sets) if sets[1:] else (),
    )


def _of_driver(entry: Observation) -> bool:
    """Return whether the driver says it about a part, which explains no other failure."""
    check = CHECKLIST[entry.check]
    return (entry.subject.kind == "gpu" and check.of_driver) or (entry.subject.kind == "host" and check.of_facts)


def _key(entry: Observation) -> Key:
    exchanged = bool(entry.evidence.get(EXCHANGED, True))
    return entry.check, entry.subject.in_any_order, tuple(sorted(entry.suspects)), exchanged


def _hosts_of(subject: Subject, hosts: Sequence[int]) -> set[Part]:
    numbers = subject.members if subject.kind == "host" else {hosts[member] for member in subject.members}
    return {Part("host", (number,)) for number in numbers}


def _explains(
    part: Part, check: str, subject: Subject, suspects: tuple[int, ...], exchanged: bool, hosts: Sequence[int]
) -> bool:
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
    return subject.kind == "group" and exchanged and both and (not suspects or bool(set(suspects) & set(part.members)))


class _Candidates:
    def __init__(self, failed: Sequence[Key], passed: Iterable[Key], hosts: Sequence[int]) -> None:
        self.failed = failed
        self.hosts = hosts
        # A key that passed counts for a part only if it never failed: a fault may be intermittent.
        self.passed = set(passed) - set(failed)

    def sets(self) -> list[frozenset[Suspect]]:
        """Return every smallest set of candidates that explains all failures; none if there are too many to try."""
        candidates = self.candidates
        explained = [frozenset(one for one in candidates if one.explains(key, self.hosts)) for key in self.failed]
        price = {one: self._price(one) for one in candidates}
        for link in (one for one in candidates if len(one.parts) == 2):
            pair = link.parts[0].members
            ends = {(Part("gpu", (member,)),) for member in pair}
            if not self._controlled(pair):
                price[link] = max(price[link], min(price[one] for one in candidates if one.parts in ends))
        for suspect in (one for one in candidates if one.parts[0].kind == "host"):
            if failing := self._all_that_fail(suspect.parts[0].members[0]):
                together = sum(price[one] for one in candidates if one.parts in failing)
                price[suspect] = min(price[suspect], together * (_ONE_CAUSE if len(failing) > 2 else 1.0))
        return smallest_sets(explained, price, _ALIKE) or []

    def _all_that_fail(self, host: int) -> set[tuple[Part, ...]]:
        """Return the GPUs of a host, two or more, if each of them fails the same check alone; else nothing."""
        gpus = {gpu for gpu, its in enumerate(self.hosts) if its == host}
        failing: dict[str, set[int]] = {}
        for check, subject, _, _ in self.failed:
            if subject.kind == "gpu":
                failing.setdefault(check, set()).update(subject.members)
        if len(gpus) < 2 or not any(gpus <= some for some in failing.values()):
            return set()
        return {(Part("gpu", (gpu,)),) for gpu in gpus}

    def _controlled(self, pair: tuple[int, ...]) -> bool:
        """Return whether a copy over a link failed, or each of its GPUs is right in a group without the other."""
        if any(subject.kind == "copy" and set(subject.members) == set(pair) for _, subject, _, _ in self.failed):
            return True
        return all(any({gpu} == group & set(pair) for group in self._right_groups) for gpu in pair)

    @cached_property
    def _right_groups(self) -> list[set[int]]:
        return [set(subject.members) for _, subject, _, _ in self.passed if subject.kind == "group"]

    @cached_property
    def candidates(self) -> list[Suspect]:
        parts: set[Part] = set()
        copies: set[tuple[int, ...]] = set()
        groups: dict[tuple[int, ...], float] = {}
        for _, subject, suspects, exchanged in self.failed:
            parts |= _hosts_of(subject, self.hosts)
            if subject.kind == "host":
                continue
            parts |= {Part("gpu", (member,)) for member in suspects or subject.members}
            if subject.kind in ("upload", "download"):
                parts.add(Part("host-link", subject.members))
            elif subject.kind == "copy":
                parts.add(Part("link", subject.members))
                copies.add(subject.members)
            elif subject.kind == "group" and exchanged and len(subject.members) == 2:
                pair = tuple(sorted(subject.members))
                groups[pair] = min(groups.get(pair, _AGAINST_DATA), _AGAINST_DATA if suspects else _COST["link"])
        alone = [Suspect((part,), _COST[part.kind]) for part in parts]
        # A failed group does not show which direction of the link is wrong.
        both = {pair: cost for pair, cost in groups.items() if not copies & {pair, pair[::-1]}}
        both |= {pair: _BOTH_WAYS for pair in copies if pair < pair[::-1] and pair[::-1] in copies}
        return sorted(
            [*alone, *(Suspect((Part("link", pair), Part("link", pair[::-1])), cost) for pair, cost in both.items())]
        )

    def _price(self, suspect: Suspect) -> float:
        """Return the cost of a suspect, with a surcharge for the share of its observations that passed."""
        wrong = sum(suspect.explains(key, self.hosts) for key in self.failed)
        right = sum(suspect.explains(key, self.hosts) for key in self.passed)
        return suspect.cost + _SPOILED * right / max(1, right + wrong)
