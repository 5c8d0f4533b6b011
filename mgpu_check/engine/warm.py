"""The worlds that are kept warm between calls, and how many of them a device can bear."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait

from mgpu_check.devices.placement import Slot
from mgpu_check.engine.launcher import Launcher
from mgpu_check.engine.own_environment import OwnEnvironment
from mgpu_check.engine.world import World

__all__ = ["WarmWorlds", "WorldKey"]

# Idle worlds of other sizes are kept, because a property that draws the world size returns to them all the time.
_LEAST_KEPT, _KEPT_PER_DEVICE = 64, 4

# On real devices each process has a context and communicators, of half a GiB and more. They get an eighth of the memory.
_BYTES_OF_PROCESS = 640 << 20
_SHARE = 8
_LEAST_PROCESSES = 2
_UNKNOWN_MEMORY = 16 << 30

_EXIT_TIMEOUT = 10.0


@dataclass(frozen=True)
class WorldKey:
    """The key that tells one world from another.

    Attributes:
        slots: of its ranks, in rank order; empty for a node process.
        visible: the slots whose devices its processes see, on all hosts where it has any.
        environment: variables that its processes have from their start.
    """

    slots: tuple[Slot, ...]
    visible: tuple[Slot, ...]
    backend: str | None
    environment: OwnEnvironment = ()

    @property
    def occupied(self) -> tuple[Slot, ...]:
        """The slots on whose devices it may have a context."""
        return self.slots or self.visible


class WarmWorlds:
    """Worlds by their key, the least recently used first.

    Args:
        real: they are on real devices, whose memory is shared, and which may refuse a second process.
        memory: bytes of the smallest device, as far as that is known when it is asked.
    """

    def __init__(self, launcher: Launcher, real: bool, memory: Callable[[], int | None]) -> None:
        self._launcher = launcher
        self._real = real
        self._memory = memory
        self._worlds: dict[WorldKey, World] = {}
        self._alone = False
        """Whether devices were seen to bear one process only."""

    def __iter__(self) -> Iterator[tuple[WorldKey, World]]:
        return iter(list(self._worlds.items()))

    def take(self, key: WorldKey) -> World | None:
        """Take the world of a key, which is not kept any more; None where there is none that can be used."""
        world = self._worlds.pop(key, None)
        if world is not None and world.broken:
            world.discard()
            return None
        return world

    def keep(self, key: WorldKey, world: World) -> None:
        """Keep a world, as the one that was used last."""
        self._worlds[key] = world

    def get(self, key: WorldKey) -> World | None:
        return self._worlds.get(key)

    def let_go(self, key: WorldKey) -> None:
        """End a world."""
        self._worlds.pop(key).discard()

    def make_room(self, key: WorldKey, slots: int, used: set[WorldKey]) -> None:
        """Let worlds go where they are too many beside a new one.

        Args:
            slots: how many there are.
            used: by the current test. Of these, devices that are full may cost some, too.

        Raises:
            RankDied: a process of one that was used has ended already.
        """
        wanted, most = max(len(key.slots), 1), max(_LEAST_KEPT, _KEPT_PER_DEVICE * slots)
        for other in list(self._worlds):
            if wanted + sum(len(world.processes) for world in self._worlds.values()) <= most:
                break
            if other not in used:
                self.let_go(other)
        if self._real:
            most = 1 if self._alone else _most_on_device(self._memory())
            for slot in key.occupied:
                beside = [other for other in self._worlds if slot in other.occupied]
                for other in sorted(beside[: max(0, len(beside) + 1 - most)], key=lambda other: other in used):
                    self._worlds[other].check_alive("while no call used it")
                    self.let_go(other)
            self.await_exits()

    def clear_devices(self, key: WorldKey) -> bool:
        """Let all worlds go that have devices of `key`, from now on whenever another needs them; whether there were any.

        Where devices are in compute mode exclusive-process, or full, a second process is refused.
        """
        if not self._real:
            return False
        beside = [other for other in self._worlds if set(other.occupied) & set(key.occupied)]
        for other in beside:
            self.let_go(other)
        self._alone |= bool(beside)
        self.await_exits()
        return bool(beside)

    def await_exits(self) -> list[int]:
        """Wait until those that were ended are gone, and their memory free; the processes that still are not.

        On real devices that takes seconds, and the devices are others' next.
        """
        if not self._real:
            return []
        deadline = time.monotonic() + _EXIT_TIMEOUT
        while (ending := self._launcher.ending()) and wait(
            self._launcher.waitables(), max(0.0, deadline - time.monotonic())
        ):
            self._launcher.collect()
        return ending

    def close(self) -> None:
        """End all of them."""
        for key in list(self._worlds):
            self.let_go(key)


def _most_on_device(memory: int | None) -> int:
    return max(_LEAST_PROCESSES, (memory or _UNKNOWN_MEMORY) // _SHARE // _BYTES_OF_PROCESS)
