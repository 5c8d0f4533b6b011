"""Robust statistics for speeds: median, scaled MAD, limits that noise does not reach, and classes of links by speed.

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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from mgpu_check.devices.observations import median_and_spread

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
    """Estimate the standard deviation of a median of repeats; 0 if no subject has more than two repeats.

    Args:
        spreads: for each subject the MAD and the number of its repeats. All subjects are assumed to scatter alike.
    """
    errors = [
        spread / _SMALL.get(repeats, 1 / NORMAL) * _MEDIAN / math.sqrt(repeats)
        for spread, repeats in spreads
        if repeats > 2
    ]
    # The median of few spreads is small by chance, so use the mean; limit it to twice the median, because one may be an
    # outlier.
    return min(sum(errors) / len(errors), 2 * median(errors)) if errors else 0.0


Pair = tuple[int, int]


@dataclass
class LinkClass:
    """Links that should have one speed.

    Attributes:
        pairs: source and destination of each link.
        reference: the links of `pairs` whose speed the others should reach.
    """

    pairs: set[Pair]
    reference: set[Pair]


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
        known = classes[-1]
        known.pairs |= mode
        if topology_known and len(known.reference) < majority * (
            majority - 1
        ):  # a few fast links are not a reference for all
            known.reference |= mode
            fast |= mode
    for better, worse in pairwise(list(classes)):
        if len(better.reference) <= LEAST_PEERS:  # too few to compare with each other
            worse.pairs |= better.pairs
            classes.remove(better)
    return classes


def _cut(speeds: Mapping[Pair, float], least: float) -> list[set[Pair]]:
    found: list[set[Pair]] = []
    last = math.inf
    for pair in sorted(speeds, key=lambda pair: -speeds[pair]):
        if not found or speeds[pair] < (1 - least) * last:
            found.append(set())
        found[-1].add(pair)
        last = speeds[pair]
    return found


def _slow_to_everyone(gpus: Collection[int], fast: Collection[Pair]) -> set[int]:
    """Return the GPUs without any fast link if they are a minority, else none."""
    slow = set(gpus) - {gpu for pair in fast for gpu in pair}
    return slow if 2 * len(slow) < len(gpus) else set()


def _everyone_has(mode: Iterable[Pair], gpus: Collection[int]) -> bool:
    within = [(source, destination) for source, destination in mode if source in gpus and destination in gpus]
    return {source for source, _ in within} == set(gpus) == {destination for _, destination in within}
