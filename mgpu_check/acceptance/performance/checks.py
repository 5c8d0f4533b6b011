"""Compare measurements of GPUs and links with those of the others of the node.

From the reports of many nodes, find those that are slower than the other nodes of their model.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import median
from typing import Any

from mgpu_check.acceptance.comparison import (
    DEVIATIONS,
    LEAST_PEERS,
    UNUSABLE,
    Against,
    Comparison,
    amount,
    beside_peers,
    least_shortfall,
    models,
    modes,
    noise_of_median,
    shortfall,
    useless,
    wrong,
)
from mgpu_check.acceptance.references import SOFTWARE, Baseline, Floors, packaged_floors
from mgpu_check.acceptance.run_report import Gpu, RunReport
from mgpu_check.devices.observations import Measurement, Observation, Outcome, Subject, Work
from mgpu_check.devices.telemetry.fields import pair_field

Group = Mapping[int, Measurement]  # measurements that are compared with each other, by their places among all


def link_classes(gpus: Sequence[Gpu]) -> dict[tuple[int, int], str]:
    """Return the class of each link over PCIe between two GPUs, as (source, destination) -> class.
    Pairs with NVLink have no class, because the number of links between two GPUs depends on the board."""
    classes = {}
    for gpu, peer in permutations(gpus, 2):
        path, ability = (gpu.facts.get(pair_field(name, peer.number)) for name in ("topology", "p2p"))
        if path is not None and ability is not None and "nvlink" not in str(ability).lower():
            classes[gpu.number, peer.number] = f"{path}, {ability}"
    return classes


def gpus_of(subject: Subject) -> tuple[int, ...]:
    """Return the numbers of the GPUs of a subject; none for a host."""
    return () if subject.kind == "host" else subject.members


def among_peers(
    measurements: Sequence[Measurement], gpus: Mapping[int, Gpu], links: Mapping[tuple[int, int], str]
) -> tuple[dict[int, Comparison], list[Group]]:
    """Compare each measurement with its peers, and return the groups that differ without a majority."""
    comparisons: dict[int, Comparison] = {}
    groups: defaultdict[tuple[Any, ...], dict[int, Measurement]] = defaultdict(dict)
    turns: Counter[tuple[Any, ...]] = Counter()
    model = models(gpus.values())
    for number, measurement in enumerate(measurements):
        reason = useless(measurement)
        if reason:
            comparisons[number] = Comparison("peers", "unknown", why=reason)
            continue
        measured_kind, pair = measurement.kind, measurement.subject.is_pair
        turn = turns[(measurement.subject, *measured_kind)]
        turns[(measurement.subject, *measured_kind)] += 1
        members = [gpus[gpu] for gpu in gpus_of(measurement.subject)]
        kinds = tuple(sorted(model[gpu.number] for gpu in members))
        link = links.get((members[0].number, members[-1].number), "") if pair else ""
        hosts = tuple(sorted({gpu.host for gpu in members}))
        # GPUs are compared over all hosts, links within a host with each other, links between hosts with each other.
        location = hosts if pair and len(hosts) == 1 else len(hosts)
        groups[(turn, *measured_kind, kinds, location, link)][number] = measurement
    split: list[Group] = []
    for key, group in groups.items():
        if next(iter(group.values())).subject.is_pair and len(group) > 2:
            comparisons.update(_pairs(group, bool(key[-1])))
            continue
        compared, divided = _majority(group)
        comparisons.update(compared)
        split += [group] if divided else []
    return comparisons, split


def _noise(group: Group) -> float:
    return noise_of_median([(m.spread, m.repeats) for m in group.values() if m.spread is not None])


def _majority(group: Group) -> tuple[dict[int, Comparison], bool]:
    """Compare each measurement with all others, and return whether they differ without a majority.
    If half of them or more fail, the slow ones are unknown. Two values have no majority."""
    head, noise, comparisons = next(iter(group.values())), _noise(group), {}
    least = least_shortfall(head.kind)
    for number, mine in group.items():
        others = [measurement.value for other_number, measurement in group.items() if other_number != number]
        comparisons[number] = beside_peers(mine.value, others, mine.unit, least, noise)
    if len(group) == 2:
        slow, fast = sorted((m.value for m in group.values()), reverse=head.unit == "s")
        return comparisons, shortfall(slow, fast, head.unit) > max(least, DEVIATIONS * noise / fast)
    failed = [number for number, comparison in comparisons.items() if comparison.outcome == "failed"]
    if divided := 2 * len(failed) >= len(group) > 1:
        reason = f"{len(failed)} of {len(group)} are slower than the others: no majority shows which are right"
        for number in failed:
            comparisons[number] = Comparison("peers", "unknown", comparisons[number].reference, why=reason)
    return comparisons, divided


def _pairs(group: Group, topology_known: bool) -> dict[int, Comparison]:
    """Compare each link with links of its class, preferably with those that share no GPU with it."""
    head = next(iter(group.values()))
    least, noise = least_shortfall(head.kind), _noise(group)
    pairs = {number: (m.subject.members[0], m.subject.members[-1]) for number, m in group.items()}
    values = {pairs[number]: m.value for number, m in group.items()}
    speeds = {pair: 1 / value if head.unit == "s" else value for pair, value in values.items()}
    if head.subject.kind == "group":  # without a direction
        speeds |= {pair[::-1]: speed for pair, speed in speeds.items()}
    gap = max(least, min(DEVIATIONS * noise / median(values.values()), UNUSABLE))
    three = len({gpu for pair in values for gpu in pair}) == 3
    comparisons = {}
    for link_class in modes(speeds, gap, topology_known):
        others = link_class.pairs - link_class.reference
        slowest = min(speeds[pair] for pair in link_class.reference)
        star = three and not topology_known and any(speeds[pair] > slowest for pair in others)
        for number in (number for number, pair in pairs.items() if pair in link_class.pairs):
            mine = pairs[number]
            if star and mine in link_class.reference:
                reason = "two of three GPUs have a faster link between them: the topology may be like that"
                comparisons[number] = Comparison("peers", "unknown", why=f"{reason}, or the third is slow")
                continue
            peers = [pair for pair in values if pair in link_class.reference and pair != mine]
            disjoint = [pair for pair in peers if not set(pair) & set(mine)]
            everyone = [pair for pair in values if pair in link_class.pairs and pair != mine]
            chosen = next((several for several in (disjoint, peers) if len(several) >= LEAST_PEERS), everyone)
            comparisons[number] = beside_peers(values[mine], [values[pair] for pair in chosen], head.unit, least, noise)
    return comparisons


CHECK = "performance"

_OWN_LOSS = 0.25
"""Share of the speed that a GPU may lose after its first measurement in a run: clocks fall by a few percent as it warms
up."""

_OTHERS, _ITSELF = "the others", "its own first measurement"
_NAMES: Mapping[Against, str]
_NAMES = {"peers": _OTHERS, "itself": _ITSELF, "baseline": "the baseline", "floor": "the floor of its SKU"}


def judge(
    measurements: Sequence[Measurement],
    gpus: Sequence[Gpu],
    baseline: Baseline | None = None,
    floors: Floors | None = None,
    software: Mapping[int, Mapping[str, str]] | None = None,
    links: Mapping[tuple[int, int], str] | None = None,
    second_look: Sequence[Measurement] = (),
) -> list[Observation]:
    """Compare each measurement with its references.

    Args:
        measurements: with numbers of GPUs in the run. Several measurements of one subject, quantity and size must be in
            the order of time; the later ones are also compared with the first.
        baseline: result of `mgpu_check.acceptance.references.read_baseline`; None without a baseline.
        floors: default the table of this package.
        software: versions of "driver", "cuda", "nccl" and "torch" by host; a baseline of other versions does not count.
        links: class of the link from the first GPU to the second. Only links of one class are compared. For a pair
            without a class, the classes are derived from the speeds. Default the classes that the facts of the GPUs
            give.
        second_look: measurements of a second look, in another order. A value that was measured again is slow only if
            both looks show it; if one does, the observation has the evidence "once".

    Returns:
        One observation for each measurement. A measurement without any comparison is unknown. It is skipped instead if
        the subject has another measurement with a comparison, or is a group, because its GPUs and links are judged by
        themselves.

        In addition a failed observation of the group of GPUs that differ without a majority. Its evidence has the key
        "differ", or "differ to the host" for copies from and to the host.

        And one unknown observation for each GPU without a comparison with `floors` or `baseline`: if all GPUs of a node
        are too slow, a comparison between them does not show it. The same if `baseline` is given and does not apply.
    """
    floors = packaged_floors() if floors is None else floors
    by_number = {gpu.number: gpu for gpu in gpus}
    first_look = len(measurements)
    measurements = [*measurements, *second_look]
    unknown = sorted({gpu for m in measurements for gpu in gpus_of(m.subject)} - set(by_number))
    if unknown:
        raise ValueError(f"judge: measurements are of GPUs {unknown}, but gpus has {sorted(by_number)}")
    beside, split = among_peers(measurements, by_number, link_classes(gpus) if links is None else links)
    judged: list[tuple[Measurement, list[Comparison]]] = []
    firsts: dict[tuple[Any, ...], Measurement] = {}
    for number, measurement in enumerate(measurements):
        comparisons = [beside[number]]
        judged.append((measurement, comparisons))
        if useless(measurement):
            continue
        earliest = firsts.setdefault((measurement.subject, *measurement.kind), measurement)
        if earliest is not measurement:
            comparisons.append(_beside_itself(measurement, earliest))
        if baseline is not None:
            comparisons.append(baseline.compare(measurement, by_number, software or {}))
        comparisons += floors.compare(measurement, by_number)
    compared = {speed.subject for speed, comparisons in judged if _outcome(comparisons) in ("passed", "failed")}
    observations = [_observation(measurement, comparisons, compared) for measurement, comparisons in judged]
    looks = [
        _JudgedSpeed(number >= first_look, speed.kind, entry)
        for number, (speed, entry) in enumerate(zip(measurements, observations, strict=True))
    ]
    open_ = [group for group in split if all(observations[number].outcome != "failed" for number in group)]
    looks += [_differ(group, min(group) >= first_look) for group in open_]  # another reference has not decided
    return _confirmed(looks) + list(_without_reference(judged, by_number, baseline, floors, software or {}))


@dataclass(frozen=True)
class _JudgedSpeed:
    second: bool
    measured_kind: tuple[Any, ...]
    entry: Observation

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.entry.subject, self.measured_kind)


def _confirmed(looks: Sequence[_JudgedSpeed]) -> list[Observation]:
    """Return the observations of both looks; failures that one of two looks shows have the evidence "once"."""
    repeated = {look.measured_kind for look in looks if look.second}
    failures = [look for look in looks if look.entry.outcome == "failed"]
    both = {look.key for look in failures if look.second} & {look.key for look in failures if not look.second}
    observations = []
    for look in looks:
        entry = look.entry
        if entry.outcome == "failed" and look.measured_kind in repeated:
            once = look.key not in both
            remark = "in one of two looks only" if once else "again when measured in another order"
            evidence = {**entry.evidence, "once": True} if once else entry.evidence
            entry = replace(entry, seen=f"{entry.seen}; {remark}", evidence=evidence)
        observations.append(entry)
    return observations


def unmeasured(measurements: Sequence[Measurement], gpus: Sequence[Gpu]) -> list[Observation]:
    """Return an observation for each GPU whose own speed was not measured: skipped if its links were, else unknown."""
    measured = {m.subject.members[0] for m in measurements if m.subject.kind == "gpu"}
    linked = {member for m in measurements for member in gpus_of(m.subject)}
    observations = []
    for gpu in gpus:
        subject = Subject("gpu", (gpu.number,))
        if gpu.number in linked - measured:
            observations.append(Observation(CHECK, subject, "skipped", "only its links were measured"))
        elif gpu.number not in measured:
            reason = "no check has measured how fast it is; memory, compute and links do"
            observations.append(Observation(CHECK, subject, "unknown", reason))
    return observations


def _differ(group: Group, second: bool) -> _JudgedSpeed:
    """Return the observation of GPUs that differ, which accuses no GPU."""
    several = sorted(group.values(), key=lambda measurement: measurement.subject)
    head, values = several[0], {str(m.subject): amount(m.value, m.unit) for m in several}
    members = tuple(sorted({gpu for m in several for gpu in gpus_of(m.subject)}))
    key = "differ to the host" if head.subject.kind in ("upload", "download") else "differ"
    evidence = {
        "measured_by": head.check, "quantity": head.quantity, "unit": head.unit, "size": head.size,
        key: {str(m.subject): m.value for m in several},
    }  # fmt: skip
    message = f"{head.quantity} differs: {', '.join(map(': '.join, values.items()))}; no majority shows which is right"
    subject, work = Subject("group", members), Work(operations=min(m.repeats for m in several))
    entry = Observation(CHECK, subject, "failed", message, _size(head), work, evidence, members)
    return _JudgedSpeed(second, head.kind, entry)


def _beside_itself(measurement: Measurement, earliest: Measurement) -> Comparison:
    missing = shortfall(measurement.value, earliest.value, measurement.unit)
    limit = max(_OWN_LOSS, least_shortfall(measurement.kind))
    outcome: Outcome = "failed" if missing > limit else "passed"
    return Comparison("itself", outcome, earliest.value, missing, limit, "first measurement of this run")


def _outcome(comparisons: Sequence[Comparison]) -> Outcome:
    outcomes = [comparison.outcome for comparison in comparisons]
    return "failed" if "failed" in outcomes else "passed" if "passed" in outcomes else "unknown"


def _observation(
    measurement: Measurement, comparisons: Sequence[Comparison], compared: Collection[Subject]
) -> Observation:
    outcome = _outcome(comparisons)
    telling = [comparison for comparison in comparisons if comparison.outcome == outcome]
    elsewhere = measurement.subject in compared or measurement.subject.kind == "group"
    if outcome == "unknown" and elsewhere and not wrong(measurement):
        outcome = "skipped"
    evidence = {
        "measured_by": measurement.check,
        **({"collective": True} if measurement.check == "collectives" else {}),
        **{name: getattr(measurement, name) for name in ("quantity", "unit", "size")},
        "value": measurement.value if math.isfinite(measurement.value) else str(measurement.value),
        "repeats": measurement.repeats,
        "spread": measurement.spread,
        "comparisons": [comparison.as_json() for comparison in comparisons],
    }
    message, work = "" if outcome == "passed" else _seen(measurement, telling), Work(operations=measurement.repeats)
    return Observation(CHECK, measurement.subject, outcome, message, _size(measurement), work, evidence)


def _size(measurement: Measurement) -> str:
    if measurement.unit == "FLOP/s":
        return f"matrices of {measurement.size} x {measurement.size}"
    for name, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if measurement.size >= scale and measurement.size % scale == 0:
            return f"{measurement.size // scale} {name}"
    return f"{measurement.size} B"


def _seen(measurement: Measurement, telling: Sequence[Comparison]) -> str:
    summary = f"{measurement.quantity} is {amount(measurement.value, measurement.unit)}"
    if telling[0].outcome == "unknown":
        return f"{summary}: " + "; ".join(f"against {_NAMES[c.against]}: {c.why}" for c in telling)
    lines = []
    for c in telling:
        assert c.reference is not None and c.missing is not None and c.limit is not None
        least = f"{c.missing:.0%} slower than {amount(c.reference, measurement.unit)}, {c.why}"
        lines.append(f"{least} (limit {c.limit:.0%})" if c.limit else least)
    return f"{summary} ({measurement.repeats} repeats): " + "; ".join(lines)


def _without_reference(
    judged: Sequence[tuple[Measurement, Sequence[Comparison]]],
    gpus: Mapping[int, Gpu],
    baseline: Baseline | None,
    floors: Floors,
    software: Mapping[int, Mapping[str, str]],
) -> Iterator[Observation]:
    measured: dict[int, set[Against]] = {}
    for measurement, comparisons in judged:
        for number in gpus_of(measurement.subject):
            references = measured.setdefault(number, set())
            references.update(c.against for c in comparisons if c.outcome in ("passed", "failed"))
    for number, references in sorted(measured.items()):
        gpu = gpus[number]
        entry = baseline.entry(gpu, software.get(gpu.host, {})) if baseline is not None else None
        lacking = entry if isinstance(entry, str) else ""
        if baseline is not None and not lacking and "baseline" not in references:
            lacking = f"{baseline.file} does not list any of the measured quantities"
        if references & {"baseline", "floor"} and not lacking:
            continue
        listed = floors.about(gpu) or "its floors are for other quantities than those measured"
        trust = "--record-baseline=FILE on a node that you trust"
        message = f"the baseline does not count for {gpu.name}: {lacking}. Record one with {trust}"
        if not lacking:
            message = (
                f"no reference says how fast {gpu.name} should be: {listed}, and no baseline was given. If all GPUs "
                f"were too slow, it would not show. Give --baseline=FILE, recorded with {trust}"
            )
        evidence: dict[str, Any] = {"name": gpu.name, "memory": gpu.memory, "floors": listed, "baseline": lacking}
        evidence["compared"] = sorted(references)
        yield Observation(CHECK, Subject("gpu", (number,)), "unknown", message, "absolute speed", evidence=evidence)


SLOW_NODE = "MGPU-NODE-SLOW"  # id of the finding about a node that stands out


@dataclass(frozen=True)
class Outlier:
    """A node that is too slow compared with the others."""

    host: int  # its number in the report; `name` is its name
    name: str
    quantity: str
    unit: str
    size: int
    value: float  # the median over the measured subjects of this node
    comparison: Comparison
    nodes: int  # number of other nodes in the comparison

    def __str__(self) -> str:
        return f"{self.name}: {self.seen}"

    @property
    def seen(self) -> str:
        c = self.comparison
        return (
            f"{self.quantity} of size {self.size} is {amount(self.value, self.unit)}, {c.missing:.0%} "
            f"slower than {amount(c.reference or 0.0, self.unit)}, the median of {self.nodes} other nodes (limit "
            f"{c.limit:.0%})"
        )

    @property
    def observation(self) -> Observation:
        measured = {"quantity": self.quantity, "unit": self.unit, "size": self.size, "value": self.value}
        evidence = {**measured, "comparisons": [self.comparison.as_json()]}
        case = f"{self.quantity}, size {self.size}"
        host = Subject("host", (self.host,))
        return Observation("performance", host, "failed", self.seen, case, Work(operations=self.nodes), evidence)


@dataclass(frozen=True)
class AmongNodes:
    """The result of `among_nodes`."""

    outliers: tuple[Outlier, ...]
    unknown: tuple[str, ...]  # a line for each node, or quantity of one, that could not be compared, with the reason


def among_nodes(report: RunReport) -> AmongNodes:
    """Compare each node of a report of many nodes with the others of the same model and software.

    A node has one value for each quantity and size: the median over its GPUs or links. A single slow GPU or link does
    not move it; the verdict of the node's own run names that part.
    """
    groups: defaultdict[tuple[Any, ...], dict[int, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
    model = models(report.gpus)
    host_of = {gpu.number: gpu.host for gpu in report.gpus}
    software = {host.number: tuple(host.software.get(name, "") for name in SOFTWARE) for host in report.hosts}
    host_names = {host.number: host.name for host in report.hosts}
    for m in report.measurements:
        if m.subject.kind == "host" or useless(m):
            continue
        hosts = {host_of[member] for member in m.subject.members}
        if len(hosts) == len({model[member] for member in m.subject.members}) == 1:
            host = hosts.pop()
            groups[(model[m.subject.members[0]], software.get(host, ()), m.kind)][host].append(m)
    outliers: list[Outlier] = []
    alone: dict[str, None] = {}
    undecided: dict[str, None] = {}
    for group in groups.values():
        if len(group) <= LEAST_PEERS:
            alone.update((host_names.get(host, f"host {host}"), None) for host in group)
            continue
        standing, reasons = _stand_out(host_names, group)
        outliers += standing
        undecided.update(dict.fromkeys(reasons))
    few = f"fewer than {LEAST_PEERS} other nodes have its model and software; not all was compared"
    return AmongNodes(tuple(outliers), (*(f"{name}: {few}" for name in alone), *undecided))


def _stand_out(
    host_names: Mapping[int, str], group: Mapping[int, Sequence[Measurement]]
) -> tuple[list[Outlier], list[str]]:
    """Return the nodes of a group that are too slow, and why others are undecided."""
    values = {host: median(m.value for m in several) for host, several in group.items()}
    measured_kind = next(iter(group.values()))[0].kind
    label = f"{measured_kind.quantity} of size {measured_kind.size}"
    outliers, reasons = [], []
    for host, value in values.items():
        name = host_names.get(host, f"host {host}")
        others = [value for peer, value in values.items() if peer != host]
        comparison = beside_peers(value, others, measured_kind.unit, least_shortfall(measured_kind))
        if comparison.outcome == "unknown":
            reasons.append(f"{name}: {label}: {comparison.why}")
        if comparison.outcome == "failed":
            outliers.append(Outlier(host, name, *measured_kind[:3], value, comparison, len(others)))
    if 2 * len(outliers) < len(group):
        return outliers, [] if outliers else reasons  # a named node explains why the others scatter
    half = ", ".join(outlier.name for outlier in outliers)
    return [], [*reasons, f"{label}: half of the nodes are slow, none is named: {half}"]
