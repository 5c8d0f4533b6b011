"""Find all smallest sets of suspects that explain the failed observations, by branch and bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

_MOST_STEPS = 100_000

S = TypeVar("S")


def smallest_sets(
    explaining: Sequence[frozenset[S]], price: Mapping[S, float], alike: float
) -> list[frozenset[S]] | None:
    """Return every set of suspects that explains each failure, at the lowest price or up to `alike` above it.

    Args:
        explaining: for each failure the suspects that explain it, at least one.
        price: the price of each suspect, above `alike`, so that no returned set contains a superfluous suspect.

    Returns:
        The sets, the cheapest first; None if the search would take too long.
    """
    if not explaining:
        return [frozenset()]
    # A failure with more suspects than another one, and among them all of the other, adds nothing.
    distinct = sorted(set(explaining), key=len)
    needed = [one for number, one in enumerate(distinct) if not any(other < one for other in distinct[:number])]
    search = _Search(price, alike)
    try:
        search.extend(frozenset(), 0.0, needed, frozenset())
    except _TooLong:
        return None
    found = sorted(search.found.items(), key=lambda item: item[1])
    return [some for some, cost in found if cost <= search.least + alike]


class _TooLong(Exception):
    pass


class _Search(Generic[S]):
    def __init__(self, price: Mapping[S, float], alike: float) -> None:
        self.price = price
        self.alike = alike
        self.least = float("inf")
        self.found: dict[frozenset[S], float] = {}
        self.steps = 0

    def extend(self, chosen: frozenset[S], cost: float, left: list[frozenset[S]], barred: frozenset[S]) -> None:
        """Add suspects to `chosen` until nothing is left. `barred` are suspects that other branches have tried."""
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise _TooLong
        if not left:
            self.found[chosen] = cost
            self.least = min(self.least, cost)
            return
        open_: list[frozenset[S]] = [one - barred for one in left]
        if not all(open_) or cost + self.at_least(open_) > self.least + self.alike + 1e-9:
            return
        tried = barred
        fewest: frozenset[S] = min(open_, key=len)
        for suspect in sorted(fewest, key=self.price.__getitem__):
            rest = [one for one in left if suspect not in one]
            self.extend(chosen | {suspect}, cost + self.price[suspect], rest, tried)
            tried |= {suspect}

    def at_least(self, left: Sequence[frozenset[S]]) -> float:
        """Return a price that every explanation of `left` exceeds or has: of failures without a common suspect."""
        seen: frozenset[S] = frozenset()
        total = 0.0
        for one in left:
            if seen.isdisjoint(one):
                seen |= one
                total += min(self.price[suspect] for suspect in one)
        return total
