"""Statistics that one slow part cannot spoil: median, scaled MAD, limits below which noise never accuses, modes of links.

The median absolute deviation (MAD), times 1.4826, estimates the standard deviation of normal data, and half of the data may
be arbitrary (Leys et al., "Detecting outliers: Do not use standard deviation around the mean, use absolute deviation around
the median", Journal of Experimental Social Psychology 49, 2013). A mean and a standard deviation are themselves moved by the
outlier that they should find: of four values one can never be more than 1.5 standard deviations from the mean.

Leys et al. accuse from 2.5 or 3 deviations on. That is for one look at many values: here hundreds of values with two to seven
peers are looked at, and a MAD of so few is often small by chance. So a value stands out only if it misses the median of its
peers by a least share of the speed *and* by `DEVIATIONS` standard deviations, where the standard deviation is the larger of
what the peers and what the repeats show. Simulated with normal noise, three repeats each and 15 % as the least share, a
healthy value is accused with a probability of:

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

__all__ = ["DEVIATIONS", "LEAST_PEERS", "NORMAL", "LinkClass", "deviation", "modes", "noise_of_median", "shortfall"]

DEVIATIONS = 8.0
LEAST_PEERS = 2
"""Others that a value is compared with: of three, two are a majority; of two, nobody knows which one is right."""

NORMAL = 1.4826
"""Standard deviations in a MAD of normal data: 1 / the upper quartile of the standard normal distribution."""

_MEDIAN = 1.2533  # standard error of a median in standard errors of a mean: sqrt(pi / 2)
# The mean MAD of so few normal values around their own median, in standard deviations (400000 draws each).
_SMALL = {3: 0.454, 4: 0.530, 5: 0.553, 6: 0.586, 7: 0.592}


def shortfall(value: float, reference: float, unit: str) -> float:
    """Return the share of the reference's speed that is missing: 0.5 is half as fast, negative is faster."""
    speed = reference / value if unit == "s" else value / reference
    return 1.0 - speed


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of `values` as their MAD estimates it. 0 for none."""
    if not values:
        return 0.0
    return NORMAL * median_and_spread(values)[1]


def noise_of_median(spreads: Iterable[tuple[float, int]]) -> float:
    """Return the standard deviation of a median of repeats.

    Args:
        spreads: of each subject the MAD of its repeats, and how many they were. All are taken to scatter alike.
    """
    errors = [
        spread / _SMALL.get(repeats, 1 / NORMAL) * _MEDIAN / math.sqrt(repeats)
        for spread, repeats in spreads
        if repeats > 2
    ]
    # The mean, because the median of few spreads is small by chance; at most twice the median, because one may be spoilt.
    return min(sum(errors) / len(errors), 2 * median(errors)) if errors else 0.0


Pair = tuple[int, int]


@dataclass
class LinkClass:
    """Links that should have one speed.

    Attributes:
        pairs: source and destination of each.
        reference: those among them that have the speed which the others should have.
    """

    pairs: set[Pair]
    reference: set[Pair]


def modes(speeds: Mapping[Pair, float], least: float, topology_known: bool) -> list[LinkClass]:
    """Divide ordered pairs of GPUs into classes of links that have one speed, such as NVLink and PCIe.

    Where the topology is not known, it is read from the speeds: they are cut at gaps of at least `least`, and a slower mode is
    a class of its own if every GPU has such links, as source and as destination. Topologies are like that: bridged pairs,
    sockets, the hybrid cube mesh. A slow link is not, nor is a GPU that is slow to everyone, unless these are half of all GPUs.
    Of three GPUs nobody can tell a slow one from two that are bridged.

    Args:
        speeds: the higher, the better.
        least: the least gap, as a share of the faster speed.
        topology_known: the pairs are known to be of one class; what is slow is slow.
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
        ):  # a few fast links are no measure for all
            known.reference |= mode
            fast |= mode
    for better, worse in pairwise(list(classes)):
        if len(better.reference) <= LEAST_PEERS:  # too few to be compared with each other
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
    """Return GPUs without any fast link, if they are a minority."""
    slow = set(gpus) - {gpu for pair in fast for gpu in pair}
    return slow if 2 * len(slow) < len(gpus) else set()


def _everyone_has(mode: Iterable[Pair], gpus: Collection[int]) -> bool:
    within = [(source, destination) for source, destination in mode if source in gpus and destination in gpus]
    return {source for source, _ in within} == set(gpus) == {destination for _, destination in within}
