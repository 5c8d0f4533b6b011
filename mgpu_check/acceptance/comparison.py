"""Compare one value with a reference: peers on the node, a baseline, or a floor; and bits by a vote of GPUs.

Speeds are compared by robust statistics: median, scaled MAD, limits that noise does not reach, and classes of links by
speed.

The median absolute deviation (MAD), times 1.4826, estimates the standard deviation of normal data, even if half of the
data is arbitrary (Leys et al., "Detecting outliers: Do not use standard deviation around the mean, use absolute
deviation around the median", Journal of Experimental Social Psychology 49, 2013). A mean and a standard deviation are
themselves moved by the outlier that they should find: one of four values is never more than 1.5 standard deviations
from the mean.

Leys et al. reject a value from 2.5 or 3 deviations on. Their limit is for one test over many values. An acceptance
tests hundreds of values with two to seven peers each, and the MAD of so few values is often small by chance. A value
therefore fails only if it misses the median of its peers by a least share of the speed *and* by `DEVIATIONS` standard
deviations. The standard deviation is the larger of the estimates from the peers and from the repeats.

A simulation with normal noise, three repeats each and 15 % as the least share gives the probability that a healthy
value fails:

====================================  ========  ========  =========
standard deviation of a single repeat  3 values  4 values  8 values
====================================  ========  ========  =========
up to 4 %                              < 1e-5    < 1e-5    < 1e-5
5 %                                    2e-5      2e-5      < 1e-5
8 %                                    3e-4      1e-4      1e-5
====================================  ========  ========  =========

Bandwidths and products of healthy GPUs, timed by events, scatter by less than 1 %.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.devices.observations import MeasuredKind, Measurement, Outcome, median_and_spread
from mgpu_check.oracles.devices.cases import SECOND_LONGEST
from mgpu_check.processes.rank_lists import grouped

DEVIATIONS = 8.0
"""A value fails if it is this many standard deviations slower than the median of its peers; see the table above."""

LEAST_PEERS = 2
"""Least number of other values in a comparison: two of three values are a majority, but two values do not show which is
right."""

NORMAL = 1.4826
"""Standard deviation of normal data in units of its MAD: 1 / the upper quartile of the standard normal distribution."""

_MEDIAN = 1.2533  # standard error of a median in standard errors of a mean: sqrt(pi / 2)
# Mean MAD of 3 to 7 normal values around their own median, in standard deviations (400000 draws each).
_SMALL = {3: 0.454, 4: 0.530, 5: 0.553, 6: 0.586, 7: 0.592}


def shortfall(value: float, reference: float, unit: str) -> float:
    """Return the share of the reference's speed that is missing: 0.5 is half as fast, negative is faster."""
    speed = reference / value if unit == "s" else value / reference
    return 1.0 - speed


def deviation(values: Sequence[float]) -> float:
    """Estimate the standard deviation of `values` from their MAD. Return 0 for an empty sequence."""
    if not values:
        return 0.0
    return NORMAL * median_and_spread(values)[1]


def noise_of_median(spreads: Iterable[tuple[float, int]]) -> float:
    """Estimate the standard deviation of a median of repeats; 0 if no subject has more than two repeats. All subjects,
    each with its MAD and number of repeats in `spreads`, are assumed to scatter alike."""
    enough = ((spread, repeats) for spread, repeats in spreads if repeats > 2)
    errors = [spread / _SMALL.get(n, 1 / NORMAL) * _MEDIAN / math.sqrt(n) for spread, n in enough]
    # The median of few spreads is small by chance, so use the mean; limit it to twice the median, because one may be an
    # outlier.
    return min(sum(errors) / len(errors), 2 * median(errors)) if errors else 0.0


Pair = tuple[int, int]


@dataclass
class LinkClass:
    """Links that should have one speed."""

    pairs: set[Pair]  # source and destination of each link
    reference: set[Pair]  # the links of `pairs` whose speed the others should reach


