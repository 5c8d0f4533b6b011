"""Repeat cases that failed in a group of GPUs: on smaller groups, in another order of ranks, and over other paths.

The log records these second looks like all other observations, so the verdict explains both by the smallest set of
parts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mgpu_check.acceptance.node import Node
from mgpu_check.acceptance.run_log import RepeatableCall, RunLog
from mgpu_check.devices.observations import Observation

__all__ = ["SECONDS", "Look", "look_again"]

SECONDS = {"quick": 60.0, "standard": 300.0, "long": 1800.0}
"""Time for all second looks of a run, by level. A call that is running when it is over ends first."""

_CASES = {"quick": 2, "standard": 4, "long": 8}
_REPEATS = {"quick": 3, "standard": 10, "long": 30}
"""Most repeats until a case fails again: an intermittent fault passes some of them."""

_NO_PEERS = {"NCCL_P2P_DISABLE": "1"}
_ARMS: Mapping[str, Mapping[str, str]] = {
    "without shared memory (NCCL_SHM_DISABLE=1)": {"NCCL_SHM_DISABLE": "1"},
    "with launches that block (CUDA_LAUNCH_BLOCKING=1)": {"CUDA_LAUNCH_BLOCKING": "1"},
}
_ARMS_FROM = ("standard", "long")


@dataclass(frozen=True)
class Look:
    """The result of a second look at one case.

    Attributes:
        case: the repeated case.
        check: name of the check that the case belongs to.
        group: the smallest group that failed.
        seen: the findings, a line each.
        follows_rank: the fault stays with a rank when the rank gets another device.
    """

    case: str
    check: str
    group: tuple[int, ...]
    seen: tuple[str, ...]
    follows_rank: bool = False


def look_again(node: Node, log: RunLog, clock: Callable[[], float] = time.monotonic) -> Iterator[Look]:
    """Repeat the cases that failed in groups, up to the number and the time for the level, and record the results in
    the log.

    Yields:
        Each look when it is done; for a case that the time did not suffice for, a look that says so.
    """
    calls: dict[str, RepeatableCall] = {}
    for entry, call in log.failed_calls():
        if entry.subject.kind == "group" and len(call.gpus) > 1:
            calls.setdefault(call.case, call)
    until = clock() + SECONDS[node.level]
    for call in itertools.islice(calls.values(), _CASES[node.level]):
        section = log.begin(call.check, f"second look at {call.case}")
        try:
            look = _SecondRun(node, call, lambda: clock() > until).look()
        except _TimeIsOver:
            seen = f"a second look did not end: the time for all of them, {SECONDS[node.level]:g} s, was over"
            look = Look(call.case, call.check, call.gpus, (seen,))
        finally:
            section.ended = log.now()
        yield look


class _TimeIsOver(Exception):
    """The time for second looks is over, so nothing more can be concluded from the one that runs."""


class _SecondRun:
    def __init__(self, node: Node, call: RepeatableCall, is_late: Callable[[], bool]) -> None:
        self.is_late = is_late
        self.node = node
        self.call = call
        self.repeats = _REPEATS[node.level]

    def look(self) -> Look:
        group = tuple(gpu for gpu in self.call.gpus if gpu not in self.node.lost)
        if len(group) < 2 or not self._fails(group):
            return self._end(group, f"did not fail again in {self.repeats} repeats on the same GPUs")
        smallest = self._narrowed(group)
        seen = [] if smallest == group else [f"fails on GPUs {_list(smallest)} alone"]
        if len(smallest) == 2:
            seen += self._around(smallest, group)
        follows = self._permuted(smallest)
        if follows:
            seen.append(follows)
        seen += self._arms(smallest)
        return self._end(smallest, *seen, follows_rank=follows == _FOLLOWS_RANK)

    def _end(self, group: tuple[int, ...], *seen: str, follows_rank: bool = False) -> Look:
        return Look(self.call.case, self.call.check, group, seen, follows_rank)

    def _fails(self, group: Sequence[int], environment: Mapping[str, str] | None = None) -> list[Observation]:
        """Repeat the case on a group until it fails, and return the failed observations; empty if it did not fail."""
        for _ in range(self.repeats):
            if self.is_late():
                raise _TimeIsOver
            failed = [o for o in self.node.repeat(self.call, group, environment) if o.outcome == "failed"]
            if failed or not set(group) <= set(self.node.numbers):
                return failed
        return []

    def _narrowed(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """Return the smallest failing group, found by halving. If neither half fails, try pairs across the halves."""
        if len(group) <= 2:
            return group
        middle = len(group) // 2
        for half in (group[:middle], group[middle:]):
            if len(half) > 1 and self._fails(half):
                return self._narrowed(half)
        for pair in itertools.product(group[:middle], group[middle:]):
            if self._fails(pair):
                return pair
        return group

    def _around(self, pair: tuple[int, ...], group: Sequence[int]) -> list[str]:
        """Pair each GPU of a failing pair with up to two other GPUs: a GPU that fails with them too is itself at
        fault."""
        others = [gpu for gpu in group if gpu not in pair][:2]
        seen = []
        for gpu in pair:
            failing = [other for other in others if self._fails((gpu, other))]
            if failing:
                seen.append(f"GPU {gpu} fails with GPU {_list(failing)}, too")
            elif others:
                seen.append(f"GPU {gpu} is right with GPU {_list(others)}")
        return seen

    def _permuted(self, group: tuple[int, ...]) -> str:
        """Run with each rank on the next device, and return whether the fault follows the device or the rank, or ""."""
        turned = (*group[1:], group[0])  # a reversal would leave the middle rank of an odd group in place
        here, there = self._fails(group), self._fails(turned)
        devices = [{gpu for entry in failed for gpu in entry.suspects} for failed in (here, there)]
        if not all(devices):
            return ""
        if devices[0] & devices[1]:
            return _FOLLOWS_DEVICE
        ranks = [{order.index(gpu) for gpu in found} for order, found in zip((group, turned), devices, strict=True)]
        return _FOLLOWS_RANK if ranks[0] & ranks[1] else "follows neither the device nor the rank"

    def _arms(self, group: tuple[int, ...]) -> list[str]:
        seen = []
        if self._fails(group, _NO_PEERS):
            seen.append("fails without the direct path between GPUs (NCCL_P2P_DISABLE=1), too")
        else:
            seen.append("only over the direct path between GPUs: right with NCCL_P2P_DISABLE=1")
        if self.node.level in _ARMS_FROM:
            for name, environment in _ARMS.items():
                seen.append(f"{'fails' if self._fails(group, environment) else 'is right'} {name}")
        return seen


_FOLLOWS_DEVICE = "follows the device to another rank"
_FOLLOWS_RANK = "follows the rank to another device"


def _list(gpus: Sequence[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, gpus[:-1])), str(gpus[-1]))))
