"""Find the parts that explain which trials of an example failed, and the next trial that rules parts out.

A part is a device, a link between two, or the code with all that devices share. A trial runs the example on some
devices in the order of their ranks. A part may show in one size of the world and not in another, and at one rank and
not at another. So a trial that passed clears its parts for this size and these ranks only, and to clear a part for good
takes a trial that exchanges another device and nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

_MOST_CAUSES = 2
"""Most parts in one explanation; with more, too many sets explain the same trials."""
_MOST_WORLDS = 30
_SUREST = 0.95
"""Largest probability that a trial is expected to fail with: a fault may show at some ranks only."""


@dataclass(frozen=True, order=True)
class Cause:
    """A part that may make trials fail.

    Attributes:
        devices: one for a device, two for a link, none for the code.
    """

    kind: Literal["device", "link", "code"]
    devices: tuple[int, ...] = ()

    def place(self, trial: Sequence[int]) -> tuple[int, ...] | None:
        """Return the size of a trial and the ranks of this part in it; None if the part is not in it."""
        if not all(device in trial for device in self.devices):
            return None
        return (len(trial), *map(trial.index, self.devices))

    def __str__(self) -> str:
        if self.kind == "code":
            return "the code"
        named = " and ".join(f"cuda:{device}" for device in self.devices)
        return f"the link between {named}" if self.kind == "link" else named


def causes_in(trial: Iterable[int]) -> list[Cause]:
    """Return the parts of a trial."""
    devices = sorted(trial)
    return [
        Cause("code"),
        *(Cause("device", (device,)) for device in devices),
        *(Cause("link", pair) for pair in itertools.combinations(devices, 2)),
    ]


class RerunEvidence:
    """Trials that failed, and trials that passed. Each is the devices in the order of their ranks."""

    def __init__(self, failed: Iterable[Sequence[int]], passed: Iterable[Sequence[int]]) -> None:
        self.failed = list(dict.fromkeys(map(tuple, failed)))
        self.passed = [trial for trial in dict.fromkeys(map(tuple, passed)) if trial not in self.failed]

    @cached_property
    def suspects(self) -> list[frozenset[Cause]]:
        """For each failed trial its parts that no trial has cleared."""
        cleared = {(cause, cause.place(trial)) for trial in self.passed for cause in causes_in(trial)}
        return [
            frozenset(cause for cause in causes_in(trial) if (cause, cause.place(trial)) not in cleared)
            for trial in self.failed
        ]

    @cached_property
    def smallest(self) -> list[frozenset[Cause]]:
        """Every smallest set of at most two parts that explains all failed trials."""
        if not self.failed:
            return []
        for count in range(1, _MOST_CAUSES + 1):
            found = self._sets(frozenset().union(*self.suspects), count)
            if found:
                return found
        return []

    @property
    def likely(self) -> frozenset[Cause]:
        """The parts that every smallest explanation contains.

        A part that explains the trials only if its rank matters is not likelier than two parts whose rank does not.
        """
        found = frozenset.intersection(*self.smallest) if self.smallest else frozenset()
        plain = all(self._may_fail(cause, trial) for cause in found for trial in self.failed)
        if len(found) == 1 and not plain and any(True for _ in self._pairs_instead_of(*found)):
            return frozenset()
        return found

    @property
    def rivals(self) -> list[Cause]:
        """The parts that the trials do not distinguish."""
        return sorted(frozenset().union(*self.smallest) - self.likely)

    def next_trial(self, candidates: Iterable[tuple[int, ...]]) -> tuple[int, ...] | None:
        """Return the candidate that rules out most parts; None if no candidate does, or no part is left to rule out."""
        new = [trial for trial in dict.fromkeys(candidates) if trial not in self.failed and trial not in self.passed]
        if not new or not self.failed:
            return None
        if not self.smallest or len(self.smallest[0]) > 1:  # several faults: each device alone shows most
            return next((trial for trial in new if len(trial) == 1), None)
        single = sorted(cause for (cause,) in self.smallest)
        return self._most_telling(new, single) if len(single) > 1 else self._control(new, single[0])

    def _control(self, new: Sequence[tuple[int, ...]], cause: Cause) -> tuple[int, ...] | None:
        """Return a trial that distinguishes the only single explanation from two faults together, or None."""
        if cause.kind == "code" and (reordered := self._reordered(new)) is not None:
            return reordered
        cleared = {cause.place(trial) for trial in self.passed}
        for others in self._pairs_instead_of(cause):
            for trial in new:
                mine = cause.place(trial) is not None and cause.place(trial) not in cleared
                theirs = any(self._may_fail(one, trial) for one in others)
                if mine != theirs:
                    return trial
        return None

    def _reordered(self, new: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
        """Return a trial with the devices of the smallest failed one at other ranks, unless one has run.

        A fault of the code stays at its ranks.
        """
        (least, *_) = sorted(map(set, self.failed), key=len)
        if sum(set(trial) == least for trial in (*self.failed, *self.passed)) > 1:
            return None
        return next((trial for trial in new if set(trial) == least), None)

    def _pairs_instead_of(self, cause: Cause) -> Iterable[frozenset[Cause]]:
        """Yield pairs of other parts that explain all failed trials: each fails in worlds of some size and above."""
        parts = [{one for one in causes_in(trial) if self._may_fail(one, trial)} - {cause} for trial in self.failed]
        for pair in itertools.combinations(sorted(set().union(*parts)), 2):
            if not any(some.isdisjoint(pair) for some in parts):
                yield frozenset(pair)

    def _may_fail(self, cause: Cause, trial: Sequence[int]) -> bool:
        return cause.place(trial) is not None and not any(
            len(other) >= len(trial) and cause.place(other) is not None for other in self.passed
        )

    def _most_telling(self, new: Sequence[tuple[int, ...]], single: Sequence[Cause]) -> tuple[int, ...] | None:
        places = {cause: {cause.place(trial) for trial in self.failed} for cause in single}
        expected = self._expected
        best, most = None, 1e-9
        for trial in new:
            inside = frozenset(trial)
            size = len(trial)
            fails = sum(1 for devices, least in expected if least <= size and devices <= inside)
            share = min(fails / len(expected), _SUREST) if expected else 0.5
            if_failed = sum(cause.place(trial) is None for cause in single)
            if_passed = sum(cause.place(trial) in places[cause] for cause in single)
            # The last term prefers trials that also show the smallest size that fails.
            score = share * if_failed + (1 - share) * if_passed + 0.1 * share * (1 - share)
            if score > most + 1e-9:
                best, most = trial, score
        return best

    @cached_property
    def _expected(self) -> list[tuple[frozenset[int], int]]:
        """Single faults that agree with all trials: devices that must take part, and the least size of the world."""
        every = sorted({device for trial in (*self.failed, *self.passed) for device in trial})
        faults = [(frozenset(cause.devices), least) for cause in causes_in(every) for least in range(1, len(every) + 1)]
        return [
            (devices, least)
            for devices, least in faults
            if all(least <= len(trial) and devices <= set(trial) for trial in self.failed)
            and not any(least <= len(trial) and devices <= set(trial) for trial in self.passed)
        ]

    def _sets(self, causes: Iterable[Cause], count: int) -> list[frozenset[Cause]]:
        found = (frozenset(some) for some in itertools.combinations(sorted(causes), count))
        return [some for some in found if not any(some.isdisjoint(suspects) for suspects in self.suspects)]


def worlds(devices: Sequence[int], sizes: Iterable[int], failed: Sequence[int]) -> list[tuple[int, ...]]:
    """Return trials that may rule parts out: worlds of `sizes`, and a failed trial with one device, or two ranks,
    exchanged."""
    found: list[tuple[int, ...]] = []
    sizes = sorted(set(sizes))
    for size in sizes:
        if math.comb(len(devices), size) <= _MOST_WORLDS:
            found += itertools.combinations(devices, size)
        else:
            twice = (*devices, *devices)
            found += [twice[start : start + size] for start in range(len(devices))]
    if len(failed) in sizes:
        found += [
            (*failed[:place], other, *failed[place + 1 :])
            for place in range(len(failed))
            for other in devices
            if other not in failed
        ]
        found += [(*failed[by:], *failed[:by]) for by in range(1, len(failed))]
        found += [_swapped(failed, *places) for places in itertools.combinations(range(len(failed)), 2)]
    return found


def _swapped(trial: Sequence[int], one: int, other: int) -> tuple[int, ...]:
    moved = list(trial)
    moved[one], moved[other] = trial[other], trial[one]
    return tuple(moved)
