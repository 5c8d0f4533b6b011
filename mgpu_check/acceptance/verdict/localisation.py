"""Repeat cases that failed in a group of GPUs: on smaller groups, in another order of ranks, and over other paths.

The log records these second looks like all other observations, so the verdict explains both by the smallest set of
parts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mgpu_check.acceptance.node import Node
from mgpu_check.acceptance.run_log import RepeatableCall, RunLog
from mgpu_check.devices.observations import Observation, Part

SECONDS = {"quick": 60.0, "standard": 300.0, "long": 1800.0}
"""Time for all second looks of a run, by level. A call that is running when it is over ends first."""

CASES = {"quick": 2, "standard": 4, "long": 8}
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
        group: the smallest group that failed.
        seen: the findings, a line each.
        follows_rank: the fault stays with a rank when the rank gets another device.
        needs_history: the case fails in the processes of the run, and passes in fresh ones on the same GPUs.
    """

    case: str
    check: str
    group: tuple[int, ...]
    seen: tuple[str, ...]
    follows_rank: bool = False
    needs_history: bool = False


def look_again(node: Node, log: RunLog, clock: Callable[[], float] = time.monotonic) -> Iterator[Look]:
    """Repeat the cases that failed in groups, up to the number and the time for the level, and record the results in
    the log.

    Yields:
        Each look when it is done; for a case that the time did not suffice for, a look that says so.
    """
    calls: dict[str, RepeatableCall] = {}
    for entry, call in log.failed_calls():
        if entry.subject.kind == "group" and len(call.gpus) > 1 and call.host is None:
            calls.setdefault(call.case, call)
    until = clock() + SECONDS[node.depth]
    for call in itertools.islice(calls.values(), CASES[node.depth]):
        section = log.begin(call.check, f"second look at {call.case}")
        try:
            look = _SecondRun(node, call, lambda: clock() > until).look()
        except _TimeIsOver:
            seen = f"a second look did not end: the time for all of them, {SECONDS[node.depth]:g} s, was over"
            look = Look(call.case, call.check, call.gpus, (seen,))
        finally:
            section.ended = log.now()
        yield look


def control(node: Node, call: RepeatableCall) -> Look:
    """Repeat a call that has failed in fresh processes on the same GPUs, and in those of the run.

    A call whose failure needs what ran before in its processes accuses no part. It passes in fresh processes, and fails
    in those of the run, each time.
    """
    repeats = _REPEATS[node.depth]

    def fails(repeat: Callable[[], list[Observation]]) -> bool:
        return any(entry.outcome == "failed" for entry in repeat())

    fresh, used = partial(node.repeat_in_fresh_processes, call), partial(node.repeat, call, call.gpus)
    if any(fails(fresh) for _ in range(repeats)) or not all(fails(used) for _ in range(repeats)):
        return Look(call.case, call.check, call.gpus, ())
    seen = (
        f"a failure on GPUs {_list(sorted(call.gpus))} does not come again in {repeats} fresh processes, and comes "
        f"{repeats} times in those of the run: it needs what ran before, so it accuses no part"
    )
    return Look(call.case, call.check, call.gpus, (seen,), needs_history=True)


class _TimeIsOver(Exception):
    """The time for second looks is over, so nothing more can be concluded from the one that runs."""


def found_about(part: Part, calls: Iterable[RepeatableCall], looks: Iterable[Look]) -> str:
    """Return in one line the findings of the repeats that concern `part` or calls that it explains."""
    cases = {(call.check, call.case) for call in calls}
    found = [
        look
        for look in looks
        if (look.check, look.case) in cases and (part.kind == "host" or set(part.members) <= set(look.group))
    ]
    return "; ".join(dict.fromkeys(line for look in found for line in look.seen))