def modes(speeds: Mapping[Pair, float], least: float, topology_known: bool) -> list[LinkClass]:
    """Divide ordered pairs of GPUs into classes of links that have one speed, such as NVLink and PCIe.

    An unknown topology is derived from the speeds. They are split into modes at gaps of at least `least`. A slower mode
    is a class of its own if every GPU has such links, both as source and as destination. This holds for real
    topologies: bridged pairs, sockets, the hybrid cube mesh. It does not hold for a slow link, nor for a GPU that is
    slow to all others, unless such GPUs are half of all. With three GPUs, a slow GPU and two bridged GPUs look the
    same.

    Args:
        speeds: speed of each pair; higher is better.
        least: the least gap, as a share of the faster speed.
        topology_known: the pairs are known to be of one class, so a slower mode is a fault.
    """
    gpus = {gpu for pair in speeds for gpu in pair}
    majority = len(gpus) // 2 + 1
    fast: set[Pair] = set()
    classes: list[LinkClass] = []
    for mode in _cut(speeds, least):
        slow = _slow_to_everyone(gpus, fast) if topology_known or len(gpus) > 3 else set()
        if not classes or (not topology_known and _everyone_has(mode, gpus - slow)):
            classes.append(LinkClass(set(mode), set(mode)))
            fast |= mode
            continue
        link_class = classes[-1]
        link_class.pairs |= mode
        # A few fast links are not a reference for all.
        if topology_known and len(link_class.reference) < majority * (majority - 1):
            link_class.reference |= mode
            fast |= mode
    for better, worse in pairwise(list(classes)):
        if len(better.reference) <= LEAST_PEERS:  # too few to compare with each other
            worse.pairs |= better.pairs
            classes.remove(better)
    return classes


def _cut(speeds: Mapping[Pair, float], least: float) -> list[set[Pair]]:
    groups: list[set[Pair]] = []
    last = math.inf
    for pair in sorted(speeds, key=lambda pair: -speeds[pair]):
        if not groups or speeds[pair] < (1 - least) * last:
            groups.append(set())
        groups[-1].add(pair)
        last = speeds[pair]
    return groups


def _slow_to_everyone(gpus: Collection[int], fast: Collection[Pair]) -> set[int]:
    """Return the GPUs without any fast link if they are a minority, else none."""
    slow = set(gpus) - {gpu for pair in fast for gpu in pair}
    return slow if 2 * len(slow) < len(gpus) else set()


def _everyone_has(mode: Iterable[Pair], gpus: Collection[int]) -> bool:
    within = [(source, destination) for source, destination in mode if source in gpus and destination in gpus]
    return {source for source, _ in within} == set(gpus) == {destination for _, destination in within}


LEAST_REPEATS = 3  # with at least 3 repeats, the median ignores one repeat that was slowed down by something else

LEAST_SHORTFALL: Mapping[str, float] = {
    "FLOP/s": 0.20, "B/s": 0.15, "host B/s": 0.25, "pageable B/s": 0.40, "s": 0.40, "stall s": 0.90
}  # fmt: skip
"""The least share of the speed, by unit, that a value must miss before it can fail.

FLOP/s: GPUs of one SKU differ by 8 % on average. The slowest of a cluster is at most 22 % behind the fastest, because
chips differ in their speed within the power limit. Outliers were slower by a third (Sinha et al., "Not All GPUs Are
Created Equal", SC 2022). B/s: three times the noise of burn-in tools (SuperBench accuses from 5 % on). Host links: host
memory is nearer to some GPUs than to others; a link at half its width or one generation below loses half. Pageable
memory is copied by the host's processor. s: latencies contain the driver; a part at half its speed fails. The second
longest of many calls scatters as no median does, so only one of ten times those of the peers fails.
"""

UNUSABLE = 0.50  # a limit above this share proves nothing: a part at half its speed would still pass

Against = Literal["peers", "itself", "baseline", "floor"]


@dataclass(frozen=True)
class Comparison:
    """The comparison of one value with one reference."""

    against: Against
    outcome: Outcome
    reference: float | None = None  # the reference in the unit of the measurement; None without a reference
    missing: float | None = None  # the share of the reference's speed that is missing, negative if the value is faster
    limit: float | None = None  # the share that may be missing
    why: str = ""  # why the outcome is unknown, or else the origin of the reference, in one line
    numbers: Mapping[str, Any] | None = None  # further figures for the JSON report

    def as_json(self) -> dict[str, Any]:
        mine = {"against": self.against, "outcome": self.outcome, "reference": self.reference, "missing": self.missing}
        return {**mine, "limit": self.limit, "why": self.why, **(self.numbers or {})}


def same_memory(memory: int, peer_memory: int) -> bool:
    """Return whether two GPUs of one name are one model, by memory in bytes: firmware reserves up to 1 % of it."""
    return abs(memory - peer_memory) <= 0.01 * max(memory, peer_memory)


