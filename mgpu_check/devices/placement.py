"""Place ranks: choose the devices on which the ranks of a world run, and restrict a process to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Slot:
    """The place where one rank can run: a device of a host."""

    host: int  # index of the host, 0 on one machine
    index: int  # index of the device among those that the run uses on this host


class WorldSize(int):
    """An `int` world size that also holds the number of ranks per host.

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
    """Spread `size` ranks over as many hosts as possible, as evenly as possible.

    Args:
        per_host: number of devices of each host; their sum is at least `size`.
    """
    counts = [0] * len(per_host)
    for _ in range(size):
        free = [host for host, most in enumerate(per_host) if counts[host] < most]
        counts[min(free, key=lambda host: counts[host])] += 1
    return WorldSize(counts)


def slots_for(size: int | None, available: Sequence[Slot], devices: Sequence[int] | None = None) -> tuple[Slot, ...]:
    """Return the slots of the ranks of a world.

    Args:
        size: number of ranks; None for one on each of `devices`, or on each slot.
        devices: numbers of devices, host by host, from 0: rank ``i`` is on ``devices[i]``.

    Raises:
        ValueError: `size` exceeds the number of slots, or of those on a host of a `WorldSize`; or `devices` is invalid.
    """
    if devices is not None:
        return _slots_of(devices, size, available)
    if size is None:
        return tuple(sorted(available))
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= len(available):
        raise ValueError(f"size={size!r} is not a world size of this run; choose 1 to {len(available)}")
    if not isinstance(size, WorldSize):
        return tuple(sorted(available)[:size])
    slots: list[Slot] = []
    for host, count in enumerate(size.per_host):
        local_slots = sorted(slot for slot in available if slot.host == host)
        if count > len(local_slots):
            short = f"host {host} has {len(local_slots)} devices, too few for {count} ranks"
            raise ValueError(f"size={size!r}: {short}; choose fewer")
        slots += local_slots[:count]
    return tuple(slots)


def _slots_of(devices: Sequence[int], size: int | None, available: Sequence[Slot]) -> tuple[Slot, ...]:
    ordered, valid = sorted(available), f"choose different numbers of 0 to {len(available) - 1}"
    if not isinstance(devices, Sequence) or not devices:
        raise ValueError(f"devices={devices!r} is not a non-empty list of devices; {valid}")
    for device in devices:
        if not isinstance(device, int) or isinstance(device, bool) or not 0 <= device < len(ordered):
            raise ValueError(f"devices={devices!r}: {device!r} is not a device of this test; {valid}")
    if len(set(devices)) < len(devices):
        raise ValueError(f"devices={list(devices)!r}: each rank needs a device of its own; {valid}")
    if size not in (None, len(devices)):
        raise ValueError(f"size={size!r}, but devices={list(devices)!r}; leave the size out where devices are given")
    return tuple(ordered[device] for device in devices)


@dataclass(frozen=True)
class Mask:
    """The devices that are visible to a process."""

    environment: Mapping[str, str] = field(default_factory=dict)  # the variables that hide all other devices
    # UUIDs of the visible devices, in order, for the process to verify; empty if they are unknown
    uuids: tuple[str, ...] = ()


Masks = Callable[[Sequence[Slot]], Mask]
"""Return the mask that makes exactly these devices of a host visible to a process."""
