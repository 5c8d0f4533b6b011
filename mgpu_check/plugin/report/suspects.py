"""Localise a failure to a device, a link or the code, from reruns of the same example on other devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mgpu_check.plugin.report.explaining import Cause, RerunEvidence

_BY_CHANCE = {True: 0.001, False: 0.01}
"""Probability that an example passes all tries of a rerun by chance, below which the rerun counts as passed.

By whether an unchanged rerun has passed.
"""
_DEVIATIONS = {True: 2.0, False: 1.5}
"""Half width of the interval of the rate of failures, in standard deviations, likewise."""
_MOST_TRIES = 60
_MOST_RIVALS = 6


@dataclass(frozen=True)
class Rerun:
    """One rerun of a failed example.

    Attributes:
        devices: indices of the participating devices, in rank order.
        failed: whether it failed again.
        ranks: the ranks that the failure names; others may not have been compared.
        refused: whether it could not run on these devices, so that the rerun is inconclusive.
        tries: how often it ran, if it did not fail.
    """

    devices: tuple[int, ...]
    failed: bool
    ranks: tuple[int, ...] = ()
    refused: bool = False
    tries: int = 1


@dataclass
class Reruns:
    """The results of a second look at a failed example.

    Attributes:
        repeats: unchanged reruns of the example.
        elsewhere: reruns on other devices, in another order, or in smaller worlds.
        notes: omitted reruns, and the reason.
        settled: no further rerun could rule out a part. Until then no part is named.
        partial: the example takes its devices by their indices. Others than those of a rerun may take part, so the code
            cannot be named; and code may treat one index apart, which no rerun shows.
    """

    repeats: list[Rerun] = field(default_factory=list)
    elsewhere: list[Rerun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    settled: bool = False
    partial: bool = False

    @property
    def unreliable(self) -> bool:
        """True if an unchanged rerun passes."""
        return any(not rerun.failed for rerun in self.repeats)

    @property
    def tries(self) -> int:
        """Number of tries that a rerun elsewhere must pass to count as passed; 0 if it would take too many.

        An example that has always failed may still pass once. The true rate of failures may be as low as Wilson's
        score interval allows (Wilson, *Probable inference, the law of succession, and statistical inference*, 1927).
        """
        failed = sum(rerun.failed for rerun in self.repeats)
        if not failed:
            return 0
        failed += 1  # the failure that made this look necessary
        count = len(self.repeats) + 1
        wide = _DEVIATIONS[self.unreliable]
        spread = wide * math.sqrt(failed * (count - failed) / count + wide**2 / 4)
        rate = (failed + wide**2 / 2 - spread) / (count + wide**2)
        tries = math.ceil(math.log(_BY_CHANCE[self.unreliable]) / math.log(1 - rate))
        return tries if tries <= _MOST_TRIES else 0

    def next_trial(self, candidates: Iterable[tuple[int, ...]], tries: int) -> tuple[int, ...] | None:
        """Return the devices of the next rerun; None if none of `candidates` rules out a part.

        Args:
            tries: the least number of tries of a rerun that counts as passed.
        """
        return self._evidence(tries).next_trial(candidates)

    @property
    def headline(self) -> str:
        """The likely cause of the failure, in a line; "" if there is no conclusion."""
        if not any(rerun.failed for rerun in self.repeats):
            return ""
        part = self._part()
        if not self.unreliable:
            return part
        times = f"failed {sum(rerun.failed for rerun in self.repeats)} of {len(self.repeats)} times"
        return f"looks like unreliable hardware, or a race: {times}" + (f"; {part}" if part else "")

    def lines(self) -> list[str]:
        """Return the headline, the counts of the reruns, and the notes."""
        if not self.repeats:
            return self.notes
        failed = sum(rerun.failed for rerun in self.repeats)
        found = [self.headline] if self.headline else []
        found.append(f"unchanged reruns: {failed} of {len(self.repeats)} failed")
        for size in sorted({len(rerun.devices) for rerun in self.elsewhere}):
            reruns = [rerun for rerun in self.elsewhere if len(rerun.devices) == size]
            wrong = [_shown(rerun.devices) for rerun in reruns if rerun.failed]
            right = [_shown(rerun.devices) for rerun in reruns if not rerun.failed]
            what = "on one device alone" if size == 1 else f"on {size} devices"
            ended = [f"{verb} on {', '.join(each)}" for verb, each in (("fails", wrong), ("passes", right)) if each]
            found.append(f"{what}: {'; '.join(ended)}")
        return [*found, *self._undecided(), *self.notes]

    def _evidence(self, tries: int) -> RerunEvidence:
        every = (*self.repeats, *self.elsewhere)
        passed = [rerun for rerun in self.elsewhere if not rerun.failed and rerun.tries >= tries > 0]
        return RerunEvidence((rerun.devices for rerun in every if rerun.failed), (rerun.devices for rerun in passed))

    def _undecided(self) -> list[str]:
        """Return a line with the parts that the reruns do not distinguish, if any device was exchanged."""
        evidence = self._evidence(self.tries)
        if not self.elsewhere or not evidence.failed or self._part():
            return []
        if not self.settled and evidence.likely:
            return [f"no part is named: the reruns that would prove {_and(sorted(evidence.likely))} are missing"]
        if Cause("code") in evidence.likely and not self._same_ranks:
            return ["no part is named: the ranks that fail follow the devices, so several parts may be at fault"]
        rivals = [str(cause) for cause in evidence.rivals]
        more = [f"{len(rivals) - _MOST_RIVALS} more parts"] if len(rivals) > _MOST_RIVALS else []
        named = ", ".join([*rivals[:_MOST_RIVALS], *more])
        return [f"no part is named: these reruns do not distinguish {named}" if rivals else "no part is named"]

    @property
    def named(self) -> list[Cause]:
        """The parts that the reruns prove to be at fault; empty if they prove none."""
        causes = sorted(self._evidence(self.tries).likely) if self.settled else []
        if Cause("code") in causes and (self.partial or len(causes) > 1 or not self._same_ranks):
            return []
        return causes

    @property
    def _same_ranks(self) -> bool:
        """True if all failures in worlds of one size name the same ranks. Failures of the code do, on any devices."""
        named = {(len(rerun.devices), rerun.ranks) for rerun in self._failing}
        return len(named) == len({size for size, _ in named})

    @property
    def _failing(self) -> list[Rerun]:
        return [rerun for rerun in (*self.repeats, *self.elsewhere) if rerun.failed]

    def _part(self) -> str:
        causes = self.named
        if not causes:
            return ""
        (first, *more) = causes
        if first.kind == "code":
            least = min(len(rerun.devices) for rerun in self._failing)
            where = "on each device alone" if least == 1 else f"on any {least} devices"
            return f"fails {where}: looks like the code, or torch, and not like one device"
        alone = not more and len(first.devices) == 1 and first.devices in (rerun.devices for rerun in self._failing)
        it, its = ("them", "their") if more else ("it", "its")
        how = f"fails on {it} alone" if alone else f"no rerun without {it} fails"
        or_code = f", or like code that treats {it} apart" if self.partial else ""
        return f"looks like {_and(causes)}{or_code}: {how}, and with others in {its} place the example passes"


def _and(causes: Sequence[Cause]) -> str:
    return " and ".join(map(str, causes))


def _shown(devices: Sequence[int]) -> str:
    return "+".join(f"cuda:{device}" for device in devices)