def models(gpus: Iterable[Gpu]) -> dict[int, tuple[str, int]]:
    """Return the model of each GPU by number, as name and memory; all GPUs of one model get the same value."""
    model_of: dict[int, tuple[str, int]] = {}
    for gpu in gpus:
        candidates = (m for m in model_of.values() if m[0] == gpu.name and same_memory(m[1], gpu.memory))
        model_of[gpu.number] = next(candidates, (gpu.name, gpu.memory))
    return model_of


def least_shortfall(measured_kind: MeasuredKind) -> float:
    if measured_kind.quantity.endswith(SECOND_LONGEST):
        return LEAST_SHORTFALL["stall s"]
    if measured_kind.unit == "B/s" and measured_kind.subject in ("upload", "download"):
        return LEAST_SHORTFALL["pageable B/s" if measured_kind.quantity.startswith("pageable") else "host B/s"]
    return LEAST_SHORTFALL[measured_kind.unit]


def amount(value: float, unit: str) -> str:
    """Format a value with its unit: ``25.3 GB/s``, ``312 TFLOP/s``, ``4.2 us``."""
    if unit == "s":
        steps = [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")]
    else:
        steps = [(1e12, "T" + unit), (1e9, "G" + unit), (1e6, "M" + unit), (1e3, "k" + unit), (1.0, unit)]
    scale, name = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    return f"{value / scale:.3g} {name}"


def beside_peers(value: float, others: Sequence[float], unit: str, least: float, noise: float = 0.0) -> Comparison:
    """Compare a value with those of its peers. `least` is the least share of the speed that must be missing, and
    `noise` the standard deviation of `value`, estimated from its own repeats."""
    if len(others) < LEAST_PEERS:
        two = "there is only one other, and two values do not show which is right"
        return Comparison("peers", "unknown", why=two if others else "there is no other of its kind")
    middle = median(others)
    scatter = max(deviation(others), noise) if least <= UNUSABLE else 0.0  # a limit so wide has room for all noise
    limit = max(least, DEVIATIONS * scatter / middle)
    numbers = {"peers": len(others), "median": middle, "mad": deviation(others) / NORMAL, "noise": noise}
    missing = shortfall(value, middle, unit)
    if missing <= limit and limit > UNUSABLE and limit > least:
        reason = f"values scatter by {scatter / middle:.0%} of their median: a part at half its speed would still pass"
        return Comparison("peers", "unknown", middle, missing, limit, reason, numbers)
    reason = f"median of {len(others)} others"
    return Comparison("peers", "failed" if missing > limit else "passed", middle, missing, limit, reason, numbers)


def wrong(measurement: Measurement) -> str | None:
    """Return why the measurement is invalid; None if it is valid."""
    if math.isfinite(measurement.value) and measurement.value > 0:
        return None
    return f"{measurement.value} {measurement.unit} is not a valid speed or time: the measurement itself went wrong"


def useless(measurement: Measurement) -> str | None:
    """Return why a measurement cannot be compared with a reference; None if it can."""
    few = f"{measurement.repeats} repeats are too few, at least {LEAST_REPEATS} are needed"
    return wrong(measurement) or (few if measurement.repeats < LEAST_REPEATS else None)


@dataclass(frozen=True)
class Vote:
    """The result of a vote without agreement among the GPUs of one model."""

    voters: tuple[int, ...]  # numbers of the GPUs that voted
    odd: tuple[int, ...]  # GPUs that differ from the majority; all voters if there is no majority
    usual: Hashable | None  # the value of more than half of the voters; None if there is no majority

    @property
    def decided(self) -> bool:
        """True if there is a majority, so that `odd` holds suspects."""
        return self.usual is not None


def vote(ballots: Mapping[int, Hashable], models: Mapping[int, Hashable]) -> list[Vote]:
    """Return the votes that were not unanimous, at most one for each model.

    A majority is more than half of the GPUs of the model that voted. Two GPUs that differ have no majority. `ballots`
    has the value of each GPU by number, not None, and `models` its model: healthy GPUs of one model must have equal
    values.
    """
    votes = []
    for _, voters in grouped((models[gpu], gpu) for gpu in sorted(ballots)):
        counts = Counter(ballots[gpu] for gpu in voters)
        if len(counts) == 1:
            continue
        usual, times = counts.most_common(1)[0]
        majority = usual if 2 * times > len(voters) else None
        odd = tuple(gpu for gpu in voters if majority is None or ballots[gpu] != majority)
        votes.append(Vote(tuple(voters), odd, majority))
    return votes
