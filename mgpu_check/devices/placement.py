"""Place ranks: where they can run, and which of these places the ranks of a world take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Slot", "WorldSize", "slots_for", "spread"]


@dataclass(frozen=True, order=True)
class Slot:
    """The place where one rank can run: a device of a host.

    Attributes:
        host: index of the host, 0 on one machine.
        index: index of the device there, among those of the run.
    """

    host: int
    index: int


class WorldSize(int):
    """A world size that also says how many of the ranks each host gets; otherwise an `int`.

    A plain number fills the first host, then the next.
    """

    per_host: tuple[int, ...]

    def __new__(cls, per_host: Sequence[int]) -> WorldSize:
        """Make the size of a world with ``per_host[h]`` ranks on host `h`."""
        size = super().__new__(cls, sum(per_host))
        size.per_host = tuple(per_host)
        return size

    def __repr__(self) -> str:
        return f"WorldSize({list(self.per_host)})"

    def __reduce__(self) -> tuple[object, ...]:
        return WorldSize, (self.per_host,)


def spread(size: int, per_host: Sequence[int]) -> WorldSize:
    """Return a world of `size` on as many of the hosts as it can be, as evenly as can be.

    Args:
        per_host: how many devices each has, together at least `size`.
    """
    counts = [0] * len(per_host)
    for _ in range(size):
        free = [host for host, most in enumerate(per_host) if counts[host] < most]
        counts[min(free, key=lambda host: counts[host])] += 1
    return WorldSize(counts)


def slots_for(size: int, available: Sequence[Slot]) -> tuple[Slot, ...]:
    """Return the slots of the ranks 0 to `size` - 1.

    Raises:
        ValueError: there are not as many, or not on the hosts that a `WorldSize` names.
    """
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= len(available):
        raise ValueError(f"size={size!r} is not a world size of this run; choose 1 to {len(available)}")
    if not isinstance(size, WorldSize):
        return tuple(sorted(available)[:size])
    taken: list[Slot] = []
    for host, count in enumerate(size.per_host):
        here = sorted(slot for slot in available if slot.host == host)
        if count > len(here):
            raise ValueError(f"size={size!r}: host {host} has {len(here)} devices, and {count} ranks are to run there")
        taken += here[:count]
    return tuple(taken)
