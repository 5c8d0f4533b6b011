"""Verdict of an acceptance: the smallest set of parts that explains the failed observations, and advice on them.

A part *explains* a failed observation if it belongs to the subject, and the data do not point elsewhere. Of the sets of
parts that explain all observations the cheapest are the smallest. A GPU costs 1, a link slightly less. The host costs
more, because it explains everything. Observations that passed although a part would spoil them add a little to its
price. So the explanation of one failed pair of eight GPUs is a link; the explanation of all pairs of one GPU is that
GPU.

A link that only collectives accuse needs a control: each of its GPUs is right with a third one. Without it, as on a
node of two GPUs, the link is as dear as one of its GPUs, so that none of the three is named.

If all GPUs of a host fail one check, alone or each with each other one, none is right beside them, and one cause is
likelier than several: a driver, the IOMMU, ACS. So the host is cheaper than three of them, and as dear as two.

A part is named only if every smallest set contains it. If several sets explain the rest, they are *rivals*: none is
named, and what they explain remains unexplained.

An observation of the driver about one GPU (`Check.of_driver`) accuses that GPU, and explains no other failure: a
pending repair of a GPU is not the cause of a failed copy. Facts of the host (`Check.of_facts`) accuse the host in the
same way: slots that are set to Gen3 are not the cause of a wrong word in the memory of one GPU.

Cases that failed in a group of GPUs are repeated before (`look_again`): on smaller groups, in another order of ranks,
and over other paths. The log records these second looks like all other observations, so the verdict explains both.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, TypeVar

from mgpu_check.acceptance.findings import Action, ReportedFinding, Severity, listed, suited
from mgpu_check.acceptance.node import Node
from mgpu_check.acceptance.plan import CHECKLIST
from mgpu_check.acceptance.run_report import Accusation, RepeatableCall, RunLog
from mgpu_check.devices.observations import EXCHANGED, Observation, Part, PartKind, Subject

_MOST_STEPS = 100_000

S = TypeVar("S")


def smallest_sets(
    explaining: Sequence[frozenset[S]], price: Mapping[S, float], alike: float
) -> list[frozenset[S]] | None:
    """Return every set of suspects that explains each failure, at the lowest price or up to `alike` above it.

    `explaining` has for each failure the suspects that explain it, at least one. The `price` of each suspect is above
    `alike`, so that no returned set contains a superfluous suspect. The cheapest set comes first; None if the search
    would take too long.
    """
    if not explaining:
        return [frozenset()]
    # A failure with more suspects than another one, and among them all of the other, adds nothing.
    distinct = sorted(set(explaining), key=len)
    needed = [suspects for suspects in distinct if not any(smaller < suspects for smaller in distinct)]
    search: _Search[S] = _Search(price, alike)
    try:
        search.extend(frozenset(), 0.0, needed, frozenset())
    except _TooLong:
        return None
    by_cost = sorted(search.costs.items(), key=lambda item: item[1])
    return [solution for solution, cost in by_cost if cost <= search.least + alike]


class _TooLong(Exception):
    pass


@dataclass
class _Search(Generic[S]):
    """The search of `smallest_sets`, which makes it, extends the empty set, and reads the costs of the solutions."""

    price: Mapping[S, float]
    alike: float
    least: float = math.inf
    costs: dict[frozenset[S], float] = field(default_factory=dict)
    steps: int = 0

    def extend(self, chosen: frozenset[S], cost: float, unexplained: list[frozenset[S]], barred: frozenset[S]) -> None:
        """Add suspects to `chosen` until nothing is left. `barred` are suspects that other branches have tried."""
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise _TooLong
        if not unexplained:
            self.costs[chosen] = cost
            self.least = min(self.least, cost)
            return
        open_: list[frozenset[S]] = [suspects - barred for suspects in unexplained]
        if not all(open_) or cost + self.at_least(open_) > self.least + self.alike + 1e-9:
            return
        tried = barred
        fewest: frozenset[S] = min(open_, key=len)
        for suspect in sorted(fewest, key=self.price.__getitem__):
            rest = [suspects for suspects in unexplained if suspect not in suspects]
            self.extend(chosen | {suspect}, cost + self.price[suspect], rest, tried)
            tried |= {suspect}

    def at_least(self, unexplained: Sequence[frozenset[S]]) -> float:
        """Return a price that any explanation of `unexplained` has or exceeds: of failures without a common suspect."""
        counted: frozenset[S] = frozenset()
        total = 0.0
        for suspects in unexplained:
            if counted.isdisjoint(suspects):
                counted |= suspects
                total += min(self.price[suspect] for suspect in suspects)
        return total


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

    components: tuple[Part, ...]
    cost: float

    def explains(self, key: Key, hosts: Sequence[int]) -> bool:
        return any(_explains(component, *key, hosts) for component in self.components)


@dataclass(frozen=True)
class Explanation:
    """The result of the search."""

    # the parts at fault, each with the indices of the failed observations that it explains
    parts: Mapping[Part, tuple[int, ...]]
    unexplained: tuple[int, ...]  # indices of the other failed observations
    shared: tuple[int, ...] = ()  # indices of observations that several of `parts` explain: one of them is enough
    # sets of parts that explain what is unexplained equally well, if there are several; else empty
    rivals: tuple[tuple[Part, ...], ...] = ()

    def others(self, component: Part) -> dict[int, list[Part]]:
        """Return, for each shared observation of a part, the other parts that explain it."""
        same = {component, Part(component.kind, component.members[::-1])}
        return {
            number: [rival for rival in self.parts if rival not in same and number in self.parts[rival]]
            for number in self.parts[component]
            if number in self.shared
        }


def explain(
    observations: Sequence[Observation],
    hosts: Sequence[int],
    follows_rank: Collection[int] = (),
    needs_history: Collection[int] = (),
) -> Explanation:
    """Return the parts that every smallest explanation of the failed `observations` contains.

    `follows_rank` has indices of observations whose fault stays with the rank on every device, as a second look has
    shown: only the host, with its software, explains them. `needs_history` has those of observations that a control in
    fresh processes does not repeat: no part explains them.
    """
    explained: dict[Part, list[int]] = {}
    keys: dict[Key, list[int]] = {}
    for number, entry in enumerate(observations):
        if entry.outcome != "failed" or number in needs_history:
            continue
        if number in follows_rank:
            for component in _hosts_of(entry.subject, hosts):
                explained.setdefault(component, []).append(number)
        elif _of_driver(entry):
            component_kind: PartKind = "host" if entry.subject.kind == "host" else "gpu"
            explained.setdefault(Part(component_kind, entry.subject.members), []).append(number)
        else:
            keys.setdefault(_key(entry), []).append(number)
    passed = [_key(entry) for entry in observations if entry.outcome == "passed" and not _of_driver(entry)]
    sets = _Candidates(list(keys), passed, hosts).sets()
    named = frozenset.intersection(*sets) if sets else frozenset()
    unexplained = [number for number in needs_history if observations[number].outcome == "failed"]
    shared: list[int] = []
    for key, numbers in keys.items():
        explaining = [suspect for suspect in sorted(named) if suspect.explains(key, hosts)]
        for component in (component for suspect in explaining for component in suspect.components):
            if _explains(component, *key, hosts):
                explained.setdefault(component, []).extend(numbers)
        unexplained += numbers if not explaining else ()
        shared += numbers if len(explaining) > 1 else ()
    rivals = [{component for suspect in chosen - named for component in suspect.components} for chosen in sets]
    return Explanation(
        {component: tuple(sorted(numbers)) for component, numbers in explained.items()},
        tuple(sorted(unexplained)),
        tuple(sorted(shared)),
        tuple(tuple(sorted(rival)) for rival in rivals) if sets[1:] else (),
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
    component: Part, check: str, subject: Subject, suspects: tuple[int, ...], exchanged: bool, hosts: Sequence[int]
) -> bool:
    members = subject.members
    if component.kind == "host":
        return component in _hosts_of(subject, hosts)
    if subject.kind == "host":
        return False
    if component.kind == "gpu":
        return component.members[0] in (suspects or members)
    if component.kind == "host-link":
        if subject.kind in ("upload", "download"):
            return members == component.members
        return CHECKLIST[check].over_the_host and subject.kind in ("gpu", "group") and component.members[0] in members
    if subject.kind == "copy":
        return members == component.members
    clears_it = bool(suspects) and not set(suspects) & set(component.members)
    return subject.kind == "group" and exchanged and set(component.members) <= set(members) and not clears_it


class _Candidates:
    """The suspects of the failures of a run, with their prices. `explain` makes it and asks once for the sets."""

    def __init__(self, failed: Sequence[Key], passed: Iterable[Key], hosts: Sequence[int]) -> None:
        self.failed = failed
        self.hosts = hosts
        # A key that passed counts for a part only if it never failed: a fault may be intermittent.
        self.passed = set(passed) - set(failed)

    def sets(self) -> list[frozenset[Suspect]]:
        """Return every smallest set of candidates that explains all failures; none if there are too many to try."""
        candidates = self.candidates
        explained = [frozenset(each for each in candidates if each.explains(key, self.hosts)) for key in self.failed]
        price = {}
        for candidate in candidates:
            failures = sum(candidate.explains(key, self.hosts) for key in self.failed)
            passes = sum(candidate.explains(key, self.hosts) for key in self.passed)
            price[candidate] = candidate.cost + _SPOILED * passes / max(1, passes + failures)
        for link in (candidate for candidate in candidates if len(candidate.components) == 2):
            pair = link.components[0].members
            ends = {(Part("gpu", (member,)),) for member in pair}
            if not self._controlled(pair):
                price[link] = max(price[link], min(price[end] for end in candidates if end.components in ends))
        for suspect in (candidate for candidate in candidates if candidate.components[0].kind == "host"):
            if failing := self._all_that_fail(suspect.components[0].members[0]):
                together = sum(price[candidate] for candidate in candidates if candidate.components in failing)
                price[suspect] = min(price[suspect], together * (_ONE_CAUSE if len(failing) > 2 else 1.0))
        return smallest_sets(explained, price, _ALIKE) or []

    def _all_that_fail(self, host: int) -> set[tuple[Part, ...]]:
        """Return the GPUs of a host, two or more, if each fails the same check alone; all but one, which then explain
        the failures, if each pair fails the same check; else nothing."""
        gpus = [gpu for gpu, its in enumerate(self.hosts) if its == host]
        failing = {
            (check, frozenset(subject.members))
            for check, subject, _, exchanged in self.failed
            if subject.kind == "gpu" or (len(subject.members) == 2 and exchanged)
        }
        for size, without in ((1, 0), (2, 1)):
            groups = [frozenset(members) for members in itertools.combinations(gpus, size)]
            if len(groups) > 1 and any(all((check, members) in failing for members in groups) for check in CHECKLIST):
                return {(Part("gpu", (gpu,)),) for gpu in gpus[without:]}
        return set()

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
        components: set[Part] = set()
        copies: set[tuple[int, ...]] = set()
        groups: dict[tuple[int, ...], float] = {}
        for _, subject, suspects, exchanged in self.failed:
            components |= _hosts_of(subject, self.hosts)
            if subject.kind == "host":
                continue
            components |= {Part("gpu", (member,)) for member in suspects or subject.members}
            if subject.kind in ("upload", "download"):
                components.add(Part("host-link", subject.members))
            elif subject.kind == "copy":
                components.add(Part("link", subject.members))
                copies.add(subject.members)
            elif subject.kind == "group" and exchanged and len(subject.members) == 2:
                pair = tuple(sorted(subject.members))
                groups[pair] = min(groups.get(pair, _AGAINST_DATA), _AGAINST_DATA if suspects else _COST["link"])
        alone = [Suspect((component,), _COST[component.kind]) for component in components]
        # A failed group does not show which direction of the link is wrong.
        both = {pair: cost for pair, cost in groups.items() if not copies & {pair, pair[::-1]}}
        both |= {pair: _BOTH_WAYS for pair in copies if pair < pair[::-1] and pair[::-1] in copies}
        links = (Suspect((Part("link", pair), Part("link", pair[::-1])), cost) for pair, cost in both.items())
        return sorted([*alone, *links])


LOCALISATION_SECONDS = {"quick": 60.0, "standard": 300.0, "long": 1800.0}
"""Time for all second looks of a run, by level. A call that is running when it is over ends first."""

LOCALISATION_CASES = {"quick": 2, "standard": 4, "long": 8}
_REPEATS = {"quick": 3, "standard": 10, "long": 30}
"""Most repeats until a case fails again: an intermittent fault passes some of them."""

_NO_PEERS = {"NCCL_P2P_DISABLE": "1"}
_ARMS: Mapping[str, Mapping[str, str]] = {
    "without shared memory (NCCL_SHM_DISABLE=1)": {"NCCL_SHM_DISABLE": "1"},
    "with launches that block (CUDA_LAUNCH_BLOCKING=1)": {"CUDA_LAUNCH_BLOCKING": "1"},
}
_ARMS_FROM = ("standard", "long")


@dataclass(frozen=True)
class Look:
    """The result of a second look at one case."""

    case: str
    check: str
    group: tuple[int, ...]  # the smallest group that failed
    seen: tuple[str, ...]  # the findings, a line each
    follows_rank: bool = False  # the fault stays with a rank when the rank gets another device
    needs_history: bool = False  # the case fails in the processes of the run, and passes in fresh ones on the same GPUs


def look_again(node: Node, log: RunLog, clock: Callable[[], float] = time.monotonic) -> Iterator[Look]:
    """Repeat the cases that failed in groups, up to the number and time for the level, and record the results in the
    log. Yield each look when it is done; for a case that the time did not suffice for, a look that says so."""
    calls: dict[str, RepeatableCall] = {}
    for entry, call in log.failed_calls():
        if entry.subject.kind == "group" and len(call.gpus) > 1 and call.host is None:
            calls.setdefault(call.case, call)
    until = clock() + LOCALISATION_SECONDS[node.depth]
    for call in itertools.islice(calls.values(), LOCALISATION_CASES[node.depth]):
        section = log.begin(call.check, f"second look at {call.case}")
        try:
            look = _SecondRun(node, call, lambda: clock() > until).look()
        except _TimeIsOver:
            limit = f"{LOCALISATION_SECONDS[node.depth]:g} s"
            message = f"a second look did not end: the time for all of them, {limit}, was over"
            look = Look(call.case, call.check, call.gpus, (message,))
        finally:
            section.ended = log.now()
        yield look


def _has_failed(entries: Iterable[Observation]) -> bool:
    return any(entry.outcome == "failed" for entry in entries)


def control(node: Node, call: RepeatableCall) -> Look:
    """Repeat a call that has failed in fresh processes on the same GPUs, and in those of the run.

    A call whose failure needs what ran before in its processes accuses no part. It passes in fresh processes, and fails
    in those of the run, each time.
    """
    repeats = _REPEATS[node.depth]
    fresh = (node.repeat_in_fresh_processes(call) for _ in range(repeats))
    in_run = (node.repeat(call, call.gpus) for _ in range(repeats))
    if any(map(_has_failed, fresh)) or not all(map(_has_failed, in_run)):
        return Look(call.case, call.check, call.gpus, ())
    message = (
        f"a failure on GPUs {_list(sorted(call.gpus))} does not come again in {repeats} fresh processes, and comes "
        f"{repeats} times in those of the run: it needs what ran before, so it accuses no part"
    )
    return Look(call.case, call.check, call.gpus, (message,), needs_history=True)


class _TimeIsOver(Exception):
    """The time for second looks is over, so nothing more can be concluded from the one that runs."""


def found_about(component: Part, calls: Iterable[RepeatableCall], looks: Iterable[Look]) -> str:
    """Return in one line the findings of the repeats that concern `component` or calls that it explains."""
    cases = {(call.check, call.case) for call in calls}
    mine = [look for look in looks if (look.check, look.case) in cases]
    about = [look for look in mine if component.kind == "host" or set(component.members) <= set(look.group)]
    return "; ".join(dict.fromkeys(line for look in about for line in look.seen))


class _SecondRun:
    """One second look: `look_again` makes it for a call, and `look` ends with the result, or raises `_TimeIsOver`."""

    def __init__(self, node: Node, call: RepeatableCall, is_late: Callable[[], bool]) -> None:
        self.node, self.call, self.is_late = node, call, is_late
        self.repeats = _REPEATS[node.depth]

    def look(self) -> Look:
        group = tuple(gpu for gpu in self.call.gpus if gpu not in self.node.lost)
        if len(group) < 2 or not self._fails(group):
            return self._end(group, f"did not fail again in {self._repeats_of(group)} repeats on the same GPUs")
        smallest = self._narrowed(group)
        findings = [] if set(smallest) == set(group) else [f"fails on GPUs {_list(sorted(smallest))} alone"]
        if len(smallest) == 2:
            findings += self._around(smallest, group)
        follows = self._permuted(group)
        if follows:
            findings.append(follows)
        findings += self._arms(smallest)
        return self._end(smallest, *findings, follows_rank=follows == _FOLLOWS_RANK)

    def _end(self, group: tuple[int, ...], *findings: str, follows_rank: bool = False) -> Look:
        return Look(self.call.case, self.call.check, group, findings, follows_rank)

    def _fails(self, group: Sequence[int], environment: Mapping[str, str] | None = None) -> tuple[int, ...]:
        """Repeat the case on a group until it fails, and return the GPUs in the order that failed; empty if none did.
        Each repeat gives each rank the next GPU: a GPU that receives wrong data is right where it is the root."""
        for repeat in range(self._repeats_of(group)):
            if self.is_late():
                raise _TimeIsOver
            order = _turned(group, repeat)
            if self._failed(order, environment):
                return order
            if not set(group) <= set(self.node.numbers):
                break
        return ()

    def _repeats_of(self, group: Sequence[int]) -> int:
        return max(self.repeats, len(group))

    def _failed(self, order: Sequence[int], environment: Mapping[str, str] | None = None) -> list[Observation]:
        return [entry for entry in self.node.repeat(self.call, order, environment) if entry.outcome == "failed"]

    def _narrowed(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """Return the smallest failing group, found by halving. If neither half fails, try pairs across the halves."""
        if len(group) <= 2:
            return group
        middle = len(group) // 2
        for half in (group[:middle], group[middle:]):
            if len(half) > 1 and self._fails(half):
                return self._narrowed(half)
        pairs = (self._fails(pair) for pair in itertools.product(group[:middle], group[middle:]))
        return next(filter(None, pairs), group)

    def _around(self, pair: tuple[int, ...], group: Sequence[int]) -> list[str]:
        """Pair each GPU of a failing pair with other GPUs: a GPU that fails with them too is at fault."""
        others = [gpu for gpu in group if gpu not in pair][:2]
        findings = []
        for gpu in pair:
            failing = [peer for peer in others if self._fails((gpu, peer))]
            if failing:
                findings.append(f"GPU {gpu} fails with GPU {_list(failing)}, too")
            elif others:
                findings.append(f"GPU {gpu} is right with GPU {_list(others)}")
        return findings

    def _permuted(self, group: tuple[int, ...]) -> str | None:
        """Run with each device at each rank, and return what the fault follows; None if too few runs show it.
        A fault follows the rank only if it shows on every device of the group there."""
        devices: list[set[int]] = []
        ranks: list[set[int]] = []
        for by in range(len(group)):
            order = _turned(group, by)
            for _ in range(self.repeats):
                if failed := self._failed(order):
                    break
            suspects = {gpu for entry in failed for gpu in entry.suspects}
            devices.append(suspects)
            ranks.append({order.index(gpu) for gpu in suspects})
        pointing = [suspects for suspects in devices if suspects]
        if len(pointing) < 2:
            return None
        if set.intersection(*pointing):
            return _FOLLOWS_DEVICE
        return _FOLLOWS_RANK if set.intersection(*ranks) else "follows neither the device nor the rank"

    def _arms(self, group: tuple[int, ...]) -> list[str]:
        findings = ["only over the direct path between GPUs: right with NCCL_P2P_DISABLE=1"]
        if self._fails(group, _NO_PEERS):
            findings = ["fails without the direct path between GPUs (NCCL_P2P_DISABLE=1), too"]
        for name, environment in _ARMS.items() if self.node.depth in _ARMS_FROM else ():
            findings.append(f"{'fails' if self._fails(group, environment) else 'is right'} {name}")
        return findings


_FOLLOWS_DEVICE = "follows the device to another rank"
_FOLLOWS_RANK = "follows the rank to another device"


def _turned(group: Sequence[int], by: int) -> tuple[int, ...]:
    """Return the group with each rank on the device of `by` ranks later."""
    by %= len(group)
    return (*group[by:], *group[:by])


def _list(gpus: Sequence[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, gpus[:-1])), str(gpus[-1]))))


@dataclass(frozen=True)
class Remedy:
    """The remedy for an accused part: its urgency, the first action of a program, and the advice to a person."""

    severity: Severity
    action: Action
    advice: str


_ADVICE: Mapping[PartKind, str] = {
    "gpu": "drain the node, reset this GPU and run again; if it fails again, send it back",
    "link": "drain the node, look at the settings of IOMMU and ACS if the link is PCIe, re-seat both GPUs or their "
    "bridge, and run again; if it fails again, send back the baseboard, or the bridge",
    "host-link": "drain the node, re-seat this GPU, look at its slot and riser, and run again; if it fails again, try "
    "the GPU in another slot",
    "host": "look at what all GPUs share: driver, libraries, firmware, IOMMU and ACS settings; run again on one GPU "
    "at a time",
}
_ACTIONS: Mapping[PartKind, Action]
_ACTIONS = {"gpu": "reset-gpu", "link": "reseat", "host-link": "reseat", "host": "inspect-node"}
_SUBJECTS = {"gpu": ("gpu",), "link": ("copy",), "host-link": ("upload", "download"), "host": ("host",)}
"""The subjects whose findings are about a part of each kind itself."""


def remedy_for(component: Part, failed: Sequence[Observation]) -> Remedy:
    """Return what to do about `component`, given the failed observations that it explains.
    A finding about another subject is a symptom: its severity and its action are not those of the part."""
    remedy = Remedy("isolate", _ACTIONS[component.kind], _ADVICE[component.kind])
    defects = listed(entry for entry in failed if _names_the_defect(entry))
    own = listed(entry for entry in failed if _is_about(entry.subject, component))
    if finding := next(iter(defects or own), None):
        remedy = replace(remedy, severity=finding.severity, action=suited(finding.action, component.kind))
    if defects:  # its finding gives better advice than the kind of the part
        return replace(remedy, advice=f"drain the node; {defects[0].advice}")
    if {entry.check for entry in failed} == {"performance"}:
        instruction = "look at clocks, throttle reasons, power and cooling, and at the width of its links"
        return replace(remedy, advice=f"{instruction}; {remedy.advice}")
    return remedy


def of_symptoms(
    findings: Iterable[ReportedFinding], observations: Sequence[Observation], accusations: Sequence[Accusation]
) -> Iterator[ReportedFinding]:
    """Yield the findings of a run. One whose subject is not accused asks to inspect the node, not for another part."""
    for finding in findings:
        own = any(_is_about(finding.subject, accusation.part) for accusation in accusations)
        if finding.ruling != "reject" or own or finding.severity == "config":
            yield finding
            continue
        about = finding.id, finding.subject
        mine = {number for number, entry in enumerate(observations) if (entry.finding, entry.subject) == about}
        causes = [str(accusation.part) for accusation in accusations if mine & set(accusation.observations)]
        advice = f"see the verdict on {' and '.join(causes)}, which explains it" if causes else finding.advice
        yield replace(finding, severity="isolate", action="inspect-node", advice=advice)


def _is_about(subject: Subject, component: Part) -> bool:
    return subject.kind in _SUBJECTS[component.kind] and subject.members == component.members


def _names_the_defect(entry: Observation) -> bool:
    """Return whether a check of facts reports a defect, not a call that ended with an error."""
    check = CHECKLIST[entry.check]
    return (check.of_driver or check.of_facts) and "ended" not in entry.evidence


def evidence_lines(
    observations: Sequence[Observation], numbers: Sequence[int], others: Mapping[int, Sequence[Part]]
) -> Iterator[str]:
    """Yield a line for each check, subject and kind of finding that failed, with the number of failures. `others` has
    the other accused parts that explain an observation, by its index."""
    looks = Counter((entry.check, entry.subject.in_any_order) for entry in observations)
    failed: dict[tuple[str, Subject, str], list[int]] = {}
    for number in numbers:
        entry = observations[number]
        failed.setdefault((entry.check, entry.subject.in_any_order, entry.finding), []).append(number)
    for (check, subject, _), mine in failed.items():
        entry = observations[mine[0]]
        case = f" ({entry.case})" if entry.case else ""
        also = dict.fromkeys(str(component) for number in mine for component in others.get(number, ()))
        shared = f"; shared: {' and '.join(also)} may explain it alone" if also else ""
        count = f"{len(mine)} of {looks[check, subject]} looks failed"
        yield f"{check}: {entry.subject}: {entry.seen}{case}; {count}{shared}"
