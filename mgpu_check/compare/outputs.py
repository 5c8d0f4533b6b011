"""Sum the outputs of modules over the ranks that have divided them."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass

from mgpu_check.processes.rank_lists import grouped


@dataclass(frozen=True)
class OutputSummary:
    """All outputs of a module in a step, by numbers that parts add up to, no matter how they were cut.

    Attributes:
        bits: the sum of the bits of the elements in float64 as integers, modulo 2^64.
        norm: the 2-norm, computed in float64.
        sum: the sum of the elements, computed in float64.
        count: number of elements.
    """

    bits: int
    norm: float
    sum: float
    count: int

    @property
    def entries(self) -> list[tuple[float, float]]:
        """The norm and the sum, each with its typical size: the rounding error of a sum is proportional to the norm."""
        return [(self.norm, self.norm), (self.sum, max(abs(self.sum), self.norm))]


def joined_bits(parts: Iterable[int]) -> int:
    """Return the sum of sums of bits, modulo 2^64, as a signed integer."""
    return (sum(parts) + 2**63) % 2**64 - 2**63


def joined_outputs(parts: Collection[OutputSummary]) -> OutputSummary:
    """Return the summary of all parts together."""
    return OutputSummary(
        joined_bits(part.bits for part in parts),
        math.hypot(*(part.norm for part in parts)),
        total(part.sum for part in parts),
        sum(part.count for part in parts),
    )


def total(numbers: Iterable[float]) -> float:
    """Return the sum of numbers, exact for finite ones in any order."""
    found = list(numbers)
    return math.fsum(found) if all(map(math.isfinite, found)) else sum(found)


def views(parts: Mapping[int, OutputSummary], seen: Mapping[int, Hashable]) -> list[Mapping[int, OutputSummary]]:
    """Return the whole outputs from the view of each rank, for each possible division among ranks.

    Each rank has the whole; or the ranks have disjoint parts; or ranks with the same samples have copies of a part.

    Args:
        parts: rank -> the outputs that it has.
        seen: rank -> a key of its samples.
    """
    copies = [ranks for _, ranks in grouped((seen[rank], rank) for rank in parts)]
    by_samples = {
        rank: joined_outputs([parts[rank], *(parts[ranks[0]] for ranks in copies if rank not in ranks)])
        for rank in parts
    }
    return [parts, dict.fromkeys(parts, joined_outputs(list(parts.values()))), by_samples]


def whole_output(parts: Mapping[int, OutputSummary], seen: Mapping[int, Hashable]) -> OutputSummary:
    """Return the whole outputs if nothing shows how many elements they have: ranks with equal parts have copies."""
    each, together, by_samples = (list(view.values()) for view in views(parts, seen))
    return next((view[0] for view in (each, by_samples) if view.count(view[0]) == len(view)), together[0])
