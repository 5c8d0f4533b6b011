"""Localise a failure to a device, a pair, a rank or a world size, from trials of the same example on other devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Rerun", "Reruns"]


@dataclass(frozen=True)
class Rerun:
    """One rerun of a failed example.

    Attributes:
        devices: indices of the participating devices, in rank order.
        failed: whether it failed again.
        ranks: the ranks that the failure names.
        refused: whether it could not run on these devices, so that the trial is inconclusive.
    """

    devices: tuple[int, ...]
    failed: bool
    ranks: tuple[int, ...] = ()
    refused: bool = False

    @property
    def blamed(self) -> frozenset[int]:
        """The devices of the ranks that the failure names."""
        return frozenset(self.devices[rank] for rank in self.ranks if 0 <= rank < len(self.devices))


@dataclass
class Reruns:
    """The trials of a second look at a failed example.

    Attributes:
        repeats: unchanged reruns of the example.
        elsewhere: reruns on other devices, in another order, or in smaller worlds.
        notes: omitted trials, and the reason.
    """

    repeats: list[Rerun] = field(default_factory=list)
    elsewhere: list[Rerun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def _failing(self) -> list[Rerun]:
        return [trial for trial in (*self.repeats, *self.elsewhere) if trial.failed]

    @property
    def unreliable(self) -> bool:
        """True if an unchanged rerun passes."""
        return any(not trial.failed for trial in self.repeats)

    @property
    def headline(self) -> str:
        """The likely cause of the failure, in a line; "" if there is no conclusion."""
        if not self.repeats:
            return ""
        part = self._part()
        if not self.unreliable:
            return part
        times = f"failed {sum(trial.failed for trial in self.repeats)} of {len(self.repeats)} times"
        return f"looks like unreliable hardware, or a race: {times}" + (f"; {part}" if part else "")

    def lines(self) -> list[str]:
        """Return the headline, the counts of the trials, and the notes."""
        if not self.repeats:
            return self.notes
        failed = sum(trial.failed for trial in self.repeats)
        found = [self.headline] if self.headline else []
        found.append(f"unchanged reruns: {failed} of {len(self.repeats)} failed")
        for size in sorted({len(trial.devices) for trial in self.elsewhere}):
            trials = [trial for trial in self.elsewhere if len(trial.devices) == size]
            wrong = [_shown(trial.devices) for trial in trials if trial.failed]
            right = [_shown(trial.devices) for trial in trials if not trial.failed]
            what = "on one device alone" if size == 1 else f"on {size} devices"
            ended = [f"{verb} on {', '.join(each)}" for verb, each in (("fails", wrong), ("passes", right)) if each]
            found.append(f"{what}: {'; '.join(ended)}")
        return found + self.notes

    def _part(self) -> str:
        failing = self._failing
        if not failing:
            return ""
        passing = [set(trial.devices) for trial in self.elsewhere if not trial.failed]
        right: set[int] = set().union(*passing)
        common = set.intersection(*(set(trial.devices) for trial in failing))
        everything = set().union(*(trial.devices for trial in (*self.repeats, *self.elsewhere)))
        suspects = common if self.unreliable else common - right
        alone = {trial.devices[0] for trial in failing if len(trial.devices) == 1}
        if len(suspects) == 1 and len(everything) > 1 and everything - suspects <= right:
            (one,) = suspects
            return f"looks like cuda:{one}: fails where it takes part, and nowhere else"
        if alone == everything and len(alone) > 1:
            return "fails on each device alone: looks like the code, or torch, and not like one device"
        several: set[int] = set().union(*(devices for devices in passing if len(devices) > 1))
        apart = everything - common <= several and not any(common <= devices for devices in passing)
        if len(common) == 2 and len(everything) > 2 and apart:
            first, second = sorted(common)
            return f"fails if cuda:{first} and cuda:{second} take part together: looks like the link between them"
        # A trial on one device cannot distinguish ranks.
        named = [trial for trial in failing if trial.ranks and len(trial.devices) > 1]
        if len({trial.devices for trial in named}) > 1:
            devices = frozenset.intersection(*(trial.blamed for trial in named))
            ranks = set.intersection(*(set(trial.ranks) for trial in named))
            if len(devices) == 1 and not ranks:
                return f"looks like cuda:{min(devices)}: the error follows the device from rank to rank"
            if len(ranks) == 1 and not devices:
                return f"the error stays with rank {min(ranks)} on different devices: looks like the code, or torch"
        least = min(len(trial.devices) for trial in failing)
        fewer: set[int] = set().union(*(devices for devices in passing if len(devices) < least))
        if len(common) < least and everything <= fewer:
            return f"fails on any {least} or more devices: looks like the code, or torch, and not like one device"
        return ""


def _shown(devices: Sequence[int]) -> str:
    return "+".join(f"cuda:{device}" for device in devices)
