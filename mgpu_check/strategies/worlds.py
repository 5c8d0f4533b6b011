"""Draw how many ranks or devices, and which ones, up to the number that the run was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import strategies as st

from mgpu_check import settings
from mgpu_check.devices.placement import Slot, WorldSize, slots_for, spread

__all__ = [
    "all_devices",
    "all_pairs",
    "device_counts",
    "device_orders",
    "device_pairs",
    "large_worlds",
    "places",
    "world_pairs",
    "world_sizes",
]

T = TypeVar("T")


def _devices() -> int:
    return settings.active().gpus or 0


@st.composite
def _when_drawn(draw: st.DrawFn, make: Callable[[], st.SearchStrategy[T]]) -> T:
    """Draw from what `make` gives now: `st.deferred` would keep the first answer for good."""
    return draw(make())


def _devices_in_one_process() -> int:
    return settings.active().gpus_of_host


def _up_to(least: int, most: int | None, available: int, argument: str) -> st.SearchStrategy[int]:
    if least > available:
        raise ValueError(
            f"{argument}: at least {least} were asked for, but the run has {available} for this test; "
            f"--gpus={least} gives it more, and a mark of the test must not ask for less"
        )
    largest = available if most is None else min(most, available)
    # The largest tries the most devices; of it and the one below, one is odd, and one no power of two.
    below = largest - 1 if largest > max(least, 2) else largest
    return st.integers(least, largest) | st.sampled_from((largest, below))


def _worlds(least: int, most: int | None) -> st.SearchStrategy[int]:
    per_host = settings.active().per_host
    sizes = _up_to(least, most, _devices(), "world_sizes")
    if len(per_host) < 2:
        return sizes
    # Simple ones first: shrinking goes towards them.
    return st.sampled_from(
        [
            world
            for size in range(least, min(most or sum(per_host), sum(per_host)) + 1)
            for world in placed(size, per_host)
        ]
    )


def placed(size: int, per_host: Sequence[int]) -> list[WorldSize]:
    """Return the ways worth a try in which a world of `size` lies on the hosts: within each, and across them."""
    hosts = range(len(per_host))
    found = [WorldSize([size if host == one else 0 for host in hosts]) for one in hosts if size <= per_host[one]]
    spreads = [
        spread(size, per_host[:count]).per_host
        for count in range(2, len(per_host) + 1)
        if size <= sum(per_host[:count])
    ]
    # As full as can be on the first hosts, and as empty as can be on the last: hosts with unequal numbers of ranks.
    filled = slots_for(size, [Slot(host, index) for host in hosts for index in range(per_host[host])])
    spreads.append(tuple(sum(slot.host == host for slot in filled) for host in hosts))
    for counts in spreads:
        world = WorldSize([*counts, *([0] * (len(per_host) - len(counts)))])
        if world.per_host not in [other.per_host for other in found]:
            found.append(world)
    return found


def world_sizes(least: int = 1, most: int | None = None) -> st.SearchStrategy[int]:
    """Draw world sizes from `least` to the number of devices of the run (or `most`, if that is less).

    In a run on several hosts they also say how many of the ranks are on which: worlds that stay within one host, and
    worlds that cross hosts.

    The number of devices is read when an example is drawn, so a module may hold the strategy before options are known.

    Raises:
        ValueError: when drawn, if the run has fewer than `least` devices.
    """
    return _when_drawn(lambda: _worlds(least, most))


def large_worlds(least: int = 1, most: int | None = None) -> st.SearchStrategy[int]:
    """Draw world sizes like `world_sizes`, the largest first: for checks of few examples, of which one has all ranks."""

    def make() -> st.SearchStrategy[int]:
        if len(settings.active().per_host) >= 2:
            return _worlds(least, most)
        largest = min(_devices(), _devices() if most is None else most)
        if largest < least:
            return _up_to(least, most, _devices(), "large_worlds")
        return st.sampled_from(range(largest, least - 1, -1))

    return _when_drawn(make)


def world_pairs(least: int = 1, most: int | None = None) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw two world sizes for one example, the largest first; one, where there is no other.

    For checks of few examples: the first has the largest, and the one below it, of which one is odd.
    """

    def make() -> st.SearchStrategy[tuple[int, ...]]:
        per_host = settings.active().per_host
        if len(per_host) >= 2:
            return st.lists(_worlds(least, most), min_size=2, max_size=2, unique=True).map(tuple)
        largest = min(_devices(), _devices() if most is None else most)
        if largest <= least:
            return _up_to(least, most, _devices(), "world_pairs").map(lambda size: (size,))
        return st.sampled_from([(largest, other) for other in range(largest - 1, least - 1, -1)])

    return _when_drawn(make)


def device_counts(least: int = 1, most: int | None = None) -> st.SearchStrategy[int]:
    """Draw numbers of devices to spread work over, like `world_sizes`; in a run on several hosts, of one host."""
    return _when_drawn(lambda: _up_to(least, most, _devices_in_one_process(), "device_counts"))


def device_orders(least: int = 1, most: int | None = None) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw different devices of one host, by index, in any order: `least` of them to all (or `most`).

    Two of three examples, and the first, have as many as there are; the first has the last one first.
    """

    def make() -> st.SearchStrategy[tuple[int, ...]]:
        there = _devices_in_one_process()
        largest = min(there, there if most is None else most)
        # Once more, so that what is wrong with one device is seen in few examples.
        sizes = st.just(largest) | _up_to(least, most, there, "device_orders")
        shuffled = st.permutations(range(there - 1, -1, -1))
        return st.tuples(shuffled, sizes).map(lambda drawn: tuple(drawn[0][: drawn[1]]))

    return _when_drawn(make)


def all_devices() -> st.SearchStrategy[int]:
    """Draw the number of devices of the run; in a run on several hosts, of the host where the test runs."""
    return _when_drawn(lambda: st.just(_devices_in_one_process()))


def places(*, cpu: bool = True) -> st.SearchStrategy[str]:
    """Draw one place for a tensor: "cpu" (unless `cpu` is false), "cuda:0", … as far as the run has devices."""
    return _when_drawn(lambda: st.sampled_from(_places(cpu)))


def device_pairs(*, cpu: bool = True) -> st.SearchStrategy[tuple[str, str]]:
    """Draw two different places, in either order.

    Raises:
        ValueError: when drawn, if there are no two: one device, and `cpu` is false.
    """
    return _when_drawn(lambda: st.sampled_from(all_pairs(cpu=cpu)))


def _places(cpu: bool) -> list[str]:
    return ["cpu"] * cpu + [f"cuda:{index}" for index in range(_devices_in_one_process())]


def all_pairs(*, cpu: bool = True) -> list[tuple[str, str]]:
    """Return all that `device_pairs` can draw in this run."""
    found = [(first, second) for first in _places(cpu) for second in _places(cpu) if first != second]
    if not found:
        raise ValueError("device_pairs: cpu=False needs two devices, but the run has 1 for this test; give it more")
    return found