class _SecondRun:
    def __init__(self, node: Node, call: RepeatableCall, is_late: Callable[[], bool]) -> None:
        self.is_late = is_late
        self.node = node
        self.call = call
        self.repeats = _REPEATS[node.depth]

    def look(self) -> Look:
        group = tuple(gpu for gpu in self.call.gpus if gpu not in self.node.lost)
        if len(group) < 2 or not self._fails(group):
            return self._end(group, f"did not fail again in {self._repeats_of(group)} repeats on the same GPUs")
        smallest = self._narrowed(group)
        seen = [] if set(smallest) == set(group) else [f"fails on GPUs {_list(sorted(smallest))} alone"]
        if len(smallest) == 2:
            seen += self._around(smallest, group)
        follows = self._permuted(group)
        if follows:
            seen.append(follows)
        seen += self._arms(smallest)
        return self._end(smallest, *seen, follows_rank=follows == _FOLLOWS_RANK)

    def _end(self, group: tuple[int, ...], *seen: str, follows_rank: bool = False) -> Look:
        return Look(self.call.case, self.call.check, group, seen, follows_rank)

    def _fails(self, group: Sequence[int], environment: Mapping[str, str] | None = None) -> tuple[int, ...]:
        """Repeat the case on a group until it fails, and return the GPUs in the order that failed; empty if none did.

        Each repeat gives each rank the next GPU: a GPU that receives wrong data is right where it is the root.
        """
        for repeat in range(self._repeats_of(group)):
            if self.is_late():
                raise _TimeIsOver
            order = _turned(group, repeat)
            if self._failed(order, environment):
                return order
            if not set(group) <= set(self.node.numbers):
                break
        return ()

    def _repeats_of(self, group: Sequence[int]) -> int:
        return max(self.repeats, len(group))

    def _failed(self, order: Sequence[int], environment: Mapping[str, str] | None = None) -> list[Observation]:
        return [entry for entry in self.node.repeat(self.call, order, environment) if entry.outcome == "failed"]

    def _narrowed(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """Return the smallest failing group, found by halving. If neither half fails, try pairs across the halves."""
        if len(group) <= 2:
            return group
        middle = len(group) // 2
        for half in (group[:middle], group[middle:]):
            if len(half) > 1 and self._fails(half):
                return self._narrowed(half)
        pairs = (self._fails(pair) for pair in itertools.product(group[:middle], group[middle:]))
        return next(filter(None, pairs), group)

    def _around(self, pair: tuple[int, ...], group: Sequence[int]) -> list[str]:
        """Pair each GPU of a failing pair with other GPUs: a GPU that fails with them too is at fault."""
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
        """Run with each device at each rank, and return whether the fault follows the device or the rank, or "".

        A fault follows the rank only if it shows on every device of the group there.
        """
        devices: list[set[int]] = []
        ranks: list[set[int]] = []
        for by in range(len(group)):
            order = _turned(group, by)
            for _ in range(self.repeats):
                if failed := self._failed(order):
                    break
            found = {gpu for entry in failed for gpu in entry.suspects}
            devices.append(found)
            ranks.append({order.index(gpu) for gpu in found})
        pointing = [found for found in devices if found]
        if len(pointing) < 2:
            return ""
        if set.intersection(*pointing):
            return _FOLLOWS_DEVICE
        return _FOLLOWS_RANK if set.intersection(*ranks) else "follows neither the device nor the rank"

    def _arms(self, group: tuple[int, ...]) -> list[str]:
        seen = []
        if self._fails(group, _NO_PEERS):
            seen.append("fails without the direct path between GPUs (NCCL_P2P_DISABLE=1), too")
        else:
            seen.append("only over the direct path between GPUs: right with NCCL_P2P_DISABLE=1")
        if self.node.depth in _ARMS_FROM:
            for name, environment in _ARMS.items():
                seen.append(f"{'fails' if self._fails(group, environment) else 'is right'} {name}")
        return seen


_FOLLOWS_DEVICE = "follows the device to another rank"
_FOLLOWS_RANK = "follows the rank to another device"


def _turned(group: Sequence[int], by: int) -> tuple[int, ...]:
    """Return the group with each rank on the device of `by` ranks later."""
    by %= len(group)
    return (*group[by:], *group[:by])


def _list(gpus: Sequence[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, gpus[:-1])), str(gpus[-1]))))
