"""Compare measurements of GPUs and links with those of the others of the node."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import permutations
from statistics import median
from typing import Any

from mgpu_check.acceptance.comparison import UNUSABLE, Comparison, beside_peers, least_shortfall, models, useless
from mgpu_check.acceptance.robust import DEVIATIONS, LEAST_PEERS, modes, noise_of_median, shortfall
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.devices.observations import Measurement, Subject
from mgpu_check.devices.telemetry.fields import pair_field

Group = Mapping[int, Measurement]
"""Measurements that are compared with each other, by their places among all."""


def link_classes(gpus: Sequence[Gpu]) -> dict[tuple[int, int], str]:
    """Return the class of each link over PCIe between two GPUs, as (source, destination) -> class.

    Pairs with NVLink have no class, because the number of links between two GPUs depends on the board.
    """
    found = {}
    for gpu, peer in permutations(gpus, 2):
        path, ability = (gpu.facts.get(pair_field(name, peer.number)) for name in ("topology", "p2p"))
        if path is not None and ability is not None and "nvlink" not in str(ability).lower():
            found[gpu.number, peer.number] = f"{path}, {ability}"
    return found


def gpus_of(subject: Subject) -> tuple[int, ...]:
    """Return the numbers of the GPUs of a subject; none for a host."""
    return () if subject.kind == "host" else subject.members


def among_peers(
    measurements: Sequence[Measurement], gpus: Mapping[int, Gpu], links: Mapping[tuple[int, int], str]
) -> tuple[dict[int, Comparison], list[Group]]:
    """Compare each measurement with its peers, and return the groups that differ without a majority."""
    found: dict[int, Comparison] = {}
    groups: defaultdict[tuple[Any, ...], dict[int, Measurement]] = defaultdict(dict)
    turns: Counter[tuple[Any, ...]] = Counter()
    model = models(gpus.values())
    for number, measurement in enumerate(measurements):
        why = useless(measurement)
        if why:
            found[number] = Comparison("peers", "unknown", why=why)
            continue
        kind, pair = measurement.kind, measurement.subject.is_pair
        turn = turns[(measurement.subject, *kind)]
        turns[(measurement.subject, *kind)] += 1
        members = [gpus[gpu] for gpu in gpus_of(measurement.subject)]
        kinds = tuple(sorted(model[gpu.number] for gpu in members))
        link = links.get((members[0].number, members[-1].number), "") if pair else ""
        hosts = tuple(sorted({gpu.host for gpu in members}))
        # GPUs are compared over all hosts, links within a host with each other, links between hosts with each other.
        where = hosts if pair and len(hosts) == 1 else len(hosts)
        groups[(turn, *kind, kinds, where, link)][number] = measurement
    split: list[Group] = []
    for key, group in groups.items():
        if next(iter(group.values())).subject.is_pair and len(group) > 2:
            found.update(_pairs(group, bool(key[-1])))
            continue
        compared, divided = _majority(group)
        found.update(compared)
        split += [group] if divided else []
    return found, split


def _noise(group: Group) -> float:
    return noise_of_median([(m.spread, m.repeats) for m in group.values() if m.spread is not None])


def _majority(group: Group) -> tuple[dict[int, Comparison], bool]:
    """Compare each measurement with all others, and return whether they differ without a majority.

    If half of them or more fail, the slow ones are unknown. Two values have no majority.
    """
    first, noise, found = next(iter(group.values())), _noise(group), {}
    least = least_shortfall(first.kind)
    for number, mine in group.items():
        others = [other.value for other_number, other in group.items() if other_number != number]
        found[number] = beside_peers(mine.value, others, mine.unit, least, noise)
    if len(group) == 2:
        slow, fast = sorted((m.value for m in group.values()), reverse=first.unit == "s")
        return found, shortfall(slow, fast, first.unit) > max(least, DEVIATIONS * noise / fast)
    failed = [number for number, comparison in found.items() if comparison.outcome == "failed"]
    if divided := 2 * len(failed) >= len(group) > 1:
        why = f"{len(failed)} of {len(group)} are slower than the others: no majority shows which are right"
        found.update(
            (number, Comparison("peers", "unknown", why=why, reference=found[number].reference)) for number in failed
        )
    return found, divided


def _pairs(group: Group, topology_known: bool) -> dict[int, Comparison]:
    """Compare each link with links of its class, preferably with those that share no GPU with it."""
    first = next(iter(group.values()))
    least, noise = least_shortfall(first.kind), _noise(group)
    pairs = {number: (m.subject.members[0], m.subject.members[-1]) for number, m in group.items()}
    values = {pairs[number]: m.value for number, m in group.items()}
    speeds = {pair: 1 / value if first.unit == "s" else value for pair, value in values.items()}
    if first.subject.kind == "group":  # without a direction
        speeds |= {pair[::-1]: speed for pair, speed in speeds.items()}
    gap = max(least, min(DEVIATIONS * noise / median(values.values()), UNUSABLE))
    three = len({gpu for pair in values for gpu in pair}) == 3
    found = {}
    for link_class in modes(speeds, gap, topology_known):
        others = link_class.pairs - link_class.reference
        slowest = min(speeds[pair] for pair in link_class.reference)
        star = three and not topology_known and any(speeds[pair] > slowest for pair in others)
        for number in (number for number, pair in pairs.items() if pair in link_class.pairs):
            mine = pairs[number]
            if star and mine in link_class.reference:
                why = (
                    "two of three GPUs have a faster link between them: the topology may be like that, or the third "
                    "is slow"
                )
                found[number] = Comparison("peers", "unknown", why=why)
                continue
            peers = [pair for pair in values if pair in link_class.reference and pair != mine]
            apart = [pair for pair in peers if not set(pair) & set(mine)]
            everyone = [pair for pair in values if pair in link_class.pairs and pair != mine]
            chosen = next((several for several in (apart, peers) if len(several) >= LEAST_PEERS), everyone)
            found[number] = beside_peers(values[mine], [values[pair] for pair in chosen], first.unit, least, noise)
    return found
